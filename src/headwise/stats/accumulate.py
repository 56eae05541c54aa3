"""Statistics of many calls in the memory of one: decode steps, batches, a whole data set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from .results import Figure, Reading, check_texts, figure_rows, unavailable
from .running_sums import KINDS, OfQueries, Part, kind_of
from .seen import Seen


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
        self._parts: dict[str, Part] = {}
        self._drawn: Tensor | None = None

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
        view = seen.found.view
        if view.drawn is not None and view.rows is not None:
            self._told_of_draw(view.rows)

    def _told_of_draw(self, rows: Tensor) -> None:
        """Warn where a call's drawn queries are those of the call before, which had its seed."""
        before, self._drawn = self._drawn, rows
        if before is not None and before.shape == rows.shape and torch.equal(before, rows):
            warnings.warn(
                "Running.add(seen): its queries are those of the call before, drawn by the same "
                "seed: standard errors over calls are too small; observe(…, queries=…, seed=…) "
                "each call with a seed of its own.",
                stacklevel=3,
            )

    def take(self, readings: Mapping[str, Reading], heads: int, first: int = 0) -> None:
        """`add()`, of readings by name."""
        if self.calls and heads != self.heads:
            raise ValueError(
                f"Running.add(seen of {heads} heads): the calls before had {self.heads}; keep one "
                f"Running for each layer."
            )
        parts = {
            name: self._parts.get(name) or kind_of(reading).start(name, reading.values)
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
        """The statistics at hand."""
        return tuple(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """Each head's mean `[H]` (of `max_logit` the maximum); `[B, H, S]` of sums per key;
        `[H, …]` of maps. In float64; NaN where it is not known (`unavailable`).

        Raises:
            KeyError: a name that was not observed; or a list for every query, such as `top_keys`,
                which has no running figure.
        """
        return self._part(name).value

    def count(self, name: str) -> Tensor:
        """How many queries (or batch rows) stand behind each head's figure: `[H]`."""
        return self._part(name).count

    def deviation(self, name: str) -> Tensor:
        """The standard deviation of a per-query statistic over all its queries: `[H]`; NaN where
        there was none."""
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

        Raises:
            ValueError: `texts` that is neither True nor False.
        """
        check_texts(texts)
        rows = figure_rows(self.figures(texts), self.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]

    @property
    def unavailable(self) -> dict[str, str]:
        """Return the reason for each metric that heads lack in the table, by its name."""
        return unavailable(self.figures())

    def figures(self, texts: bool = False) -> dict[str, Figure | None]:
        """Return each statistic in a number per head, as `table()` has it; `None` of maps."""
        return {name: part.figure(texts) for name, part in self._parts.items()}

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
            part.unknown = part.unknown or theirs.unknown
        total.calls += other.calls
        return total

    def __radd__(self, other: object) -> Running:
        return self + Running() if other == 0 else NotImplemented

    @property
    def _said(self) -> str:
        return f"{', '.join(self.names)} of {self.heads} heads"

    def state(self) -> dict[str, Any]:
        """All of it as plain values and tensors (copies)."""
        kinds = {kind: name for name, kind in KINDS.items()}
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
            part = KINDS[saved["kind"]].of_state(saved, device)
            made._parts[part.name] = part
        return made

    def _part(self, name: str) -> Part:
        if name not in self._parts:
            known = ", ".join(self._parts) or "nothing yet"
            raise KeyError(f"{name!r} was not observed; there are: {known}")
        return self._parts[name]

    def _of_queries(self, name: str) -> OfQueries:
        part = self._part(name)
        if not isinstance(part, OfQueries):
            raise KeyError(f"{name!r} is no figure of single queries")
        return part
