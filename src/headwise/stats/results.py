"""What statistics give: a reading of one call, how it was read, a head's figure over several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .._text import Brief, and_more
from ..core.numbers import fault_of_flags, said
from .sampling import standard_error

KERNEL = "the kernel's own"
CALL = "identity: one more call"
PASS = "a pass over the scores"
KERNEL_PASS = "the kernel's pass over the scores"
ROWS = "rows of scores"
PAIRS = "the chosen scores alone"
OUTPUT = "from the output"
VIA = "from another figure"
"""The ways in which figures are read (`Route.kind`)."""


@dataclass(frozen=True, eq=False, repr=False)
class Reading(Brief):
    """One figure of every head: its tensor, and the rows that count in a mean.

    `values` is `[B, H, T]` per query or `[B, H, …]` per head. `rows` (broadcastable to
    `[B, H, T]`) holds the queries that have what is measured; `None` means that the figure is not
    per query. `among` holds the queries that could have had it, where that is news: the share of
    `rows` in it is the coverage. Of a figure that is the `largest`, heads keep the maximum.

    Of some of the queries, n stand in place of T, and `sampled` is true: the `largest` of these is
    a lower bound, on which nothing may be decided. Where they were drawn by chance, `weights` `[n]`
    says how many queries each stands for, and `error` is the standard error of each head's mean
    `[H]`; or `whole` has the sums over all queries, and the mean is exact.

    For figures that are not per query, so that they can be joined over calls: `per_key` says that
    `values` `[B, H, S]` are sums over queries; `over` says of means over how many queries they
    were taken, entry by entry (broadcastable to `values`).

    `unknown` is the reason why the figure cannot be known for the call; `values` are NaN then.
    """

    values: Tensor
    rows: Tensor | None = None
    among: Tensor | None = None
    largest: bool = False
    error: Tensor | None = None
    per_key: bool = False
    over: Tensor | None = None
    sampled: bool = False
    weights: Tensor | None = None
    whole: Sums | None = None
    unknown: str = ""

    def without_values(self, why: str) -> Reading:
        """Return the reading of a figure that cannot be known for its call."""
        nothing = torch.full_like(self.values, torch.nan)
        return replace(self, values=nothing, unknown=why)

    @property
    def sums(self) -> Sums:
        """What tables take of it."""
        return sums_of(self) if self.whole is None else self.whole


@dataclass(frozen=True, eq=False, repr=False)
class Sums(Brief):
    """Sums of a figure over the valid queries of a call, in float64.

    Of every batch row `[B, H]`, their `total` and number (`count`), and how many could have had the
    figure (`among`, where that is news); of each head `[H]`, the `squares` of their deviations from
    its mean, and the `largest`.
    """

    total: Tensor
    count: Tensor
    among: Tensor | None
    squares: Tensor
    largest: Tensor

    @property
    def mean(self) -> Tensor:
        """Of each head `[H]`; 0 without a valid query."""
        return self.total.sum(0) / self.count.sum(0).clamp(min=1)

    @property
    def packed(self) -> Tensor:
        """Return total, count and among over the batch, `[3, H]`; without an among, count again."""
        among = self.count if self.among is None else self.among
        return torch.stack([self.total, self.count, among]).sum(1)


def of_some(reading: Reading, every: Reading | None, weights: Tensor | None) -> Reading:
    """Say of a reading of some queries, drawn if they have weights, how its mean is that of all.

    `every` is the reading of all, where that is known: its maximum takes the place of theirs.
    """
    if every is not None and every.largest:
        return every
    values, rows = reading.values.detach(), reading.rows
    if rows is None or values.dim() != 3 or weights is None:
        return replace(reading, sampled=True)
    if every is not None:
        return replace(reading, sampled=True, weights=weights, whole=every.sums)
    error = standard_error(values, rows.expand(values.shape), weights)
    return replace(reading, sampled=True, weights=weights, error=error)


@dataclass(frozen=True)
class Route:
    """How a figure is read in a call, and why so where there are other ways."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


@dataclass(frozen=True, repr=False)
class Figure(Brief):
    """A statistic in one number per head `[H]`, over batch, valid queries and calls.

    It is NaN where it is unknown: for the reason `unknown`, because weights are NaN, or because the
    mean is over nothing (`count` is 0). With `sampled`, a maximum is that of some of the queries.
    """

    mean: Tensor
    coverage: Tensor | None = None
    error: Tensor | None = None
    sampled: bool = False
    count: Tensor | None = None
    unknown: str = ""


def summarise(readings: list[Reading], texts: bool = False) -> Figure | None:
    """The figure of each head over the readings of one or more calls; `None` for maps.

    With `texts`, its error is that over texts (`Texts`) in place of that of drawn queries.
    """
    first = readings[0]
    unknown = next((reading.unknown for reading in readings if reading.unknown), "")
    if first.largest:
        of_no_row = first.values.new_full((1, first.values.shape[1]), -torch.inf)
        largest = torch.cat([r.values.to(of_no_row) for r in readings] + [of_no_row]).amax(0)
        return Figure(largest, sampled=any(r.sampled for r in readings), unknown=unknown)
    if first.values.dim() != (2 if first.rows is None else 3):
        return None
    parts = [reading.sums for reading in readings]
    covered = all(part.among is not None for part in parts)
    counted = torch.stack([part.packed for part in parts]).cpu()  # in one copy to the host
    total, count, among = counted.sum(0)
    coverage = count / among.clamp(min=1) if covered else None
    mean = total / count
    if texts:
        every = Texts.about(mean.nan_to_num(0.0, 0.0, 0.0))
        for part in parts:
            every = every.joined(part.total.cpu(), part.count.cpu())
        return Figure(mean, coverage, every.error(mean), count=count, unknown=unknown)
    each = [
        part[1] / count.clamp(min=1) * reading.error.cpu()
        for part, reading in zip(counted, readings, strict=True)
        if reading.error is not None
    ]
    error = torch.linalg.vector_norm(torch.stack(each), dim=0) if each else None
    return Figure(mean, coverage, error, count=count, unknown=unknown)


TOGETHER = 1 << 19
"""The most numbers in a reading that is copied, to be summed up together with others."""


def summarise_each(each: Sequence[list[Reading]], texts: bool = False) -> list[Figure | None]:
    """Return `summarise()` of the readings of each of several modules.

    Modules whose readings are alike are summed up together, as if their heads were those of one: a
    table of many layers takes as few operations, and copies to the host, as that of a single one.
    """
    alike: dict[object, list[int]] = {}
    for place, readings in enumerate(each):
        alike.setdefault(tuple(map(_form, readings)), []).append(place)
    found: list[Figure | None] = [None] * len(each)
    for places in alike.values():
        calls = zip(*(each[place] for place in places), strict=True)
        figure = summarise([_side_by_side(call) for call in calls], texts)
        if figure is None:
            continue
        sizes = [each[place][0].values.shape[1] for place in places]
        parts = (
            [None] * len(places) if x is None else x.split(sizes)
            for x in (figure.mean, figure.coverage, figure.error, figure.count)
        )
        for place, mean, coverage, error, count in zip(places, *parts, strict=True):
            found[place] = Figure(mean, coverage, error, figure.sampled, count, figure.unknown)
    return found


def _form(reading: Reading) -> object:
    """Return what must be equal in readings that stand side by side; of some, nothing is."""
    x = reading.values
    apart = reading.weights is not None or reading.whole is not None or reading.over is not None
    apart = apart or x.dim() != (2 if reading.rows is None else 3) or x.numel() > TOGETHER
    if apart or reading.per_key or reading.unknown:
        return object()
    none = tuple(part is None for part in (reading.rows, reading.among, reading.error))
    return x.shape[0], x.shape[2:], x.dtype, x.device, reading.largest, reading.sampled, none


def _side_by_side(readings: Sequence[Reading]) -> Reading:
    """Return the heads of several readings of one form as those of a single one."""
    if len(readings) == 1:
        return readings[0]
    values = torch.cat([one.values for one in readings], 1)
    flags: list[Tensor | None] = []
    for parts in ([one.rows for one in readings], [one.among for one in readings]):
        known = [
            x.expand(r.values.shape) for x, r in zip(parts, readings, strict=True) if x is not None
        ]
        flags.append(torch.cat(known, 1) if known else None)
    errors = [one.error for one in readings if one.error is not None]
    error = torch.cat(errors) if errors else None
    return replace(readings[0], values=values, rows=flags[0], among=flags[1], error=error)


def check_texts(texts: object) -> None:
    """Raise ValueError for `texts` of a table that is no flag, such as the name of a statistic."""
    if fault := fault_of_flags(texts=texts):
        raise ValueError(
            f"table(texts={said(texts)}): {fault}; table() has a column for every statistic."
        )


def table_rows(
    readings: dict[str, list[Reading]], heads: int, texts: bool = False
) -> list[dict[str, float]]:
    """The figures of each head over calls; statistics that are maps are left out.

    With `texts`, standard errors are those over texts, each a batch row of a call.
    """
    return figure_rows({name: summarise(calls, texts) for name, calls in readings.items()}, heads)


def figure_rows(figures: dict[str, Figure | None], heads: int) -> list[dict[str, float]]:
    """Return a row per head, with a column per figure, its standard error and its coverage.

    A row omits what is unknown (NaN) for its head.
    """
    rows: list[dict[str, float]] = [{} for _ in range(heads)]
    for name, figure in figures.items():
        if figure is None:
            continue
        columns = {
            f"{name}_sampled" if figure.sampled else name: figure.mean,
            f"{name}_se": figure.error,
            f"{name}_coverage": figure.coverage,
        }
        for column, values in columns.items():
            if values is not None:
                for row, value in zip(rows, values.tolist(), strict=True):
                    if not math.isnan(value):
                        row[column] = value
    return rows


def unavailable(figures: Mapping[str, Figure | None], first_head: int = 0) -> dict[str, str]:
    """Return the reason for each metric that the row of some head omits."""
    found = {}
    for name, figure in figures.items():
        if figure is None or not bool((nan := figure.mean.isnan()).any()):
            continue
        empty = torch.zeros_like(nan) if figure.count is None else nan & (figure.count == 0)
        reasons = (
            (nan & ~empty, "NaN, as the scores or the outputs of the model are not finite"),
            (empty, "no query counts in its mean"),
        )
        found[name] = figure.unknown or "; ".join(
            f"{_heads(which.nonzero()[:, 0] + first_head)}: {why}"
            for which, why in reasons
            if bool(which.any())
        )
    return found


def _heads(numbers: Tensor) -> str:
    """Name heads by their numbers, the first of many."""
    return f"head{'s' * (len(numbers) > 1)} {and_more(list(map(str, numbers.tolist())), 8)}"


def summed(values: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    """The sum in float64, without a graph, in one order: PyTorch's own follows the strides.

    So equal readings have equal tables, bit for bit, wherever they came from.
    """
    return values.detach().contiguous().sum(dims, dtype=torch.float64)


def sums_of(reading: Reading) -> Sums:
    """Sum a figure up over its queries, each of which counts as many as it stands for.

    Of a figure that is one number for each head and batch row, that and 1.
    """
    values = reading.values.detach().double()
    if reading.rows is None:
        away = (values - summed(values, 0) / max(1, len(values))).square()
        largest = torch.cat([values, values.new_full((1, values.shape[1]), -torch.inf)]).amax(0)
        return Sums(values.contiguous(), torch.ones_like(values), None, summed(away, 0), largest)
    weights = 1.0 if reading.weights is None else reading.weights
    rows = reading.rows.expand(values.shape)
    counted = rows * weights
    total, count = summed(torch.where(rows, values * weights, 0.0), 2), summed(counted, 2)
    among = None if reading.among is None else summed(reading.among.expand(rows.shape) * weights, 2)
    mean = total.sum(0) / count.sum(0).clamp(min=1)
    away = torch.where(rows, (values - mean[:, None]).square() * weights, 0.0)
    counting = values.masked_fill(~rows, -torch.inf).transpose(0, 1).flatten(1)
    largest = torch.nn.functional.pad(counting, (0, 1), value=-torch.inf).amax(1)
    return Sums(total, count, among, summed(away, (0, 2)), largest)


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

    def error(self, mean: Tensor) -> Tensor:
        """The error of the mean: `[H]`; NaN where a head was seen in fewer than two texts."""
        squares = self._about(mean).squares.clamp(min=0)
        error = (self.texts / (self.texts - 1) * squares).sqrt() / self.queries
        return error.masked_fill(self.texts < 2, torch.nan)
