import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange


class MHSA(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "s n (k h d) -> k s h n d", k=3, h=self.heads)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(rearrange(x, "s h n d -> s n (h d)"))


class VideoTokens(nn.Module):
    """Clip [B, C, T, H, W] -> tokens [B, T * h * w, dim], frame after frame."""

    def __init__(self, in_ch, dim, patch, frames, size):
        super().__init__()
        self.conv = nn.Conv3d(in_ch, dim, (1, patch, patch), stride=(1, patch, patch))
        self.space = nn.Parameter(torch.randn(1, dim, 1, size // patch, size // patch) * 0.02)
        self.time = nn.Parameter(torch.randn(1, dim, frames, 1, 1) * 0.02)

    def forward(self, clip):
        x = self.conv(clip) + self.space + self.time
        return x.flatten(2).transpose(1, 2)


class DividedSpaceTimeBlock(nn.Module):
    """Time attention (same patch, all frames), then space attention (same
    frame, all patches), then an MLP."""

    def __init__(self, dim, heads, frames):
        super().__init__()
        self.frames = frames
        self.norm_t, self.norm_s, self.norm_m = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.time_attn = MHSA(dim, heads)
        self.space_attn = MHSA(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t = x.shape[0], self.frames

        y = rearrange(self.norm_t(x), "b (n t) d -> (b n) t d", t=t)
        y = self.time_attn(y)
        x = x + rearrange(y, "(b n) t d -> b (n t) d", b=b)

        y = rearrange(self.norm_s(x), "b (t n) d -> (b t) n d", t=t)
        y = self.space_attn(y)
        x = x + rearrange(y, "(b t) n d -> b (t n) d", b=b)

        return x + self.mlp(self.norm_m(x))


if __name__ == "__main__":
    tok = VideoTokens(3, 48, patch=8, frames=4, size=32)
    blk = DividedSpaceTimeBlock(48, heads=4, frames=4)
    print(blk(tok(torch.randn(2, 3, 4, 32, 32))).shape)
