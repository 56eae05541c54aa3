"""The mass on chosen keys, `Σ_{j∈J(i)} p_ij`, from the scores of these keys and the LSE alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE
from ..core.index import grid
from ..core.mask_algebra import Mask, Rows
from ..core.modes import readable
from ..core.reference import finish_scores
from ..core.shapes import Extent
from .engine import Engine
from .needs import UNREADABLE, Need, Setting
from .patterns import KeyRanges, Pattern
from .results import CALL, KERNEL, PAIRS, ROWS, Route
from .scores import RowBlock, near, probability
from .view import View, visible_keys

CROWDED = 1 / 64
"""The share of the matrix from which pairs cost more, one by one, than whole rows of scores."""


def ranges_in(pattern: Pattern, view: View) -> KeyRanges:
    """A pattern's keys for the queries that are looked at."""
    ranges = pattern.ranges(view.whole, view.device)
    if view.rows is None:
        return ranges
    start, stop = ranges.start[:, view.rows], ranges.stop[:, view.rows]
    omit = None if ranges.omit is None else ranges.omit[:, view.rows]
    return KeyRanges(ranges.order, start, stop, omit)


def in_sight(pattern: Pattern, view: View) -> Int[Tensor, "#B #H n"]:
    """Whether each query may attend to its key of a pattern that has one at most: 1 or 0."""
    free = view.rows is None and view.mask.free and getattr(pattern, "free", False)
    return view.once(("in sight", pattern), lambda: _in_sight(pattern, view), free)


def _in_sight(pattern: Pattern, view: View) -> Int[Tensor, "#B #H n"]:
    extent, ranges = view.extent, ranges_in(pattern, view)
    i, _ = grid(extent, view.device)
    key = ranges.order[0, ranges.start[0].clamp(0, extent.keys - 1)][:, None]
    allowed = view.mask.allowed(i, key, extent)
    chosen = (ranges.stop[0] > ranges.start[0])[:, None]
    count = chosen if allowed is None else allowed & chosen
    return count[(None,) * (4 - count.dim())][..., 0].long()


@dataclass(frozen=True)
class MassOn(Need):
    """`Σ_j p_ij` over the keys of a pattern or a mask `[B, H, n]`, and how many are in sight.

    The second is `None` where the kernel gave the mass.

    Of a mask, `exp(lse restricted − lse)`: one call, of which only the log-sum-exp is read.
    """

    keys: Pattern | Mask
    name: str
    mass = True

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        return getattr(self.keys, "figure", None)

    def route(self, setting: Setting) -> Route:
        if isinstance(self.keys, Mask):
            return Route(CALL, "its log-sum-exp within the mask")
        return Route(KERNEL if self.kernel is not None and setting.kernel else PAIRS)

    def told(self, route: Route, engine: Engine) -> Route:
        if route.kind != KERNEL and not readable(engine.view.asked.q):
            return Route(ROWS, UNREADABLE)
        if route.kind != PAIRS:
            return route
        assert not isinstance(self.keys, Mask)
        return Masses(engine).reader_of(ranges_in(self.keys, engine.view))[0]

    def at_hand(self, route: Route, every: Engine, drawn: Engine) -> bool:
        if route.kind == KERNEL:
            return every.given is not None
        if drawn.few or not every.near:
            return drawn.few
        if isinstance(self.keys, Mask):  # twice the scores of the drawn queries, at most
            view = every.view
            ranges = self.keys.key_ranges(view.extent, view.device)
            most = 2 * drawn.view.extent.queries * view.extent.keys / view.extent.queries
            return ranges is not None and float((ranges[1] - ranges[0]).double().mean()) <= most
        return Masses(every).reader_of(ranges_in(self.keys, every.view))[0].kind == PAIRS

    def prepare(self, route: Route, engine: Engine) -> None:
        """Without numbers nobody knows whether the log-sum-exp serves: one pass gives all."""
        if readable(engine.view.asked.q):
            return
        if isinstance(self.keys, Mask):
            self._wait(engine, _within(self.keys, engine))
        elif route.kind != KERNEL:
            Masses(engine).wait(ranges_in(self.keys, engine.view), self.name)

    def answer(self, route: Route, engine: Engine) -> tuple[Tensor, Tensor | None]:
        if route.kind == KERNEL:
            assert self.kernel is not None
            return engine.field(self.kernel), None
        if isinstance(self.keys, Mask):
            mass, count = self._of_mask(self.keys, engine)
        else:
            mass, count = Masses(engine).of(ranges_in(self.keys, engine.view), self.name)
        return mass.clamp(max=1.0), count

    def _of_mask(self, keys: Mask, engine: Engine) -> tuple[Tensor, Tensor]:
        view, chosen = engine.view, _within(keys, engine)
        call = view.call.with_(mask=view.call.mask & chosen)
        count = visible_keys(call.mask, call.extent, view.device)
        if not engine.near:
            self._wait(engine, chosen)
            return engine.rows.read(f"{self.name}: mass"), count
        restricted = engine.lse_of(call)
        some = torch.isfinite(restricted) & torch.isfinite(engine.lse)
        base = torch.where(some, engine.lse, 0.0)
        share = torch.exp(torch.where(some, restricted, 0.0) - base)
        return torch.where(some, share, 0.0), count

    def _wait(self, engine: Engine, mask: Mask) -> None:
        """Let the mass within a mask be taken from the next pass over whole rows."""

        def mass(block: RowBlock) -> Tensor:
            view = engine.view
            place = grid(view.extent, view.device, block.rows, block.keys)
            allowed = mask.allowed(*place, view.extent)
            return (block.p if allowed is None else torch.where(allowed, block.p, 0.0)).sum(-1)

        engine.rows.wait(f"{self.name}: mass", mass)


def _within(mask: Mask, engine: Engine) -> Mask:
    """A mask that chooses keys, for the queries that are looked at.

    Raises:
        ValueError: it does not fit the call, or adds to the scores.
    """
    view = engine.view
    mask.check(view.whole)
    if mask.biased:
        raise ValueError(f"Mass({mask!r}): a mask that adds to the scores chooses no keys")
    return mask if view.rows is None else Rows(mask, view.rows, view.whole)


class Masses:
    """Masses in one call; each is read on the road that is cheapest for its keys."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.scores, self.call = engine, engine.scores, engine.scores.call

    @property
    def extent(self) -> Extent:
        return self.scores.extent

    @property
    def device(self) -> torch.device:
        return self.scores.device

    def of(self, ranges: KeyRanges, name: str | None = None) -> tuple[Tensor, Tensor]:
        """`Σ_j p_ij` over each query's chosen keys, and how many of those it may attend to."""
        if self.extent.queries and self.extent.keys and not near(self.engine.lse):
            name = self.engine.rows.known(name)
            self.wait(ranges, name)
            return self.engine.rows.read(f"{name}: mass"), self.engine.rows.read(f"{name}: count")
        return self.reader_of(ranges)[1]()

    def wait(self, ranges: KeyRanges, name: str) -> None:
        """Let the mass be taken from the next pass over whole rows, without the log-sum-exp."""
        chosen_in = self._chosen(ranges)

        def mass(block: RowBlock) -> Tensor:
            return torch.where(chosen_in(block), block.p, 0.0).sum(-1)

        def count(block: RowBlock) -> Tensor:
            return (chosen_in(block) & block.allowed).sum(-1)

        self.engine.rows.wait(f"{name}: mass", mass)
        self.engine.rows.wait(f"{name}: count", count, torch.long)

    def reader_of(self, ranges: KeyRanges) -> tuple[Route, Callable[[], tuple[Tensor, Tensor]]]:
        """The road to the mass on chosen keys, and who takes it, where the log-sum-exp is near."""
        pairs = Route(PAIRS)
        if not self.extent.queries or not self.extent.keys:
            return pairs, self._of_none
        first, last = int(ranges.start.amin()), int(ranges.stop.amax())
        if last <= first:
            return pairs, self._of_none
        if ranges.omit is None and ranges.order.shape[0] == 1:
            if (
                bool((ranges.start == first).all() & (ranges.stop == last).all())
                and last - first <= 64
            ):
                return pairs, lambda: self._of_columns(ranges.order[0, first:last])
            if bool(((ranges.stop - ranges.start) <= 1).all()):
                return pairs, lambda: self._of_one_key(ranges)
        width = (ranges.stop - ranges.start).clamp(min=0)
        if float(width.float().mean()) > CROWDED * self.extent.keys:
            why = "so many keys are chosen that one by one they would cost more"
            return Route(ROWS, why), lambda: self._of_rows(ranges)
        return pairs, lambda: self._of_pairs(ranges)

    def _of_none(self) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(self.engine.lse)
        return zero, zero[:1, :1].long()

    def _of_columns(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """All queries chose the same few keys: a thin matrix of scores."""
        call = self.call
        i, _ = grid(self.extent, self.device)
        scores, allowed = self.scores.logits(call.q, call.k[:, :, keys], i, keys[None, :])
        return probability(scores, self.engine.lse[..., None]).sum(-1), allowed.sum(-1)

    def _of_one_key(self, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Each query chose one key at most: one dot product a row."""
        call, extent = self.call, self.extent
        chosen = ranges.stop[0] > ranges.start[0]
        key = ranges.order[0, ranges.start[0].clamp(0, extent.keys - 1)]
        kept = call.k.index_select(2, key)
        q = call.q.unflatten(1, (extent.kv_heads, extent.group))
        scores = torch.einsum("bgrtd,bgtd->bgrt", q, kept).flatten(1, 2)[..., None] * call.scale
        i, _ = grid(extent, self.device)
        scores, allowed = finish_scores(
            scores, call.mask, extent, i[None, None], key[None, None, :, None], softcap=call.softcap
        )
        allowed = allowed & chosen[None, None, :, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        return probability(scores, self.engine.lse[..., None])[..., 0], allowed[..., 0].long()

    def _of_pairs(self, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """The general case: the pairs one after another, a bounded number at a time."""
        extent = self.extent
        mass = torch.zeros_like(self.engine.lse)
        count = torch.zeros_like(mass, dtype=torch.long)
        start, width = torch.broadcast_tensors(
            ranges.start, (ranges.stop - ranges.start).clamp(min=0)
        )
        size = extent.batch * extent.heads * self.call.q.shape[-1]
        for queries in _rows_within(width.amax(0), max(1, SCORES_AT_A_TIME // size)):
            i, step, real = _pairs(queries, width[:, queries])
            if not i.shape[1]:
                continue
            rank = (start.gather(1, i) + step).clamp(max=extent.keys - 1)
            i, rank, real = (x.expand(extent.batch, -1) for x in (i, rank, real))
            j = ranges.order.expand(extent.batch, -1).gather(1, rank)
            if ranges.omit is not None:
                real = real & (j != ranges.omit.expand(extent.batch, -1).gather(1, i))
            p, allowed = self._probability_of_pairs(i, j)
            place = i[:, None].expand(-1, extent.heads, -1)
            mass.scatter_add_(2, place, torch.where(real[:, None], p, 0.0))
            count.scatter_add_(2, place, (allowed & real[:, None]).long())
        return mass, count

    def _of_rows(self, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """When the pairs are a good part of the matrix: blocks of whole rows, a GEMM each."""
        call, chosen_in = self.call, self._chosen(ranges)

        def of(block: Any) -> tuple[Tensor, Tensor]:
            i, j = grid(self.extent, self.device, block.rows, block.keys)
            q, k = call.q[:, :, block.rows], call.k[:, :, block.keys]
            logits, allowed = self.scores.logits(q, k, i, j)
            p = probability(logits, self.engine.lse[:, :, block.rows, None])
            chosen = chosen_in(block)
            return torch.where(chosen, p, 0.0).sum(-1), (chosen & allowed).sum(-1)

        return self.scores.in_blocks(of, SCORES_IN_CACHE, (call.q.dtype, torch.long))

    def _chosen(self, ranges: KeyRanges) -> Callable[[Any], Tensor]:
        """Which keys of a block of rows are chosen, `[B or 1, 1, t, s]`."""
        place = torch.arange(self.extent.keys, device=self.device).expand_as(ranges.order)
        rank = torch.empty_like(ranges.order).scatter_(1, ranges.order, place)[:, None]

        def chosen(block: Any) -> Tensor:
            start, stop = ranges.start[:, block.rows, None], ranges.stop[:, block.rows, None]
            ranks = rank[..., block.keys]
            found = (ranks >= start) & (ranks < stop)
            if ranges.omit is not None:
                _, j = grid(self.extent, self.device, keys=block.keys)
                found = found & (j != ranges.omit[:, block.rows, None])
            return found[:, None]

        return chosen

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
        lse = self.engine.lse.gather(2, i[:, None].expand(-1, extent.heads, -1))
        return probability(scores[..., 0], lse), allowed[..., 0]


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
