import math
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn


def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: (dim // 2)].float() / dim))
    t = torch.arange(end, dtype=torch.float32)
    freqs = torch.outer(t, freqs)
    return torch.polar(torch.ones_like(freqs), freqs)


def apply_rotary_emb(xq, xk, freqs_cis) -> Tuple[torch.Tensor, torch.Tensor]:
    xq_ = torch.view_as_complex(xq.float().reshape(*xq.shape[:-1], -1, 2))
    xk_ = torch.view_as_complex(xk.float().reshape(*xk.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, freqs_cis.shape[0], 1, freqs_cis.shape[1])
    xq_out = torch.view_as_real(xq_ * freqs_cis).flatten(3)
    xk_out = torch.view_as_real(xk_ * freqs_cis).flatten(3)
    return xq_out.type_as(xq), xk_out.type_as(xk)


class CachedLlamaAttention(nn.Module):
    """
    x:         (bsz, seqlen, dim)
    freqs_cis: complex (seqlen, head_dim / 2), rows start_pos .. start_pos + seqlen of the table
    mask:      additive (seqlen, start_pos + seqlen) or None
    In training (start_pos is None) the cache is left alone and causal masking is applied inside.
    """

    def __init__(self, dim=64, n_heads=8, n_kv_heads=2, max_batch=4, max_seq=64):
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.register_buffer("cache", torch.zeros(2, max_batch, max_seq, n_kv_heads, self.head_dim), persistent=False)

    def forward(self, x, freqs_cis, start_pos: Optional[int] = None, mask: Optional[torch.Tensor] = None):
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)

        past = 0
        if start_pos is not None:
            past = start_pos
            end = start_pos + seqlen
            with torch.no_grad():
                self.cache[0, :bsz, start_pos:end] = xk
                self.cache[1, :bsz, start_pos:end] = xv
            xk = self.cache[0, :bsz, :end].clone()
            xv = self.cache[1, :bsz, :end].clone()

        g = self.n_heads // self.n_kv_heads
        # (b, s, kv, g, d): no copy of keys and values
        xq = xq.view(bsz, seqlen, self.n_kv_heads, g, self.head_dim)
        scores = torch.einsum("bskgd,btkd->bkgst", xq, xk) / math.sqrt(self.head_dim)
        if mask is None and seqlen > 1:
            mask = torch.full((seqlen, past + seqlen), float("-inf"), device=x.device).triu(past + 1)
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        p = F.softmax(scores.float(), dim=-1).type_as(x)
        out = torch.einsum("bkgst,btkd->bskgd", p, xv)
        return self.wo(out.reshape(bsz, seqlen, -1))
