import torch
import torch.nn as nn
from einops import rearrange, repeat


class KVCache:
    def __init__(self):
        self.k = None
        self.v = None

    def update(self, k, v):
        # don't keep the graph of old steps alive
        k, v = k.detach(), v.detach()
        if self.k is None:
            self.k, self.v = k, v
        else:
            self.k = torch.cat([self.k, k], dim=-2)
            self.v = torch.cat([self.v, v], dim=-2)
        return self.k, self.v


class DecoderAttention(nn.Module):
    def __init__(self, dim, q_heads, kv_heads):
        super().__init__()
        self.q_heads = q_heads
        self.kv_heads = kv_heads
        dh = dim // q_heads
        self.scale = dh ** -0.5
        self.wq = nn.Linear(dim, q_heads * dh, bias=False)
        self.wk = nn.Linear(dim, kv_heads * dh, bias=False)
        self.wv = nn.Linear(dim, kv_heads * dh, bias=False)
        self.wo = nn.Linear(q_heads * dh, dim, bias=False)

    def forward(self, x, cache=None):
        if cache is None:
            cache = KVCache()
        q = rearrange(self.wq(x), "b t (h d) -> b h t d", h=self.q_heads)
        k = rearrange(self.wk(x), "b t (h d) -> b h t d", h=self.kv_heads)
        v = rearrange(self.wv(x), "b t (h d) -> b h t d", h=self.kv_heads)
        k, v = cache.update(k, v)

        g = self.q_heads // self.kv_heads
        k = repeat(k, "b h t d -> b (h g) t d", g=g)
        v = repeat(v, "b h t d -> b (h g) t d", g=g)

        sim = torch.einsum("bhid,bhjd->bhij", q * self.scale, k)
        i, j = sim.shape[-2:]
        sim = sim.masked_fill(torch.ones(i, j, dtype=torch.bool, device=x.device).triu(j - i + 1), float("-inf"))
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(-1), v)
        return self.wo(rearrange(out, "b h t d -> b t (h d)"))
