"""Functional attention in query chunks; nothing here owns parameters."""
from typing import Optional, Tuple

import torch
from torch import Tensor


def chunked_causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunk: int = 128,
    key_valid: Optional[Tensor] = None,
    scale: Optional[float] = None,
) -> Tensor:
    """Causal attention whose peak memory is chunk x S instead of S x S.

    Args:
        q, k, v: [B, H, S, D], same length S
        chunk: number of query rows handled together
        key_valid: optional [B, S] bool, False for keys to skip (padding at
            the end of a row)
        scale: defaults to D ** -0.5

    Position i attends to positions 0 .. i.
    """
    S, D = q.shape[-2:]
    if k.shape[-2] != S:
        raise ValueError("q and k must have the same length")
    if scale is None:
        scale = D ** -0.5
    pieces = []
    for start in range(0, S, chunk):
        rows = q[..., start : start + chunk, :]
        logits = torch.einsum("bhid,bhjd->bhij", rows * scale, k)
        allowed = torch.ones(rows.shape[-2], S, dtype=torch.bool, device=q.device)
        allowed = allowed.tril(diagonal=start + 1)[None, None]
        if key_valid is not None:
            allowed = allowed & key_valid[:, None, None, :]
        logits = logits.masked_fill(~allowed, float("-inf"))
        weights = torch.softmax(logits.float(), dim=-1).to(v.dtype)
        pieces.append(torch.einsum("bhij,bhjd->bhid", weights, v))
    return torch.cat(pieces, dim=-2)


def split_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(-2)


def attention_layer(x: Tensor, weights: Tuple[Tensor, Tensor], heads: int, **kw) -> Tensor:
    """weights = (w_in [3C, C], w_out [C, C])"""
    w_in, w_out = weights
    q, k, v = (split_heads(t, heads) for t in torch.nn.functional.linear(x, w_in).chunk(3, -1))
    y = merge_heads(chunked_causal_attention(q, k, v, **kw))
    return torch.nn.functional.linear(y, w_out)


if __name__ == "__main__":
    w = torch.randn(96, 32) * 0.1, torch.randn(32, 32) * 0.1
    valid = torch.arange(50)[None] < torch.tensor([[50], [33]])
    print(attention_layer(torch.randn(2, 50, 32), w, 4, chunk=16, key_valid=valid).shape)
