"""Per-head sums or maxima over a step, which merge exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..stats.moments import between, largest_of
from ..stats.record import Reading, forms_of, side_by_side

Array = npt.NDArray[np.float64]
Heads = Mapping[str, int]
"""The number of heads of each layer, in the order of the layers."""

MEAN, MAXIMUM = "mean", "maximum"
FIELDS = {MEAN: ("count", "sum", "squares", "error"), MAXIMUM: ("maximum",)}
"""The rows of `data`. For a mean: the number of values, their sum, the sum of their squared
deviations from their mean, and the square of the sampling error of the sum."""


def sums_of_each(readings: Sequence[Reading]) -> list[Tensor | None]:
    """Return the sums of each reading: `[4, H]` for a mean, `[1, H]` for a maximum.

    In float64, on the reading's device (`to_host`). `None` for readings without one number for each
    query or batch row, such as a map. Readings of equal shapes are summed together, as if their
    heads were those of one call.
    """
    alike: dict[object, list[int]] = {}
    readings = [x if x.among is None else replace(x, among=None) for x in readings]
    for place, ((form,), reading) in enumerate(zip(forms_of(zip(readings)), readings, strict=True)):
        if reading.of_heads:
            alike.setdefault(form, []).append(place)
    found: list[Tensor | None] = [None] * len(readings)
    for places in alike.values():
        some = [readings[place] for place in places]
        kept = _sums_of(side_by_side(some))
        parts = kept.split([one.values.shape[1] for one in some], 1)
        for place, part in zip(places, parts, strict=True):
            found[place] = part
    return found


def to_host(blocks: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of one dtype on the CPU, in one copy from each device."""
    found, devices = [*blocks], {x.device for x in blocks if not x.is_cpu}
    for device in devices:
        places = [place for place, x in enumerate(blocks) if x.device == device]
        parts = torch.cat([blocks[place].flatten() for place in places]).cpu()
        sizes = [blocks[place].numel() for place in places]
        for place, part in zip(places, parts.split(sizes), strict=True):
            found[place] = part.view(blocks[place].shape)
    return found


def _sums_of(reading: Reading) -> Tensor:
    """Return the sums of a reading: `[4, H]` for a mean, `[1, H]` for a maximum, in float64."""
    values = reading.values.detach()
    if reading.largest:
        return largest_of(values)[None].double()
    one = reading.moments.heads
    errors = torch.zeros_like(one.count) if one.errors is None else one.errors
    return torch.stack([one.count, one.total, one.squares, errors])


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge sums or maxima of two samples, with squares about the common mean (Chan et al. 1979).

    >>> some, more = torch.tensor([[2.0], [6], [2], [0]]), torch.tensor([[1.0], [9], [0], [0]])
    >>> merged(some, more).flatten().tolist()  # 2, 4 and 9
    [3.0, 15.0, 26.0, 0.0]
    """
    if len(one) == 1:
        return torch.maximum(one, other)
    sums = one + other
    sums[2] += between(one[0], one[1], other[0], other[1])
    return sums


@dataclass(frozen=True, eq=False)
class HeadMetrics:
    """One statistic of every head of a model over a step.

    `data` is `[4, N]` or `[1, N]` (`FIELDS[kind]`), where N counts the heads of all layers, those
    of the first layer first. `queries` out of `of_queries` queries were sampled.
    """

    kind: str
    data: Array
    queries: int
    of_queries: int

    @property
    def sampled(self) -> bool:
        """Return True if only some queries were sampled; a maximum is then a lower bound."""
        return self.queries < self.of_queries

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """True for heads with a value, `[N]`."""
        return self.data[0] != (-math.inf if self.kind == MAXIMUM else 0)

    @cached_property
    def values(self) -> Array:
        """The mean or maximum of each head `[N]`; NaN if missing, inf if not finite."""
        present, found = self.present, self.data[0]
        if self.kind == MEAN:
            found = self.data[1] / np.where(present, self.data[0], 1.0)
        return np.where(present, np.where(np.isfinite(found), found, np.inf), np.nan)

    @property
    def errors(self) -> Array:
        """The standard errors of sampled means `[N]`: 0 for exact means, NaN if missing."""
        if self.kind == MAXIMUM:
            return np.full(self.data.shape[1], np.nan)
        counts = np.where(self.present, self.data[0], 1.0)
        return np.where(self.present, np.sqrt(self.data[3]) / counts, np.nan)

    def wide(self, heads: int) -> HeadMetrics:
        """Return the same metrics, with missing values for the heads of later layers."""
        missing = heads - self.data.shape[1]
        empty = -math.inf if self.kind == MAXIMUM else 0.0
        data = np.pad(self.data, ((0, 0), (0, missing)), constant_values=empty)
        return HeadMetrics(self.kind, data, self.queries, self.of_queries)

    def of_layers(self, heads: Heads) -> Array:
        """Return the mean over queries and heads, or the maximum, of each layer `[L]`."""
        found, first = [], 0
        for number in heads.values():
            part = self.data[:, first : first + number]
            first += number
            if self.kind == MAXIMUM:
                found.append(part[0].max(initial=-math.inf))
            else:
                count = part[0].sum()
                found.append(part[1].sum() / count if count else -math.inf)
        numbers = np.array(found)
        return np.where(numbers == -math.inf, np.nan, numbers)


def nothing(rows: int, heads: int) -> Tensor:
    """Return the sums `[rows, heads]` of heads that were not called."""
    return torch.full((rows, heads), -torch.inf if rows == 1 else 0.0, dtype=torch.float64)
