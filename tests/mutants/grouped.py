"""Right: grouped heads and PyTorch's own kernel, as today's decoders have them."""

import torch.nn.functional as F
from torch import nn


class GroupedQueryAttention(nn.Module):
    """Causal self-attention in which several query heads share a key/value head."""

    def __init__(self, dim, num_heads, num_kv_heads, attn_dropout=0.0):
        super().__init__()
        if dim % num_heads or num_heads % num_kv_heads:
            raise ValueError("num_kv_heads must divide num_heads, and num_heads must divide dim")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = dim // num_heads
        self.repeats = num_heads // num_kv_heads
        self.attn_dropout = attn_dropout
        self.q_proj = nn.Linear(dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, dim, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.repeats, dim=1)
        v = v.repeat_interleave(self.repeats, dim=1)
        p = self.attn_dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, -1)
        return self.o_proj(out)
