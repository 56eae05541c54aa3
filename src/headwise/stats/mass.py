"""`Mass`: the attention to chosen keys, `Σ_{j∈J(i)} p_ij`.

The mass is the total attention weight on a set of keys. For few keys it is computed from their
scores alone, `exp(s_ij − lse_i)`. For ranges and tables it is `exp(lse within the mask − lse)`,
whose first term takes one more call. For many keys that are not ranges, the mass is computed
from whole rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from jaxtyping import Bool
from torch import Tensor

from ..backends.blocked import SCORES_AT_A_TIME
from ..core.index import grid
from ..core.mask_algebra import Mask, Rows
from ..core.modes import readable
from ..core.reference import Definition, finish_scores
from .blocks import RowFigure, ScoreBlock, probability
from .patterns import First, KeyRanges, OfTokens, OneKey, Pattern, ranges_of
from .plan import CALL, KERNEL, PAIRS, ROWS, UNREADABLE, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic
from .view import Lazy, View, visible_keys

CROWDED = 1 / 64
"""The fraction of the matrix above which single pairs cost more than whole rows."""

FEW = 64
"""The maximum number of keys that are treated as the same few keys for all queries."""

WITHIN = Route(CALL, "its log-sum-exp within the mask")
CROWD = Route(ROWS, "computing this many keys one by one would cost more")


@dataclass(frozen=True)
class Mass(Statistic):
    """The attention to chosen keys: `[B, H, T]`, between 0 and 1.

    It is the total weight on the chosen keys, `m_i = Σ_{j∈J(i)} p_ij`. The keys are those of a
    pattern or of any mask, as in `Mass(Window(16), name="near")`. The mean is over the queries for
    which at least one chosen key is visible; the fraction of such queries is the coverage.

    Args:
        keys: a pattern, or another mask that adds nothing to the scores.
        name: the name of the metric. Default: the pattern's name, or `mass` for other masks.

    Raises:
        ValueError: `keys` is neither.

    Source: Olsson et al. 2022 (prefix matching), Clark et al. 2019, §3.
    """

    keys: Mask
    name: str | None = None
    deferred = True

    def __post_init__(self) -> None:
        if not isinstance(self.keys, Mask):
            given = self.keys if isinstance(self.keys, type | str) else type(self.keys).__name__
            raise ValueError(
                f"Mass({given!r}): keys must be a pattern or a mask, such as Previous() or "
                f"Window(16)."
            )
        needs = {name: MassOn(self.keys, name) for name in self.names}
        object.__setattr__(self, "needs", MappingProxyType(needs))

    @property
    def free(self) -> bool:  # type: ignore[override]
        return self.keys.free

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        own = self.keys.name if isinstance(self.keys, Pattern) else "mass"
        return (own if self.name is None else self.name,)

    @property
    def raw(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.names

    def metric(self, record: Record) -> dict[str, Reading]:
        ((name, need),) = self.needs.items()
        answer = record.answers[need]
        mass, target = answer if isinstance(answer, tuple) else (answer, None)
        if target is None:
            target = has_target(self.keys, record.view)
        return {name: Reading(mass, target, among=record.view.valid_rows)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        chosen = self.keys.allowed(*grid(full.extent, full.weights.device), full.extent)
        mass = full.weights if chosen is None else torch.where(chosen, full.weights, 0.0)
        return {self.names[0]: mass.sum(-1)}


def has_target(keys: Mask, view: View) -> Bool[Tensor, "#B #H n"]:
    """Return True for queries that may attend to the key of a pattern with at most one key."""

    def targets() -> Tensor:
        if isinstance(keys, First | OneKey) and (seen := view.ranges) is not None:
            low, high = seen
            if isinstance(keys, First):
                return (low < keys.count) & (high > low)
            key = view.positions - keys.behind
            return (low <= key) & (key < high)
        ranges = ranges_of(keys, view.whole, view.device)
        assert ranges is not None
        ranges = ranges.of(view.rows)
        i, _ = grid(view.extent, view.device)
        key = ranges.order[0, ranges.start[0].clamp(0, max(0, view.extent.keys - 1))][:, None]
        allowed = view.mask.allowed(i, key, view.extent)
        chosen = (ranges.stop[0] > ranges.start[0])[:, None]
        chosen = chosen if allowed is None else allowed & chosen
        return chosen[(None,) * (4 - chosen.dim())][..., 0]

    return view.once(("target", keys), targets, free=view.rows is None and keys.free)


@dataclass(frozen=True, eq=False)
class MassOn(Need):
    """`Σ_j p_ij` over the keys of a mask `[B, H, n]`, and the queries that can see one of them.

    If the kernel computes it, only the mass is returned; the pattern then has at most one key.
    """

    keys: Mask
    name: str
    mass = True

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        return self.keys.kernel if isinstance(self.keys, Pattern) else None

    def route(self, setting: Setting) -> Route:
        if self.kernel is not None and setting.kernel:
            return Route(KERNEL)
        if not setting.near:
            return Route(ROWS, "" if setting.readable else UNREADABLE)
        return Route(PAIRS)

    def resolve(self, view: View) -> None:
        has_target(self.keys, view)

    def shown(self, route: Route, work: Work) -> Route:
        return _Masses(self, work).route[0] if route.kind == PAIRS else route

    def available(self, route: Route, every: Work, drawn: Work) -> bool:
        if route.kind == KERNEL:
            return super().available(route, every, drawn)
        if drawn.few or not every.near:
            return drawn.few
        masses = _Masses(self, every)
        if masses.route[0].kind == PAIRS:
            return True
        ranges, view = masses.ranges, drawn.view  # at most twice the scores of the sampled queries
        most = 2 * view.extent.queries * view.extent.keys / view.whole.queries
        return ranges is not None and ranges.omit is None and masses.mean_width <= most

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor]:
        masses = _Masses(self, work)
        rows = route.kind == ROWS
        mass, targets = masses.of_rows() if rows else masses.route[1]()
        return mass.clamp(max=1.0), targets

    def row_figure(self, work: Work) -> RowFigure:
        masses, shape = _Masses(self, work), (work.view.extent.batch, work.view.extent.heads)

        def mass(block: ScoreBlock) -> Tensor:
            p, e = block.p.unflatten(0, shape), masses.extent
            allowed = masses.keys.allowed(*grid(e, p.device, block.rows, block.keys), e)
            return (p if allowed is None else torch.where(allowed, p, 0.0)).sum(-1).flatten(0, 1)

        return mass


class _Masses:
    """The attention of the observed queries to the keys of a mask, in one call.

    Raises:
        ValueError: the mask does not fit the call, or adds to the scores.
    """

    def __init__(self, need: MassOn, work: Work) -> None:
        view, keys, self.need = work.view, need.keys, need
        keys.check(view.whole)
        if keys.biased:
            raise ValueError(f"Mass({keys!r}): a mask that adds to the scores selects no keys")
        self.work, self.extent, self.device = work, view.extent, view.device
        self.call, self.scores = view.call, work.scores
        self.keys = keys if view.rows is None else Rows(keys, view.rows, view.whole)
        self.pattern = isinstance(keys, Pattern)

    @Lazy
    def ranges(self) -> KeyRanges | None:
        """The chosen keys as ranges; `None` if they are not ranges or values cannot be read."""
        view = self.work.view
        known = readable(view.original.q)
        found = ranges_of(self.need.keys, view.whole, view.device) if known else None
        return None if found is None else found.of(view.rows)

    @property
    def mean_width(self) -> float:
        """The mean number of chosen keys per query."""
        assert self.ranges is not None
        return float((self.ranges.stop - self.ranges.start).clamp(min=0).double().mean())

    @property
    def route(self) -> tuple[Route, Callable[[], tuple[Tensor, Tensor]]]:
        """The route to the mass if the log-sum-exp is `near`, and the function that computes it."""
        if not self.pattern or self.ranges is None:
            return WITHIN, self._within
        ranges, pairs = self.ranges, Route(PAIRS)
        if not self.extent.queries or not self.extent.keys:
            return pairs, self._of_none
        first, last = int(ranges.start.amin()), int(ranges.stop.amax())
        if last <= first:
            return pairs, self._of_none
        if ranges.omit is None and ranges.order.shape[0] == 1:
            same = bool((ranges.start == first).all() & (ranges.stop == last).all())
            if same and last - first <= FEW:
                return pairs, lambda: self._of_columns(ranges.order[0, first:last])
            if len(ranges.start) == 1 and bool(((ranges.stop - ranges.start) <= 1).all()):
                return pairs, lambda: self._of_one_key(ranges)
        if ranges.omit is None and not isinstance(self.need.keys, OfTokens):
            return WITHIN, self._within
        if self.mean_width > CROWDED * self.extent.keys:
            return CROWD, self.of_rows
        return pairs, lambda: self._of_pairs(ranges)

    def targets(self) -> Tensor:
        """Return True for queries that see one of the chosen keys, `[B or 1, H or 1, n]`."""
        return visible_keys(self.call.mask & self.keys, self.extent, self.device) > 0

    def of_rows(self) -> tuple[Tensor, Tensor]:
        """Return the mass from renormalized whole rows."""
        return self.work.by_rows(self.need), self.targets()

    def _within(self) -> tuple[Tensor, Tensor]:
        """Return the mass on many keys, from one more call restricted to them."""
        lse = self.work.lse
        restricted = self.work.lse_of(self.call.with_(mask=self.call.mask & self.keys))
        some = torch.isfinite(restricted) & torch.isfinite(lse)
        base = torch.where(some, lse, 0.0)
        share = torch.exp(torch.where(some, restricted, 0.0) - base)
        return torch.where(some, share, 0.0), self.targets()

    def _of_none(self) -> tuple[Tensor, Tensor]:
        zero = torch.zeros_like(self.work.lse)
        return zero, zero[:1, :1] > 0

    def _of_columns(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mass on the same few keys for all queries, from a thin matrix of scores."""
        i, _ = grid(self.extent, self.device)
        scores, allowed = self.scores.logits(self.call.q, self.call.k[:, :, keys], i, keys[None, :])
        return probability(scores, self.work.lse[..., None]).sum(-1), allowed.any(-1)

    def _of_one_key(self, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Return the mass on at most one key per query, from one dot product per row."""
        chosen = ranges.stop[0] > ranges.start[0]
        key = ranges.order[0, ranges.start[0].clamp(0, self.extent.keys - 1)]
        i = torch.arange(self.extent.queries, device=self.device)
        scores, allowed = self._scores(
            self.call.q, self.call.k.index_select(2, key), i[None, None], key[None, None]
        )
        allowed = allowed & chosen
        p = probability(scores.masked_fill(~allowed, -torch.inf), self.work.lse)
        return p, allowed

    def _of_pairs(self, ranges: KeyRanges) -> tuple[Tensor, Tensor]:
        """Return the mass on any keys, from a bounded number of pairs at a time."""
        extent, call = self.extent, self.call
        mass = torch.zeros_like(self.work.lse)
        count = torch.zeros_like(mass, dtype=torch.long)
        start, width = torch.broadcast_tensors(
            ranges.start, (ranges.stop - ranges.start).clamp(min=0)
        )
        size = extent.batch * extent.heads * call.q.shape[-1]
        for queries in _rows_within(width.amax(0), max(1, SCORES_AT_A_TIME // size)):
            i, step, real = _pairs(queries, width[:, queries])
            if not i.shape[1]:
                continue
            rank = (start.gather(1, i) + step).clamp(max=extent.keys - 1)
            i, rank, real = (x.expand(extent.batch, -1) for x in (i, rank, real))
            j = ranges.order.expand(extent.batch, -1).gather(1, rank)
            if ranges.omit is not None:
                real = real & (j != ranges.omit.expand(extent.batch, -1).gather(1, i))
            i, j, real = i[:, None], j[:, None], real[:, None]
            place = i.expand(-1, extent.heads, -1)
            q = call.q.gather(2, place[..., None].expand(-1, -1, -1, call.q.shape[-1]))
            of_keys = j[..., None].expand(-1, extent.kv_heads, -1, call.k.shape[-1])
            scores, allowed = self._scores(q, call.k.gather(2, of_keys), i, j)
            p = probability(scores, self.work.lse.gather(2, place))
            mass.scatter_add_(2, place, torch.where(real, p, 0.0))
            count.scatter_add_(2, place, (allowed & real).long())
        return mass, count > 0

    def _scores(self, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of pairs of q and k, `[B, H, N]`, and the mask of allowed pairs."""
        extent = self.extent
        grouped = q.unflatten(1, (extent.kv_heads, extent.group))
        scores = torch.einsum("bgrnd,bgnd->bgrn", grouped, k).flatten(1, 2)[..., None]
        scores, allowed = finish_scores(
            scores * self.call.scale,
            self.call.mask,
            extent,
            i[..., None],
            j[..., None],
            softcap=self.call.softcap,
        )
        return scores[..., 0], allowed[..., 0]


def _pairs(queries: Tensor, width: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat query `queries[n]` `width[b, n]` times for each batch row b.

    Return the queries `[B, N]`, the index of each entry within its query, and a mask that is False
    for padding.
    """
    total = width.sum(1)
    ends = width.cumsum(1)
    step = torch.arange(int(total.max()), device=width.device).expand(len(width), -1).contiguous()
    real = step < total[:, None]
    number = torch.searchsorted(ends, step, right=True).clamp(max=len(queries) - 1)
    return queries[number], torch.where(real, step - (ends - width).gather(1, number), 0), real


def _rows_within(width: Tensor, budget: int) -> list[Tensor]:
    """Return query indices in groups whose widths sum to about the budget."""
    group = torch.cumsum(width, 0) // budget
    _, sizes = torch.unique_consecutive(group, return_counts=True)
    return list(torch.arange(len(width), device=width.device).split(sizes.tolist()))
