import math

import torch
from torch import nn


class T5DecoderAttention(nn.Module):
    """T5-style causal attention.

    Args of forward:
        x: (B, T, d_model)
        mask: optional (B, T), 1 = token, 0 = padding
        position_bias: optional bias from an earlier layer (B or 1, H, T, T), mask already added
    Returns output and the position bias to hand to the next layer.
    """

    def __init__(self, d_model, num_heads, d_kv, num_buckets=32, max_distance=128, has_bias=True, dropout=0.0):
        super().__init__()
        self.h, self.d_kv = num_heads, d_kv
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.wi = nn.Linear(d_model, 3 * num_heads * d_kv, bias=False)
        self.wo = nn.Linear(num_heads * d_kv, d_model, bias=False)
        self.rel = nn.Embedding(num_buckets, num_heads) if has_bias else None
        self.p = dropout
        # the 1/sqrt(d) of the logits lives in the initialisation of the query rows
        with torch.no_grad():
            self.wi.weight.normal_(0, d_model ** -0.5)
            self.wi.weight[: num_heads * d_kv].mul_(d_kv ** -0.5)

    def buckets(self, n, device):
        pos = torch.arange(n, device=device)
        back = (pos[:, None] - pos[None, :]).clamp(min=0)
        half = self.num_buckets // 2
        far = half + (
            torch.log(back.clamp(min=1).float() / half) / math.log(self.max_distance / half) * (self.num_buckets - half)
        ).long()
        far = far.clamp(max=self.num_buckets - 1)
        return torch.where(back < half, back, far)

    def forward(self, x, mask=None, position_bias=None):
        b, n, _ = x.shape
        q, k, v = self.wi(x).view(b, n, 3, self.h, self.d_kv).permute(2, 0, 3, 1, 4)
        if position_bias is None:
            if self.rel is not None:
                position_bias = self.rel(self.buckets(n, x.device)).permute(2, 0, 1)[None]
            else:
                position_bias = x.new_zeros(1, self.h, n, n)
            ok = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()[None, None]
            if mask is not None:
                ok = ok & mask.bool()[:, None, None, :]
            position_bias = position_bias.masked_fill(~ok, torch.finfo(x.dtype).min)
        logits = q @ k.transpose(-1, -2) + position_bias
        w = logits.float().softmax(-1).to(x.dtype)
        w = nn.functional.dropout(w, self.p, self.training)
        return self.wo((w @ v).transpose(1, 2).flatten(2)), position_bias
