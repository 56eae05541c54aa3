import torch
import torch.nn.functional as F
from torch import nn, Tensor
from typing import Optional, Tuple

KV = Tuple[Tensor, Tensor]


class GroupedQueryAttention(nn.Module):
    """Causal attention with fewer key/value heads than query heads.

    The cache is a plain (k, v) tuple, each [B, n_kv, S, hd]. Prompts go
    through SDPA; single-token steps go through a small einsum path that never
    materialises the repeated keys.
    """

    def __init__(self, dim: int, n_heads: int, n_kv: int, bias: bool = False):
        super().__init__()
        if n_heads % n_kv:
            raise ValueError("n_heads must be a multiple of n_kv")
        self.n_heads, self.n_kv = n_heads, n_kv
        self.rep = n_heads // n_kv
        self.hd = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.hd, bias=bias)
        self.wk = nn.Linear(dim, n_kv * self.hd, bias=bias)
        self.wv = nn.Linear(dim, n_kv * self.hd, bias=bias)
        self.wo = nn.Linear(n_heads * self.hd, dim, bias=bias)

    def _step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # q [B, n_heads, 1, hd]
        b = q.shape[0]
        q = q.reshape(b, self.rep, self.n_kv, self.hd)
        s = torch.einsum("brkd,bksd->brks", q, k) * self.hd ** -0.5
        p = s.float().softmax(dim=-1).to(v.dtype)
        o = torch.einsum("brks,bksd->brkd", p, v)
        return o.reshape(b, 1, self.n_heads * self.hd)

    def _prompt(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, _, t, _ = q.shape
        s = k.shape[2]
        past = s - t
        mask = torch.ones(t, s, dtype=torch.bool, device=q.device).tril(diagonal=past)
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return o.transpose(1, 2).reshape(b, t, self.n_heads * self.hd)

    def forward(self, x: Tensor, past: Optional[KV] = None) -> Tuple[Tensor, KV]:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.hd).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv, self.hd).transpose(1, 2)
        if past is not None:
            k = torch.cat([past[0], k], dim=2)
            v = torch.cat([past[1], v], dim=2)
        if t == 1:
            o = self._step(q, k, v)
        else:
            o = self._prompt(q, k, v)
        return self.wo(o), (k, v)


if __name__ == "__main__":
    m = GroupedQueryAttention(128, n_heads=8, n_kv=2)
    out, kv = m(torch.randn(2, 10, 128))
    for _ in range(3):
        out, kv = m(torch.randn(2, 1, 128), kv)
    print(out.shape, kv[0].shape)
