import torch
import torch.nn as nn


class RelPartialLearnableAttn(nn.Module):
    """Transformer-XL attention. Input is (length, batch, d_model), memory (mem_len, batch, d_model)."""

    def __init__(self, n_head, d_model, d_head, dropout=0.0):
        super().__init__()
        self.n_head, self.d_model, self.d_head = n_head, d_model, d_head
        self.qkv_net = nn.Linear(d_model, 3 * n_head * d_head, bias=False)
        self.r_net = nn.Linear(d_model, n_head * d_head, bias=False)
        self.o_net = nn.Linear(n_head * d_head, d_model, bias=False)
        self.r_w_bias = nn.Parameter(torch.zeros(n_head, d_head))
        self.r_r_bias = nn.Parameter(torch.zeros(n_head, d_head))
        self.drop = nn.Dropout(dropout)
        self.scale = 1 / (d_head ** 0.5)

    def _pos_emb(self, klen, device, dtype):
        inv_freq = 1 / (10000 ** (torch.arange(0.0, self.d_model, 2.0, device=device) / self.d_model))
        pos_seq = torch.arange(0, klen, 1.0, device=device)
        sinusoid = torch.outer(pos_seq, inv_freq)
        return torch.cat([sinusoid.sin(), sinusoid.cos()], dim=-1).to(dtype)

    def _rel_shift(self, x):
        qlen, klen = x.size(0), x.size(1)
        zero_pad = x.new_zeros((qlen, 1, *x.shape[2:]))
        x_padded = torch.cat([zero_pad, x], dim=1)
        x_padded = x_padded.view(klen + 1, qlen, *x.shape[2:])
        return x_padded[1:].view_as(x)

    def forward(self, w, mems=None):
        qlen, bsz = w.size(0), w.size(1)
        cat = torch.cat([mems, w], 0) if mems is not None else w
        klen = cat.size(0)

        q, k, v = torch.chunk(self.qkv_net(cat), 3, dim=-1)
        q = q[-qlen:].view(qlen, bsz, self.n_head, self.d_head)
        k = k.view(klen, bsz, self.n_head, self.d_head)
        v = v.view(klen, bsz, self.n_head, self.d_head)
        r = self.r_net(self._pos_emb(klen, w.device, w.dtype)).view(klen, self.n_head, self.d_head)

        AC = torch.einsum("ibnd,jbnd->ijbn", q + self.r_w_bias, k)
        BD = self._rel_shift(torch.einsum("ibnd,jnd->ijbn", q + self.r_r_bias, r))
        score = (AC + BD) * self.scale

        mask = torch.ones(qlen, klen, dtype=torch.bool, device=w.device).triu(1 + klen - qlen)
        score = score.masked_fill(mask[:, :, None, None], -float("inf"))
        prob = self.drop(torch.softmax(score, dim=1))
        vec = torch.einsum("ijbn,jbnd->ibnd", prob, v).reshape(qlen, bsz, -1)
        return self.o_net(vec)
