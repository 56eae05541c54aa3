"""One pass over all scores, in blocks that stay in cache, for several figures at once.

With the log-sum-exp known, a block of probabilities is `exp(q kᵀ − lse)` and final: nothing is ever
rescaled. Whatever is a sum over keys or over queries can be taken from the same pass. Where the
log-sum-exp is too large for that, or a compiler must not ask, blocks are whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..backends import Call
from ..backends.blocked import SCORES_AT_A_TIME
from ..backends.tiles import Bounds
from ..core.index import grid
from ..core.modes import readable
from .scores import LITTLE, Scores

SCORES = 1 << 19
"""How many scores a block holds (2 MiB in float32)."""

ROWS, KEYS = 128, 4096
"""Queries and keys to a block, at most."""


@dataclass(frozen=True, eq=False)
class Block:
    """Probabilities of some queries, keys and heads.

    `heads` is a range of `B · H` flattened; `p` and `log_p` are `[heads, t, s]`. Where a pair may
    not attend (`hidden`, broadcastable to the same; `None` for nowhere), `p` is 0 and `log_p` a
    large negative number. The next block overwrites them.
    """

    heads: slice
    rows: slice
    keys: slice
    p: Tensor
    log_p: Tensor
    hidden: Tensor | None = None


@runtime_checkable
class Accumulator(Protocol):
    """Something that is summed up block by block."""

    def add(self, block: Block) -> None: ...


def sweep(blocks: Iterator[Block], accumulators: Sequence[Accumulator]) -> None:
    """Show every block of probabilities to every accumulator."""
    for block in blocks:
        for accumulator in accumulators:
            accumulator.add(block)


def whole_rows(scores: Scores) -> Iterator[Block]:
    """Every block of queries with a key that some of them may see, each row normalised anew."""
    for cut in scores.blocks(SCORES_AT_A_TIME):
        if cut.keys.stop > cut.keys.start and scores.extent.batch:
            found = scores.rows(cut)
            log_p = found.log_p.flatten(0, 1)
            hidden = ~found.allowed.flatten(0, 1)
            yield Block(slice(0, len(log_p)), cut.rows, cut.keys, log_p.exp(), log_p, hidden)


def tiles(call: Call, lse: Tensor) -> Iterator[Block]:
    """Every block with a key that some query may see; each pair is in one block at most.

    `call` is in the statistics' dtype; `lse` `[B, H, T]` is its log-sum-exp, −inf in dead rows and
    elsewhere so small that scores less it have all their digits.
    """
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
    room = _Room(q)
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
                    part, others = q[pairs, :, rows].flatten(1, 2), k[pairs, keys].mT
                    log_p, p = room.of(len(part), part.shape[1], others.shape[2])
                    torch.bmm(part, others, out=log_p)
                    log_p, p = (x.unflatten(1, (e.group, size)).flatten(0, 1) for x in (log_p, p))
                    hidden = None if masked is None else masked.finish_(log_p, heads, linear)
                    log_p.sub_(base[heads, rows, None])
                    yield Block(heads, rows, keys, torch.exp(log_p, out=p), log_p, hidden)


class _Room:
    """Two tensors that every block is written into: fresh ones would cost more than the sums."""

    def __init__(self, like: Tensor) -> None:
        self.log_p, self.p = like.new_empty(0), like.new_empty(0)

    def of(self, *shape: int) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        if size > len(self.p):
            self.log_p, self.p = (x.new_empty(size) for x in (self.log_p, self.p))
        return self.log_p[:size].view(shape), self.p[:size].view(shape)


class _Masked:
    """What a mask does to the scores of some rows and keys, for any range of heads."""

    def __init__(self, call: Call, rows: slice, keys: slice) -> None:
        self.call, self.e = call, call.extent
        i, j = grid(self.e, call.q.device, rows, keys)
        bias, allowed = call.mask.bias(i, j, self.e), call.mask.allowed(i, j, self.e)
        self.bias = None if bias is None else self._flat(bias)
        self.hidden = None if allowed is None else self._flat(~allowed)

    def _flat(self, table: Tensor) -> Tensor:
        """`[1, t, s]` where all heads are alike, else `[B · H, t, s]`."""
        table = table[(None,) * (4 - table.dim())]
        if table.shape[:2] == (1, 1):
            return table[0]
        return table.expand(self.e.batch, self.e.heads, -1, -1).flatten(0, 1)

    def finish_(self, scores: Tensor, heads: slice, linear: bool) -> Tensor | None:
        """Scale (unless that is done), softcap, bias and mask, in place; gives what it hid."""
        if not linear:
            scores.mul_(self.call.scale)
            if self.call.softcap is not None:
                scores.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
            if self.bias is not None:
                scores.add_(_of(self.bias, heads).to(scores.dtype))
        if self.hidden is None:
            return None
        hidden = _of(self.hidden, heads)
        scores.masked_fill_(hidden, LITTLE)
        return hidden


def _of(table: Tensor, heads: slice) -> Tensor:
    return table if len(table) == 1 else table[heads]


# ── accumulators ────────────────────────────────────────────────────────────────────────────────


class RowSums:
    """Sums over keys: `figure(block)` `[heads, t]`, added up in `total` `[B · H, n]`."""

    def __init__(self, figure: Callable[[Block], Tensor], total: Tensor) -> None:
        self.figure, self.total = figure, total

    def add(self, block: Block) -> None:
        self.total[block.heads, block.rows] += self.figure(block)


class Columns:
    """Sums of P over queries, each of which counts `counts` `[n]`."""

    def __init__(self, total: Tensor, counts: Tensor) -> None:
        self.total, self.counts = total, counts.to(total.dtype)
        self.all = not readable(counts) or bool((counts == 1).all())

    def add(self, block: Block) -> None:
        weights = self.counts[block.rows]
        if self.all or bool(weights.any()):
            self.total[block.heads, block.keys] += weights @ block.p


class Spread:
    """Running weight, mean and variance of key positions (Chan et al. 1979), for p among the keys.

    A row's blocks come with very different weights; all of it is kept in float64.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.weight, self.mean, self.variance = (
            torch.zeros_like(zeros, dtype=torch.float64) for _ in "wmv"
        )

    def add(self, block: Block) -> None:
        p, tiny = block.p, torch.finfo(block.p.dtype).tiny
        step = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
        weight = p.sum(-1)
        mean = (p @ step) / weight.clamp(min=tiny)
        squares = ((step - mean[..., None]).square_() * p).sum(-1).double()
        place = block.heads, block.rows
        before, new = self.weight[place], weight.double()
        total = before + new
        share = new / total.clamp(min=tiny)
        apart = mean.double() + block.keys.start - self.mean[place]
        joined = before * self.variance[place] + squares + before * share * apart.square()
        self.variance[place] = joined / total.clamp(min=tiny)
        self.mean[place] += apart * share
        self.weight[place] = total

    @property
    def deviation(self) -> Tensor:
        """`[B · H, n]`, in float64."""
        return self.variance.clamp(min=0).sqrt()


def entropy_of(block: Block) -> Tensor:
    return -torch.linalg.vecdot(block.p, block.log_p)


class Ahead:
    """`Σ p (j − position of i)` of a block, counted from its first key, so that it stays exact."""

    def __init__(self, positions: Tensor) -> None:
        self.positions = positions

    def __call__(self, block: Block) -> Tensor:
        p = block.p
        step = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
        sums = p @ torch.stack([step, torch.ones_like(step)], dim=1)
        start = (block.keys.start - self.positions[block.rows]).to(p.dtype)
        return sums[..., 0] + start * sums[..., 1]
