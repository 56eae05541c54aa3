"""QK-normalised attention with a learned temperature per head."""
import math
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn, Tensor


class CosineAttention(nn.Module):
    """Query and key vectors are brought to unit length, so that a logit is a
    cosine times exp(log_temp).

    Shapes: x [B, T, C] -> [B, T, C]
    """

    def __init__(self, dim: int, num_heads: int = 8, causal: bool = True,
                 init_temp: float = 10.0, max_temp: float = 100.0, drop: float = 0.0):
        super().__init__()
        assert dim % num_heads == 0
        self.num_heads = num_heads
        self.causal = causal
        self.max_log = math.log(max_temp)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim)
        self.log_temp = nn.Parameter(torch.full((num_heads, 1, 1), math.log(init_temp)))
        self.attn_drop = nn.Dropout(drop)

    def forward(self, x: Tensor, pad_mask: Optional[Tensor] = None) -> Tensor:
        """pad_mask: [B, T], True on trailing padding."""
        B, T, C = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)

        q = F.normalize(q, dim=2)
        k = F.normalize(k, dim=2)

        temp = self.log_temp.clamp(max=self.max_log).exp()
        attn = (q @ k.transpose(-2, -1)) * temp

        if self.causal:
            later = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)
            attn = attn.masked_fill(later, float("-inf"))
        if pad_mask is not None:
            attn = attn.masked_fill(pad_mask[:, None, None], float("-inf"))

        attn = self.attn_drop(attn.softmax(dim=-1))
        y = (attn @ v).transpose(1, 2).reshape(B, T, C)
        return self.proj(y)
