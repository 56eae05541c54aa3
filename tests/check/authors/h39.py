import math
from typing import Optional, Tuple

import torch
from torch import Tensor, nn


def relative_position_bucket(rel: Tensor, bidirectional: bool, num_buckets: int, max_distance: int) -> Tensor:
    """rel = key position - query position, any shape of int64."""
    offset = torch.zeros_like(rel)
    if bidirectional:
        num_buckets //= 2
        offset = (rel > 0).long() * num_buckets
        n = rel.abs()
    else:
        n = (-rel).clamp(min=0)
    exact = num_buckets // 2
    log_ratio = torch.log(n.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (log_ratio * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return offset + torch.where(n < exact, n, far)


class T5Attention(nn.Module):
    """T5 self-attention: no 1/sqrt(d) (it is in the init), bias shared by passing it from layer to layer."""

    def __init__(self, d_model: int, d_kv: int, heads: int, is_decoder: bool, has_bias: bool, p: float = 0.1,
                 buckets: int = 32, max_distance: int = 128):
        super().__init__()
        self.heads, self.d_kv, self.is_decoder = heads, d_kv, is_decoder
        self.buckets, self.max_distance = buckets, max_distance
        inner = heads * d_kv
        self.q, self.k, self.v = (nn.Linear(d_model, inner, bias=False) for _ in range(3))
        self.o = nn.Linear(inner, d_model, bias=False)
        self.rel = nn.Embedding(buckets, heads) if has_bias else None
        self.dropout = nn.Dropout(p)
        nn.init.normal_(self.q.weight, std=(d_model * d_kv) ** -0.5)
        for lin in (self.k, self.v):
            nn.init.normal_(lin.weight, std=d_model ** -0.5)
        nn.init.normal_(self.o.weight, std=inner ** -0.5)

    def compute_bias(self, t: int, s: int, device) -> Tensor:
        query = torch.arange(s - t, s, device=device)[:, None]
        key = torch.arange(s, device=device)[None, :]
        bucket = relative_position_bucket(key - query, not self.is_decoder, self.buckets, self.max_distance)
        bias = self.rel(bucket).permute(2, 0, 1)[None]  # 1, H, t, s
        if self.is_decoder:
            bias = bias.masked_fill(key > query, torch.finfo(bias.dtype).min)
        return bias

    def forward(self, x: Tensor, bias: Optional[Tensor] = None, pad: Optional[Tensor] = None,
                past: Optional[Tuple[Tensor, Tensor]] = None):
        # pad: [B, s] over all keys (past included), True on padding
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, self.heads, self.d_kv).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        if bias is None:
            if self.rel is None:
                raise ValueError("the first layer has to pass its position bias on")
            bias = self.compute_bias(t, k.size(2), x.device)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k).float() + bias.float()
        if pad is not None:
            scores = scores.masked_fill(pad[:, None, None, :], torch.finfo(scores.dtype).min)
        probs = self.dropout(scores.softmax(-1).type_as(v))
        out = torch.einsum("bhts,bhsd->bthd", probs, v).reshape(b, t, -1)
        return self.o(out), bias, (k, v)
