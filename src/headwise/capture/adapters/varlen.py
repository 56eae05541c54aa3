"""`varlen_attn`: sequences one behind another, of which each attends to itself or to its past."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...core.mask_algebra import Mask
from ...core.masks import Causal
from ..call import AttentionCall
from ..mask_import import Ranges
from ..net import CaptureSession, Interceptor
from ..private_torch import arguments


def functions() -> dict[Any, Interceptor]:
    """The operator behind `varlen_attn`; none where its module is not loaded."""
    if "torch.nn.attention.varlen" not in sys.modules:
        return {}
    operator = torch.ops.torch_attn._varlen_attn
    return {operator: varlen_attention, operator.default: varlen_attention}


def varlen_attention(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Queries `[T_q, H, D]`, keys and values `[T_k, G, D]` of sequences that `cu_seq` delimits.

    Where queries and keys are of the same sequences it is one call, and no query sees another
    sequence. Else every sequence is a call of its own, its last query at its last key.
    """
    result = function(*args, **kwargs)
    asked = arguments(torch.ops.torch_attn._varlen_attn.default, args, kwargs)
    if asked["block_table"] is not None:
        raise ValueError(
            f"{net.quote}: {net.names.current!r} calls varlen_attn with a block_table, whose pages "
            f"cannot be watched; leave paged caches out."
        )
    out = result[0]
    q, k, v, made = (
        x.transpose(0, 1)[None] for x in (asked["query"], asked["key"], asked["value"], out)
    )
    of_q, of_k = asked["cu_seq_q"], asked["cu_seq_k"]
    of_k = of_q if of_k is None else of_k
    used = asked["seqused_k"]
    left, right = asked["window_size"] or (-1, -1)
    if asked["is_causal"]:
        right = 0
    if used is None and torch.equal(of_q, of_k):
        whole = slice(0, q.shape[2])
        parts = [(whole, whole, _of_sequences(of_q.long(), left, right))]
    else:
        first, last = of_k[:-1], of_k[1:] if used is None else of_k[:-1] + used
        edges = torch.stack([of_q[:-1], of_q[1:], first, last], dim=1).tolist()
        parts = [
            (slice(a, b), slice(c, d), _of_window(b - a, d - c, left, right, q.device))
            for a, b, c, d in edges
            if b > a and d > c
        ]
    told = []
    for rows, keys, mask in parts:
        parts_of = q[:, :, rows], k[:, :, keys], v[:, :, keys], made[:, :, rows]
        call = AttentionCall(net.names.current, "varlen_attn", *parts_of, own_positions=True)
        call.keywords |= {"mask": mask, "scale": asked["scale"]}
        told.append(net.emit(call))
    if all(new is None for new in told):
        return result
    out = out.clone()
    for (rows, _, _), new in zip(parts, told, strict=True):
        if new is not None:
            out[rows] = new[0].transpose(0, 1)
    return out, *result[1:]


def _of_sequences(edges: Tensor, left: int, right: int) -> Mask:
    """Each query sees its own sequence, so far back and ahead (−1: all of it)."""
    i = torch.arange(int(edges[-1]), device=edges.device)
    number = torch.searchsorted(edges[1:].contiguous(), i, right=True)
    low, high = edges[number], edges[number + 1]
    if left >= 0:
        low = torch.maximum(low, i - left)
    if right >= 0:
        high = torch.minimum(high, i + right + 1)
    return Ranges(low[None, None, :, None], high[None, None, :, None])


def _of_window(queries: int, keys: int, left: int, right: int, device: torch.device) -> Mask:
    """Return the mask of a window in one sequence, counted from its end."""
    if (left, right) == (-1, 0):
        return Causal()
    here = torch.arange(queries, device=device) + keys - queries
    low = here - left if left >= 0 else torch.zeros_like(here)
    high = here + right + 1 if right >= 0 else torch.full_like(here, keys)
    low, high = (x.clamp(0, keys)[None, None, :, None] for x in (low, high))
    return Ranges(low, high)
