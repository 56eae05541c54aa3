import torch
import torch.nn as nn


class SRAttention(nn.Module):
    """
    Attention with spatial reduction: the keys and values come from a copy of
    the map that a strided convolution made `sr_ratio` times smaller.

    Args:
        dim: channels
        num_heads: heads
        sr_ratio: stride of the reduction, 1 turns it off
    """

    def __init__(self, dim, num_heads=8, qkv_bias=True, attn_drop=0., proj_drop=0., sr_ratio=1):
        super().__init__()
        assert dim % num_heads == 0
        self.dim = dim
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5

        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, dim * 2, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

        self.sr_ratio = sr_ratio
        if sr_ratio > 1:
            self.reduce = nn.Conv2d(dim, dim, kernel_size=sr_ratio, stride=sr_ratio)
            self.reduce_norm = nn.LayerNorm(dim)

    def _small_map(self, x, H, W):
        B, N, C = x.shape
        if self.sr_ratio == 1:
            return x
        fmap = x.reshape(B, C, H, W)
        fmap = self.reduce(fmap)
        return self.reduce_norm(fmap.flatten(2).transpose(1, 2))

    def forward(self, x, H, W):
        B, N, C = x.shape
        head = C // self.num_heads

        q = self.q(x).reshape(B, N, self.num_heads, head).permute(0, 2, 1, 3)
        src = self._small_map(x, H, W)
        kv = self.kv(src).reshape(B, -1, 2, self.num_heads, head).permute(2, 0, 3, 1, 4)
        k, v = kv.unbind(0)

        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))

        out = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj_drop(self.proj(out))


if __name__ == "__main__":
    layer = SRAttention(64, num_heads=2, sr_ratio=4)
    tokens = torch.randn(2, 16 * 24, 64)
    print(layer(tokens, 16, 24).shape)
