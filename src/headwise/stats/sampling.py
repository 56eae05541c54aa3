"""A few queries in place of all: which ones, how much each counts, how far off their mean may be.

The first few queries and the last ones are unlike all others: a causal query 0 gives all of its
mass to key 0, and closing tokens attend in their own way. Such a query counts 1/T in a mean; drawn
by chance, as one of n, it would count 1/n in some draws and 0 in others. So these are always looked
at and stand for themselves; of the rest one is drawn from each of as many stretches, which grow
with the position.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from ..core.modes import readable, traced
from ..core.numbers import LONGEST, as_int, format_value

ALL_FROM = 16
"""Up to so many times the drawn queries, masses are taken at all queries: few of them may hold most
of a mass, and no sample contains those that it missed."""


@dataclass(frozen=True)
class QuerySample:
    """Queries to look at, `rows` `[n]` in ascending order.

    Where they were drawn, `weights` `[n]` says how many queries each stands for, itself among them;
    they sum to the number of all. `None` where they were named.
    """

    rows: Tensor
    weights: Tensor | None


def draw(
    queries: int | Sequence[int] | Tensor, of: int, seed: int, device: torch.device
) -> QuerySample | None:
    """Return the requested sample: a number of queries, or the queries themselves.

    A number is drawn stratified (`stretches`). `None` where it is at least that of all queries.

    Raises:
        ValueError: no query, one named twice, or one that there is not.

    >>> sample = draw(16, 100, 0, torch.device("cpu"))
    >>> sample.rows[:2], sample.rows[-1], sample.weights.sum()
    (tensor([0, 1]), tensor(99), tensor(100., dtype=torch.float64))
    """
    queries, seed = check_queries(queries), _checked(seed)
    if isinstance(queries, int):
        if queries >= of:
            return None
        followed = traced() or _len_torch_dispatch_stack() > 0
        return (_on if followed else _kept_on)(device, queries, of, seed)
    rows = torch.as_tensor(queries).flatten()
    ordered = (_sort if readable(rows) else _sorted)(rows, of)
    if len(ordered) == of:
        return None
    return QuerySample(ordered.to(device, non_blocking=True), None)


EARLY = 1 / 3
"""The share of the drawn queries that thin out with their position; the others are spread evenly.
"""


def stretches(queries: int, of: int) -> Tensor:
    """Cut `of` queries into stretches, one for each that is drawn: their edges `[n + 1]`.

    The first queries (an eighth of those drawn) and the last ones (two at most) are a stretch each.
    Between them `EARLY` of the edges are even in the logarithm of the position, the others in the
    position: what falls with the number of keys, as causal masses do, varies little within any.

    >>> stretches(16, 43)
    tensor([ 0,  1,  2,  4,  6,  8, 10, 13, 17, 20, 23, 27, 31, 35, 39, 42, 43])
    """
    first, last = queries // 8, min(2, queries // 16)
    inner, length = queries - first - last, of - first - last
    # As steep as the logarithm begins, no stretch is shorter than a query.
    begin = float(max(1, first))
    while inner * (EARLY / (begin * math.log1p(length / begin)) + (1 - EARLY) / length) > 1:
        begin *= 1.25
    i = torch.arange(1, length, dtype=torch.float64, device="cpu")
    early = torch.log1p(i / begin) / math.log1p(length / begin)
    place = inner * (EARLY * early + (1 - EARLY) * i / length)
    number = torch.arange(1, inner, dtype=torch.float64, device="cpu")
    edges = torch.searchsorted(place, number - 1e-9) + first + 1
    ends = (0, first + 1), (of - last, of + 1)
    begins, stops = (torch.arange(*end, device="cpu") for end in ends)
    return torch.cat([begins, edges, stops])


def _on(device: torch.device, queries: int, of: int, seed: int) -> QuerySample:
    """Draw, and copy to a device without a wait; by one seed it is the same on every device."""
    rows, weights = (_drawn if traced() else _draw)(queries, of, seed)
    return QuerySample(*(x.to(device, non_blocking=True) for x in (rows, weights)))


@functools.lru_cache(256)
def _kept_on(device: torch.device, queries: int, of: int, seed: int) -> QuerySample:
    """Draw once for all calls of one length, whose graphs may keep it."""
    with torch.inference_mode(False):
        return _on(device, queries, of, seed)


def _draw(queries: int, of: int, seed: int) -> tuple[Tensor, Tensor]:
    """One query from each stretch, in order, and how long that is."""
    generator = torch.Generator("cpu").manual_seed(seed)
    edges = stretches(queries, of)
    low, wide = edges[:-1], edges.diff()
    inside = torch.rand(queries, generator=generator, dtype=torch.float64, device="cpu")
    return low + (inside * wide).floor().long(), wide.double()


def _sort(rows: Tensor, of: int) -> Tensor:
    """Named queries in order, counted from the first.

    Raises:
        ValueError: one named twice, or one that there is not.
    """
    shown = _format_rows(rows)
    ordered = torch.where(rows < 0, rows + of, rows).long().sort().values
    if int(ordered[0]) < 0 or int(ordered[-1]) >= of:
        there = f"there are {of} queries, from 0 to {of - 1}" if of else "the call has no queries"
        raise ValueError(f"{shown}: {there}.")
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"{shown}: a query is named twice.")
    return ordered


# A compiler looks into neither: generators and the values of tensors are not known to it.
_drawn = torch.library.custom_op(
    "headwise::drawn_queries",
    _draw,
    mutates_args=(),
    schema="(SymInt queries, SymInt of, SymInt seed) -> (Tensor, Tensor)",
)
_sorted = torch.library.custom_op(
    "headwise::named_queries",
    _sort,
    mutates_args=(),
    schema="(Tensor rows, SymInt of) -> Tensor",
)


@_drawn.register_fake
def _(queries: int, of: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.empty(queries, dtype=torch.long), torch.empty(queries, dtype=torch.float64)


@_sorted.register_fake
def _(rows: Tensor, of: int) -> Tensor:
    return torch.empty_like(rows, dtype=torch.long)


def check_queries(queries: int | Sequence[int] | Tensor) -> int | Tensor:
    """A number of queries, or their numbers `[n]`.

    Raises:
        ValueError: what no call could be sampled by, however many queries it has.
    """
    count = as_int(queries)
    if count is not None:
        if count < 1:
            raise ValueError(f"queries={queries}: at least one query must be looked at.")
        return count
    rows = queries if isinstance(queries, Tensor) else None
    if rows is None and isinstance(queries, Collection) and not isinstance(queries, str | bytes):
        numbers = [as_int(number) for number in queries]
        if None not in numbers:
            rows = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if rows is None or not rows.dim() or not rows.numel() or rows.is_meta:
        raise ValueError(f"queries={format_value(queries)}: {_WANTED}")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(f"{_format_rows(rows)}: {_WANTED}")
    rows = rows.flatten()
    if readable(rows) and len(rows.unique()) < len(rows):
        raise ValueError(f"{_format_rows(rows)}: a query is named twice.")
    return rows


_WANTED = "give a whole number of queries, or a list of them."


def _checked(seed: object) -> int:
    number = as_int(seed)
    if number is None or number < -LONGEST:
        raise ValueError(f"seed={format_value(seed)}: give a whole number.")
    return number


def _format_rows(rows: Tensor) -> str:
    return f"queries={rows.tolist() if len(rows) <= 8 else f'{list(rows.shape)} {rows.dtype}'}"


def standard_error(
    values: Float[Tensor, "B H n"], rows: Bool[Tensor, "B H n"], weights: Float[Tensor, " n"]
) -> Float[Tensor, " H"]:
    """Estimate how far off each head's mean over drawn queries may be; NaN of a single one.

    A stretch holds one drawn query, so its neighbours stand in for others from it: half the squared
    difference of two (at either end), a sixth of a squared second difference (between, where no
    even trend adds to it) is the variance within it (Cochran 1977, §5A.12). Of w queries one was
    looked at: their sum is off by w² of it where the figure follows a trend, by w (w − 1) where it
    is noise; between these lies w (w − ½), and 0 for a query that stands for itself. As overlapping
    second differences have about half as many degrees of freedom as there are, the error is widened
    by t/3, so that three of it hold what three of a normal mean do (Abramowitz & Stegun 1964,
    26.7.5). Rows that do not count weigh nothing (ratio estimate).
    """
    if len(weights) < 2:
        return values.new_full((values.shape[1],), math.nan)
    count = rows.to(weights.dtype).sum(0)
    total = torch.where(rows, values.to(weights.dtype), 0.0).sum(0)
    all_counts = (count * weights).sum(1, keepdim=True).clamp(min=1)
    mean = (total * weights).sum(1, keepdim=True) / all_counts
    residual = total - mean * count
    pairs, threes = residual.diff(dim=1).square() / 2, residual.diff(n=2, dim=1).square() / 6
    within = torch.cat([pairs[:, :1], threes, pairs[:, -1:]], dim=1)
    share = weights * (weights - 0.5) * (weights > 1)
    freedom = share.sum().square() / share.square().sum().clamp(min=1) / 2
    freedom = freedom.clamp(min=0.5)  # where every query stands for itself, and none is off
    widened = 1 + 2.5 / freedom + 5.75 / freedom**2 + 10.06 / freedom**3
    return widened * (within @ share).sqrt() / all_counts[:, 0]
