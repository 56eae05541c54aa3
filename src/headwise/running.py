"""Statistics of many calls in the memory of one: decode steps, batches, a whole data set."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .attend import Seen, figure_rows
from .readings import Figure, Reading


class Running:
    """What heads did over many calls, in memory that does not grow with their number.

    `running.add(seen)` takes in what `observe()` gave, call by call: a prefill with many queries,
    then steps with one each and ever more keys. Sums are kept in float64, so the order and size of
    the steps leave no mark.

    * Per query (entropy, masses, …): count, mean, standard deviation and maximum of each head.
    * Per key (`received`): the sums themselves, `[B, H, S]`; what comes later is longer.
    * Maps, offsets, similarities: their means, weighted by the queries behind every entry.

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
        heads = seen.evidence.extent.heads
        if self.calls and heads != self.heads:
            raise ValueError(
                f"Running.add(seen of {heads} heads): the calls before had {self.heads}; keep one "
                f"Running for each layer."
            )
        parts = {
            name: self._parts.get(name) or _part_of(name, reading)
            for name, reading in seen.readings.items()
        }
        for name, reading in seen.readings.items():
            parts[name].check(reading)
        for name, reading in seen.readings.items():
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

    def table(self) -> list[dict[str, float | int]]:
        """A row per head, with the columns of `Seen.table()`, over all calls."""
        figures = {name: part.figure() for name, part in self._parts.items()}
        rows = figure_rows(figures, self.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]

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


class _Part:
    """One statistic's sums over calls; of a list for every query, none."""

    count: Tensor

    def __init__(self, name: str, like: Tensor) -> None:
        self.name, self.count = name, _per_head(like)

    def check(self, reading: Reading) -> None:
        """Raise ValueError where the reading cannot be joined to those before."""

    def add(self, reading: Reading, first: int) -> None:
        """Take in a call's reading; `first` is the position of its first key."""

    @property
    def value(self) -> Tensor:
        raise KeyError(
            f"{self.name!r} is a list for every query and has no running figure; "
            f"take it from each call's own result"
        )

    def figure(self) -> Figure | None:
        """The statistic in a number per head, for tables; `None` for maps."""
        return None


def _part_of(name: str, reading: Reading) -> _Part:
    values = reading.values
    if reading.largest:
        return _Largest(name, values)
    if reading.per_key:
        return _OfKeys(name, values)
    if reading.over is not None:
        return _Means(name, values)
    if reading.rows is not None and values.dim() == 3:
        return _OfQueries(name, values)
    if reading.rows is None and values.dim() == 2:
        return _OfHeads(name, values)
    return _Part(name, values)


def _per_head(like: Tensor, value: float = 0.0) -> Tensor:
    return torch.full(like.shape[1:2], value, dtype=torch.float64, device=like.device)


class _OfQueries(_Part):
    """Count, mean, squared deviations and maximum of each head (Chan et al. 1979)."""

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__(name, like)
        self.mean, self.squares, self.among = (_per_head(like) for _ in range(3))
        self.maximum = _per_head(like, -math.inf)
        self.errors = _per_head(like)  # squares of what standard errors add to the sum
        self.covered = self.drawn = True

    def add(self, reading: Reading, first: int) -> None:
        assert reading.rows is not None
        values = reading.values.detach().double()
        rows = reading.rows.expand(values.shape)
        count = rows.sum((0, 2)).double()
        mean = torch.where(rows, values, 0.0).sum((0, 2)) / count.clamp(min=1)
        squares = torch.where(rows, (values - mean[:, None]).square(), 0.0).sum((0, 2))
        apart, total = mean - self.mean, self.count + count
        share = count / total.clamp(min=1)
        self.squares += squares + apart.square() * self.count * share
        self.mean += apart * share
        self.count = total
        if values.numel():
            largest = values.masked_fill(~rows, -torch.inf).amax((0, 2))
            self.maximum = torch.maximum(self.maximum, largest)
        self.covered &= reading.among is not None
        if reading.among is not None:
            self.among += reading.among.expand(values.shape).sum((0, 2))
        self.drawn &= reading.error is not None
        if reading.error is not None:
            self.errors += (count * reading.error).square()

    @property
    def value(self) -> Tensor:
        return self.mean

    @property
    def deviation(self) -> Tensor:
        return (self.squares / self.count.clamp(min=1)).sqrt()

    def figure(self) -> Figure:
        coverage = self.count / self.among.clamp(min=1) if self.covered else None
        error = self.errors.sqrt() / self.count.clamp(min=1) if self.drawn else None
        return Figure(self.mean, coverage, error)


class _OfHeads(_Part):
    """The mean over batch rows and calls of one number per head."""

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__(name, like)
        self.total = _per_head(like)

    def add(self, reading: Reading, first: int) -> None:
        self.count += len(reading.values)
        self.total += reading.values.detach().double().sum(0)

    @property
    def value(self) -> Tensor:
        return self.total / self.count.clamp(min=1)

    def figure(self) -> Figure:
        return Figure(self.value)


class _Largest(_Part):
    """The maximum over batch rows and calls of one number per head."""

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__(name, like)
        self.largest = _per_head(like, -math.inf)

    def add(self, reading: Reading, first: int) -> None:
        self.count += len(reading.values)
        if len(reading.values):
            largest = reading.values.detach().double().amax(0)
            self.largest = torch.maximum(self.largest, largest)

    @property
    def value(self) -> Tensor:
        return self.largest

    def figure(self) -> Figure:
        return Figure(self.largest)


class _OfKeys(_Part):
    """Sums per key; later calls may have more keys, or stand behind dropped ones."""

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__(name, like)
        self.sums = torch.zeros(*like.shape[:2], 0, dtype=torch.float64, device=like.device)

    def check(self, reading: Reading) -> None:
        batch, now = len(self.sums), len(reading.values)
        if batch != now:
            raise ValueError(
                f"Running.add: {self.name!r} is summed per key, and this call's batch of {now} "
                f"does not continue the {batch} before; keep one Running for each batch."
            )

    def add(self, reading: Reading, first: int) -> None:
        stop = first + reading.values.shape[2]
        self.sums = torch.nn.functional.pad(self.sums, (0, max(0, stop - self.sums.shape[2])))
        self.sums[:, :, first:stop] += reading.values.detach()
        self.count += len(reading.values)

    @property
    def value(self) -> Tensor:
        return self.sums


class _Means(_Part):
    """Means that are joined by the number of queries behind each entry."""

    def __init__(self, name: str, like: Tensor) -> None:
        super().__init__(name, like)
        self.total = torch.zeros(like.shape[1:], dtype=torch.float64, device=like.device)
        self.over = torch.zeros_like(self.total)

    def check(self, reading: Reading) -> None:
        before, now = list(self.total.shape), list(reading.values.shape[1:])
        if before != now:
            raise ValueError(
                f"Running.add: {self.name!r} is {now} for each batch row and was {before} before; "
                f"figures of one size can be averaged."
            )

    def add(self, reading: Reading, first: int) -> None:
        assert reading.over is not None
        over = reading.over.double().expand(reading.values.shape)
        self.total += (reading.values.detach() * over).sum(0)
        self.over += over.sum(0)
        self.count = self.over.flatten(1).amax(1)  # the most behind any entry

    @property
    def value(self) -> Tensor:
        return self.total / self.over.clamp(min=1)
