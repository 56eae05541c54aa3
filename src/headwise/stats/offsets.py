"""`OffsetHistogram`: attention by distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.modes import read_at_once
from ..core.numbers import check_whole
from ..core.reference import Definition
from .blocks import ScoreBlock
from .plan import Need, OfPass
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


@dataclass(frozen=True)
class OffsetHistogram(Statistic):
    """The attention of each head by distance: `[B, H, bins]`. No gradient.

    Bin 0 is the query's own position, and bin b covers the distances `[2^(b−1), 2^b)` before it.
    The last bin includes all larger distances. Keys ahead of the query are in no bin. Values are
    means over valid queries.

    Args:
        bins: the number of bins, at least 2; with 18, the last bin starts at 65,536 tokens.
        ahead: also compute `offsets_ahead` `[B, H, bins]` for keys ahead; its bin 0 is 0.

    Source: Press et al. 2021, §4, and related work (effective context).
    """

    bins: int = 18
    ahead: bool = False

    def __post_init__(self) -> None:
        check_whole(self, "bins", 2)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("offsets", "offsets_ahead") if self.ahead else ("offsets",)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return dict.fromkeys(self.names, _MassByDistance(self.bins, len(self.names)))

    def metric(self, record: Record) -> dict[str, Reading]:
        extent = record.extent
        total = record[_MassByDistance(self.bins, len(self.names))]
        valid = record.valid_rows.expand(extent.batch, extent.heads, extent.queries)
        count = (valid * record.view.weights).sum(-1, keepdim=True)
        means = (total / count.clamp(min=1)[..., None]).unbind(2)
        return {
            name: Reading(mean, over=count) for name, mean in zip(self.names, means, strict=True)
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        distance = i - torch.arange(extent.keys, device=device)
        valid = full.allowed.any(-1).sum(-1, keepdim=True)
        metrics = {}
        for name, away in zip(self.names, (distance, -distance), strict=False):
            bins = _bin_of(away, self.bins)
            if name == "offsets_ahead":
                bins = torch.where(away == 0, self.bins, bins)
            sums = [
                torch.where(bins == b, full.weights, 0.0).sum((-1, -2)) for b in range(self.bins)
            ]
            metrics[name] = torch.stack(sums, -1) / valid.clamp(min=1)
        return metrics


def _bin_of(distance: Tensor, bins: int) -> Tensor:
    """Return the bin of each distance, computed exactly from powers of 2; `bins` for keys ahead."""
    powers = torch.bitwise_left_shift(1, torch.arange(bins - 1, device=distance.device))
    edges = torch.nn.functional.pad(powers, (1, 0))
    found = torch.bucketize(distance, edges, right=True) - 1
    return torch.where(distance < 0, bins, found)


@dataclass(frozen=True)
class _MassByDistance(OfPass):
    """Attention by distance of keys behind the query, and also of keys ahead if `sides` is 2."""

    bins: int
    sides: int
    name = "offsets"

    def accumulator(self, work: Work) -> _Offsets:
        view = work.view
        weights = None if view.drawn is None else view.weights
        return _Offsets(view.zeros(self.sides, self.bins), view.positions, weights)


class _Offsets:
    """Sums of P by distance behind, and ahead if `total` has two sides: `[B · H, 1 or 2, bins]`.

    `weights` are those of sampled queries at `positions`.
    """

    def __init__(self, total: Tensor, positions: Tensor, weights: Tensor | None) -> None:
        self.total, self.positions, self.weights = total, positions, weights

    def add(self, block: ScoreBlock) -> None:
        p = block.p if self.weights is None else block.p * self.weights[block.rows, None]
        j = torch.arange(block.keys.start, block.keys.stop, device=self.positions.device)
        _, sides, size = self.total.shape
        distance = self.positions[block.rows, None] - j
        bins = _bin_of(distance, size)
        if sides == 2:
            bins = torch.where(distance < 0, size + _bin_of(-distance, size), bins)
        total = self.total[block.heads].view(-1, sides * size)
        if read_at_once(bins) and int(bins.amin()) == (high := int(bins.amax())):
            if high < sides * size:
                total[:, high] += p.sum((-1, -2))
        else:
            found = p.new_zeros(len(p), sides * size + 1)
            found.index_add_(1, bins.flatten(), p.flatten(1))
            total += found[:, :-1]
