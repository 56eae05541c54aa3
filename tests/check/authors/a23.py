import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


class BlockLocalAttention(nn.Module):
    """Causal local attention: every block of `window` tokens looks at itself and the block before."""

    def __init__(self, dim, heads=4, dim_head=16, window=8):
        super().__init__()
        self.heads, self.window = heads, window
        self.scale = dim_head ** -0.5
        self.to_q = nn.Linear(dim, heads * dim_head, bias=False)
        self.to_kv = nn.Linear(dim, heads * dim_head * 2, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x):
        b, n, _ = x.shape
        w, h = self.window, self.heads
        pad = (-n) % w
        if pad > 0:
            x = F.pad(x, (0, 0, 0, pad))

        q, k, v = self.to_q(x), *self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b (c w) (h d) -> b h c w d", w=w, h=h) for t in (q, k, v))

        # look one block back
        k = torch.cat((k.roll(1, dims=2), k), dim=3)
        v = torch.cat((v.roll(1, dims=2), v), dim=3)

        sim = torch.einsum("bhcid,bhcjd->bhcij", q, k) * self.scale
        i = torch.arange(w, device=x.device)[:, None] + w
        j = torch.arange(2 * w, device=x.device)[None, :]
        sim = sim.masked_fill(j > i, -torch.finfo(sim.dtype).max)

        attn = sim.softmax(dim=-1)
        out = torch.einsum("bhcij,bhcjd->bhcid", attn, v)
        out = rearrange(out, "b h c w d -> b (c w) (h d)")[:, :n]
        return self.to_out(out)
