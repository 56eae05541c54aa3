import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiQueryAttention(nn.Module):
    """Multi-query attention (one K/V head shared by all query heads)."""

    def __init__(self, dim: int, num_heads: int, dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim ** -0.5
        self.dropout = dropout
        self.c_q = nn.Linear(dim, dim)
        self.c_kv = nn.Linear(dim, 2 * self.head_dim)
        self.c_proj = nn.Linear(dim, dim)

    def forward(self, x, layer_past=None):
        B, T, C = x.shape
        q = self.c_q(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        q = q * self.scale
        kv = self.c_kv(x).unsqueeze(1)
        if layer_past is not None:
            kv = torch.cat((layer_past, kv), dim=2)
        k, v = kv.split(self.head_dim, dim=-1)
        S = k.size(2)

        mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(diagonal=S - T)
        out = F.scaled_dot_product_attention(
            q,
            k.expand(-1, self.num_heads, -1, -1),
            v.expand(-1, self.num_heads, -1, -1),
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
        )
        out = out.transpose(1, 2).reshape(B, T, C)
        return self.c_proj(out), kv
