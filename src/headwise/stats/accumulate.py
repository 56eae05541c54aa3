"""Statistics of many calls in the memory of one: decode steps, batches, a whole data set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .observe import Seen
from .results import Figure, Reading, Texts, figure_rows, known, summed

_T = TypeVar("_T")


class Running:
    """What heads did over many calls, in memory that does not grow with their number.

    `running.add(seen)` takes in what `observe()` gave, call by call: a prefill with many queries,
    then steps with one each and ever more keys. Sums are kept in float64, so the order and size of
    the steps leave no mark.

    * Per query (entropy, masses, …): count, mean, standard deviation and maximum of each head.
    * Per key (`received`): the sums themselves, `[B, H, S]`; what comes later is longer.
    * Maps, offsets, similarities: their means, weighted by the queries behind every entry.

    What several of them have seen (of other texts, on other ranks) adds up: `one + other`.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> running = Running()
    >>> for start, stop in (0, 4), (4, 5), (5, 6):  # four tokens at once, then one by one
    ...     seen = hw.observe(
    ...         q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop],
    ...         hw.Entropy(), hw.Received(), mask=hw.Causal())
    ...     running.add(seen)
    >>> whole = hw.observe(q, k, v, hw.Entropy(), hw.Received(), mask=hw.Causal())
    >>> torch.allclose(running["received"], whole["received"].double(), atol=1e-6)
    True
    >>> abs(running.table()[1]["entropy"] - whole.table()[1]["entropy"]) < 1e-6
    True
    """

    def __init__(self) -> None:
        self.calls = 0
        self.heads = 0
        self._parts: dict[str, _Part] = {}

    def add(self, seen: Seen, *, first: int = 0) -> None:
        """Take in a call's statistics.

        Args:
            seen: of the same heads as before.
            first: the position of the call's first key, where a cache has dropped keys before it
                (`cache.length − S` with a window); so per-key sums stay with their tokens.

        Raises:
            ValueError: another number of heads; maps of another size, or per-key sums of another
                batch, than before.
        """
        self.take(seen.readings, seen.found.extent.heads, first)

    def take(self, readings: Mapping[str, Reading], heads: int, first: int = 0) -> None:
        """`add()`, of readings by name."""
        if self.calls and heads != self.heads:
            raise ValueError(
                f"Running.add(seen of {heads} heads): the calls before had {self.heads}; keep one "
                f"Running for each layer."
            )
        parts = {
            name: self._parts.get(name) or _kind_of(reading).start(name, reading.values)
            for name, reading in readings.items()
        }
        for name, reading in readings.items():
            parts[name].check(reading)
        for name, reading in readings.items():
            parts[name].add(reading, first)
        self._parts |= parts
        self.heads = heads
        self.calls += 1

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics at hand."""
        return tuple(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """Each head's mean `[H]` (of `max_logit` the maximum); `[B, H, S]` of sums per key;
        `[H, …]` of maps. In float64.

        Raises:
            KeyError: a name that was not observed; or a list for every query, such as `top_keys`,
                which has no running figure.
        """
        return self._part(name).value

    def count(self, name: str) -> Tensor:
        """How many queries (or batch rows) stand behind each head's figure: `[H]`."""
        return self._part(name).count

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of a per-query statistic over all its queries: `[H]`."""
        return self._of_queries(name).deviation

    def maximum(self, name: str) -> Tensor:
        """The largest value of a per-query statistic: `[H]`, −inf where there was none."""
        return self._of_queries(name).maximum

    def sampled(self, name: str) -> bool:
        """Whether a maximum is that of some of the queries of a call: a lower bound.

        Raises:
            KeyError: as `running[name]`.
        """
        return getattr(self._part(name), "sampled", False)

    def table(self, texts: bool = False) -> list[dict[str, float | int]]:
        """A row per head, with the columns of `Seen.table()`, over all calls.

        With `texts`, every batch row of every call counts as a text of its own, and `<name>_se` is
        the standard error of the mean over texts (`Texts`), from two texts on.
        """
        figures = {name: part.figure(texts) for name, part in self._parts.items()}
        rows = figure_rows(figures, self.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]

    def __add__(self, other: Running) -> Running:
        """What both have seen, as one; neither changes. `sum()` adds many.

        Raises:
            ValueError: they saw other heads or statistics, or figures that do not add up.
        """
        if not isinstance(other, Running):
            return NotImplemented
        if not self.calls or not other.calls:
            return Running.of_state((self if self.calls else other).state())
        if (self.heads, set(self.names)) != (other.heads, set(other.names)):
            raise ValueError(
                f"Running + Running: {self._said} and {other._said} do not add up; take the same "
                f"statistics of the same heads."
            )
        total = Running.of_state(self.state())
        for name, part in total._parts.items():
            theirs = Running.of_state(other.state(), part.count.device)._parts[name]
            if type(theirs) is not type(part):
                raise ValueError(f"Running + Running: {name!r} is not the same figure in both.")
            part.merge(theirs)
        total.calls += other.calls
        return total

    def __radd__(self, other: object) -> Running:
        return self + Running() if other == 0 else NotImplemented

    @property
    def _said(self) -> str:
        return f"{', '.join(self.names)} of {self.heads} heads"

    def state(self) -> dict[str, Any]:
        """All of it as plain values and tensors (copies)."""
        kinds = {kind: name for name, kind in _KINDS.items()}
        parts = [{"kind": kinds[type(part)], **asdict(part)} for part in self._parts.values()]
        return {"calls": self.calls, "heads": self.heads, "parts": parts}

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device | None = None) -> Running:
        """What `state()` gave, on `device` (by default, where it was).

        Raises:
            KeyError, TypeError: something that `state()` does not give.
        """
        made = cls()
        made.calls, made.heads = int(state["calls"]), int(state["heads"])
        for saved in state["parts"]:
            part = _KINDS[saved["kind"]].of_state(saved, device)
            made._parts[part.name] = part
        return made

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            known = ", ".join(self._parts) or "nothing yet"
            raise KeyError(f"{name!r} was not observed; there are: {known}")
        return self._parts[name]

    def _of_queries(self, name: str) -> _OfQueries:
        part = self._part(name)
        if not isinstance(part, _OfQueries):
            raise KeyError(f"{name!r} is no figure of single queries")
        return part


@dataclass(eq=False)
class _Part:
    """One statistic's sums over calls; of a list for every query, none."""

    name: str
    count: Tensor

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Part:
        """Nothing yet, of a statistic whose values look like these."""
        return cls(name, _per_head(like))

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device | None) -> _Part:
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


def _kind_of(reading: Reading) -> type[_Part]:
    if reading.largest:
        return _Largest
    if reading.per_key:
        return _OfKeys
    if reading.over is not None:
        return _Means
    if reading.rows is not None and reading.values.dim() == 3:
        return _OfQueries
    if reading.rows is None and reading.values.dim() == 2:
        return _OfHeads
    return _Part


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
class _OfQueries(_Part):
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
    def start(cls, name: str, like: Tensor) -> _OfQueries:
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

    def merge(self, other: _OfQueries) -> None:
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
        return self.mean

    @property
    def deviation(self) -> Tensor:
        return (self.squares / self.count.clamp(min=1)).sqrt()

    def figure(self, texts: bool) -> Figure:
        coverage = self.count / self.among.clamp(min=1) if self.covered else None
        if texts:
            return Figure(self.mean, coverage, self.texts.error(self.mean))
        error = self.errors.sqrt() / self.count.clamp(min=1) if self.drawn else None
        return Figure(self.mean, coverage, known(error))


@dataclass(eq=False)
class _OfHeads(_Part):
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
        return self.total / self.count.clamp(min=1)

    def figure(self, texts: bool) -> Figure:
        return Figure(self.value, error=self.texts.error(self.value) if texts else None)


@dataclass(eq=False)
class _Largest(_Part):
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
        return Figure(self.largest, sampled=self.sampled)


@dataclass(eq=False)
class _OfKeys(_Part):
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
class _Means(_Part):
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
        self._join(summed(reading.values * over, 0), summed(over, 0))

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
        return self.total / self.over.clamp(min=1)


_KINDS: dict[str, type[_Part]] = {
    "list": _Part,
    "queries": _OfQueries,
    "heads": _OfHeads,
    "largest": _Largest,
    "keys": _OfKeys,
    "means": _Means,
}
