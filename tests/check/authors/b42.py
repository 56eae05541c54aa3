import torch
import torch.nn as nn


class ShawAttention(nn.Module):
    """Relative position representations (Shaw et al. 2018), encoder version."""

    def __init__(self, d_model, n_heads, clip=16, dropout=0.1):
        super().__init__()
        self.n_heads, self.dh, self.clip = n_heads, d_model // n_heads, clip
        self.w_qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.w_o = nn.Linear(d_model, d_model)
        # offsets 0..clip live in rows 0..clip; -1 is the last row, -2 the one before, ...
        self.rel_k = nn.Parameter(torch.empty(2 * clip + 1, self.dh))
        self.rel_v = nn.Parameter(torch.empty(2 * clip + 1, self.dh))
        nn.init.xavier_uniform_(self.rel_k)
        nn.init.xavier_uniform_(self.rel_v)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, pad=None):
        # pad: B x L, True at padding
        B, L, D = x.shape
        q, k, v = (t.reshape(B, L, self.n_heads, self.dh) for t in self.w_qkv(x).split(D, -1))

        pos = torch.arange(L, device=x.device)
        off = (pos[None, :] - pos[:, None]).clamp(-self.clip, self.clip)

        logits = torch.einsum('bihd,bjhd->bhij', q, k)
        logits = logits + torch.einsum('bihd,ijd->bhij', q, self.rel_k[off])
        logits = logits / self.dh ** 0.5
        if pad is not None:
            logits = logits + torch.zeros_like(pad, dtype=logits.dtype).masked_fill(pad, float('-inf'))[:, None, None]
        w = self.dropout(logits.softmax(-1))

        o = torch.einsum('bhij,bjhd->bihd', w, v)
        o = o + torch.einsum('bhij,ijd->bihd', w, self.rel_v[off])
        return self.w_o(o.flatten(2))
