"""Right: an encoder's attention, every token sees every other, as vision models have it."""

from torch import nn


class Attention(nn.Module):
    """Multi-head self-attention without a mask."""

    def __init__(self, dim, num_heads=3, qkv_bias=True, attn_drop=0.0):
        super().__init__()
        if dim % num_heads:
            raise ValueError("dim must be a multiple of num_heads")
        self.num_heads = num_heads
        head_dim = dim // num_heads
        self.scale = head_dim**-0.5
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return self.proj(x)
