import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn


class SDPAttention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, attn_drop=0.0, proj_drop=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, dim * 3, bias=qkv_bias)
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x):
        q, k, v = rearrange(self.qkv(x), "b n (three h d) -> three b n h d", three=3, h=self.num_heads)
        # dispatches to flash attention when it is available
        x = F.scaled_dot_product_attention(
            q, k, v,
            dropout_p=self.attn_drop if self.training else 0.0,
            is_causal=True,
        )
        x = rearrange(x, "b n h d -> b n (h d)")
        x = self.proj(x)
        return self.proj_drop(x)
