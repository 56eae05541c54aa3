"""Count, sum, squared deviations and maximum per head, which merge over calls and ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._text import Brief


def summed(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """Return the sum in float64, without a graph, in an order that does not depend on strides.

    Equal readings therefore have tables that are equal bit for bit. (PyTorch's own order follows
    the strides.)
    """
    return values.detach().contiguous().sum(dims, dtype=torch.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Moments(Brief):
    """Sums of a metric over the valid queries of every head, in float64.

    `total` and `count` are `[H]`, or `[B, H]` per batch row. So is `among`, the number of queries
    that could have had the metric, if it differs from `count`. `squares` `[H]` holds the sums of
    squared deviations from each head's mean, `largest` `[H]` the maximum, and `errors` `[H]` the
    squared standard errors of the sums of sampled queries.

    >>> some = Moments.zeros(1).merge(moments_of(torch.tensor([[[2.0, 4.0]]]), torch.ones(1) > 0))
    >>> more = some.merge(moments_of(torch.tensor([[[9.0]]]), torch.ones(1) > 0))
    >>> [x.item() for x in (more.count, more.mean, more.squares, more.largest)]
    [3.0, 5.0, 26.0, 9.0]

    Source: Chan et al. 1979.
    """

    total: Tensor
    count: Tensor
    among: Tensor | None
    squares: Tensor
    largest: Tensor
    errors: Tensor | None = None

    @classmethod
    def zeros(cls, heads: int, device: torch.device | None = None) -> Moments:
        """Return the moments over no queries."""
        zero = torch.zeros(heads, dtype=torch.float64, device=device)
        return cls(zero, zero, zero, zero, torch.full_like(zero, -torch.inf))

    @property
    def heads(self) -> Moments:
        """The moments over all batch rows, each `[H]`."""
        if self.total.dim() == 1:
            return self
        among = None if self.among is None else self.among.sum(0)
        return replace(self, total=self.total.sum(0), count=self.count.sum(0), among=among)

    @property
    def mean(self) -> Tensor:
        """The mean of each head `[H]`; 0 if it has no valid query."""
        return self.heads.total / self.heads.count.clamp(min=1)

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both per head; the squares are about the common mean."""
        one, two = self.heads, other.heads
        errors = [x for x in (one.errors, two.errors) if x is not None]
        return Moments(
            one.total + two.total,
            one.count + two.count,
            None if one.among is None or two.among is None else one.among + two.among,
            one.squares + two.squares + between(one.count, one.total, two.count, two.total),
            torch.maximum(one.largest, two.largest),
            errors[0] + errors[1] if len(errors) == 2 else errors[0] if errors else None,
        )

    @property
    def packed(self) -> Tensor:
        """`total`, `count` and `among` per head, `[3, H]`; without `among`, `count` again."""
        one = self.heads
        return torch.stack([one.total, one.count, one.count if one.among is None else one.among])


def between(count: Tensor, total: Tensor, more: Tensor, more_total: Tensor) -> Tensor:
    """Return the sum of squares between two groups: their means' deviations from the common mean.

    Source: Chan et al. 1979.
    """
    gap = more_total / more.clamp(min=1) - total / count.clamp(min=1)
    return gap.square() * count * more / (count + more).clamp(min=1)


def moments_of(
    values: Tensor, rows: Tensor | None, among: Tensor | None = None, weights: Tensor | None = None
) -> Moments:
    """Sum a metric over its valid `rows`, each weighted by the number of queries it represents.

    `rows` is `None` for a metric with one number for each head and batch row.
    """
    values = values.detach().double()
    if rows is None:
        away = (values - summed(values, 0) / max(1, len(values))).square()
        largest = largest_of(values)
        return Moments(values.contiguous(), torch.ones_like(values), None, summed(away, 0), largest)

    def weighed(x: Tensor) -> Tensor:
        return x if weights is None else x * weights

    rows = rows.expand(values.shape)
    total, count = summed(torch.where(rows, weighed(values), 0.0), 2), summed(weighed(rows), 2)
    if among is not None:
        among = summed(weighed(among.expand(rows.shape)), 2)
    mean = total.sum(0) / count.sum(0).clamp(min=1)
    away = torch.where(rows, weighed((values - mean[:, None]).square()), 0.0)
    largest = largest_of(torch.where(rows, values, -torch.inf).transpose(1, 2).flatten(0, 1))
    return Moments(total, count, among, summed(away, (0, 2)), largest)


def largest_of(values: Tensor) -> Tensor:
    """Return the maximum over the first axis, or −∞ if the axis is empty."""
    return values.amax(0) if len(values) else values.new_full(values.shape[1:], -torch.inf)


@dataclass(frozen=True, eq=False)
class ClusterVariance:
    """The standard error of each head's mean over texts, with each text as one sample.

    Text u has `n_u` valid queries whose metrics sum to `t_u`. The mean is the ratio
    `m = Σ t_u / Σ n_u`, and its error over the U texts that have a valid query is
    `√(U / (U − 1) · Σ (t_u − m n_u)²) / Σ n_u` (Cochran 1977, §2.11). For texts of equal length, it
    is the standard deviation of their means divided by √U. The sums `[H]` are kept with
    `t_u − c n_u` in place of `t_u`; any center c near the mean preserves precision.
    """

    centre: Tensor
    texts: Tensor
    queries: Tensor
    squares: Tensor
    crossed: Tensor
    weights: Tensor

    @classmethod
    def about(cls, centre: Tensor) -> ClusterVariance:
        """Return the sums of no texts, about this center."""
        centre = centre.nan_to_num(0.0, 0.0, 0.0)
        return cls(centre, *(torch.zeros_like(centre) for _ in range(5)))

    def add(self, totals: Tensor, counts: Tensor) -> ClusterVariance:
        """Add texts, given their sums and their numbers of queries, `[U, H]`."""
        away = totals - counts * self.centre
        texts, queries = (counts > 0).sum(0), counts.sum(0)
        sums = texts, queries, away.square().sum(0), (away * counts).sum(0), counts.square().sum(0)
        return self + ClusterVariance(self.centre, *sums)

    def _about(self, centre: Tensor) -> ClusterVariance:
        """Return the same sums about a different center."""
        step = centre - self.centre
        squares = self.squares - 2 * step * self.crossed + step.square() * self.weights
        return replace(
            self, centre=centre, squares=squares, crossed=self.crossed - step * self.weights
        )

    def __add__(self, other: ClusterVariance) -> ClusterVariance:
        other = self if other is self else other._about(self.centre)
        mine, theirs = [*vars(self).values()][1:], [*vars(other).values()][1:]
        return ClusterVariance(self.centre, *(a + b for a, b in zip(mine, theirs, strict=True)))

    def error(self, mean: Tensor) -> Tensor:
        """Return the standard error of the mean `[H]`; NaN for heads with fewer than two texts."""
        squares = self._about(mean).squares.clamp(min=0)
        error = (self.texts / (self.texts - 1) * squares).sqrt() / self.queries
        return error.masked_fill(self.texts < 2, torch.nan)
