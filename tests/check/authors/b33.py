import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class CosineAttention(nn.Module):
    """Scaled cosine attention with one learned temperature per head (Swin V2)."""

    def __init__(self, dim, num_heads, qkv_bias=True, max_scale=100.0):
        super().__init__()
        self.num_heads = num_heads
        self.max_log = math.log(max_scale)
        self.logit_scale = nn.Parameter(torch.full((num_heads, 1, 1), math.log(10.0)))
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, attn_bias=None):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]

        attn = F.normalize(q) @ F.normalize(k).transpose(-2, -1)
        attn = attn * self.logit_scale.clamp(max=self.max_log).exp()
        if attn_bias is not None:
            attn = attn + attn_bias
        attn = attn.softmax(dim=-1)

        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
