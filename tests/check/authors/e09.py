import math
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn


class AttnOutput(NamedTuple):
    hidden: torch.Tensor
    weights: Optional[torch.Tensor]


class EncoderConfig:
    def __init__(self, hidden=64, heads=4, dropout=0.0, max_len=512, base=10000):
        self.hidden = hidden
        self.heads = heads
        self.dropout = dropout
        self.max_len = max_len
        self.base = base


def _tables(dim, max_len, base):
    inv = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    ang = torch.arange(max_len, dtype=torch.float32)[:, None] * inv[None, :]
    ang = torch.cat([ang, ang], dim=-1)
    return ang.cos(), ang.sin()


def _rot(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


class EncoderAttention(nn.Module):
    """Bidirectional attention with rotary positions.

    mask: (B, L), True for real tokens.
    need_weights: also give back the attention probabilities (B, heads, L, L), for plotting.
    """

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.cfg = cfg
        self.head_dim = cfg.hidden // cfg.heads
        self.in_proj = nn.Linear(cfg.hidden, 3 * cfg.hidden)
        self.out_proj = nn.Linear(cfg.hidden, cfg.hidden)
        cos, sin = _tables(self.head_dim, cfg.max_len, cfg.base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, x, mask=None, need_weights=False):
        B, L, _ = x.shape
        q, k, v = (
            t.view(B, L, self.cfg.heads, self.head_dim).transpose(1, 2)
            for t in self.in_proj(x).chunk(3, dim=-1)
        )
        cos, sin = self.cos[:L].to(q.dtype), self.sin[:L].to(q.dtype)
        attn_mask = None if mask is None else mask[:, None, None, :]

        out = F.scaled_dot_product_attention(
            _rot(q, cos, sin),
            _rot(k, cos, sin),
            v,
            attn_mask=attn_mask,
            dropout_p=self.cfg.dropout if self.training else 0.0,
        )
        out = self.out_proj(out.transpose(1, 2).reshape(B, L, -1))

        weights = None
        if need_weights:
            with torch.no_grad():
                logits = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
                if attn_mask is not None:
                    logits = logits.masked_fill(~attn_mask, float("-inf"))
                weights = logits.softmax(dim=-1)
        return AttnOutput(out, weights)
