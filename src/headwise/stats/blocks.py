"""Blocks of scores and probabilities, for statistics that are sums over keys or over queries.

Once the log-sum-exp is known, a block of probabilities is `exp(q kᵀ − lse)` and needs no rescaling,
so one pass over blocks that stay in cache yields every statistic that is a sum. If the log-sum-exp
is too large for that, or if a gradient is required, blocks are whole rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..backends import Call
from ..backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE, blocks, computed_again
from ..backends.tiles import Bounds
from ..core.index import grid
from ..core.modes import readable, traced
from ..core.reference import finish_scores
from ..core.shapes import Extent

NEAR = 2.0**-14
"""The largest unit in the last place of a log-sum-exp that probabilities are computed from."""

LITTLE = -1e30
"""The logarithm that stands for probability 0; finite, so that 0 · log 0 is 0."""

GRAPH_BLOCKS = 32
"""The maximum number of blocks in a compiled graph, where they run one after another."""

SCORES = 1 << 19
"""The number of scores in a block (2 MiB in float32)."""

ROWS, KEYS = 128, 4096
"""The maximum numbers of queries and of keys in a block."""


def near(lse: Tensor, sure: bool = False) -> bool:
    """Return True if every row's log-sum-exp is small enough that `s − lse` keeps its precision.

    A log-sum-exp of 10⁹ in float32 is accurate only to ±32, so `exp(s − lse)` may be off by any
    factor, as in a row whose scores are all −10⁹; such rows must be renormalized (`Scores.rows`).
    Return False if the values cannot be read (while compiling), unless `sure` is True.
    """
    if not sure and not readable(lse):
        return False
    if not lse.numel():
        return True
    lse = lse.detach()
    limit = NEAR / torch.finfo(lse.dtype).eps
    low, high = torch.stack(torch.aminmax(lse)).tolist()
    if low == -torch.inf:  # rows that may attend to nothing
        low = lse.masked_fill(lse == -torch.inf, 0.0).amin().item()
    return -limit <= low and high <= limit


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Probabilities of some queries, keys and heads.

    `heads` is a range of the flattened `B · H` axis; `p` and `log_p` are `[heads, t, s]`. At masked
    pairs (`hidden`, broadcastable to the same shape; `None` if there are none), `p` is 0 and
    `log_p` is a large negative number. The next block overwrites both. In blocks of whole rows,
    `log_sink` `[heads, t]` is the logarithm of the learned sink's probability.
    """

    heads: slice
    rows: slice
    keys: slice
    p: Tensor
    log_p: Tensor
    hidden: Tensor | None = None
    log_sink: Tensor | None = None


RowFigure = Callable[[ScoreBlock], Tensor]
"""A function that returns sums `[heads, t]` over the keys of a block."""


def entropy_of(block: ScoreBlock) -> Tensor:
    """Return `−Σ p log p` of a block, including the sink's term if the block has one."""
    entropy = -torch.linalg.vecdot(block.p, block.log_p)
    if block.log_sink is None:
        return entropy
    return entropy - torch.exp(block.log_sink) * block.log_sink


def ahead_of(positions: Tensor) -> RowFigure:
    """Return the figure `Σ p (j − position of i)`, computed relative to each block's first key."""

    def ahead(block: ScoreBlock) -> Tensor:
        p = block.p
        step = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
        sums = p @ torch.stack([step, torch.ones_like(step)], dim=1)
        start = (block.keys.start - positions[block.rows]).to(p.dtype)
        return sums[..., 0] + start * sums[..., 1]

    return ahead


# ── scores and whole rows ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Scores:
    """The scores of a call in the statistics' dtype, and its learned sinks."""

    call: Call
    gradients: bool = False
    sinks: Tensor | None = None

    @property
    def extent(self) -> Extent:
        return self.call.extent

    @property
    def device(self) -> torch.device:
        return self.call.q.device

    def logits(self, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores that enter the softmax at these rows and keys, and allowed pairs."""
        e, call = self.extent, self.call
        rows = q.unflatten(1, (e.kv_heads, e.group)).flatten(2, 3)  # the keys are not repeated
        scores = (rows @ k.mT).unflatten(2, (e.group, q.shape[2])).flatten(1, 2) * call.scale
        return finish_scores(scores, call.mask, e, i, j, softcap=call.softcap)

    def rows(self, rows: slice, keys: slice, queries: Tensor | None = None) -> ScoreBlock:
        """Return a block of renormalized rows, which is accurate for scores of any magnitude.

        The queries must not attend to keys outside `keys`. `queries` `[t]` selects arbitrary rows.
        """
        i, j = grid(self.extent, self.device, rows, keys)
        i = i if queries is None else queries[:, None]
        q = self.call.q[:, :, rows if queries is None else queries]
        logits, allowed = self.logits(q, self.call.k[:, :, keys], i, j)
        # A row without keys has no softmax: it gets a finite placeholder that is zeroed afterwards.
        entering = logits.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        if self.sinks is not None:
            sink = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            entering = torch.cat([entering, sink], dim=-1)
        least = torch.finfo(entering.dtype).min  # −inf times 0 would be NaN
        log_p = torch.log_softmax(entering, dim=-1).clamp(min=least).flatten(0, 1)
        hidden, log_sink = ~allowed.flatten(0, 1), None
        if self.sinks is not None:
            log_sink = log_p[..., -1].masked_fill(hidden.all(-1), LITTLE)
            log_p = log_p[..., :-1]
        log_p = log_p.masked_fill(hidden, LITTLE)
        return ScoreBlock(slice(0, len(log_p)), rows, keys, log_p.exp(), log_p, hidden, log_sink)

    def blocks(self, scores: int) -> Iterator[Any]:
        """Cut the queries into blocks of `scores` scores, or larger ones under a compiler."""
        e = self.extent
        if traced():
            scores = max(scores, -(-e.batch * e.heads * e.queries * e.keys // GRAPH_BLOCKS))
        return blocks(self.call.mask, e, self.device, scores)

    def row_figures(self, figures: Sequence[RowFigure]) -> list[Tensor]:
        """Return one sum over keys `[B, H, n]` per function, all from one pass over whole rows.

        If a gradient is required, the backward pass recomputes each block, so no T×T matrix is
        kept. Otherwise results are written into preallocated tensors, and the last block (the
        largest under a causal mask) comes first, so that later blocks fit into its memory.
        """
        e, size = self.extent, SCORES_AT_A_TIME if self.gradients else SCORES_IN_CACHE
        cut, shape = self.blocks(size), (e.batch, e.heads)

        def of(block: Any) -> tuple[Tensor, ...]:
            rows = self.rows(block.rows, block.keys)
            return tuple(figure(rows).unflatten(0, shape) for figure in figures)

        if self.gradients:
            parts: list[Any] = [computed_again(of, block) for block in cut]
            if parts:
                return [torch.cat(figure, dim=2) for figure in zip(*parts, strict=True)]
        whole = [self.call.q.new_zeros(*shape, e.queries) for _ in figures]
        for block in reversed(list(cut)):
            for figure, part in zip(whole, of(block), strict=True):
                figure[:, :, block.rows] = part
        return whole


def probability(logits: Tensor, lse: Tensor) -> Tensor:
    """Return `exp(s − lse)`, 0 in dead rows."""
    dead = lse == -torch.inf
    return torch.exp(logits - lse.masked_fill(dead, 0.0)).masked_fill(dead, 0.0)


# ── one pass over all scores ────────────────────────────────────────────────────────────────────


@runtime_checkable
class Accumulator(Protocol):
    """A sum that grows block by block."""

    def add(self, block: ScoreBlock) -> None: ...


def sweep(
    call: Call, lse: Tensor, sinks: Tensor | None, accumulators: Sequence[Accumulator]
) -> None:
    """Pass every block of probabilities to every accumulator."""
    if not (call.extent.batch and call.extent.queries and call.extent.keys):
        return
    found = _tiles(call, lse) if near(lse) else _whole_rows(Scores(call, sinks=sinks))
    for block in found:
        for accumulator in accumulators:
            accumulator.add(block)


def _whole_rows(scores: Scores) -> Iterator[ScoreBlock]:
    """Yield every block of queries that can see a key, with each row renormalized."""
    for cut in scores.blocks(SCORES_AT_A_TIME):
        if cut.keys.stop > cut.keys.start:
            yield scores.rows(cut.rows, cut.keys)


def _tiles(call: Call, lse: Tensor) -> Iterator[ScoreBlock]:
    """Yield every block that contains a visible key; each pair is in at most one block.

    `call` is in the statistics' dtype; `lse` `[B, H, T]` is its log-sum-exp: −inf in dead rows, and
    otherwise small enough that `s − lse` keeps its precision.
    """
    e = call.extent
    # Dead rows have no allowed key, so any finite log-sum-exp will do.
    base = lse.masked_fill(lse == -torch.inf, 0.0).flatten(0, 1)
    linear = call.softcap is None and not call.mask.biased
    q = call.q * call.scale if linear else call.q
    q, k = q.unflatten(1, (e.kv_heads, e.group)).flatten(0, 1), call.k.flatten(0, 1)
    bounds, room = Bounds.of(call.mask, e, call.q.device), _Room(q)
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
                    yield ScoreBlock(heads, rows, keys, torch.exp(log_p, out=p), log_p, hidden)


class _Room:
    """Two buffers reused for every block: allocating new ones would cost more than the sums."""

    def __init__(self, like: Tensor) -> None:
        self.log_p, self.p = like.new_empty(0), like.new_empty(0)

    def of(self, *shape: int) -> tuple[Tensor, Tensor]:
        size = math.prod(shape)
        if size > len(self.p):
            self.log_p, self.p = (x.new_empty(size) for x in (self.log_p, self.p))
        return self.log_p[:size].view(shape), self.p[:size].view(shape)


class _Masked:
    """The bias and the masked pairs of some rows and keys, for any range of heads."""

    def __init__(self, call: Call, rows: slice, keys: slice) -> None:
        self.call, e = call, call.extent
        i, j = grid(e, call.q.device, rows, keys)
        bias, allowed = call.mask.bias(i, j, e), call.mask.allowed(i, j, e)

        def flat(table: Tensor) -> Tensor:
            """Return `[1, t, s]` if all heads are equal, else `[B · H, t, s]`."""
            table = table[(None,) * (4 - table.dim())]
            if table.shape[:2] == (1, 1):
                return table[0]
            return table.expand(e.batch, e.heads, -1, -1).flatten(0, 1)

        self.bias = None if bias is None else flat(bias)
        self.hidden = None if allowed is None else flat(~allowed)

    def finish_(self, scores: Tensor, heads: slice, linear: bool) -> Tensor | None:
        """Scale (unless done already), softcap, bias and mask in place; return the masked pairs."""

        def of(table: Tensor) -> Tensor:
            return table if len(table) == 1 else table[heads]

        if not linear:
            scores.mul_(self.call.scale)
            if self.call.softcap is not None:
                scores.div_(self.call.softcap).tanh_().mul_(self.call.softcap)
            if self.bias is not None:
                scores.add_(of(self.bias).to(scores.dtype))
        if self.hidden is None:
            return None
        hidden = of(self.hidden)
        scores.masked_fill_(hidden, LITTLE)
        return hidden


class RowSums:
    """Sums over keys: `figure(block)` `[heads, t]`, added up in `total` `[B · H, n]`."""

    def __init__(self, figure: RowFigure, total: Tensor) -> None:
        self.figure, self.total = figure, total

    def add(self, block: ScoreBlock) -> None:
        self.total[block.heads, block.rows] += self.figure(block)
