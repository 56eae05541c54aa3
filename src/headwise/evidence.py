"""What can be known of a call's probabilities without the T×T matrix.

`Evidence` answers a few exact questions about `P = softmax(scores)`: its log-sum-exp, `E[s]`,
`P @ columns`, single entries, the largest score. Each is one more attention call or a few rows of
scores (docs of each method); statistics are formulas on these answers. Where an identity is not
linear in the scores (softcap, bias), the answer comes from blocks of rows instead, in O(T) memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._axes import Extent, statistics_dtype
from ._index import grid
from .backends import Backend, Call, choose
from .backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE, block_definition, blocks
from .definition import Definition, finish_scores

CROWDED = 1 / 64
"""The share of the matrix from which pairs cost more, one by one, than whole rows of scores."""


@dataclass(frozen=True)
class Runs:
    """A set of keys for every query, each a range `[start, stop)` in one ordering of the keys.

    `order` is `[B or 1, S]` (key positions), `start` and `stop` are `[B or 1, T]`. First, previous,
    same-token and induction keys all have this shape, and so need no T×T matrix to be written down.
    `omit` leaves out one key per query (−1 for none).
    """

    order: Int[Tensor, "#B S"]
    start: Int[Tensor, "#B T"]
    stop: Int[Tensor, "#B T"]
    omit: Int[Tensor, "#B T"] | None = None


@runtime_checkable
class Pattern(Protocol):
    """Which keys a head that follows the pattern looks at."""

    @property
    def name(self) -> str: ...

    def runs(self, extent: Extent, device: torch.device) -> Runs: ...

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        """The pattern as a boolean matrix `[B or 1, T, S]`, for the definition."""
        ...


@dataclass(frozen=True, eq=False)
class Reading:
    """One figure of every head: its tensor, and the rows that count in a mean.

    `values` is `[B, H, T]` per query or `[B, H, …]` per head. `rows` (broadcastable to
    `[B, H, T]`) holds the queries that have what is measured; `None` means that the figure is not
    per query. `among` holds the queries that could have had it, where that is news: the share of
    `rows` in it is the coverage. Of a figure that is the `largest`, heads keep the maximum.
    """

    values: Tensor
    rows: Tensor | None = None
    among: Tensor | None = None
    largest: bool = False


@dataclass(frozen=True)
class Figure:
    """A statistic in one number per head `[H]`, over batch, valid queries and calls."""

    mean: Tensor
    coverage: Tensor | None = None


def summarise(readings: list[Reading]) -> Figure | None:
    """The figure of each head over the readings of one or more calls; `None` for maps."""
    first = readings[0]
    if first.largest:
        return Figure(torch.stack([r.values.amax(0) for r in readings]).amax(0))
    if first.values.dim() != (2 if first.rows is None else 3):
        return None
    if first.rows is None:
        return Figure(torch.cat([r.values for r in readings]).mean(0))
    total = _sum_of_heads([torch.where(_held(r.rows, r), r.values, 0.0) for r in readings])
    count = _sum_of_heads([_held(r.rows, r) for r in readings])
    coverage = None
    if first.among is not None:
        coverage = count / _sum_of_heads([_held(r.among, r) for r in readings]).clamp(min=1)
    return Figure(total / count.clamp(min=1), coverage)


def _sum_of_heads(tensors: list[Tensor]) -> Tensor:
    """The sum over batch, queries and calls of tensors `[B, H, T]`: `[H]`."""
    return torch.stack([tensor.sum((0, 2)) for tensor in tensors]).sum(0)


def _held(rows: Tensor | None, reading: Reading) -> Tensor:
    assert rows is not None  # readings of one statistic are all per query, or none is
    return rows.expand(reading.values.shape)


@runtime_checkable
class Statistic(Protocol):
    """A statistic: its names, its reading from evidence, and its definition on P."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        """The exact figure, from identities."""
        ...

    def define(self, full: Definition) -> dict[str, Tensor]:
        """The same from the whole matrix, as the textbook would."""
        ...


class Evidence:
    """What is known of one call. Costs are on top of the forward that gave `lse`."""

    def __init__(self, call: Call, backend: Backend, lse: Float[Tensor, "B H T"]) -> None:
        dtype = statistics_dtype(call.q.dtype)
        q, k, v = (x.detach().to(dtype) for x in (call.q, call.k, call.v))
        self.call = call.with_(q=q, k=k, v=v, dropout=0.0)
        # The statistics' own calls are in float32; not every backend serves that.
        self.backend = choose(self.call) if backend.refuse(self.call) else backend
        self.lse = lse.detach().to(dtype)
        self.extent = call.extent

    @property
    def device(self) -> torch.device:
        return self.call.q.device

    @cached_property
    def counts(self) -> Int[Tensor, "#B #H T"]:
        """How many keys each query may attend to, `n_i`."""
        extent = self.extent
        i, j = grid(extent, self.device)
        if not self.call.mask.biased:  # a bias may forbid keys inside a range
            found = self.call.mask.interval(i, extent)
            if found is not None:
                every_row = torch.zeros(1, 1, extent.queries, 1, dtype=i.dtype, device=i.device)
                low, high, _ = torch.broadcast_tensors(*found, every_row)
                return (high - low).clamp(min=0)[..., 0]
        parts = []
        for block in blocks(self.call.mask, extent, self.device):
            allowed = self.call.mask.allowed(i[block.rows], j, extent)
            if allowed is None:
                allowed = torch.ones(1, 1, 1, extent.keys, dtype=torch.bool, device=self.device)
            size = block.rows.stop - block.rows.start
            allowed = allowed[(None,) * (4 - allowed.dim())].expand(-1, -1, size, extent.keys)
            parts.append(allowed.sum(-1))
        return torch.cat(parts, dim=2) if parts else torch.zeros(1, 1, 0, device=self.device).long()

    @cached_property
    def alive(self) -> Bool[Tensor, "#B #H T"]:
        """Queries that may attend to something."""
        return self.counts > 0

    @cached_property
    def entropy(self) -> Float[Tensor, "B H T"]:
        """`−Σ_j p_ij log p_ij = lse_i − E[s]`, with `E[s] = scale · q_i·(P K)_i`.

        One attention call with the keys as values. All keys are moved by their mean first: that
        changes no probability, and keeps both sides of the difference small. With softcap or a bias
        the scores are not linear in the keys, and blocks of rows are summed.
        """
        call = self.call
        if call.softcap is not None or call.mask.biased:
            return self._by_rows(lambda full: torch.special.entr(full.weights).sum(-1))
        keys = call.k - call.k.mean(2, keepdim=True)
        keys_seen, lse = self.backend.run(call.with_(k=keys, v=keys))
        mean = torch.einsum("bhtd,bhtd->bht", call.q, keys_seen) * call.scale
        return torch.where(self.alive, (lse - mean).clamp(min=0.0), 0.0)

    def mean_of(self, columns: Float[Tensor, "#B #G S C"]) -> Float[Tensor, "B H T C"]:
        """`P @ columns`: attention with these columns as values, head_dim of them to a call."""
        call, extent = self.call, self.extent
        wide = columns.to(call.q.dtype).expand(extent.batch, extent.kv_heads, -1, -1)
        parts = [
            self.backend.run(call.with_(v=part.contiguous()))[0]
            for part in wide.split(max(1, call.q.shape[-1]), dim=-1)
        ]
        return torch.cat(parts, dim=-1)

    @cached_property
    def max_logit(self) -> Float[Tensor, "B H"]:
        """The largest score of each head, exactly; −inf where no query sees a key.

        `lse_i − log n_i ≤ max_j s_ij ≤ lse_i`: the rows with the largest LSE come first, and then
        only blocks with a row whose LSE can still win. A few rows on peaked heads, all on flat.
        """
        call, extent = self.call, self.extent
        if not extent.queries or not extent.keys:
            return self.lse.new_full((extent.batch, extent.heads), -torch.inf)
        row = max(1, extent.batch * extent.heads * extent.keys)
        count = min(extent.queries, max(1, min(16, SCORES_AT_A_TIME // row)))
        i = self.lse.topk(count, dim=-1).indices
        q = call.q.gather(2, i[..., None].expand(-1, -1, -1, call.q.shape[-1]))
        j = torch.arange(extent.keys, device=self.device).view(1, 1, 1, -1)
        best = self._logits(q, call.k, i[..., None], j)[0].amax((-1, -2))
        # Rounding of the LSE itself must not shut out the winner.
        bound = torch.where(self.lse.isneginf(), self.lse, self.lse + 1e-5 * (1 + self.lse.abs()))
        for block in blocks(call.mask, extent, self.device, SCORES_IN_CACHE):
            if bool((bound[:, :, block.rows].amax(-1) <= best).all()) or not _size(block.keys):
                continue
            i, j = grid(extent, self.device, block.rows, block.keys)
            found, _ = self._logits(call.q[:, :, block.rows], call.k[:, :, block.keys], i, j)
            best = torch.maximum(best, found.amax((-1, -2)))
        return best

    def _logits(self, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """The scores that enter the softmax at these rows and keys, and where they are allowed."""
        scores = _grouped_scores(q, k, self.extent) * self.call.scale
        mask, softcap = self.call.mask, self.call.softcap
        return finish_scores(scores, mask, self.extent, i, j, softcap=softcap)

    def mass(self, runs: Runs) -> tuple[Float[Tensor, "B H T"], Int[Tensor, "#B #H T"]]:
        """`Σ_j p_ij` over each query's chosen keys, and how many of those it may attend to.

        `p_ij = exp(s_ij − lse_i)` for the chosen pairs alone: O(D) a pair.
        """
        zero = torch.zeros_like(self.lse)
        if not self.extent.queries or not self.extent.keys:
            return zero, zero[:1, :1].long()
        first, last = int(runs.start.amin()), int(runs.stop.amax())
        if last <= first:
            return zero, zero[:1, :1].long()
        if runs.omit is None and runs.order.shape[0] == 1:
            if bool((runs.start == first).all() & (runs.stop == last).all()) and last - first <= 64:
                return self._mass_of_columns(runs.order[0, first:last])
            if bool(((runs.stop - runs.start) <= 1).all()):
                return self._mass_of_one_key(runs)
        width = (runs.stop - runs.start).clamp(min=0)
        if float(width.float().mean()) > CROWDED * self.extent.keys:
            return self._mass_of_rows(runs)
        return self._mass_of_pairs(runs)

    def _mass_of_columns(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """All queries chose the same few keys: a thin matrix of scores."""
        call = self.call
        i, _ = grid(self.extent, self.device)
        scores, allowed = self._logits(call.q, call.k[:, :, keys], i, keys[None, :])
        return self._probability(scores, self.lse[..., None]).sum(-1), allowed.sum(-1)

    def _mass_of_one_key(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """Each query chose one key at most: one dot product a row."""
        call, extent = self.call, self.extent
        chosen = runs.stop[0] > runs.start[0]
        key = runs.order[0, runs.start[0].clamp(0, extent.keys - 1)]
        kept = call.k.index_select(2, key)
        q = call.q.unflatten(1, (extent.kv_heads, extent.group))
        scores = torch.einsum("bgrtd,bgtd->bgrt", q, kept).flatten(1, 2)[..., None] * call.scale
        i, _ = grid(extent, self.device)
        scores, allowed = finish_scores(
            scores, call.mask, extent, i[None, None], key[None, None, :, None], softcap=call.softcap
        )
        allowed = allowed & chosen[None, None, :, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        return self._probability(scores, self.lse[..., None])[..., 0], allowed[..., 0].long()

    def _mass_of_pairs(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """The general case: the pairs one after another, a bounded number at a time."""
        extent = self.extent
        mass = torch.zeros_like(self.lse)
        count = torch.zeros_like(mass, dtype=torch.long)
        start, width = torch.broadcast_tensors(runs.start, (runs.stop - runs.start).clamp(min=0))
        size = extent.batch * extent.heads * self.call.q.shape[-1]
        for queries in _rows_within(width.amax(0), max(1, SCORES_AT_A_TIME // size)):
            i, step, real = _pairs(queries, width[:, queries])
            if not i.shape[1]:
                continue
            rank = (start.gather(1, i) + step).clamp(max=extent.keys - 1)
            i, rank, real = (x.expand(extent.batch, -1) for x in (i, rank, real))
            j = runs.order.expand(extent.batch, -1).gather(1, rank)
            if runs.omit is not None:
                real = real & (j != runs.omit.expand(extent.batch, -1).gather(1, i))
            p, allowed = self._probability_of_pairs(i, j)
            place = i[:, None].expand(-1, extent.heads, -1)
            mass.scatter_add_(2, place, torch.where(real[:, None], p, 0.0))
            count.scatter_add_(2, place, (allowed & real[:, None]).long())
        return mass, count

    def _mass_of_rows(self, runs: Runs) -> tuple[Tensor, Tensor]:
        """When the pairs are a good part of the matrix: blocks of whole rows, a GEMM each."""
        call, extent = self.call, self.extent
        place = torch.arange(extent.keys, device=self.device).expand_as(runs.order)
        rank = torch.empty_like(runs.order).scatter_(1, runs.order, place)[:, None]
        masses, counts = [], []
        for block in blocks(call.mask, extent, self.device, SCORES_IN_CACHE):
            i, j = grid(extent, self.device, block.rows, block.keys)
            start, stop = runs.start[:, block.rows, None], runs.stop[:, block.rows, None]
            ranks = rank[..., block.keys]
            chosen = (ranks >= start) & (ranks < stop)
            if runs.omit is not None:
                chosen = chosen & (j != runs.omit[:, block.rows, None])
            q, k = call.q[:, :, block.rows], call.k[:, :, block.keys]
            logits, allowed = self._logits(q, k, i, j)
            p = self._probability(logits, self.lse[:, :, block.rows, None])
            masses.append(torch.where(chosen[:, None], p, 0.0).sum(-1))
            counts.append((chosen[:, None] & allowed).sum(-1))
        return torch.cat(masses, dim=2), torch.cat(counts, dim=2)

    def _probability_of_pairs(self, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """`p_ij` and whether it is allowed, `[B, H, N]`, at queries i and keys j `[B, N]`."""
        call, extent = self.call, self.extent
        ii, jj = i[:, None, :, None], j[:, None, :, None]
        q = call.q.gather(2, ii.expand(-1, extent.heads, -1, call.q.shape[-1]))
        k = call.k.gather(2, jj.expand(-1, extent.kv_heads, -1, call.k.shape[-1]))
        grouped = q.unflatten(1, (extent.kv_heads, extent.group))
        scores = torch.einsum("bgrnd,bgnd->bgrn", grouped, k).flatten(1, 2)[..., None]
        scores, allowed = finish_scores(
            scores * call.scale, call.mask, extent, ii, jj, softcap=call.softcap
        )
        lse = self.lse.gather(2, i[:, None].expand(-1, extent.heads, -1))
        return self._probability(scores[..., 0], lse), allowed[..., 0]

    def _probability(self, logits: Tensor, lse: Tensor) -> Tensor:
        """`exp(s − lse)`, 0 in dead rows."""
        return torch.exp(logits - torch.where(lse == -torch.inf, 0.0, lse)).masked_fill(
            lse == -torch.inf, 0.0
        )

    def _by_rows(self, figure: Callable[[Definition], Tensor]) -> Tensor:
        parts = [
            figure(block_definition(self.call, block))
            for block in blocks(self.call.mask, self.extent, self.device)
        ]
        return torch.cat(parts, dim=2) if parts else torch.zeros_like(self.lse)


def _size(part: slice) -> int:
    return part.stop - part.start


def _grouped_scores(q: Tensor, k: Tensor, extent: Extent) -> Tensor:
    """`q kᵀ` `[B, H, t, s]` without repeating the keys of a group."""
    rows = q.unflatten(1, (extent.kv_heads, extent.group)).flatten(2, 3)
    return (rows @ k.mT).unflatten(2, (extent.group, q.shape[2])).flatten(1, 2)


def _pairs(queries: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each batch row, query `queries[n]` as often as `width[b, n]` says, side by side.

    Gives the queries `[B, N]`, the place of each among its query's own, and which are no filling.
    """
    total = width.sum(1)
    ends = width.cumsum(1)
    step = torch.arange(int(total.max()), device=width.device).expand(len(width), -1).contiguous()
    real = step < total[:, None]
    number = torch.searchsorted(ends, step, right=True).clamp(max=len(queries) - 1)
    return queries[number], torch.where(real, step - (ends - width).gather(1, number), 0), real


def _rows_within(width: Tensor, budget: int) -> list[Tensor]:
    """Query numbers in groups whose widths sum to about the budget."""
    group = torch.cumsum(width, 0) // budget
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    return list(torch.arange(len(width), device=width.device).split(sizes.tolist()))
