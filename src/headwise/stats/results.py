"""What statistics give: a reading of one call, how it was read, a head's figure over several."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

KERNEL = "the kernel's own"
CALL = "identity: one more call"
PASS = "a pass over the scores"
KERNEL_PASS = "the kernel's pass over the scores"
ROWS = "rows of scores"
PAIRS = "the chosen scores alone"
OUTPUT = "from the output"
VIA = "from another figure"
"""The ways in which figures are read (`Route.kind`)."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One figure of every head: its tensor, and the rows that count in a mean.

    `values` is `[B, H, T]` per query or `[B, H, …]` per head. `rows` (broadcastable to
    `[B, H, T]`) holds the queries that have what is measured; `None` means that the figure is not
    per query. `among` holds the queries that could have had it, where that is news: the share of
    `rows` in it is the coverage. Of a figure that is the `largest`, heads keep the maximum. `error`
    is the standard error of each head's mean `[H]`, where queries were drawn by chance.

    For figures that are not per query, so that they can be joined over calls: `per_key` says that
    `values` `[B, H, S]` are sums over queries; `over` says of means over how many queries they
    were taken, entry by entry (broadcastable to `values`).
    """

    values: Tensor
    rows: Tensor | None = None
    among: Tensor | None = None
    largest: bool = False
    error: Tensor | None = None
    per_key: bool = False
    over: Tensor | None = None


@dataclass(frozen=True)
class Route:
    """How a figure is read in a call, and why so where there are other ways."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


@dataclass(frozen=True)
class Figure:
    """A statistic in one number per head `[H]`, over batch, valid queries and calls."""

    mean: Tensor
    coverage: Tensor | None = None
    error: Tensor | None = None


def summarise(readings: list[Reading], texts: bool = False) -> Figure | None:
    """The figure of each head over the readings of one or more calls; `None` for maps.

    With `texts`, its error is that over texts (`Texts`) in place of that of drawn queries.
    """
    first = readings[0]
    if first.largest:
        return Figure(torch.stack([r.values.amax(0) for r in readings]).amax(0))
    if first.values.dim() != (2 if first.rows is None else 3):
        return None
    parts = [sums_of_texts(reading) for reading in readings]
    total = torch.stack([part[0].sum(0).cpu() for part in parts]).sum(0)
    count = torch.stack([part[1].sum(0).cpu() for part in parts]).sum(0)
    coverage = None
    if first.among is not None:
        among = [summed(_held(r.among, r), (0, 2)).cpu() for r in readings]
        coverage = count / torch.stack(among).sum(0).clamp(min=1)
    mean = total / count.clamp(min=1)
    if texts:
        every = Texts.about(mean)
        for totals, counts in parts:
            every = every.joined(totals.cpu(), counts.cpu())
        return Figure(mean, coverage, every.error(mean))
    errors = [r.error for r in readings if r.error is not None]
    error = None
    if len(errors) == len(readings):
        shares = [part[1].sum(0).cpu() / count.clamp(min=1) for part in parts]
        each = [share * part.cpu() for share, part in zip(shares, errors, strict=True)]
        error = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return Figure(mean, coverage, error)


def summed(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The sum in float64, without a graph, in one order: PyTorch's own follows the strides.

    So equal readings have equal tables, bit for bit, wherever they came from.
    """
    return values.detach().contiguous().sum(dims, dtype=torch.float64)


def sums_of_texts(reading: Reading) -> tuple[Tensor, Tensor]:
    """The sum over valid queries, and their number, of every batch row: `[B, H]`, in float64.

    Of a figure that is one number for each head and batch row, that and 1.
    """
    if reading.rows is None:
        values = reading.values.detach().double().contiguous()
        return values, torch.ones_like(values)
    rows = _held(reading.rows, reading)
    return summed(torch.where(rows, reading.values, 0.0), 2), summed(rows, 2)


@dataclass(frozen=True, eq=False)
class Texts:
    """The standard error of each head's mean over texts, each of which is a draw of its own.

    Text u has `n_u` valid queries whose figures sum to `t_u`; the mean is `m = Σ t_u / Σ n_u`, a
    ratio, and its error over the U texts that have a valid query
    `√(U / (U − 1) · Σ (t_u − m n_u)²) / Σ n_u` (Cochran 1977, §2.11). With equally long texts that
    is the standard deviation of their means over √U. Kept are sums `[H]`, with `t_u − c n_u` for
    `t_u`: any centre c near the mean keeps their digits.
    """

    centre: Tensor
    texts: Tensor
    queries: Tensor
    squares: Tensor
    crossed: Tensor
    weights: Tensor

    @classmethod
    def about(cls, centre: Tensor) -> Texts:
        """No text yet."""
        return cls(centre, *(torch.zeros_like(centre) for _ in range(5)))

    def joined(self, totals: Tensor, counts: Tensor) -> Texts:
        """With more texts: their sums and numbers of queries `[U, H]`."""
        away = totals - counts * self.centre
        return Texts(
            self.centre,
            self.texts + (counts > 0).sum(0),
            self.queries + counts.sum(0),
            self.squares + away.square().sum(0),
            self.crossed + (away * counts).sum(0),
            self.weights + counts.square().sum(0),
        )

    def _about(self, centre: Tensor) -> Texts:
        """The same sums about another centre."""
        step = centre - self.centre
        squares = self.squares - 2 * step * self.crossed + step.square() * self.weights
        crossed = self.crossed - step * self.weights
        return replace(self, centre=centre, squares=squares, crossed=crossed)

    def __add__(self, other: Texts) -> Texts:
        other = other._about(self.centre)
        return Texts(
            self.centre,
            self.texts + other.texts,
            self.queries + other.queries,
            self.squares + other.squares,
            self.crossed + other.crossed,
            self.weights + other.weights,
        )

    def error(self, mean: Tensor) -> Tensor | None:
        """The error of the mean: `[H]`; `None` where a head was seen in fewer than two texts."""
        if not bool((self.texts > 1).all()):
            return None
        squares = self._about(mean).squares.clamp(min=0)
        return (self.texts / (self.texts - 1) * squares).sqrt() / self.queries


def _held(rows: Tensor | None, reading: Reading) -> Tensor:
    assert rows is not None  # readings of one statistic are all per query, or none is
    return rows.expand(reading.values.shape)
