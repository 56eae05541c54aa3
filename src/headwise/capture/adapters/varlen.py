"""Capture `varlen_attn`: concatenated sequences, each of which attends only to itself."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from ...core.mask_algebra import Mask
from ...core.masks import Causal
from ..call import AttentionCall
from ..mask_import import Ranges
from ..private_torch import arguments
from ..session import CaptureSession, Interceptor


def functions() -> dict[Any, Interceptor]:
    """Return the operator of `varlen_attn`; nothing if its module is not loaded."""
    if "torch.nn.attention.varlen" not in sys.modules:
        return {}
    operator = torch.ops.torch_attn._varlen_attn
    return {operator: varlen_attention, operator.default: varlen_attention}


def varlen_attention(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Report queries `[T_q, H, D]`, keys and values `[T_k, G, D]` of the sequences in `cu_seq`.

    If queries and keys belong to the same sequences, this is one call in which no query sees
    another sequence. Otherwise every sequence is a call, with its last query at its last key.
    """
    result = function(*args, **kwargs)
    bound_args = arguments(torch.ops.torch_attn._varlen_attn.default, args, kwargs)
    if bound_args["block_table"] is not None:
        raise ValueError(
            f"{net.quote}: {net.names.current!r} calls varlen_attn with a block_table, whose pages "
            f"cannot be watched; leave paged caches out."
        )
    out = result[0]
    q, k, v, heads_out = (
        x.transpose(0, 1)[None]
        for x in (bound_args["query"], bound_args["key"], bound_args["value"], out)
    )
    of_q, of_k = bound_args["cu_seq_q"], bound_args["cu_seq_k"]
    of_k = of_q if of_k is None else of_k
    used = bound_args["seqused_k"]
    left, right = bound_args["window_size"] or (-1, -1)
    if bound_args["is_causal"]:
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
    replacements = []
    for rows, keys, mask in parts:
        parts_of = q[:, :, rows], k[:, :, keys], v[:, :, keys], heads_out[:, :, rows]
        call = AttentionCall(net.names.current, "varlen_attn", *parts_of, own_positions=True)
        call.keywords |= {"mask": mask, "scale": bound_args["scale"]}
        replacements.append(net.emit(call))
    if all(new is None for new in replacements):
        return result
    out = out.clone()
    for (rows, _, _), new in zip(parts, replacements, strict=True):
        if new is not None:
            out[rows] = new[0].transpose(0, 1)
    return out, *result[1:]


def _of_sequences(edges: Tensor, left: int, right: int) -> Mask:
    """Return the mask of a window in each sequence, `left` back, `right` ahead (−1: no limit)."""
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
