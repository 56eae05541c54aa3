"""Tables: each metric as one number per head, over the calls of one module or of many."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._text import Brief, and_more
from ..core.numbers import fault_of_flags, format_value
from .moments import ClusterVariance
from .record import Reading, forms_of, side_by_side


@dataclass(frozen=True, repr=False)
class HeadSummary(Brief):
    """A metric as one number per head `[H]`, over batch, valid queries and calls.

    The mean is NaN if it is unknown: for the reason `unknown`, because weights are NaN, or because
    no query is counted (`count` is 0). With `sampled`, a maximum covers only some of the queries.
    """

    mean: Tensor
    coverage: Tensor | None = None
    error: Tensor | None = None
    sampled: bool = False
    count: Tensor | None = None
    unknown: str = ""

    def split(self, sizes: Sequence[int]) -> list[HeadSummary]:
        """Split into one summary per module, given the number of heads of each."""
        sizes = list(sizes)
        parts = (
            [None] * len(sizes) if x is None else x.split(sizes)
            for x in (self.mean, self.coverage, self.error, self.count)
        )
        return [
            HeadSummary(mean, coverage, error, self.sampled, count, self.unknown)
            for mean, coverage, error, count in zip(*parts, strict=True)
            if mean is not None
        ]


def summarise(readings: Sequence[Reading], texts: bool = False) -> HeadSummary | None:
    """Return the metric of each head over the readings of one or more calls; `None` for maps.

    With `texts`, its error is the standard error over texts, not over sampled queries.
    """
    first = readings[0]
    unknown = next((reading.unknown for reading in readings if reading.unknown), "")
    if first.largest:
        of_no_row = first.values.new_full((1, first.values.shape[1]), -torch.inf)
        largest = torch.cat([r.values.to(of_no_row) for r in readings] + [of_no_row]).amax(0)
        return HeadSummary(largest, sampled=any(r.sampled for r in readings), unknown=unknown)
    if first.values.dim() != (2 if first.rows is None else 3):
        return None
    parts = [reading.moments for reading in readings]
    counted = torch.stack([part.packed for part in parts]).cpu()  # in one copy to the host
    total, count, among = counted.sum(0)
    covered = all(part.among is not None for part in parts)
    coverage, mean = count / among.clamp(min=1) if covered else None, total / count
    error = None
    if texts:
        every = ClusterVariance.about(mean)
        for part in parts:
            every = every.add(part.total.cpu(), part.count.cpu())
        error = every.error(mean)
    else:
        errors = [
            part[1] / count.clamp(min=1) * reading.error.cpu()
            for part, reading in zip(counted, readings, strict=True)
            if reading.error is not None
        ]
        error = torch.linalg.vector_norm(torch.stack(errors), dim=0) if errors else None
    return HeadSummary(mean, coverage, error, count=count, unknown=unknown)


def summarise_each(
    each: Sequence[Sequence[Reading]], texts: bool = False
) -> list[HeadSummary | None]:
    """Return `summarise()` of the readings of each of several modules.

    Modules whose readings have the same form are summed together, as if they were one module, so a
    table of many layers takes no more operations and copies to the host than a table of one.
    """
    alike: dict[object, list[int]] = {}
    for place, forms in enumerate(forms_of(each)):
        alike.setdefault(forms, []).append(place)
    summaries: list[HeadSummary | None] = [None] * len(each)
    for places in alike.values():
        calls = zip(*(each[place] for place in places), strict=True)
        every = summarise([side_by_side(call) for call in calls], texts)
        if every is None:
            continue
        sizes = [each[place][0].values.shape[1] for place in places]
        for place, one in zip(places, every.split(sizes), strict=True):
            summaries[place] = one
    return summaries


def split_each(
    summaries: Iterable[HeadSummary | None], heads: Iterable[Sequence[int]]
) -> list[list[HeadSummary | None]]:
    """Split each summary into one per module, given the number of heads of each."""
    pairs = zip(summaries, heads, strict=True)
    return [[None] * len(sizes) if one is None else [*one.split(sizes)] for one, sizes in pairs]


def check_texts(texts: object) -> None:
    """Raise ValueError if `texts` is not a flag but, for example, the name of a statistic."""
    if fault := fault_of_flags(texts=texts):
        raise ValueError(
            f"table(texts={format_value(texts)}): {fault}; table() has a column for "
            f"every statistic."
        )


def table_rows(readings: Mapping[str, Reading], heads: int) -> list[dict[str, float]]:
    """Return the metrics of each head of a call; statistics that are maps are left out."""
    return summary_rows(summaries_of(readings), heads)


def summaries_of(readings: Mapping[str, Reading]) -> dict[str, HeadSummary | None]:
    """Return a call's metrics as one number per head; those of equal form are summed together."""
    each = summarise_each([[one] for one in readings.values()])
    return dict(zip(readings, each, strict=True))


def summary_rows(summaries: Mapping[str, HeadSummary | None], heads: int) -> list[dict[str, float]]:
    """Return a row per head, with a column per metric, its standard error and its coverage.

    A row omits values that are unknown (NaN) for its head.
    """
    rows: list[dict[str, float]] = [{} for _ in range(heads)]
    for name, one in summaries.items():
        if one is None:
            continue
        columns = {
            f"{name}_sampled" if one.sampled else name: one.mean,
            f"{name}_se": one.error,
            f"{name}_coverage": one.coverage,
        }
        for column, values in columns.items():
            if values is not None:
                for row, value in zip(rows, values.tolist(), strict=True):
                    if not math.isnan(value):
                        row[column] = value
    return rows


def unavailable(summaries: Mapping[str, HeadSummary | None], first_head: int = 0) -> dict[str, str]:
    """Return the reason for each metric that is missing from the row of some head."""
    reasons = {}
    for name, one in summaries.items():
        if one is None or not bool((nan := one.mean.isnan()).any()):
            continue
        empty = torch.zeros_like(nan) if one.count is None else nan & (one.count == 0)
        causes = (
            (nan & ~empty, "NaN, as the scores or the outputs of the model are not finite"),
            (empty, "no query counts in its mean"),
        )
        reasons[name] = one.unknown or "; ".join(
            f"{_heads(which.nonzero()[:, 0] + first_head)}: {why}"
            for which, why in causes
            if bool(which.any())
        )
    return reasons


def _heads(numbers: Tensor) -> str:
    """Name heads by their numbers; for many heads, only the first ones."""
    return f"head{'s' * (len(numbers) > 1)} {and_more(list(map(str, numbers.tolist())), 8)}"
