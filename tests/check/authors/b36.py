import torch
import torch.nn as nn


class ViTAttention(nn.Module):
    def __init__(self, dim=384, heads=6, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.drop = nn.Dropout(dropout)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        """x: [batch, 1 + patches, dim] (class token first)"""
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q = q.reshape(b, n, self.heads, -1)
        k = k.reshape(b, n, self.heads, -1)
        v = v.reshape(b, n, self.heads, -1)

        dots = torch.einsum("bihd,bjhd->bhij", q, k) * self.scale
        attn = self.drop(dots.softmax(dim=-1))
        out = torch.einsum("bhij,bihd->bihd", attn, v).reshape(b, n, c)
        return self.proj(out)
