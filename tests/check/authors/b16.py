import torch
import torch.nn as nn


def sinusoid(n, dim, device=None):
    # row r <-> offset r - (n - 1)
    off = torch.arange(-(n - 1), n, device=device, dtype=torch.float32)
    freq = 10000 ** (-torch.arange(0, dim, 2, device=device).float() / dim)
    ang = off[:, None] * freq[None]
    return torch.cat([ang.sin(), ang.cos()], dim=-1)


class ConformerMHSA(nn.Module):
    """Pre-norm relative self-attention module; the relative scores are picked with a gather
    rather than the pad-and-view trick (slower, easier to read)."""

    def __init__(self, dim, heads, dropout=0.1):
        super().__init__()
        self.dim, self.heads, self.hd = dim, heads, dim // heads
        self.ln = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.pos = nn.Linear(dim, dim, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, 1, self.hd))
        self.v = nn.Parameter(torch.zeros(heads, 1, self.hd))
        self.out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x, lengths=None):
        B, T, _ = x.shape
        q, k, val = self.qkv(self.ln(x)).view(B, T, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        r = self.pos(sinusoid(T, self.dim, x.device).to(x.dtype))
        r = r.view(2 * T - 1, self.heads, self.hd).permute(1, 2, 0)

        content = (q + self.u) @ k.transpose(2, 3)
        position = (q + self.v) @ r                             # B h T 2T-1
        t = torch.arange(T, device=x.device)
        idx = (t[None, :] - t[:, None] + T - 1).expand(B, self.heads, T, T)
        score = (content + position.gather(3, idx)) * self.hd ** -0.5

        if lengths is not None:
            pad = t[None] >= lengths[:, None]
            score = score.masked_fill(pad[:, None, None], float("-inf"))
        ctx = self.drop(score.softmax(-1)) @ val
        return x + self.drop(self.out(ctx.transpose(1, 2).flatten(2)))
