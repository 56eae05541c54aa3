"""Check that a captured call is complete, and that its batch rows and heads are what they seem.

A product of probabilities with values may cover only some queries of a module, a block of its
sequence, or some of its keys. A call is complete if the outputs of all heads, side by side, are
the input of the next projection or the output of the module, position by position. Until this is
known, the call is pending. A call that covers only a part is left out, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, takewhile
from math import prod
from operator import mul
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class PendingCall:
    """A call that may be complete or cover only a part of its module's attention.

    Args:
        name: the qualified name of its module.
        quote: the text that stands for the call in reasons.
        out: the heads' outputs `[B, H, T, Dv]` that the model continues with.
        shape: the shape of the product itself.
        keys: the number of keys that count.
        sure: the number of heads is known; otherwise it is inferred from the usual order of axes.
        declared: the head axis was given by the user; the other leading axes are batch rows,
            including windows that overlap or are padded.
        by_hand: a product written out in the model, which may cover only some keys; the call of a
            function covers all.
        queries_first: the product itself has its queries before its batch rows.
        callbacks: functions to call with `total_queries` once the call is known to be complete.
        total_queries: the number of queries of the module, over the batch; None until it is known.
        sliced: outputs of some of its queries were read or returned side by side, as for one of
            two streams of tokens that attend jointly.
        streams: the ranges of queries whose outputs a projection of their own reads, with its name.
    """

    name: str
    quote: str
    out: Tensor
    shape: torch.Size
    keys: int
    sure: bool = True
    declared: bool = False
    by_hand: bool = False
    queries_first: bool = False
    callbacks: list[Callable[[int], None]] = field(default_factory=list)
    total_queries: int | None = None
    sliced: bool = False
    streams: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows, self.heads, self.queries, self.width = self.out.shape

    def on_complete(self, keep: Callable[[int], None]) -> None:
        """Call `keep` with the total number of queries as soon as it is known."""
        if self.total_queries is None:
            self.callbacks.append(keep)
        else:
            keep(self.total_queries)

    def resolve(self, queries: int) -> None:
        """Record that the call is complete, with this total number of queries."""
        self.total_queries = queries
        for keep in self.callbacks:
            keep(queries)
        self.callbacks.clear()

    @property
    def seen(self) -> int:
        """The number of queries of the call, over the batch."""
        return self.rows * self.queries

    @property
    def turnable(self) -> bool:
        """True if the axes of batch rows and heads may have been confused."""
        return self.rows == self.heads or (len(self.shape) < 4 and self.heads > 1)

    @property
    def wide(self) -> int:
        """The width of all heads side by side."""
        return self.heads * self.width


@dataclass(frozen=True)
class ResolvedCall:
    """The result for a pending call: its total number of queries, or why it is left out."""

    call: PendingCall
    queries: int = 0
    reason: str = ""


# ── inputs of projections ───────────────────────────────────────────────────────────────────────


def read(waiting: Sequence[PendingCall], x: Tensor, name: str = "") -> list[ResolvedCall]:
    """Return the calls that are resolved because projection `name` reads `x`, `[…, H · Dv]`."""
    if x.dim() < 3:  # the positions of all rows in one axis are ambiguous
        return []
    for w in waiting:
        if begins := _slices(w, x):
            w.sliced = True
            if len(begins) == 1:
                w.streams.setdefault((begins[0], begins[0] + x.shape[1]), name)
    alike = [w for w in waiting if x.numel() == w.out.numel() and x.shape[-1] % w.width == 0]
    if len(alike) > 1:  # which of them is it?
        alike = [w for w in alike if _joins(w.out.detach(), x)]
    return [_read(w, x) for w in alike] or _chunks(waiting, x)


def _read(w: PendingCall, x: Tensor) -> ResolvedCall:
    """Resolve a call by `x`, which has as many elements as the heads' outputs, features last."""
    if x.shape[-1] != w.wide:
        return _left(
            w, f"has {w.heads} heads according to its axes, but joins {x.shape[-1] // w.width}"
        )
    place = _place(x.shape[:-1], w)
    out = w.out.detach()
    if place and w.turnable and not _joins(out, x):
        turned = out.reshape(w.heads, w.rows, w.queries, w.width).transpose(0, 1)
        if _joins(turned, x):
            return _left(w, f"has its {w.heads} heads on the axis that usually holds batch rows")
    if place == "queries first" and x.shape[1] % x.shape[0] == 0 and not w.queries_first:
        # or a batch of blocks
        place = place if _same(out.permute(2, 0, 1, 3).reshape(x.shape), x) else ""
    return ResolvedCall(w, w.seen) if place else _left(w, _misread(w, x.shape[:-1]))


def _slices(w: PendingCall, x: Tensor) -> list[int]:
    """Return the starts of N consecutive queries whose outputs are `x` `[B, N, H · Dv]`."""
    count = x.shape[1] if x.dim() == 3 else 0
    if not 0 < count < w.queries or len(x) != w.rows or x.shape[-1] != w.wide:
        return []
    joined = w.out.detach().transpose(1, 2).reshape(w.rows, w.queries, w.wide)
    if joined.dtype != x.dtype:
        return []
    begins = (joined == x[:, :1]).all(-1).all(0)[: w.queries - count + 1].nonzero()[:, 0].tolist()
    return [begin for begin in begins if _same(joined[:, begin : begin + count], x)]


def _joins(out: Tensor, x: Tensor) -> bool:
    """Return True if `x` is the heads' outputs `[B, H, T, Dv]` side by side."""
    turns = ((0, 2, 1, 3), (2, 0, 1, 3))
    return any(_same(out.permute(turn).reshape(x.shape), x) for turn in turns)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or torch.equal(one, other):
        return one.dtype == other.dtype
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _place(axes: Sequence[int], w: PendingCall) -> str:
    """Return the order in which these axes hold the positions of a call; "" if they do not."""
    if prod(axes) != w.seen:
        return ""
    if w.declared or len(axes) == 1 or w.rows in accumulate(axes[:-1], mul, initial=1):
        return "rows first"
    return "queries first" if tuple(axes) == (w.queries, w.rows) else ""


def streams_of(w: PendingCall) -> dict[str, tuple[int, int]]:
    """Return the range of queries of each stream of tokens in a call, by name, in their order.

    They are known if each stream has its own output projection. If the name of one of two refers to
    text, the streams are `text` and `image`; others have the names of their projections. Queries
    that no projection reads are `registers` if several streams are read, otherwise `rest`.
    """
    ranges = sorted(w.streams)
    if not ranges or any(one[1] > other[0] for one, other in pairwise(ranges)):
        return {}
    paths = [w.streams[one].split(".") for one in ranges]
    parts = zip(w.name.split("."), *paths, strict=False)
    common = len([*takewhile(lambda part: len({*part}) == 1, parts)])
    names = [".".join(path[common:]) for path in paths]
    text = [_TEXT.search(name) is not None for name in names]
    if len(names) == 2 and sum(text) == 1:
        names = ["text" if is_text else "image" for is_text in text]
    elif len({*names, ""}) <= len(names):
        names = [f"stream {number}" for number in range(len(names))]
    edges = [0, *chain(*ranges), w.queries]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    other = "registers" if len(ranges) > 1 else "rest"
    others = [other] if len(gaps) == 1 else [f"{other} {number}" for number in range(len(gaps))]
    found = zip([*ranges, *gaps], [*names, *others], strict=True)
    return {name: one for one, name in sorted(found)}


_TEXT = re.compile("txt|text|add|context|caption")
"""The names of text projections in joint attention."""


# ── outputs of modules ──────────────────────────────────────────────────────────────────────────


def at_end(
    waiting: Sequence[PendingCall], output: Any, lost: Sequence[torch.Size], before: str = ""
) -> tuple[list[ResolvedCall], list[PendingCall]]:
    """Return the calls that the output of a module resolves, and those that stay pending.

    Args:
        output: the module's output.
        lost: the shapes of the softmaxes in it that were not seen to be multiplied by values.
        before: the reason why another of its calls is left out.
    """
    weights = {(w.queries, w.keys) for w in waiting}
    given = [x for x in _tensors(output) if x.dim() > 1]
    others = [x for x in given if tuple(x.shape[-2:]) not in weights]
    wide = [x for x in given if x.shape[-1] in {w.wide for w in waiting}]
    x = next(iter(others or wide), None)
    if x is None:
        return [], list(waiting)
    for w in waiting:
        w.sliced = w.sliced or bool(_slices(w, x))
    found = [_read(w, x) for w in waiting if (x.numel(), x.shape[-1]) == (w.out.numel(), w.wide)]
    found = [one for one in found if one.reason]
    rest = [w for w in waiting if all(w is not one.call for one in found)]
    streams = [x.shape for x in others if x.dim() == 3]
    whole = [
        w
        for w in rest
        if w.sliced
        or _of_streams(w, streams)
        or any(_place(axes, w) or (w.declared and prod(axes) < w.seen) for axes in _axes(x))
    ]
    rest = [w for w in rest if w not in whole]
    found += _of_shares(whole, lost)
    if chunks := _chunks(rest, x):
        return found + chunks, []
    pending = [w for w in rest if w.heads > 1 and sorted(x.shape) == sorted(w.shape)]
    rest = [w for w in rest if w not in pending]
    found += [_of_others(w, rest, _axes(x)[0], len(lost)) for w in rest]
    before = next((one.reason for one in found if one.reason), before)
    if before:  # the remaining calls are not all of the module's
        reason = f"belongs to a module with another call that was not captured completely: {before}"
        found = [one if one.reason else _left(one.call, reason) for one in found]
    return found, pending


def _of_streams(w: PendingCall, streams: Sequence[torch.Size]) -> bool:
    """Return True if outputs `[B, N, C]` of several streams of tokens have the call's queries."""
    lengths = [length for rows, length, _ in streams if rows == w.rows]
    return w.sure and len(lengths) > 1 and sum(lengths) == w.queries


def at_last(w: PendingCall) -> ResolvedCall:
    """Resolve a call that is still pending when the model's forward ends."""
    if w.sure or len(w.shape) > 3:
        return ResolvedCall(w, w.seen)
    return _left(w, "has an unknown number of heads")


def _tensors(given: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the floating-point tensors in the output of a module."""
    if isinstance(given, Tensor) and given.is_floating_point() and given.layout is torch.strided:
        yield given
    if isinstance(given, dict | tuple | list) and depth:
        for part in given.values() if isinstance(given, dict) else given:
            yield from _tensors(part, depth - 1)


def _axes(x: Tensor) -> list[tuple[int, ...]]:
    """Return the possible position axes of an output; features are last, or second for images."""
    shape = tuple(x.shape)
    return [shape[:-1]] + ([shape[:1] + shape[2:]] if len(shape) == 4 else [])


def _of_shares(whole: Sequence[PendingCall], lost: Sequence[torch.Size]) -> list[ResolvedCall]:
    """Resolve calls with all queries, some of which may cover only some keys."""
    sizes = [(w.rows, w.heads, w.queries) for w in whole if w.by_hand]
    found = []
    for w in whole:
        number = sizes.count((w.rows, w.heads, w.queries)) if w.by_hand else 1
        one_by_one = w.heads == 1 and w.queries == w.keys  # single heads, each over all keys
        others = sum(prod(shape[:-1]) == w.heads * w.seen for shape in lost if w.heads > 1)
        if number > 1 and not one_by_one:
            reason = (
                f"is one of {number} products of the same queries, each perhaps over some of the "
                f"keys"
            )
        elif others:
            more = f"{others} more softmax{'es' * (others > 1)} of its queries"
            reason = f"is not all: no product with values was seen of {more}"
        else:
            found.append(ResolvedCall(w, w.seen))
            continue
        found.append(_left(w, reason))
    return found


def _chunks(waiting: Sequence[PendingCall], x: Tensor) -> list[ResolvedCall]:
    """Resolve several calls, each with some of the queries; return [] for other calls."""
    if len(waiting) < 2 or len({(w.rows, w.heads, w.width) for w in waiting}) > 1:
        return []
    rows, queries = waiting[0].rows, sum(w.queries for w in waiting)
    if not any(prod(a) == rows * queries and a[0] in (rows, queries) for a in _axes(x)):
        return []
    ordered = sorted(waiting, key=lambda w: w.keys)
    ends = accumulate(w.queries for w in ordered)
    before = {w.keys - end for w, end in zip(ordered, ends, strict=True)}
    alone = all(w.queries == w.keys for w in waiting)  # each is a sequence by itself
    if alone or (len(before) == 1 and min(before) >= 0):
        return [ResolvedCall(w, w.seen) for w in waiting]
    reason = f"is one of {len(waiting)} products of some queries, whose positions are unknown"
    return [_left(w, reason) for w in waiting]


def _of_others(
    w: PendingCall, rest: Sequence[PendingCall], axes: tuple[int, ...], lost: int
) -> ResolvedCall:
    """Resolve a call whose module returns positions other than those of its queries."""
    queries, seen = prod(axes), sum(other.seen for other in rest)
    one_for_each = len(axes) == 1  # one vector for each row, of all its positions
    if w.rows not in (axes if one_for_each else accumulate(axes[:-1], mul, initial=1)):
        return _left(w, _misread(w, axes))
    if seen < queries and lost:
        reason = f"sees {seen} of {queries} queries, and no product with values was seen of {lost}"
        return _left(w, f"{reason} more softmax{'es' * (lost > 1)}")
    if seen < queries and (len(rest) > 1 or not w.sure):
        return _left(w, _misread(w, axes))
    if seen > queries and not one_for_each:
        return _left(w, f"has {seen} queries, but its module returns {queries} positions")
    return ResolvedCall(w, max(w.seen, queries))


def _left(w: PendingCall, reason: str) -> ResolvedCall:
    return ResolvedCall(w, reason=f"{w.quote} {reason}")


def _misread(w: PendingCall, axes: Sequence[int]) -> str:
    return (
        f"has {w.rows} × {w.queries} queries by its axes, but the positions are {list(axes)}: "
        f"batch rows, heads and blocks cannot be distinguished"
    )
