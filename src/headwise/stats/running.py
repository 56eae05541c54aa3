"""Statistics of many calls in the memory of one: decode steps, batches, a whole data set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from .moments import ClusterVariance, Moments, summed
from .record import Reading
from .seen import Seen
from .tables import HeadSummary, check_texts, summary_rows, unavailable

_T = TypeVar("_T")


class Running:
    """Metrics of heads over many calls, in memory that does not grow with their number.

    `running.add(seen)` adds a result of `observe()`, call by call: a prefill with many queries,
    then decode steps with one query each and a growing number of keys. Sums are kept in float64, so
    the order and size of the steps make no difference beyond float64 rounding.

    * Per query (entropy, masses, …): count, mean, standard deviation and maximum of each head.
    * Per key (`received`): the sums, `[B, H, S]`, which grow with the number of keys.
    * Maps, offsets, similarities: means, weighted by the number of queries that each entry covers.

    `one + other` combines the results of two, for example from different texts or ranks.

    >>> import torch, headwise as hw
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
    >>> running = Running()
    >>> for start, stop in (0, 4), (4, 5), (5, 6):  # four tokens at once, then one at a time
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
        self._drawn: Tensor | None = None

    def add(self, seen: Seen, *, first: int = 0) -> None:
        """Add a call's statistics.

        Args:
            seen: a result for the same heads as before.
            first: the position of the call's first key, if a cache has dropped keys before it
                (`cache.length − S` with a window), so that per-key sums stay aligned with tokens.

        Raises:
            ValueError: the number of heads, the size of maps, or the batch size of per-key sums
                differs from earlier calls.
        """
        self.take(seen.readings, seen.record.extent.heads, first)
        view = seen.record.view
        if view.drawn is None or view.rows is None:
            return
        before, self._drawn = self._drawn, view.rows
        if (
            before is not None
            and before.shape == view.rows.shape
            and torch.equal(before, view.rows)
        ):
            warnings.warn(
                "Running.add(seen): its queries are those of the call before, drawn by the same "
                "seed, so standard errors over calls are too small; give each call its own seed: "
                "observe(…, queries=…, seed=…).",
                stacklevel=2,
            )

    def take(self, readings: Mapping[str, Reading], heads: int, first: int = 0) -> None:
        """Add the readings of a call by name, as `add()` does."""
        if self.calls and heads != self.heads:
            raise ValueError(
                f"Running.add(seen of {heads} heads): earlier calls had {self.heads}; use one "
                f"Running per layer."
            )
        parts = {
            name: self._parts.get(name) or _kind_of(reading).start(name, reading.values)
            for name, reading in readings.items()
        }
        for name, reading in readings.items():
            parts[name].check(reading)
        for name, reading in readings.items():
            parts[name].add(reading, first)
            parts[name].unknown = parts[name].unknown or reading.unknown
        self._parts |= parts
        self.heads = heads
        self.calls += 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """Return a metric in float64: each head's mean `[H]` (for `max_logit` the maximum), sums
        per key `[B, H, S]`, or a map `[H, …]`. NaN where it is unknown (see `unavailable`).

        Raises:
            KeyError: the name was not observed, or the metric is a list per query, such as
                `top_keys`, which has no running value.
        """
        return self._part(name).value

    def count(self, name: str) -> Tensor:
        """Return the number of queries (or batch rows) that each head's metric covers: `[H]`."""
        return self._part(name).count

    def deviation(self, name: str) -> Tensor:
        """Return the standard deviation of a per-query metric over all its queries: `[H]`; NaN
        for heads without a query."""
        moments = self._of_queries(name)
        return (moments.squares / moments.count).sqrt()

    def maximum(self, name: str) -> Tensor:
        """Return the largest value of a per-query metric: `[H]`, −inf for heads without a query."""
        return self._of_queries(name).largest

    def sampled(self, name: str) -> bool:
        """Return True if a maximum covers sampled queries only, and so is a lower bound.

        Raises:
            KeyError: for the same reasons as `running[name]`.
        """
        return getattr(self._part(name), "sampled", False)

    def table(self, texts: bool = False) -> list[dict[str, float | int]]:
        """Return a row per head, with the columns of `Seen.table()`, over all calls.

        With `texts`, every batch row of every call counts as one text, and `<name>_se` is the
        standard error of the mean over texts, which requires at least two texts.

        Raises:
            ValueError: `texts` is neither True nor False.
        """
        check_texts(texts)
        rows = summary_rows(self.summaries(texts), self.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]

    @property
    def unavailable(self) -> dict[str, str]:
        """Return, by name, why each metric is missing from the table for some heads."""
        return unavailable(self.summaries())

    def summaries(self, texts: bool = False) -> dict[str, HeadSummary | None]:
        """Return each metric as one number per head, as in `table()`; `None` for maps."""
        return {name: part.summary(texts) for name, part in self._parts.items()}

    def __add__(self, other: Running) -> Running:
        """Return the combined result of both, which stay unchanged. `sum()` combines many.

        Raises:
            ValueError: heads or statistics differ, or metrics cannot be combined.
        """
        if not isinstance(other, Running):
            return NotImplemented
        if not self.calls or not other.calls:
            return Running.of_state((self if self.calls else other).state())
        if (self.heads, set(self.names)) != (other.heads, set(other.names)):
            both = (f"{', '.join(one.names)} of {one.heads} heads" for one in (self, other))
            raise ValueError(
                f"Running + Running: {' and '.join(both)} do not add up; take the same "
                f"statistics of the same heads."
            )
        total = Running.of_state(self.state())
        for name, part in total._parts.items():
            theirs = Running.of_state(other.state(), part.count.device)._parts[name]
            if type(theirs) is not type(part):
                raise ValueError(f"Running + Running: {name!r} is not the same metric in both.")
            part.merge(theirs)
            part.unknown = part.unknown or theirs.unknown
        total.calls += other.calls
        return total

    def __radd__(self, other: object) -> Running:
        return self + Running() if other == 0 else NotImplemented

    def state(self) -> dict[str, Any]:
        """Return the state as plain values and copied tensors."""
        parts = [{"kind": part.kind, **asdict(part)} for part in self._parts.values()]
        return {"calls": self.calls, "heads": self.heads, "parts": parts}

    @classmethod
    def of_state(cls, state: dict[str, Any], device: torch.device | None = None) -> Running:
        """Return a `Running` from a result of `state()`, on `device`. Default: the state's device.

        Raises:
            KeyError, TypeError: `state` is not a result of `state()`.
        """
        made = cls()
        made.calls, made.heads = int(state["calls"]), int(state["heads"])
        kinds = {kind.kind: kind for kind in (_Part, _OfMoments, _Largest, _OfKeys, _Means)}
        for saved in state["parts"]:
            part = _create(kinds[_current(saved)["kind"]], _current(saved), device)
            made._parts[part.name] = part
        return made

    def _part(self, name: str) -> _Part:
        if name not in self._parts:
            known = ", ".join(self._parts) or "nothing yet"
            raise KeyError(f"{name!r} was not observed; there are: {known}")
        return self._parts[name]

    def _of_queries(self, name: str) -> Moments:
        part = self._part(name)
        if not isinstance(part, _OfMoments) or not part.per_query:
            raise KeyError(f"{name!r} is not a metric of single queries")
        return part.moments


def _current(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part in the current format of `state()`, even from files of older versions."""
    given = dict(saved)
    if given["kind"] == "queries":
        named = {"total": given["mean"] * given["count"], "largest": given["maximum"]}
        named |= {name: given[name] for name in ("count", "squares")}
        named["among"] = given["among"] if given["covered"] else None
        named["errors"] = given["errors"] if given["drawn"] else None
    elif given["kind"] == "heads":
        unknown = torch.full_like(given["total"], math.nan)
        named = {"total": given["total"], "count": given["count"], "among": None}
        named |= {"squares": unknown, "largest": unknown, "errors": None}
    else:
        return given
    kept = {name: given[name] for name in ("name", "count", "texts", "unknown") if name in given}
    return {**kept, "kind": "moments", "moments": named, "per_query": given["kind"] == "queries"}


def _create(kind: type[_T], given: Mapping[str, Any], device: torch.device | None) -> _T:
    """Return a dataclass of tensors, moved to `device`, and plain values.

    Raises:
        TypeError: the type of a value differs from that of its field.
    """
    values: dict[str, Any] = {}
    nested = {"Moments": Moments, "ClusterVariance": ClusterVariance}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name not in given:
            continue
        value, wanted = given[one.name], str(one.type)
        if wanted in nested:
            value = _create(nested[wanted], value, device)
        elif isinstance(value, Tensor):
            value = value.to(device) if device else value
        none = value is None and "None" in wanted
        types = {"bool": bool, "str": str, **nested}
        if not (none or isinstance(value, types.get(wanted, Tensor))):
            raise TypeError(f"{one.name} is not a {one.type}")
        values[one.name] = value
    return kind(**values)


# ── parts ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _Part:
    """One metric's sums over calls; empty for lists per query.

    `unknown` is the reason why it cannot be computed for one of the calls.
    """

    name: str
    count: Tensor
    unknown: str = field(default="", kw_only=True)

    kind = "list"

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Part:
        """Return an empty part for a metric with values of this form."""
        return cls(name, _per_head(like))

    def check(self, reading: Reading) -> None:
        """Raise ValueError if the reading cannot be joined to the earlier ones."""

    def add(self, reading: Reading, first: int) -> None:
        """Add a call's reading; `first` is the position of its first key."""

    def merge(self, other: Any) -> None:
        """Add another part of the same metric."""

    @property
    def value(self) -> Tensor:
        raise KeyError(
            f"{self.name!r} is a list per query and has no running value; "
            f"read it from the result of each call"
        )

    def summary(self, texts: bool) -> HeadSummary | None:
        """Return the metric as one number per head, for tables; `None` for maps."""
        return None


def _kind_of(reading: Reading) -> type[_Part]:
    if reading.largest:
        return _Largest
    if reading.per_key:
        return _OfKeys
    if reading.over is not None:
        return _Means
    axes = 2 if reading.rows is None else 3
    return _OfMoments if reading.values.dim() == axes else _Part


def _per_head(like: Tensor, value: float = 0.0) -> Tensor:
    return torch.full(like.shape[1:2], value, dtype=torch.float64, device=like.device)


@dataclass(eq=False)
class _OfMoments(_Part):
    """A metric with one number per query, or per head and batch row."""

    moments: Moments
    texts: ClusterVariance
    per_query: bool

    kind = "moments"

    @classmethod
    def start(cls, name: str, like: Tensor) -> _OfMoments:
        axes = (0, 2) if like.dim() == 3 else (0,)
        centre = summed(like, axes) / (like.numel() // max(1, like.shape[1]))
        empty = Moments.zeros(like.shape[1], like.device)
        return cls(name, empty.count, empty, ClusterVariance.about(centre), like.dim() == 3)

    def add(self, reading: Reading, first: int) -> None:
        new = reading.moments
        self.moments, self.texts = self.moments.merge(new), self.texts.add(new.total, new.count)
        self.count = self.moments.count

    def merge(self, other: _OfMoments) -> None:
        self.moments, self.texts = self.moments.merge(other.moments), self.texts + other.texts
        self.count = self.moments.count

    @property
    def value(self) -> Tensor:
        return self.moments.total / self.count

    def summary(self, texts: bool) -> HeadSummary:
        one = self.moments
        coverage = None if one.among is None else one.count / one.among.clamp(min=1)
        error = None if one.errors is None else one.errors.sqrt() / one.count
        error = self.texts.error(one.mean) if texts else error
        return HeadSummary(self.value, coverage, error, count=one.count, unknown=self.unknown)


@dataclass(eq=False)
class _Largest(_Part):
    """The maximum over batch rows and calls of one number per head."""

    largest: Tensor
    sampled: bool = False

    kind = "largest"

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Largest:
        return cls(name, _per_head(like), _per_head(like, -math.inf))

    def add(self, reading: Reading, first: int) -> None:
        values = reading.values.detach().double()
        largest = values.amax(0) if len(values) else self.largest
        self._join(len(values), largest, reading.sampled)

    def merge(self, other: _Largest) -> None:
        self._join(other.count, other.largest, other.sampled)

    def _join(self, count: Tensor | int, largest: Tensor, sampled: bool) -> None:
        self.count, self.sampled = self.count + count, self.sampled | sampled
        self.largest = torch.maximum(self.largest, largest)

    @property
    def value(self) -> Tensor:
        return self.largest

    def summary(self, texts: bool) -> HeadSummary:
        return HeadSummary(self.largest, sampled=self.sampled, unknown=self.unknown)


@dataclass(eq=False)
class _OfKeys(_Part):
    """Sums per key; later calls may have more keys, or start after dropped ones."""

    sums: Tensor

    kind = "keys"

    @classmethod
    def start(cls, name: str, like: Tensor) -> _OfKeys:
        sums = torch.zeros(*like.shape[:2], 0, dtype=torch.float64, device=like.device)
        return cls(name, _per_head(like), sums)

    def check(self, reading: Reading) -> None:
        batch, now = len(self.sums), len(reading.values)
        if batch != now:
            raise ValueError(
                f"Running.add: {self.name!r} is summed per key, and this call's batch of {now} "
                f"differs from the batch of {batch} before; use one Running per batch."
            )

    def add(self, reading: Reading, first: int) -> None:
        self._join(len(reading.values), reading.values.detach(), first)

    def merge(self, other: _OfKeys) -> None:
        batches = len(self.sums), len(other.sums)
        if batches[0] != batches[1]:
            raise ValueError(
                f"Running + Running: {self.name!r} is summed per key, and batches of {batches[0]} "
                f"and {batches[1]} do not add up; omit it, or use batches of equal size."
            )
        self._join(other.count, other.sums, 0)

    def _join(self, count: Tensor | int, values: Tensor, first: int) -> None:
        stop = first + values.shape[2]
        self.sums = torch.nn.functional.pad(self.sums, (0, max(0, stop - self.sums.shape[2])))
        self.sums[:, :, first:stop] += values
        self.count = self.count + count

    @property
    def value(self) -> Tensor:
        return self.sums


@dataclass(eq=False)
class _Means(_Part):
    """Means that are joined with weights: the number of queries that each entry covers."""

    total: Tensor
    over: Tensor

    kind = "means"

    @classmethod
    def start(cls, name: str, like: Tensor) -> _Means:
        zero = torch.zeros(like.shape[1:], dtype=torch.float64, device=like.device)
        return cls(name, _per_head(like), zero, zero)

    def check(self, reading: Reading) -> None:
        self._check(reading.values.shape[1:])

    def add(self, reading: Reading, first: int) -> None:
        assert reading.over is not None
        over = reading.over.double().expand(reading.values.shape)
        self._join(summed(torch.where(over > 0, reading.values * over, 0.0), 0), summed(over, 0))

    def merge(self, other: _Means) -> None:
        self._check(other.total.shape)
        self._join(other.total, other.over)

    def _check(self, now: torch.Size) -> None:
        if self.total.shape != now:
            raise ValueError(
                f"Running.add: {self.name!r} is {list(now)} for each batch row and was "
                f"{list(self.total.shape)} before; only equal shapes can be averaged."
            )

    def _join(self, total: Tensor, over: Tensor) -> None:
        self.total, self.over = self.total + total, self.over + over
        self.count = self.over.flatten(1).amax(1)  # the most queries of any entry

    @property
    def value(self) -> Tensor:
        return self.total / self.over
