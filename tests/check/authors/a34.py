import torch
from torch import nn
import torch.nn.functional as F


class TiedKVAttention(nn.Module):
    """One shared key/value head, and values *are* the keys (before rotation).

    x: (B, N, D) -> (B, N, D). keep: optional bool (B, N), True marks real tokens.
    """

    def __init__(self, D, heads, max_n=256):
        super().__init__()
        self.heads, self.e = heads, D // heads
        self.to_q = nn.Linear(D, D, bias=False)
        self.to_kv = nn.Linear(D, self.e, bias=False)
        self.out = nn.Linear(D, D, bias=False)
        ang = torch.arange(max_n)[:, None] * torch.logspace(0, -4, self.e // 2)[None, :]
        self.register_buffer("cs", torch.stack([ang.cos(), ang.sin()], -1), persistent=False)

    def turn(self, t):
        re, im = t.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = self.cs[: t.size(-2)].to(t.dtype).unbind(-1)
        return torch.stack([re * c - im * s, re * s + im * c], -1).flatten(-2)

    def forward(self, x, keep=None):
        B, N, D = x.shape
        q = self.turn(self.to_q(x).unflatten(-1, (self.heads, self.e)).transpose(1, 2))
        kv = self.to_kv(x)
        k = self.turn(kv)
        # fold the heads into the query axis; there is only one key head
        s = q.reshape(B, self.heads * N, self.e) @ k.transpose(1, 2) / self.e ** 0.5
        s = s.view(B, self.heads, N, N)
        hide = torch.ones(N, N, dtype=torch.bool, device=x.device).triu(1)
        if keep is not None:
            # a token always sees itself, so no row is empty
            eye = torch.eye(N, dtype=torch.bool, device=x.device)
            hide = hide | (~keep[:, None, None, :] & ~eye)
        a = s.masked_fill(hide, float("-inf")).softmax(-1)
        y = torch.einsum("bhnm,bme->bnhe", a, kv)
        return self.out(y.flatten(2))
