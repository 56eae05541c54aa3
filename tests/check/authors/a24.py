import torch
from torch import nn


class TiledGQA(nn.Module):
    # query head h uses kv head (h % n_kv). Not Llama's order, so don't load HF weights into it.
    def __init__(self, d, n_q=8, n_kv=2, causal=True):
        super().__init__()
        self.n_q, self.n_kv, self.hd, self.causal = n_q, n_kv, d // n_q, causal
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, n_kv * self.hd, bias=False)
        self.v = nn.Linear(d, n_kv * self.hd, bias=False)
        self.o = nn.Linear(d, d, bias=False)

    def forward(self, x, cache=None):
        b, t, d = x.shape
        q = self.q(x).view(b, t, self.n_q, self.hd).transpose(1, 2)
        k = self.k(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        v = self.v(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        if cache is not None:
            if "k" in cache:
                k = torch.cat([cache["k"], k], 2)
                v = torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        r = self.n_q // self.n_kv
        k, v = k.repeat(1, r, 1, 1), v.repeat(1, r, 1, 1)
        att = q @ k.transpose(-1, -2) * self.hd ** -0.5
        if self.causal and t > 1:
            s = k.shape[2]
            att = att + torch.full((t, s), float("-inf"), device=x.device, dtype=att.dtype).triu(s - t + 1)
        y = att.softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, d))
