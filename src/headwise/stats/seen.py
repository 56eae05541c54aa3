"""The result of one call: its output, its log-sum-exp and the requested statistics."""

from __future__ import annotations

from collections.abc import Callable, Hashable, ItemsView, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .._tables import HeadTable
from ..core.modes import no_graph, traced
from ..core.shapes import no_autocast
from .detached import without_graph
from .entries import Which, entries
from .record import Reading, Record, beside
from .statistic import Statistic, Statistics
from .tables import summaries_of, table_rows, unavailable


class Readings(Mapping[str, Reading]):
    """The metrics that statistics compute from a record, by name.

    Deferred statistics are computed when they are first read, the others immediately. If a graph is
    kept, all are computed immediately.
    """

    record: Any
    """The `Record` from which they are computed; `None` in a copy, where all are computed."""

    def __init__(self, record: Record, statistics: Statistics) -> None:
        self.record, self._statistics = record, statistics.each
        self._parts: list[dict[str, Reading] | None] = [None] * len(statistics.each)
        self._owner, self._later = statistics.owner, statistics.later
        whole = record.view.gradients or (record.view.prepared is None and traced())
        for number in range(len(self._parts)) if whole else statistics.at_once:
            self._part(number)

    def let_go(self) -> Readings:
        """Return the same readings without the call, which deferred statistics do not need."""
        if None not in self._parts:
            self.record = None
        elif self.record is not None:
            self.record.let_go(self._later)
        return self

    @property
    def form(self) -> Hashable | None:
        """Return a key that is equal for readings that can be joined, or `None`."""
        if self.record is None or any(part is not None for part in self._parts):
            return None
        form = self.record.form
        return None if form is None else (id(self._statistics), form)

    def beside(self, *others: Readings) -> Readings:
        """Join these with others of the same form into the readings of one call with all heads."""
        found = object.__new__(Readings)
        vars(found).update(vars(self), _parts=[None] * len(self._parts))
        found.record = beside([self.record, *(other.record for other in others)])
        return found

    def of_all_queries(self, statistics: Statistics) -> bool:
        """Return True if these statistics (all or a subset) are known for every query."""
        record = self.record
        if record is None or record.view.rows is None:
            return False
        every = record.every
        needs = [need for one in statistics if _of_queries(one) for need in one.needs.values()]
        return not needs or (every is not None and all(need in every.answers for need in needs))

    def _part(self, number: int) -> dict[str, Reading]:
        """Return the readings of one statistic."""
        part, record = self._parts[number], self.record
        if part is None:
            assert record is not None
            statistic = self._statistics[number]
            part = statistic.metric(record)
            if record.view.rows is not None and _of_queries(statistic):
                every, drawn = self._of_every_query(record.every, statistic), record.view.drawn
                part = {name: x.of_some(every and every(name), drawn) for name, x in part.items()}
            self._parts[number] = part
        return part

    def _of_every_query(
        self, every: Record | None, statistic: Statistic
    ) -> Callable[[str], Callable[[], Reading]] | None:
        """Return a function from a name to a getter of its reading for all queries, or `None`."""
        needs = statistic.needs.values()
        if every is None or not needs or not all(need in every.answers for need in needs):
            return None
        made: dict[str, Reading] = {}

        def reading(name: str) -> Reading:
            if not made:
                with no_graph():
                    made.update(statistic.metric(every))
            return made[name]

        return lambda name: partial(reading, name)

    def __getitem__(self, name: str) -> Reading:
        if name not in self._owner:  # such as the contribution, if a projection is known
            every = range(len(self._parts))
            self._owner = self._owner | {x: n for n in every for x in self._part(n)}
        return self._part(self._owner[name])[name]

    def items(self) -> ItemsView[str, Reading]:
        """Return the readings by name."""
        each = [self._part(number) for number in range(len(self._parts))]
        return {name: reading for part in each for name, reading in part.items()}.items()

    def values_of(self, name: str) -> Tensor | None:
        """Return a metric's values if they are the unchanged answer to a need."""
        number, record = self._owner.get(name), self.record
        if number is None or record is None:
            return None
        statistic = self._statistics[number]
        if name not in statistic.raw:
            return None
        need = statistic.needs[name]
        answer = record.answers[need]
        return answer[0] if isinstance(answer, tuple) else answer

    @property
    def known(self) -> tuple[str, ...]:
        """The requested names, without computing any metric."""
        return tuple(self._owner)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies: every reading, without a graph."""
        parts = [self._part(number) for number in range(len(self._parts))]
        ready = [{name: x.detached() for name, x in part.items()} for part in parts]
        nothing = (None,) * len(parts)
        return {"record": None, "_statistics": nothing, "_parts": ready, "_owner": self._owner}

    def __repr__(self) -> str:
        return f"<Readings: {', '.join(self.known)}>"

    def __iter__(self) -> Iterator[str]:
        if not any(self._parts):
            return iter(self._owner)
        every = zip(self._parts, self._statistics, strict=True)
        return iter([x for part, one in every for x in (one.names if part is None else part)])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_queries(statistic: Statistic) -> bool:
    """Return True if a statistic depends on the observed queries."""
    needs = statistic.needs.values()
    return not needs or any(need.scores for need in needs)


@dataclass(eq=False, repr=False)
class Seen(HeadTable):
    """The results of one call: the output, its log-sum-exp, and every statistic requested.

    `seen[name]` is `[B, H, T]` per query, `[B, H, S]` per key, or `[B, H, …]` per head. With
    sampled queries, the T axis has n entries. The first and last sampled queries represent only
    themselves, the others several queries (`seen.reading(name).weights`), so a plain mean over n is
    not a mean over T; `table()` and metrics per key or head apply these weights. `lse` covers all
    queries if the output was computed, else the observed ones.
    """

    record: Record = field(repr=False)
    readings: Readings = field(repr=False)
    output: Float[Tensor, "B H T Dv"] | None = None
    lost: bool = False
    """Statistics could have had a gradient, but were requested without one."""
    changed: Callable[[], bool] = bool  # returns False
    """Returns True if the values of the call's tensors may have changed since the observation."""
    again: Callable[[], Record] | None = None
    """Runs the call for its log-sum-exp, if no statistic needed it."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without a graph."""
        with self._without_autocast():
            record = self._scored.detached()
            readings = self.readings.__getstate__()
        kept = object.__new__(Readings)
        vars(kept).update(readings)
        output = None if self.output is None else self.output.detach()
        lost = self.lost or self.record.view.gradients
        return {"record": record, "readings": kept, "output": output, "lost": lost, "again": None}

    def __repr__(self) -> str:
        e = self.record.extent
        sizes = f"batch {e.batch}, {e.heads} heads, {e.queries} queries, {e.keys} keys"
        return f"<Seen: {sizes}; {', '.join(('lse', *self.readings.known))}>"

    @property
    def _scored(self) -> Record:
        """The record, with the log-sum-exp."""
        if self.record.whole_lse is None and self.again is not None:
            made = self.again()
            self.record = replace(self.record, whole_lse=made.whole_lse, lse=made.lse)
        return self.record

    @property
    def lse(self) -> Float[Tensor, "B H _"]:
        """The log-sum-exp of each query's scores and sink; −inf if the query has no visible key."""
        with self._without_autocast():
            lse = self._scored.whole_lse
        assert lse is not None
        return lse

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """The attention output.

        Raises:
            ValueError: the call was observed with `output=False`.
        """
        if self.output is None:
            raise ValueError("seen.out: observed with output=False, so there is no output")
        return self.output

    def _without_autocast(self) -> AbstractContextManager[object]:
        """Return a context without autocast, for metrics that are computed later."""
        if torch._C._is_any_autocast_enabled():
            return no_autocast(self.record.view.device)
        return nullcontext()

    @property
    def rows(self) -> Tensor:
        """The observed queries that may attend to a key; broadcasts to `[B, H, n]`."""
        return self.record.valid_rows

    @property
    def queries(self) -> Int[Tensor, " n"]:
        """The indices of the observed queries, in ascending order."""
        queries = self.record.view.queries  # samples are shared by equal calls
        return queries if self.record.view.drawn is None else queries.clone()

    def weights(
        self, heads: Which = None, queries: Which = None, keys: Which = None
    ) -> Float[Tensor, "B h t s"]:
        """Return these entries of P, from q, k and the log-sum-exp: O(D) per entry.

        Args:
            heads, queries, keys: indices, lists of indices, or slices. Default: all. With sampled
                queries, `queries` are positions in `seen.queries`.

        Raises:
            ValueError: an index is out of range; or q, k, mask or sinks were changed in place since
                the observation, so that the log-sum-exp of these rows differs.

        >>> import headwise as hw
        >>> q = k = v = torch.randn(1, 2, 300, 8)
        >>> seen = hw.observe(q, k, v, mask=hw.Causal())
        >>> seen.weights(heads=[1], queries=[299]).sum().round(decimals=4)
        tensor(1.)
        """
        with torch.no_grad(), no_autocast(self.record.view.device):
            return entries(self._scored, heads, queries, keys, self.changed())

    def __getitem__(self, name: str) -> Tensor:
        values = self.readings.values_of(name)
        if values is None:
            values = self.reading(name).values
        return without_graph(values) if self.lost else values

    def reading(self, name: str) -> Reading:
        """Return a metric with the rows that count in its mean.

        Raises:
            KeyError: the name was not requested; the message lists the requested names.
        """
        if name == "lse" and name not in self.readings:
            with self._without_autocast():
                lse = self._scored.lse
            assert lse is not None
            return Reading(lse, self.rows, sampled=self.record.view.rows is not None)
        if name not in self.readings:
            known = ", ".join(dict.fromkeys(["lse", *self.readings]))
            raise KeyError(f"{name!r} was not observed; there are: {known}")
        return self.readings[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(self.readings)

    def table(self) -> list[dict[str, float | int]]:
        """Return a row per head: the mean over batch and valid queries; the maximum of `max_logit`.

        With sampled queries, a mean still covers all queries if that is nearly free: for metrics of
        the kernel's own pass; for masses on single keys and within narrow windows, if the
        log-sum-exp of all queries is computed; and for every mass, if the sample is at least 1/16
        of all queries. For other metrics, `<name>_se` is the standard error, and the largest logit
        of the sample is `max_logit_sampled`: the true maximum may be higher. A mass whose pattern
        has no target in some rows is averaged over the others, and `<name>_coverage` is their
        fraction. A row omits metrics that are unknown for its head (NaN in tensors); `unavailable`
        gives the reasons.
        """
        rows = table_rows(self.readings, self.record.extent.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]

    @property
    def unavailable(self) -> dict[str, str]:
        """Return, by name, why each metric is missing from the table for some heads."""
        return unavailable(summaries_of(self.readings))
