import torch
from torch import nn
import torch.nn.functional as F


class LatentCrossAttention(nn.Module):
    """Cross-attention used in a conditional U-Net. Flattened image tokens attend to a text context.

    x:       (B, HW, C)
    context: (B, M, Cctx)
    """

    def __init__(self, query_dim, context_dim=None, heads=8, dim_head=64, dropout=0.0):
        super().__init__()
        inner_dim = heads * dim_head
        context_dim = query_dim if context_dim is None else context_dim
        self.heads = heads
        self.scale = dim_head ** -0.5

        self.to_q = nn.Linear(query_dim, inner_dim, bias=False)
        self.to_k = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_v = nn.Linear(context_dim, inner_dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner_dim, query_dim), nn.Dropout(dropout))

    def forward(self, x, context=None, mask=None):
        b = x.shape[0]
        context = x if context is None else context

        q = self.to_q(x) * self.scale
        k = self.to_k(context)
        v = self.to_v(context)
        q, k, v = (t.view(b, -1, self.heads, t.shape[-1] // self.heads).transpose(1, 2) for t in (q, k, v))

        if mask is not None:                      # (B, M) bool, True = keep
            mask = mask.view(b, 1, 1, -1)
        # flash / mem-efficient kernels when available
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = out.transpose(1, 2).reshape(b, -1, self.heads * out.shape[-1])
        return self.to_out(out)
