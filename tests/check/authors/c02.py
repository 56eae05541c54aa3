from dataclasses import dataclass

import torch
from einops import rearrange
from torch import nn, einsum


@dataclass
class WindowConfig:
    dim: int = 48
    heads: int = 3
    window: int = 4
    qkv_bias: bool = True
    dropout: float = 0.0


class LocalWindowBlock(nn.Module):
    """Pre-norm block: every pixel attends to the pixels of its own
    (non-overlapping) window. Maps are [B, H, W, C]."""

    def __init__(self, cfg: WindowConfig):
        super().__init__()
        self.cfg = cfg
        self.scale = (cfg.dim // cfg.heads) ** -0.5
        self.norm = nn.LayerNorm(cfg.dim)
        self.to_qkv = nn.Linear(cfg.dim, cfg.dim * 3, bias=cfg.qkv_bias)
        self.proj = nn.Sequential(nn.Linear(cfg.dim, cfg.dim), nn.Dropout(cfg.dropout))
        self.pos = nn.Parameter(torch.randn(cfg.window ** 2, cfg.dim) * 0.02)
        self.mlp = nn.Sequential(
            nn.LayerNorm(cfg.dim),
            nn.Linear(cfg.dim, cfg.dim * 4),
            nn.GELU(),
            nn.Linear(cfg.dim * 4, cfg.dim),
        )

    def attend(self, x):
        cfg = self.cfg
        q, k, v = self.to_qkv(x + self.pos).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "w n (h d) -> w h n d", h=cfg.heads) for t in (q, k, v))
        sim = einsum("w h i d, w h j d -> w h i j", q * self.scale, k)
        out = einsum("w h i j, w h j d -> w h i d", sim.softmax(dim=-1), v)
        return self.proj(rearrange(out, "w h n d -> w n (h d)"))

    def forward(self, x):
        p = self.cfg.window
        B, H, W, _ = x.shape
        if H % p or W % p:
            raise ValueError(f"map {H}x{W} does not divide into windows of {p}")
        nh, nw = H // p, W // p

        y = self.norm(x)
        y = rearrange(y, "b (nh ph) (nw pw) c -> (b nh nw) (ph pw) c", ph=p, pw=p)
        y = self.attend(y)
        y = rearrange(y, "(b nh nw) (ph pw) c -> b (ph nh) (pw nw) c", b=B, nh=nh, nw=nw, ph=p, pw=p)
        x = x + y
        return x + self.mlp(x)


if __name__ == "__main__":
    blk = LocalWindowBlock(WindowConfig())
    out = blk(torch.randn(2, 16, 8, 48))
    print(tuple(out.shape))
