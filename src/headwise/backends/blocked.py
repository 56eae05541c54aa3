"""Plain torch in blocks of queries: any call in memory that grows with T, never with T×T.

Each block is the definition itself on a few rows, so this backend means what the definition means;
keys that no query of the block may see are not touched. Under autograd a block is computed again
in the backward pass instead of being kept (Chen et al. 2016, gradient checkpointing).
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
from .base import Backend
from .tiles import Bounds

SCORES_AT_A_TIME = 1 << 22
"""How many scores a block may hold (16 MiB in float32); one row of them in any case."""

SCORES_IN_CACHE = 1 << 20
"""The same for passes that only read their scores once, and want them near."""


@dataclass(frozen=True)
class Block:
    """Queries `rows` and the range of keys `keys` outside which none of them may attend."""

    rows: slice
    keys: slice


def blocks(
    mask: Mask, extent: Extent, device: torch.device, scores: int | None = None
) -> Iterator[Block]:
    """Cut the queries into blocks of so many scores, each with the keys that it may see."""
    size = block_rows(extent, SCORES_AT_A_TIME if scores is None else scores)
    bounds = Bounds.of(mask, extent, device)
    for start in range(0, extent.queries, size):
        rows_of = slice(start, min(start + size, extent.queries))
        low, high = min(bounds.first[rows_of]), max(bounds.last[rows_of])
        yield Block(rows_of, slice(low, max(low, high)))


def block_rows(extent: Extent, scores: int = SCORES_AT_A_TIME) -> int:
    """Queries to a block."""
    row = max(1, extent.batch * extent.heads * extent.keys)
    return max(1, min(extent.queries, scores // row))


class Blocked(Backend):
    """Any mask, bias, softcap, dtype and device; memory O(T)."""

    name = "blocked"

    def refuse(self, call: Call) -> list[str]:
        return []

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        cut = blocks(call.mask, call.extent, call.q.device)
        if not (call.needs_grad or transformed()) or not call.extent.queries:
            return _without_gradient(call, cut)
        parts = [computed_again(_run_block, call, block) for block in cut]
        outs, lses = zip(*parts, strict=True)
        return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def computed_again(of: Callable[..., tuple[Tensor, ...]], *parts: Any) -> tuple[Tensor, ...]:
    """`of(*parts)`, which a backward pass computes again instead of keeping what it is made of.

    Checkpoints hold for plain autograd alone: transforms and forward derivatives keep everything.
    """
    if transformed() or forward_derivatives():
        return of(*parts)
    return checkpoint(of, *parts, use_reentrant=False)


def gradients_again(
    call: Call, grads: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients in q, k, v and sinks, where needed; ones that can be differentiated where asked.

    For backward passes of kernels that cannot do it; `grads` are those of output and LSE.
    """
    again = torch.is_grad_enabled()
    inputs = (call.q, call.k, call.v, call.sinks)
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    with torch.enable_grad():
        results = zip(Blocked().run(call), grads, strict=True)
        came = [(result, grad) for result, grad in results if grad is not None]
        outs, incoming = zip(*came, strict=True)
        found = iter(
            torch.autograd.grad(outs, wanted, incoming, create_graph=again, allow_unused=True)
        )
    return tuple(
        next(found) if need and x is not None else None
        for x, need in zip(inputs, needed, strict=True)
    )


def _without_gradient(call: Call, cut: Iterator[Block]) -> tuple[Tensor, Tensor]:
    """Blocks into room that is made beforehand: small results left between the passing large ones
    would keep the heap from closing up."""
    e = call.extent
    out = call.v.new_empty(e.batch, e.heads, e.queries, call.v.shape[-1])
    lse = torch.empty(out.shape[:3], dtype=statistics_dtype(call.q.dtype), device=out.device)
    for block in cut:
        out[:, :, block.rows], lse[:, :, block.rows] = _run_block(call, block)
    return out, lse


def _run_block(call: Call, block: Block) -> tuple[Tensor, Tensor]:
    full = block_definition(call, block, dropout=call.dropout)
    return full.out, full.lse


def block_definition(call: Call, block: Block, dropout: float = 0.0) -> Definition:
    """The definition on one block of the call."""
    i, j = grid(call.extent, call.q.device, block.rows, block.keys)
    return rows(
        call.q[:, :, block.rows],
        call.k[:, :, block.keys],
        call.v[:, :, block.keys],
        call.mask,
        call.extent,
        i,
        j,
        scale=call.scale,
        softcap=call.softcap,
        dropout=dropout,
        sinks=call.sinks,
        seed=call.seed,
    )
