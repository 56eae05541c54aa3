"""What a statistic comes to over many calls, by what kind of figure it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .results import Figure, Reading, Texts, summed

_T = TypeVar("_T")


@dataclass(eq=False)
class Part:
    """One statistic's sums over calls; of a list for every query, none.

    `unknown` is the reason why it cannot be known for one of the calls.
    """

    name: str
    count: Tensor
    unknown: str = field(default="", kw_only=True)

    @classmethod
    def start(cls, name: str, like: Tensor) -> Part:
        """Nothing yet, of a statistic whose values look like these."""
        return cls(name, _per_head(like))

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device | None) -> Part:
        """What `asdict()` gave."""
        given = {name: value for name, value in state.items() if name != "kind"}
        if "texts" in given:
            given["texts"] = _made(Texts, given["texts"], device)
        return _made(cls, given, device)

    def check(self, reading: Reading) -> None:
        """Raise ValueError where the reading cannot be joined to those before."""

    def add(self, reading: Reading, first: int) -> None:
        """Take in a call's reading; `first` is the position of its first key."""

    def merge(self, other: Any) -> None:
        """Take in what another part of the same statistic has seen."""

    @property
    def value(self) -> Tensor:
        raise KeyError(
            f"{self.name!r} is a list for every query and has no running figure; "
            f"take it from each call's own result"
        )

    def figure(self, texts: bool) -> Figure | None:
        """The statistic in a number per head, for tables; `None` for maps."""
        return None


def kind_of(reading: Reading) -> type[Part]:
    if reading.largest:
        return _Largest
    if reading.per_key:
        return _OfKeys
    if reading.over is not None:
        return _Means
    if reading.rows is not None and reading.values.dim() == 3:
        return OfQueries
    if reading.rows is None and reading.values.dim() == 2:
        return _OfHeads
    return Part


def _per_head(like: Tensor, value: float = 0.0) -> Tensor:
    return torch.full(like.shape[1:2], value, dtype=torch.float64, device=like.device)


def _made(kind: type[_T], given: dict[str, Any], device: torch.device | None) -> _T:
    """A dataclass of tensors, moved to `device`, and plain values.

    Raises:
        TypeError: a value of another type than its field's.
    """
    for one in fields(kind):  # type: ignore[arg-type]
        wanted = {"Tensor": Tensor, "Texts": Texts, "bool": bool, "str": str}[str(one.type)]
        if one.name in given and not isinstance(given[one.name], wanted):
            raise TypeError(f"{one.name} is no {one.type}")
    on = {n: x.to(device) if device and isinstance(x, Tensor) else x for n, x in given.items()}
    return kind(**on)


@dataclass(eq=False)
class OfQueries(Part):
    """Count, mean, squared deviations and maximum of each head (Chan et al. 1979).

    `among` counts the queries that could have had the figure; `errors` are squares of what standard
    errors of drawn queries add to the sum.
    """

    mean: Tensor
    squares: Tensor
    maximum: Tensor
    among: Tensor
    errors: Tensor
    texts: Texts
    covered: bool = True
    drawn: bool = False

    @classmethod
    def start(cls, name: str, like: Tensor) -> OfQueries:
        zero = _per_head(like)
        lowest = _per_head(like, -math.inf)
        rows = like.shape[0] * like.shape[2]
        centre = (summed(like, (0, 2)) / rows).nan_to_num(0.0, 0.0, 0.0)
        return cls(name, zero, zero, zero, lowest, zero, zero, Texts.about(centre))

    def add(self, reading: Reading, first: int) -> None:
        sums = reading.sums
        count = sums.count.sum(0)
        self._join(count, sums.mean, sums.squares)
        self.texts = self.texts.joined(sums.total, sums.count)
        self.maximum = torch.maximum(self.maximum, sums.largest)
        self.covered &= sums.among is not None
        if sums.among is not None:
            self.among = self.among + sums.among.sum(0)
        if reading.error is not None:
            self.drawn = True
            self.errors = self.errors + (count * reading.error).square()

    def merge(self, other: OfQueries) -> None:
        self._join(other.count, other.mean, other.squares)
        self.texts = self.texts + other.texts
        self.maximum = torch.maximum(self.maximum, other.maximum)
        self.among, self.errors = self.among + other.among, self.errors + other.errors
        self.covered, self.drawn = self.covered & other.covered, self.drawn | other.drawn

    def _join(self, count: Tensor, mean: Tensor, squares: Tensor) -> None:
        apart, total = mean - self.mean, self.count + count
        share = count / total.clamp(min=1)
        self.squares = self.squares + squares + apart.square() * self.count * share
        self.mean = self.mean + apart * share
        self.count = total

    @property
    def value(self) -> Tensor:
        return self.mean.masked_fill(self.count == 0, math.nan)

    @property
    def deviation(self) -> Tensor:
        return (self.squares / self.count).sqrt()

    def figure(self, texts: bool) -> Figure:
        coverage = self.count / self.among.clamp(min=1) if self.covered else None
        error = self.errors.sqrt() / self.count if self.drawn else None
        error = self.texts.error(self.mean) if texts else error
        return Figure(self.value, coverage, error, count=self.count, unknown=self.unknown)


@dataclass(eq=False)
class _OfHeads(Part):
    """The mean over batch rows and calls of one number per head."""

    total: Tensor
    texts: Texts

    @classmethod
    def start(cls, name: str, like: Tensor) -> _OfHeads:
        zero = _per_head(like)
        centre = (summed(like, 0) / len(like)).nan_to_num(0.0, 0.0, 0.0)
        return cls(name, zero, zero, Texts.about(centre))

    def add(self, reading: Reading, first: int) -> None:
        self.count = self.count + len(reading.values)
        self.total = self.total + summed(reading.values, 0)
        sums = reading.sums
        self.texts = self.texts.joined(sums.total, sums.count)

    def merge(self, other: _OfHeads) -> None:
        self.count, self.total = self.count + other.count, self.total + other.total
        self.texts = self.texts + other.texts

    @property
    def value(self) -> Tensor:
        return self.total / self.count

    def figure(self, texts: bool) -> Figure:
        error = self.texts.error(self.value) if texts else None
        return Figure(self.value, error=error, count=self.count, unknown=self.unknown)


@dataclass(eq=False)
class _Largest(Part):
    """The maximum over batch rows and calls of one number per head."""

    largest: Tensor
    sampled: bool = False

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Largest:
        return cls(name, _per_head(like), _per_head(like, -math.inf))

    def add(self, reading: Reading, first: int) -> None:
        self.count = self.count + len(reading.values)
        self.sampled |= reading.sampled
        if len(reading.values):
            largest = reading.values.detach().double().amax(0)
            self.largest = torch.maximum(self.largest, largest)

    def merge(self, other: _Largest) -> None:
        self.count = self.count + other.count
        self.largest = torch.maximum(self.largest, other.largest)
        self.sampled |= other.sampled

    @property
    def value(self) -> Tensor:
        return self.largest

    def figure(self, texts: bool) -> Figure:
        return Figure(self.largest, sampled=self.sampled, unknown=self.unknown)


@dataclass(eq=False)
class _OfKeys(Part):
    """Sums per key; later calls may have more keys, or stand behind dropped ones."""

    sums: Tensor

    @classmethod
    def start(cls, name: str, like: Tensor) -> _OfKeys:
        sums = torch.zeros(*like.shape[:2], 0, dtype=torch.float64, device=like.device)
        return cls(name, _per_head(like), sums)

    def check(self, reading: Reading) -> None:
        batch, now = len(self.sums), len(reading.values)
        if batch != now:
            raise ValueError(
                f"Running.add: {self.name!r} is summed per key, and this call's batch of {now} "
                f"does not continue the {batch} before; keep one Running for each batch."
            )

    def add(self, reading: Reading, first: int) -> None:
        self._join(reading.values.detach(), first)
        self.count = self.count + len(reading.values)

    def merge(self, other: _OfKeys) -> None:
        batches = len(self.sums), len(other.sums)
        if batches[0] != batches[1]:
            raise ValueError(
                f"Running + Running: {self.name!r} is summed per key, and batches of {batches[0]} "
                f"and {batches[1]} do not add up; leave it out, or use batches of one size."
            )
        self._join(other.sums, 0)
        self.count = self.count + other.count

    def _join(self, values: Tensor, first: int) -> None:
        stop = first + values.shape[2]
        self.sums = torch.nn.functional.pad(self.sums, (0, max(0, stop - self.sums.shape[2])))
        self.sums[:, :, first:stop] += values

    @property
    def value(self) -> Tensor:
        return self.sums


@dataclass(eq=False)
class _Means(Part):
    """Means that are joined by the number of queries behind each entry."""

    total: Tensor
    over: Tensor

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Means:
        zero = torch.zeros(like.shape[1:], dtype=torch.float64, device=like.device)
        return cls(name, _per_head(like), zero, zero)

    def check(self, reading: Reading) -> None:
        self._check(list(reading.values.shape[1:]))

    def add(self, reading: Reading, first: int) -> None:
        assert reading.over is not None
        over = reading.over.double().expand(reading.values.shape)
        self._join(summed(torch.where(over > 0, reading.values * over, 0.0), 0), summed(over, 0))

    def merge(self, other: _Means) -> None:
        self._check(list(other.total.shape))
        self._join(other.total, other.over)

    def _check(self, now: list[int]) -> None:
        before = list(self.total.shape)
        if before != now:
            raise ValueError(
                f"Running.add: {self.name!r} is {now} for each batch row and was {before} before; "
                f"figures of one size can be averaged."
            )

    def _join(self, total: Tensor, over: Tensor) -> None:
        self.total, self.over = self.total + total, self.over + over
        self.count = self.over.flatten(1).amax(1)  # the most behind any entry

    @property
    def value(self) -> Tensor:
        return self.total / self.over


KINDS: dict[str, type[Part]] = {
    "list": Part,
    "queries": OfQueries,
    "heads": _OfHeads,
    "largest": _Largest,
    "keys": _OfKeys,
    "means": _Means,
}
