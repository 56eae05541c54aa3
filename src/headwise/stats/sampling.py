"""Sampling of queries: the sample, the weight of each query, the standard error of the mean.

The first and last few queries are unlike all others: a causal query 0 attends only to key 0, and
closing tokens have their own patterns. Such a query counts 1/T in a mean; if it were drawn at
random, it would count 1/n in some samples and 0 in others. Samples therefore always contain these
queries, with weight 1. The other queries are cut into intervals that grow with the position, and
one query is drawn from each.
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
"""The largest ratio of all to sampled queries at which masses are computed for all queries: most
of a mass may be on a few queries, which a sample can miss."""


@dataclass(frozen=True)
class QuerySample:
    """Queries to look at, `rows` `[n]` in ascending order.

    For a random sample, `weights` `[n]` is the number of queries that each one represents,
    including itself; they sum to the number of all queries. For a given list it is `None`.
    """

    rows: Tensor
    weights: Tensor | None


def draw(
    queries: int | Sequence[int] | Tensor, of: int, seed: int, device: torch.device
) -> QuerySample | None:
    """Return the requested sample, given as a number of queries or as a list.

    For a number, the sample is stratified (see `stretches`). Return `None` if the sample would
    contain all queries.

    Raises:
        ValueError: there are no queries, or one is listed twice or is out of range.

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
"""The fraction of sampled queries spaced logarithmically; the others are spaced evenly."""


def stretches(queries: int, of: int) -> Tensor:
    """Cut `of` queries into intervals, one per sampled query, and return their edges `[n + 1]`.

    Each of the first queries (an eighth of the sample) and of the last ones (at most two) is its
    own interval. Between them, a fraction `EARLY` of the edges is spaced evenly in the logarithm of
    the position, the rest in the position. Metrics that fall with the number of keys, as causal
    masses do, then vary little within an interval.

    >>> stretches(16, 43)
    tensor([ 0,  1,  2,  4,  6,  8, 10, 13, 17, 20, 23, 27, 31, 35, 39, 42, 43])
    """
    first, last = queries // 8, min(2, queries // 16)
    inner, length = queries - first - last, of - first - last
    # No interval is shorter than a query, even where the logarithm is steepest.
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
    """Sample and copy to a device without synchronizing; samples do not depend on the device."""
    rows, weights = (_drawn if traced() else _draw)(queries, of, seed)
    return QuerySample(*(x.to(device, non_blocking=True) for x in (rows, weights)))


@functools.lru_cache(256)
def _kept_on(device: torch.device, queries: int, of: int, seed: int) -> QuerySample:
    """Sample once for all calls of equal length; their graphs may keep the result."""
    with torch.inference_mode(False):
        return _on(device, queries, of, seed)


def _draw(queries: int, of: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return one query from each interval, in order, and the interval's length."""
    generator = torch.Generator("cpu").manual_seed(seed)
    edges = stretches(queries, of)
    low, wide = edges[:-1], edges.diff()
    inside = torch.rand(queries, generator=generator, dtype=torch.float64, device="cpu")
    return low + (inside * wide).floor().long(), wide.double()


def _sort(rows: Tensor, of: int) -> Tensor:
    """Return listed queries in ascending order, with negative indices resolved.

    Raises:
        ValueError: a query is listed twice or is out of range.
    """
    shown = _format_rows(rows)
    ordered = torch.where(rows < 0, rows + of, rows).long().sort().values
    if int(ordered[0]) < 0 or int(ordered[-1]) >= of:
        there = f"there are {of} queries, from 0 to {of - 1}" if of else "the call has no queries"
        raise ValueError(f"{shown}: {there}.")
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"{shown}: a query is listed twice.")
    return ordered


# A compiler can trace neither function: it supports neither generators nor reading values.
_drawn = torch.library.custom_op(
    "headwise::drawn_queries",
    _draw,
    mutates_args=(),
    schema="(SymInt queries, SymInt of, SymInt seed) -> (Tensor, Tensor)",
)
_sorted = torch.library.custom_op(
    "headwise::named_queries", _sort, mutates_args=(), schema="(Tensor rows, SymInt of) -> Tensor"
)


@_drawn.register_fake
def _(queries: int, of: int, seed: int) -> tuple[Tensor, Tensor]:
    return torch.empty(queries, dtype=torch.long), torch.empty(queries, dtype=torch.float64)


@_sorted.register_fake
def _(rows: Tensor, of: int) -> Tensor:
    return torch.empty_like(rows, dtype=torch.long)


def check_queries(queries: int | Sequence[int] | Tensor) -> int | Tensor:
    """Return `queries` as a number of queries or as a tensor of their indices `[n]`.

    Raises:
        ValueError: the argument is not valid for any number of queries.
    """
    count = as_int(queries)
    if count is not None:
        if count < 1:
            raise ValueError(f"queries={queries}: at least one query is required.")
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
        raise ValueError(f"{_format_rows(rows)}: a query is listed twice.")
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
    """Estimate the standard error of each head's mean over sampled queries; NaN for a single one.

    Each interval contains one sampled query, so the variance within it is estimated from its
    neighbors: half the squared difference of two queries (at either end), or a sixth of a squared
    second difference (in between; a linear trend cancels) (Cochran 1977, §5A.12). One of w queries
    was observed, so the squared error of their sum is w² times that variance if the metric follows
    a trend, and w (w − 1) times if it is noise. The estimate uses w (w − ½), and 0 for w = 1.
    Overlapping second differences have about half as many degrees of freedom as their number, so
    the error is widened by t/3: three standard errors then cover as much as for a normal mean
    (Abramowitz & Stegun 1964, 26.7.5). Invalid rows have weight 0 (ratio estimate).
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
    freedom = freedom.clamp(min=0.5)  # if each query represents itself, there is no error
    widened = 1 + 2.5 / freedom + 5.75 / freedom**2 + 10.06 / freedom**3
    return widened * (within @ share).sqrt() / all_counts[:, 0]
