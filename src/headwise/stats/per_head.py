"""One small class a statistic, of whole heads: one number, a table, or what each key receives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..core.modes import readable
from ..core.numbers import check_whole, real, said
from ..core.reference import Definition
from .engine import Engine, rows_of_p
from .execute import Pass
from .needs import (
    MAX_LOGIT,
    BlockSums,
    Need,
    ReceivedFrom,
    Reduced,
    Setting,
)
from .norms import KEY_NORM, QUERY_NORM, MaxLogitAbove, above
from .results import Reading, Route
from .sampling import draw
from .score_sweep import Block

ABOVE = "max_logit_above_"
"""What the largest score above a limit is called, before the limit."""


@dataclass(frozen=True)
class MaxLogit:
    """The largest score of each head: `[B, H]`, −inf where no query sees a key.

    The score as it enters the softmax: scaled, softcapped, biased. A learned sink is no score. Of
    some of the queries (`queries=`) it is a lower bound, and tables call it `max_logit_sampled`,
    unless the kernel's own pass has that of all.

    Args:
        above: only where it is above this, −inf elsewhere; then it is called `max_logit_above_…`.
            Most heads of a healthy model cost O(T·D) then, for `scale · max ‖q‖ · max ‖k‖` is no
            larger. Of all queries of the call, also where only some are looked at.

    >>> import torch, headwise as hw
    >>> k = v = torch.eye(2).view(1, 2, 1, 2) * 12.0  # two heads, one query, one key
    >>> q = k * torch.tensor([1.0, 2.0]).view(2, 1, 1)
    >>> hw.observe(q, k, v, hw.MaxLogit(above=150.0))["max_logit_above_150"].round()
    tensor([[-inf, 204.]])

    Source: Kimi K2 2025 (QK-clip), Dehghani et al. 2023 (logit growth).
    """

    above: float | None = None
    free, formula = True, True

    def __post_init__(self) -> None:
        if self.above is None:
            return
        limit = real(self.above)
        if limit is None or not math.isfinite(limit):
            raise ValueError(f"MaxLogit(above={said(self.above)}): a limit is a finite number.")
        object.__setattr__(self, "above", limit)

    @property
    def names(self) -> tuple[str, ...]:
        if self.above is None:
            return ("max_logit",)
        return (f"{ABOVE}{str(self.above).removesuffix('.0')}",)

    @property
    def as_found(self) -> tuple[str, ...]:
        return self.names

    @property
    def needs(self) -> dict[str, Need]:
        need = MAX_LOGIT if self.above is None else MaxLogitAbove(self.above)
        return {self.names[0]: need}

    def read(self, found: Pass) -> dict[str, Reading]:
        return {name: Reading(found[need], largest=True) for name, need in self.needs.items()}

    def define(self, full: Definition) -> dict[str, Tensor]:
        largest = full.logits.amax((-1, -2))
        return {self.names[0]: largest if self.above is None else above(largest, self.above)}


@dataclass(frozen=True)
class Norms:
    """The largest norm of each head's queries and of its keys: `[B, H]` both. No gradient.

    `max ‖q_i‖` over the queries that may attend to something and `max ‖k_j‖` over the keys that
    some query may attend to, those of the head's own key/value head; 0 where there are none. As
    they enter the scores, with rotation and norms. Of all queries of the call, also where only
    some are looked at. No score, before softcap and bias, is larger than
    `scale · query_norm · key_norm`.

    Source: the inequality of Cauchy and Schwarz; Dehghani et al. 2023 (logit growth).
    """

    names = ("query_norm", "key_norm")
    free, formula, as_found = True, True, names

    needs = MappingProxyType({"query_norm": QUERY_NORM, "key_norm": KEY_NORM})

    def read(self, found: Pass) -> dict[str, Reading]:
        return {name: Reading(found[need], largest=True) for name, need in self.needs.items()}

    def define(self, full: Definition) -> dict[str, Tensor]:
        k = full.k.repeat_interleave(full.extent.group, dim=1)
        norms = (
            torch.where(full.allowed.any(axis), x.double().norm(dim=-1), 0.0).amax(-1)
            for x, axis in ((full.q, -1), (k, -2))
        )
        return dict(zip(self.names, (x.to(full.weights.dtype) for x in norms), strict=True))


@dataclass(frozen=True)
class Received:
    """The attention that every key receives: `[B, H, S]`, column sums of P. No gradient.

    What heavy-hitter caches keep their keys by. Sums to the number of valid queries, less what
    learned sinks take. Drawn queries count as many as they stand for.

    Args:
        last: only from the last so many queries (SnapKV's observation window).

    Source: Zhang et al. 2023 (H2O), Li et al. 2024 (SnapKV).
    """

    last: int | None = None
    names = ("received",)

    def __post_init__(self) -> None:
        if self.last is not None:
            check_whole(self, "last", 1)

    @property
    def needs(self) -> dict[str, Need]:
        return {"received": ReceivedFrom(self.last)}

    def read(self, found: Pass) -> dict[str, Reading]:
        return {"received": Reading(found[ReceivedFrom(self.last)], per_key=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        first = 0 if self.last is None else max(0, full.extent.queries - self.last)
        return {"received": full.weights[:, :, first:].sum(2)}


@dataclass(frozen=True)
class OffsetHistogram:
    """How much of a head's attention goes how far: `[B, H, bins]`, mass by distance. No gradient.

    Bin 0 is the query's own position, bin b the distances `[2^(b−1), 2^b)` before it; what lies
    farther is in the last bin, and what lies ahead is in none. Means over valid queries.

    Args:
        bins: how many, at least 2; 18 reach back 65,536 tokens and beyond.
        ahead: also `offsets_ahead` `[B, H, bins]`, the same for what lies ahead; its bin 0 is 0.

    Source: Press et al. 2021, §4 and its kin (effective context).
    """

    bins: int = 18
    ahead: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "bins", 2)

    @property
    def names(self) -> tuple[str, ...]:
        return ("offsets", "offsets_ahead") if self.ahead else ("offsets",)

    @property
    def needs(self) -> dict[str, Need]:
        return dict.fromkeys(self.names, _MassByDistance(self.bins, len(self.names)))

    def read(self, found: Pass) -> dict[str, Reading]:
        extent = found.extent
        total = found.view.by_head(found[_MassByDistance(self.bins, len(self.names))].total)
        alive = found.valid_rows.expand(extent.batch, extent.heads, extent.queries)
        count = (alive * found.view.weights).sum(-1, keepdim=True)
        means = (total / count.clamp(min=1)[..., None]).unbind(2)
        return {
            name: Reading(mean, over=count) for name, mean in zip(self.names, means, strict=True)
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        distance = i - torch.arange(extent.keys, device=device)
        alive = full.allowed.any(-1).sum(-1, keepdim=True)
        figures = {}
        for name, away in zip(self.names, (distance, -distance), strict=False):
            bins = _bin_of(away, self.bins)
            if name == "offsets_ahead":
                bins = torch.where(away == 0, self.bins, bins)
            sums = [
                torch.where(bins == b, full.weights, 0.0).sum((-1, -2)) for b in range(self.bins)
            ]
            figures[name] = torch.stack(sums, -1) / alive.clamp(min=1)
        return figures


def _bin_of(distance: Tensor, bins: int) -> Tensor:
    """The bin of each distance; `bins` itself for what lies ahead. Exact: powers are compared."""
    edges = torch.tensor([0, *(1 << b for b in range(bins - 1))], device=distance.device)
    found = torch.bucketize(distance, edges, right=True) - 1
    return torch.where(distance < 0, bins, found)


@dataclass(frozen=True)
class _MassByDistance(Reduced):
    """Mass by distance behind, and ahead too where there are two sides."""

    bins: int
    sides: int
    name = "offsets"

    def make(self, engine: Engine) -> _Offsets:
        view = engine.view
        weights = None if view.drawn is None else view.weights
        return _Offsets(view.zeros(self.sides, self.bins), view.positions, weights)


class _Offsets:
    """Sums of P by distance behind, and ahead where there is room: `[B · H, 1 or 2, bins]`.

    Of drawn queries at `positions`, each counts its weight.
    """

    def __init__(self, total: Tensor, positions: Tensor, weights: Tensor | None) -> None:
        self.total, self.positions, self.weights = total, positions, weights

    def add(self, block: Block) -> None:
        p = block.p if self.weights is None else block.p * self.weights[block.rows, None]
        j = torch.arange(block.keys.start, block.keys.stop, device=self.positions.device)
        _, sides, size = self.total.shape
        distance = self.positions[block.rows, None] - j
        bins = _bin_of(distance, size)
        if sides == 2:
            bins = torch.where(distance < 0, size + _bin_of(-distance, size), bins)
        total = self.total[block.heads].view(-1, sides * size)
        if readable(bins) and int(bins.amin()) == (high := int(bins.amax())):
            if high < sides * size:
                total[:, high] += p.sum((-1, -2))
        else:
            found = p.new_zeros(len(p), sides * size + 1)
            found.index_add_(1, bins.flatten(), p.flatten(1))
            total += found[:, :-1]


@dataclass(frozen=True)
class Similarity:
    """How alike two heads of a layer attend: `[B, H, H]`, Jensen–Shannon distance, 0 to 1.

    `√(H(½p + ½r) − ½H(p) − ½H(r))`, entropies in bits, averaged over valid queries among `queries`
    drawn ones (stratified; all there are, if those are fewer). 0 on the diagonal; NaN of two heads
    that no drawn query attends in both. A learned sink is one outcome more. No gradient.

    Source: Lin 1991; between heads: Clark et al. 2019, §6.
    """

    queries: int = 64
    seed: int = 0
    names = ("similarity",)

    def __post_init__(self) -> None:
        check_whole(self, "queries", 1)

    @property
    def needs(self) -> dict[str, Need]:
        return {"similarity": _DistanceOfHeads(self.queries, self.seed)}

    def read(self, found: Pass) -> dict[str, Reading]:
        total, count = found[_DistanceOfHeads(self.queries, self.seed)]
        return {"similarity": Reading(total / count, over=count)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        ones = torch.ones(full.extent.queries, dtype=torch.float64, device=full.weights.device)
        rows, weights = _drawn(self, ones)
        sink = None if full.sink is None else full.sink[:, :, rows]
        distances, both = _js_distances(full.weights[:, :, rows], sink)
        both = both * weights.to(both.dtype)[:, None, None]
        return {"similarity": (distances * both).sum(1) / both.sum(1)}


@dataclass(frozen=True)
class _DistanceOfHeads(Need):
    """Sums of distances between heads over drawn queries, and how many counted: `[B, H, H]`."""

    queries: int
    seed: int
    name = "similarity"

    def route(self, setting: Setting) -> Route:
        there = setting.extent.queries
        return Route("drawn rows of P", f"{min(self.queries, there)} of {there}")

    def answer(self, route: Route, engine: Engine) -> tuple[Tensor, Tensor]:
        view = engine.view
        extent = view.extent
        rows, weights = _drawn(self, view.weights)
        total = engine.lse.detach().new_zeros(extent.batch, extent.heads, extent.heads)
        count = torch.zeros_like(total)
        size = max(1, (1 << 20) // max(1, extent.batch * extent.heads * extent.keys))
        for some, weight in zip(rows.split(size), weights.split(size), strict=True):
            distances, both = _js_distances(*rows_of_p(view, some))
            both = both * weight[:, None, None]
            total += (distances * both).sum(1)
            count += both.sum(1)
        return total, count


def _drawn(of: Similarity | _DistanceOfHeads, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from queries that stand for so many each `[T]`: their numbers, and for how many."""
    sample = draw(of.queries, len(weights), of.seed, weights.device)
    if sample is None:
        return torch.arange(len(weights), device=weights.device), weights
    assert sample.weights is not None
    return sample.rows, weights[sample.rows] * sample.weights.to(weights.dtype)


def _js_distances(p: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Between all pairs of heads, and 1 where both see something: both `[B, n, H, H]`.

    `p` is `[B, H, n, S]`, and what a learned sink takes `[B, H, n]`.
    """
    heads = p.shape[1]
    if sink is not None:
        p = torch.cat([p, sink[..., None]], dim=-1)
    p = p.transpose(1, 2)  # [B, n, H, S]
    tiny, eps = torch.finfo(p.dtype).tiny, torch.finfo(p.dtype).eps
    valid = (p.sum(-1) > 0).to(p.dtype)
    distances = p.new_zeros(*p.shape[:2], heads, heads)
    for head in range(heads - 1):
        one, others = p[:, :, head, None], p[:, :, head + 1 :]
        both = one + others
        # With t = (p − r) / (p + r): ¼ Σ (p + r) ((1 + t) log(1 + t) + (1 − t) log(1 − t)), and no
        # difference of entropies, whose rounding the root would blow up where heads are alike.
        t = ((one - others) / both.clamp(min=tiny)).clamp(eps - 1, 1 - eps)
        apart = (1 + t) * torch.log1p(t) + (1 - t) * torch.log1p(-t)
        apart = torch.linalg.vecdot(both, apart) / (4 * math.log(2))
        apart = apart.clamp(0, 1).sqrt()  # rounding may lead past either end
        distances[:, :, head, head + 1 :] = apart
        distances[:, :, head + 1 :, head] = apart
    return distances, valid[..., None] * valid[..., None, :]


@dataclass(frozen=True)
class Map:
    """P in small: `[B, H, n, n]`, the mass that a block of queries gives to a block of keys.

    Entry `[a, b]` is the mean over the valid queries of block `a` of their mass on block `b`, so
    rows sum to 1, less what a learned sink takes (to 0 where no query is valid). With as many
    blocks as tokens it is P itself. Attention with the one-hot of the key's block as values: one
    call for each D blocks.

    Raises:
        ValueError: if `blocks` is under 1.
    """

    blocks: int = 64
    names = ("map",)

    def __post_init__(self) -> None:
        check_whole(self, "blocks", 1)

    @property
    def needs(self) -> dict[str, Need]:
        return {"map": BlockSums(self.blocks)}

    def read(self, found: Pass) -> dict[str, Reading]:
        extent, need = found.extent, BlockSums(self.blocks)
        total = found[need]
        alive = found.valid_rows.expand(extent.batch, extent.heads, extent.queries)
        count = self._valid(alive * found.view.weights, need.of_queries(found.view))
        return {"map": Reading(total / count.clamp(min=1), over=count)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        e, device, n = full.extent, full.weights.device, self.blocks
        of_key, of_query = (BlockSums(n).of(size, device) for size in (e.keys, e.queries))
        total = full.weights.new_zeros(e.batch, e.heads, n, e.keys).index_add(
            2, of_query, full.weights
        )
        total = total.new_zeros(e.batch, e.heads, n, n).index_add(3, of_key, total)
        alive = full.allowed.any(-1).to(total.dtype)
        return {"map": total / self._valid(alive, of_query).clamp(min=1)}

    def _valid(self, alive: Tensor, of_query: Tensor) -> Tensor:
        """How many valid queries each block has, `[B, H, n, 1]`; `alive` is `[B, H, T]`."""
        count = alive.new_zeros(*alive.shape[:2], self.blocks)
        return count.index_add_(2, of_query, alive)[..., None]
