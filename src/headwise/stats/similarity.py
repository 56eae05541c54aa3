"""`Similarity`: the distance between the attention of two heads of a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.numbers import check_whole
from ..core.reference import Definition
from .plan import Need, Route, Setting
from .record import Reading, Record
from .run import Work, rows_of_p
from .sampling import draw
from .statistic import Statistic


@dataclass(frozen=True)
class Similarity(Statistic):
    """The Jensen–Shannon distance between the attention of two heads: `[B, H, H]`, from 0 to 1.

    `√(H(½p + ½r) − ½H(p) − ½H(r))`, with entropies in bits, averaged over the valid queries in a
    stratified sample of `queries` (all, if there are fewer). 0 on the diagonal; NaN for two heads
    without a common valid query. A learned sink counts as one more outcome. No gradient.

    Source: Lin 1991; between heads: Clark et al. 2019, §6.
    """

    queries: int = 64
    seed: int = 0
    names = ("similarity",)

    def __post_init__(self) -> None:
        check_whole(self, "queries", 1)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return {"similarity": _DistanceOfHeads(self.queries, self.seed)}

    def metric(self, record: Record) -> dict[str, Reading]:
        total, count = record[_DistanceOfHeads(self.queries, self.seed)]
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
    """Sums of distances between heads over sampled queries, and the query counts: `[B, H, H]`."""

    queries: int
    seed: int
    name = "similarity"

    def route(self, setting: Setting) -> Route:
        there = setting.extent.queries
        return Route("sampled rows of P", f"{min(self.queries, there)} of {there}")

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor]:
        view = work.view
        extent = view.extent
        rows, weights = _drawn(self, view.weights)
        total = work.lse.detach().new_zeros(extent.batch, extent.heads, extent.heads)
        count = torch.zeros_like(total)
        size = max(1, (1 << 20) // max(1, extent.batch * extent.heads * extent.keys))
        for some, weight in zip(rows.split(size), weights.split(size), strict=True):
            block = rows_of_p(view, some)
            sink = None if block.log_sink is None else view.by_head(block.log_sink.exp())
            distances, both = _js_distances(view.by_head(block.p), sink)
            both = both * weight[:, None, None]
            total += (distances * both).sum(1)
            count += both.sum(1)
        return total, count


def _drawn(of: Similarity | _DistanceOfHeads, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Sample from queries of the given `weights` `[T]`; return indices and the sample's weights."""
    sample = draw(of.queries, len(weights), of.seed, weights.device)
    if sample is None:
        return torch.arange(len(weights), device=weights.device), weights
    assert sample.weights is not None
    return sample.rows, weights[sample.rows] * sample.weights.to(weights.dtype)


def _js_distances(p: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return distances of all pairs of heads, and 1 where both see a key: both `[B, n, H, H]`.

    `p` is `[B, H, n, S]`, and `sink`, the weight on a learned sink, is `[B, H, n]`.
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
        # With t = (p − r) / (p + r): ¼ Σ (p + r) ((1 + t) log(1 + t) + (1 − t) log(1 − t)). It
        # avoids a difference of entropies, whose rounding the root would amplify for similar heads.
        t = ((one - others) / both.clamp(min=tiny)).clamp(eps - 1, 1 - eps)
        terms = (1 + t) * torch.log1p(t) + (1 - t) * torch.log1p(-t)
        terms = torch.linalg.vecdot(both, terms) / (4 * math.log(2))
        terms = terms.clamp(0, 1).sqrt()  # rounding may exceed either bound
        distances[:, :, head, head + 1 :] = terms
        distances[:, :, head + 1 :, head] = terms
    return distances, valid[..., None] * valid[..., None, :]
