"""One pass over all scores, in blocks that stay in cache, for several figures at once.

With the log-sum-exp known, a block of probabilities is `exp(q kᵀ − lse)` and final: nothing is ever
rescaled. Whatever is a sum over keys or over queries can be taken from the same pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ._index import grid
from .backends import Call
from .backends.tiles import Bounds

SCORES = 1 << 19
"""How many scores a block holds (2 MiB in float32)."""

ROWS, KEYS = 128, 4096
"""Queries and keys to a block, at most."""

LITTLE = -1e30
"""The logarithm of no probability at all; finite, so that 0 · log 0 is 0."""


@dataclass(frozen=True, eq=False)
class Block:
    """Probabilities of some queries, keys and heads.

    `heads` is a range of `B · H` flattened; `p` and `log_p` are `[heads, t, s]`. Where a pair may
    not attend, `p` is 0 and `log_p` a large negative number.
    """

    heads: slice
    rows: slice
    keys: slice
    p: Tensor
    log_p: Tensor


@runtime_checkable
class Accumulator(Protocol):
    """Something that is summed up block by block."""

    def add(self, block: Block) -> None: ...


def sweep(call: Call, lse: Tensor, accumulators: Sequence[Accumulator]) -> None:
    """Show every block of probabilities to every accumulator.

    `call` is in the statistics' dtype; `lse` `[B, H, T]` is its log-sum-exp, −inf in dead rows.
    """
    for block in blocks(call, lse):
        for accumulator in accumulators:
            accumulator.add(block)


def blocks(call: Call, lse: Tensor) -> Iterator[Block]:
    """Every block with a key that some query may see; each pair is in one block at most."""
    e = call.extent
    if not (e.batch and e.queries and e.keys):
        return
    # Dead rows have no allowed key, so any finite number does for their log-sum-exp.
    base = lse.masked_fill(lse == -torch.inf, 0.0).flatten(0, 1)
    linear = call.softcap is None and not call.mask.biased
    q = (
        (call.q * call.scale if linear else call.q)
        .unflatten(1, (e.kv_heads, e.group))
        .flatten(0, 1)
    )
    k = call.k.flatten(0, 1)
    bounds = Bounds.of(call.mask, e, call.q.device)
    for start in range(0, e.queries, ROWS):
        rows = slice(start, min(start + ROWS, e.queries))
        size = rows.stop - rows.start
        for first, stop, open_ in bounds.edges(rows):
            for low in range(first, stop, KEYS):
                keys = slice(low, min(low + KEYS, stop))
                masked = None if open_ and linear else _Masked(call, rows, keys)
                step = max(1, SCORES // (e.group * size * (keys.stop - keys.start)))
                for pair in range(0, len(k), step):
                    pairs = slice(pair, min(pair + step, len(k)))
                    heads = slice(pairs.start * e.group, pairs.stop * e.group)
                    part = q[pairs, :, rows]
                    scores = part.flatten(1, 2) @ k[pairs, keys].mT
                    scores = scores.unflatten(1, (e.group, size)).flatten(0, 1)
                    if masked is not None:
                        scores = masked.finish(scores, heads, linear)
                    log_p = scores.sub_(base[heads, rows, None])
                    yield Block(heads, rows, keys, log_p.exp(), log_p)


class _Masked:
    """What a mask does to the scores of some rows and keys, for any range of heads."""

    def __init__(self, call: Call, rows: slice, keys: slice) -> None:
        self.call, self.e = call, call.extent
        self.i, self.j = grid(self.e, call.q.device, rows, keys)
        self.allowed: Tensor | None = None
        if call.softcap is None and not call.mask.biased:
            allowed = call.mask.allowed(self.i, self.j, self.e)
            if allowed is not None:
                self.allowed = self._flat(~allowed)
        else:
            self.bias = call.mask.bias(self.i, self.j, self.e)
            allowed = call.mask.allowed(self.i, self.j, self.e)
            self.allowed = None if allowed is None else self._flat(~allowed)
            self.bias = None if self.bias is None else self._flat(self.bias)

    def _flat(self, table: Tensor) -> Tensor:
        """`[1, t, s]` where all heads are alike, else `[B · H, t, s]`."""
        table = table[(None,) * (4 - table.dim())]
        if table.shape[:2] == (1, 1):
            return table[0]
        return table.expand(self.e.batch, self.e.heads, -1, -1).flatten(0, 1)

    def finish(self, scores: Tensor, heads: slice, linear: bool) -> Tensor:
        if not linear:
            scores = scores * self.call.scale
            if self.call.softcap is not None:
                scores = self.call.softcap * torch.tanh(scores / self.call.softcap)
            if self.bias is not None:
                scores = scores + _of(self.bias, heads).to(scores.dtype)
        if self.allowed is None:
            return scores
        return scores.masked_fill_(_of(self.allowed, heads), LITTLE)


def _of(table: Tensor, heads: slice) -> Tensor:
    return table if len(table) == 1 else table[heads]
