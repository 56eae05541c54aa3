"""Plain PyTorch: the definition on all queries at once, or in blocks of queries.

In blocks, memory grows with T, not with T×T, and keys that no query of a block may see are skipped.
Under autograd, blocks are recomputed in the backward pass instead of being kept (Chen et al. 2016,
gradient checkpointing).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.call import Call
from ..core.index import grid
from ..core.mask_algebra import Mask
from ..core.modes import forward_derivatives, transformed
from ..core.reference import Definition, rows
from ..core.shapes import Extent, statistics_dtype
from ..kernels.torch_ops import gradients_of
from .base import Backend
from .tiles import Bounds

SCORES_AT_A_TIME = 1 << 22
"""The largest number of scores in a block (16 MiB in float32), but at least one row."""

SCORES_IN_CACHE = 1 << 20
"""The same for passes that read their scores once, and need them in cache."""


@dataclass(frozen=True)
class Block:
    """Queries `rows` and the range of keys `keys` outside which none of them may attend."""

    rows: slice
    keys: slice


def blocks(
    mask: Mask, extent: Extent, device: torch.device, scores: int | None = None
) -> Iterator[Block]:
    """Cut the queries into blocks of at most that many scores, each with the keys it may see."""
    size = block_rows(extent, SCORES_AT_A_TIME if scores is None else scores)
    bounds = Bounds.of(mask, extent, device)
    for start in range(0, extent.queries, size):
        rows_of = slice(start, min(start + size, extent.queries))
        low, high = min(bounds.first[rows_of]), max(bounds.last[rows_of])
        yield Block(rows_of, slice(low, max(low, high)))


def block_rows(extent: Extent, scores: int = SCORES_AT_A_TIME) -> int:
    """Return the number of queries per block."""
    row = max(1, extent.batch * extent.heads * extent.keys)
    return max(1, min(extent.queries, scores // row))


class Eager(Backend):
    """The definition, with the T×T matrix: runs any call, but slowly."""

    name = "eager"

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        return _run_block(call, Block(slice(None), slice(None)))


class Blocked(Backend):
    """The definition in blocks: any mask, bias, softcap, dtype and device; memory O(T)."""

    name = "blocked"

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        cut = blocks(call.mask, call.extent, call.q.device)
        if (call.needs_grad or transformed()) and call.extent.queries:
            outs, lses = zip(*(computed_again(_run_block, call, b) for b in cut), strict=True)
            return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
        # Results go into preallocated tensors, and the last block (the largest under a causal
        # mask) comes first, to avoid fragmentation of memory.
        e = call.extent
        out = call.v.new_empty(e.batch, e.heads, e.queries, call.v.shape[-1])
        lse = torch.empty(out.shape[:3], dtype=statistics_dtype(call.q.dtype), device=out.device)
        for block in reversed(list(cut)):
            out[:, :, block.rows], lse[:, :, block.rows] = _run_block(call, block)
        return out, lse


def computed_again(of: Callable[..., tuple[Tensor, ...]], *parts: Any) -> tuple[Tensor, ...]:
    """Return `of(*parts)`, which the backward pass recomputes (activation checkpointing).

    This works under plain autograd only: transforms and forward derivatives keep everything.
    """
    if transformed() or forward_derivatives():
        return of(*parts)
    return checkpoint(of, *parts, use_reentrant=False)


def gradients_again(
    call: Call, grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Return the required gradients of q, k, v and sinks, differentiable if grad mode is enabled.

    Used in backward passes of kernels without second derivatives; `grads` are the gradients of the
    output and LSE.
    """
    again = torch.is_grad_enabled()
    inputs = (call.q, call.k, call.v, call.sinks)
    with torch.enable_grad():
        return gradients_of(Blocked().run(call), inputs, grads, needed, again)


def _run_block(call: Call, block: Block) -> tuple[Tensor, Tensor]:
    full = block_definition(call, block, dropout=call.dropout)
    return full.out, full.lse


def block_definition(call: Call, block: Block, dropout: float = 0.0) -> Definition:
    """Compute the definition on one block of the call."""
    i, j = grid(call.extent, call.q.device, block.rows, block.keys)
    q, k, v = call.q[:, :, block.rows], call.k[:, :, block.keys], call.v[:, :, block.keys]
    options: dict[str, Any] = {"scale": call.scale, "softcap": call.softcap, "dropout": dropout}
    return rows(q, k, v, call.mask, call.extent, i, j, sinks=call.sinks, seed=call.seed, **options)


def statistics_again(call: Call, position: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Compute the native kernel's differentiable results with plain PyTorch operations.

    These are output, LSE, entropy, E[j − position] and the masses on the first, previous and own
    key. They provide second derivatives, as the kernel's backward pass is not differentiable.
    `position` maps query indices to key positions.
    """
    cut = blocks(call.mask, call.extent, call.q.device)
    parts = [checkpoint(_figures, call, b, position, use_reentrant=False) for b in cut]
    return [torch.cat(figure, dim=2) for figure in zip(*parts, strict=True)]  # type: ignore[misc]


def _figures(call: Call, block: Block, position: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    full = block_definition(call, block, call.dropout)
    p = full.weights
    valid = full.allowed.any(-1)
    entering, outcomes = full.logits.masked_fill(~valid[..., None], 0.0), p
    if full.sink is not None and call.sinks is not None:
        sinks = call.sinks.to(p.dtype).view(1, -1, 1, 1).expand(*p.shape[:3], 1)
        entering = torch.cat([entering, sinks], dim=-1)
        outcomes = torch.cat([p, full.sink[..., None]], dim=-1)
    # Scores may be arbitrarily large. Relative to the largest score, logarithms of weights are
    # exact, and so are their gradients.
    top = entering.detach().amax(-1, keepdim=True)
    log_sum = torch.logsumexp(entering - top, dim=-1)
    lse = torch.where(valid, top[..., 0] + log_sum, -torch.inf)
    log_p = (entering - top - log_sum[..., None]).masked_fill(outcomes == 0, 0.0)
    entropy = -(outcomes * log_p).sum(-1)
    queries = torch.arange(block.rows.start, block.rows.stop, device=p.device)
    keys = torch.arange(block.keys.start, block.keys.stop, device=p.device)
    away = keys - position(queries)[:, None]
    single = [torch.where(where, p, 0.0).sum(-1) for where in (keys == 0, away == -1, away == 0)]
    return full.out, lse, entropy, (p * away).sum(-1), *single
