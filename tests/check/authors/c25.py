from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import nn


@dataclass(frozen=True)
class InducedConfig:
    width: int = 64
    heads: int = 4
    inducing: int = 16
    ff_mult: int = 2


class Attend(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.h = cfg.heads
        self.scale = (cfg.width // cfg.heads) ** -0.5
        self.q = nn.Linear(cfg.width, cfg.width)
        self.kv = nn.Linear(cfg.width, 2 * cfg.width)
        self.o = nn.Linear(cfg.width, cfg.width)

    def forward(self, x, ctx, ctx_mask=None):
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=self.h) * self.scale
        k, v = rearrange(self.kv(ctx), "b n (two h d) -> two b h n d", two=2, h=self.h)
        if ctx_mask is not None:
            ctx_mask = rearrange(ctx_mask, "b n -> b 1 1 n")
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=ctx_mask)
        return self.o(rearrange(y, "b h n d -> b n (h d)"))


class InducedSetAttention(nn.Module):
    """Set self-attention through a few learnt points, O(n * m).

    The points read the set, then the set reads the points. `mask` is a bool
    [b, n] that is True for the elements of the set.
    """

    def __init__(self, cfg: InducedConfig = InducedConfig()):
        super().__init__()
        self.points = nn.Parameter(torch.randn(cfg.inducing, cfg.width) * cfg.width ** -0.5)
        self.gather = Attend(cfg)
        self.spread = Attend(cfg)
        self.n1, self.n2, self.n3 = (nn.LayerNorm(cfg.width) for _ in range(3))
        self.ff = nn.Sequential(
            nn.Linear(cfg.width, cfg.ff_mult * cfg.width), nn.SiLU(), nn.Linear(cfg.ff_mult * cfg.width, cfg.width)
        )

    def forward(self, x, mask=None):
        y = self.n1(x)
        p = repeat(self.points, "m d -> b m d", b=x.shape[0])
        p = p + self.gather(p, y, mask)
        x = x + self.spread(y, self.n2(p))
        return x + self.ff(self.n3(x))


if __name__ == "__main__":
    net = InducedSetAttention()
    m = torch.arange(50)[None] < torch.tensor([[50], [31]])
    print(net(torch.randn(2, 50, 64), m).shape)
