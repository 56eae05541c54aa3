"""The raw numbers of one call, from which statistics compute metrics; and a metric's values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .._text import Brief
from ..core.mask_algebra import Rows
from ..core.shapes import Extent
from .moments import Moments, moments_of
from .plan import Need
from .sampling import standard_error
from .view import View


@dataclass(eq=False)
class Record:
    """The results of one call. `record[need]` is the answer to a need.

    A record is immutable by convention (a frozen dataclass would triple the time to create one),
    as is a `Reading`. `out` is the output, if the call computed one. `lse` is the log-sum-exp of
    the observed queries. `whole_lse` is that of all queries if the call computed its output, else
    the same as `lse`. Both are `None` if no call was made. `every` is the record of all queries if
    queries were sampled and results for all of them are available.
    """

    view: View
    answers: Mapping[Need, Any]
    out: Float[Tensor, "B H T Dv"] | None = field(default=None, repr=False)
    whole_lse: Float[Tensor, "B H _"] | None = field(default=None, repr=False)
    lse: Float[Tensor, "B H n"] | None = field(default=None, repr=False)
    every: Record | None = None
    direct: bool = False
    """True if a one-pass backend has read the call unchanged."""

    def __getitem__(self, need: Need) -> Any:
        return self.answers[need]

    @property
    def extent(self) -> Extent:
        """The call's sizes, with the number of observed queries."""
        return self.view.extent

    @property
    def counts(self) -> Int[Tensor, "#B #H n"]:
        """The number of keys that each query may attend to."""
        return self.view.counts

    @property
    def valid_rows(self) -> Bool[Tensor, "#B #H n"]:
        """The queries that may attend to a key."""
        return self.view.valid_rows

    def detached(self) -> Record:
        """Return a record of the call and its log-sum-exp only, without a graph."""
        lse = {n: x.detach() for n in ("whole_lse", "lse") if (x := getattr(self, n)) is not None}
        return Record(self.view, {}, **lse)

    @property
    def form(self) -> Hashable | None:
        """Return a key that is equal for records that can be joined (`beside`), or `None`.

        Only records on a GPU are joined, where many small operations take longer than a few large
        ones.
        """
        view, answers = self.view, self.answers
        mask = view.mask.mask if isinstance(view.mask, Rows) else view.mask
        if view.device.type == "cpu" or view.gradients or not (mask.free or mask.fixed):
            return None
        if any(x.dim() > 2 and x.shape[-3] > 1 for x in mask.tensors()):  # it differs between heads
            return None
        every = None if self.every is None else self.every.form
        if (every is None) != (self.every is None):
            return None
        sizes = (view.whole.batch, view.whole.heads)
        if not all(isinstance(x, Tensor) and x.shape[:2] == sizes for x in answers.values()):
            return None
        given = tuple([(need, x.shape, x.dtype) for need, x in answers.items()])
        numbers = view.whole, view.device, view.dtype, view.has_sinks, self.lse is None
        return mask if mask.free else id(mask), id(view.rows), id(view.drawn), numbers, given, every

    def let_go(self, needs: Collection[Need]) -> None:
        """Drop everything but the answers to these needs and the log-sum-exp."""
        self.out = self.whole_lse = None
        if len(needs) < len(self.answers):
            self.answers = {need: x for need, x in self.answers.items() if need in needs}
        self.view.let_go()
        if self.every is not None:
            self.every.let_go(needs)


def beside(records: Sequence[Record]) -> Record:
    """Return one record that has the heads of several records of the same form."""
    first, known = records[0], {}
    answers = {need: _joined([x.answers[need] for x in records], known) for need in first.answers}
    lse = (
        None if first.lse is None else _joined([x.lse for x in records if x.lse is not None], known)
    )
    every = None if first.every is None else beside([x.every for x in records if x.every])
    return Record(first.view, answers, lse=lse, every=every)


def _joined(each: Sequence[Tensor], known: dict[int, Tensor]) -> Tensor:
    """Concatenate tensors `[B, H, …]` along the heads; views of the same tensors in one step."""
    base, start = each[0]._base, each[0].storage_offset()
    parts = [x._base for x in each if x._base is not None and x.storage_offset() == start]
    if base is None or base.dim() != 4 or len(parts) < len(each) or base.shape[1:] != each[0].shape:
        return torch.cat([*each], 1)
    if any(x.shape != base.shape for x in parts):
        return torch.cat([*each], 1)
    if id(base) not in known:
        known[id(base)] = torch.cat(parts, 2)
    return known[id(base)][(start - base.storage_offset()) // base.stride(0)]


class _Late:
    """A field, `None` by default, that may be set to a function, which is called at the first read.

    >>> @dataclass(frozen=True)
    ... class Circle:
    ...     area: int | None = _Late()
    >>> Circle().area, Circle(3).area, Circle(lambda: 4).area
    (None, 3, 4)
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: object | None, kind: type | None = None) -> Any:
        if owner is None:
            return None
        value = vars(owner)[self.name]
        if callable(value):
            value = vars(owner)[self.name] = value()
        return value

    def __set__(self, owner: object, value: object) -> None:
        vars(owner)[self.name] = value


@dataclass(eq=False, repr=False)
class Reading(Brief):
    """One metric of every head: its tensor, and the rows that count in a mean.

    `values` is `[B, H, T]` per query or `[B, H, …]` per head. `rows` (broadcastable to
    `[B, H, T]`) is True for the queries that have the metric; `None` means that the metric is not
    per query. `among` is True for queries that could have had it, if that differs: the fraction of
    `rows` among them is the coverage. With `largest`, a head's metric is the maximum, not the mean.

    If only some queries were observed, the T axis has n entries and `sampled` is True: a maximum
    is then only a lower bound. For a random sample, `weights` `[n]` is the number of queries that
    each one represents, and `error` `[H]` is the standard error of each head's mean, computed when
    first read. If `every` (the reading of all queries) or `whole` (its sums) is given instead, the
    mean is exact.

    For joining metrics over calls, if not per query: `per_key` means that `values` `[B, H, S]`
    are sums over queries; `over` is the number of queries averaged in each entry
    (broadcastable to `values`).

    `unknown` is the reason why the metric cannot be computed for the call; `values` are NaN then.
    """

    values: Tensor
    rows: Tensor | None = None
    among: Tensor | None = None
    largest: bool = False
    error: Any = _Late()  # a tensor or None, or a function that returns one
    per_key: bool = False
    over: Tensor | None = None
    sampled: bool = False
    weights: Tensor | None = None
    whole: Moments | None = None
    unknown: str = ""
    every: Callable[[], Reading] | None = None

    def detached(self) -> Reading:
        """Return the reading without a graph, with the sums over all queries computed."""
        whole = self.whole if self.every is None else self.moments
        return replace(self, values=self.values.detach(), whole=whole, every=None)

    def of(self, heads: slice) -> Reading:
        """Return the reading of some heads, for a metric per query or per head."""

        def some(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.dim() < 2 or x.shape[1] == 1 else x[:, heads]

        return replace(
            self, values=self.values[:, heads], rows=some(self.rows), among=some(self.among)
        )

    def without_values(self, why: str) -> Reading:
        """Return the reading of a metric that cannot be computed for its call."""
        nothing = torch.full_like(self.values, torch.nan)
        return replace(self, values=nothing, unknown=why)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without a graph."""
        return dict(vars(self.detached()))

    @property
    def moments(self) -> Moments:
        """The sums from which tables are computed."""
        if self.whole is not None:
            return self.whole
        if self.every is not None:
            return self.every().moments
        made = moments_of(self.values, self.rows, self.among, self.weights)
        if (error := self.error) is None:
            return made
        return replace(made, errors=(made.heads.count * error).square())

    def of_some(self, every: Callable[[], Reading] | None, weights: Tensor | None) -> Reading:
        """Return the reading marked as covering some queries; with `weights`, a random sample.

        `every` returns the reading of all queries, if known: its maximum replaces that of the
        sample.
        """
        if every is not None and self.largest:
            return every()
        values, rows = self.values.detach(), self.rows
        if rows is None or values.dim() != 3 or weights is None:
            return replace(self, sampled=True)
        if every is not None:
            return replace(self, sampled=True, weights=weights, every=every)
        error: Any = partial(standard_error, values, rows.expand(values.shape), weights)
        return replace(self, sampled=True, weights=weights, error=error)

    @property
    def of_heads(self) -> bool:
        """True if the reading has a mean or maximum per head."""
        axes = 2 if self.rows is None else 3
        single = not self.per_key and self.over is None and self.values.dim() == axes
        return self.largest or single


TOGETHER = 1 << 19
"""The largest size of a reading that is copied in order to be summed together with others."""


def form_of(reading: Reading) -> object | None:
    """Return a key that is equal for readings that can be joined; `None` for maps and lists."""
    x, parts = reading.values, (reading.rows, reading.among, reading.error, reading.weights)
    if not reading.of_heads:
        return None
    if reading.unknown or x.numel() > TOGETHER:
        return object()
    given = tuple(
        part is None for part in (*parts, reading.whole, reading.whole and reading.whole.among)
    )
    every = None if reading.every is None else form_of(reading.every())
    return len(x), x.shape[2:], x.dtype, x.device, reading.largest, reading.sampled, given, every


def forms_of(each: Iterable[Iterable[Reading]]) -> list[tuple[object, ...]]:
    """Return the forms of each group of readings; a unique object for maps."""
    return [tuple([form_of(one) or object() for one in readings]) for readings in each]


def side_by_side(readings: Sequence[Reading]) -> Reading:
    """Return one reading that has the heads of several readings of the same form."""
    first = readings[0]
    if len(readings) == 1:
        return first

    def joined(parts: list[Tensor | None], sizes: list[torch.Size] | None = None) -> Any:
        given = [x for x in parts if x is not None]
        if not given:
            return None
        if sizes is not None:
            given = [x.expand(size) for x, size in zip(given, sizes, strict=True)]
        return torch.cat(given, -1 if sizes is None else len(sizes[0]) - 2)

    sizes = [one.values.shape for one in readings]
    whole = None
    if first.whole is not None:
        every = zip(*(vars(one.whole).values() for one in readings), strict=True)
        whole = Moments(*(joined([*parts]) for parts in every))
    return replace(
        first,
        values=torch.cat([one.values for one in readings], 1),
        rows=joined([one.rows for one in readings], sizes),
        among=joined([one.among for one in readings], sizes),
        error=joined([one.error for one in readings]),
        weights=joined([one.weights for one in readings], [size[1:] for size in sizes]),
        whole=whole,
        every=partial(_every, readings) if first.every else None,
    )


def _every(readings: Sequence[Reading]) -> Reading:
    return side_by_side([one.every() for one in readings if one.every is not None])
