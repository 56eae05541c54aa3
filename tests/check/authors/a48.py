from typing import NamedTuple, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


class LayerState(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


class GatedAttention(nn.Module):
    """SDPA followed by a per-head sigmoid gate computed from the input.

    state is None for a whole sequence; with a state the layer takes any number of new tokens.
    """

    def __init__(self, dim, heads, kv_heads, head_dim=16, dropout=0.0):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim, self.dropout = heads, kv_heads, head_dim, dropout
        self.fused = nn.Linear(dim, (heads + 2 * kv_heads) * head_dim + heads, bias=False)
        self.norm_q = nn.RMSNorm(head_dim)
        self.norm_k = nn.RMSNorm(head_dim)
        self.out = nn.Linear(heads * head_dim, dim, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, x, state: Optional[LayerState] = None):
        B, T, _ = x.shape
        q, k, v, g = self.fused(x).split(
            [self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim, self.heads], -1
        )
        q = self.norm_q(q.unflatten(-1, (self.heads, -1))).transpose(1, 2)
        k = self.norm_k(k.unflatten(-1, (self.kv_heads, -1))).transpose(1, 2)
        v = v.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

        if state is not None:
            k = torch.cat([state.k, k], dim=2)
            v = torch.cat([state.v, v], dim=2)
        state = LayerState(k, v)

        S = k.size(2)
        mask = None
        if T != S and T > 1:
            mask = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(S - T)
        y = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=T == S and T > 1,
            dropout_p=self.dropout if self.training else 0.0, enable_gqa=True,
        )
        y = y * torch.sigmoid(g).transpose(1, 2).unsqueeze(-1)
        return self.out(y.transpose(1, 2).flatten(2)), state
