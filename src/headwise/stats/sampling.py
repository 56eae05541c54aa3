"""A few queries in place of all: which ones, how much each counts, how far off their mean may be.

The first few queries and the last ones are unlike all others: a causal query 0 gives all of its
mass to key 0, and closing tokens attend in their own way. Such a query counts 1/T in a mean; drawn
by chance, as one of n, it would count 1/n in some draws and 0 in others. So these are always looked
at and stand for themselves; of the rest one is drawn from each of as many equal stretches.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..core.modes import readable, traced
from ..core.numbers import LONGEST, said, whole

ALL_FROM = 16
"""Up to so many times the drawn queries, masses are taken at all queries: few of them may hold most
of a mass, and no sample tells of those that it missed."""


@dataclass(frozen=True)
class Sample:
    """Queries to look at, `rows` `[n]` in ascending order.

    Where they were drawn, `weights` `[n]` says how many queries each stands for, itself among them;
    they sum to the number of all. `None` where they were named.
    """

    rows: Tensor
    weights: Tensor | None


def draw(
    queries: int | Sequence[int] | Tensor, of: int, seed: int, device: torch.device
) -> Sample | None:
    """Take the sample that a caller asked for: a number of queries, or the queries themselves.

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
        rows, weights = (_drawn if traced() else _draw)(queries, of, seed)
        return Sample(rows.to(device), weights.to(device))
    rows = torch.as_tensor(queries).flatten()
    ordered = (_sort if readable(rows) else _sorted)(rows, of)
    if len(ordered) == of:
        return None
    return Sample(ordered.to(device), None)


def _ends(queries: int) -> tuple[int, int]:
    """How many of the drawn queries are the first, and how many the last."""
    return min(4, queries // 8), min(2, queries // 16)


def stretches(queries: int, of: int) -> Tensor:
    """Cut `of` queries into stretches, one for each that is drawn: their edges `[n + 1]`.

    The first and the last queries are a stretch each; the others are equally long, to a query.

    >>> stretches(16, 43)
    tensor([ 0,  1,  2,  6,  9, 12, 15, 18, 21, 24, 27, 30, 33, 36, 39, 42, 43])
    """
    first, last = _ends(queries)
    inner = queries - first - last
    edges = torch.arange(inner + 1, dtype=torch.float64) * (of - first - last) / inner
    ends = torch.arange(first), torch.arange(of - last + 1, of + 1)
    return torch.cat([ends[0], first + edges.ceil().long(), ends[1]])


def _draw(queries: int, of: int, seed: int) -> tuple[Tensor, Tensor]:
    """One query from each stretch, in order, and how long that is."""
    generator = torch.Generator().manual_seed(seed)
    edges = stretches(queries, of)
    low, wide = edges[:-1], edges.diff()
    inside = torch.rand(queries, generator=generator, dtype=torch.float64)
    return low + (inside * wide).floor().long(), wide.double()


def _sort(rows: Tensor, of: int) -> Tensor:
    """Named queries in order, counted from the first.

    Raises:
        ValueError: one named twice, or one that there is not.
    """
    said = _said(rows)
    ordered = torch.where(rows < 0, rows + of, rows).long().sort().values
    if int(ordered[0]) < 0 or int(ordered[-1]) >= of:
        there = f"there are {of} queries, from 0 to {of - 1}" if of else "the call has no queries"
        raise ValueError(f"{said}: {there}.")
    if bool((ordered[1:] == ordered[:-1]).any()):
        raise ValueError(f"{said}: a query is named twice.")
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
    count = whole(queries)
    if count is not None:
        if count < 1:
            raise ValueError(f"queries={queries}: at least one query must be looked at.")
        return count
    rows = queries if isinstance(queries, Tensor) else None
    if rows is None and isinstance(queries, Collection) and not isinstance(queries, str | bytes):
        numbers = [whole(number) for number in queries]
        if None not in numbers:
            rows = torch.tensor(numbers, dtype=torch.long, device="cpu")
    if rows is None or not rows.dim() or not rows.numel() or rows.is_meta:
        raise ValueError(f"queries={said(queries)}: {_WANTED}")
    if rows.is_floating_point() or rows.is_complex() or rows.dtype == torch.bool:
        raise ValueError(f"{_said(rows)}: {_WANTED}")
    rows = rows.flatten()
    if readable(rows) and len(rows.unique()) < len(rows):
        raise ValueError(f"{_said(rows)}: a query is named twice.")
    return rows


_WANTED = "give a whole number of queries, or a list of them."


def _checked(seed: object) -> int:
    number = whole(seed)
    if number is None or number < -LONGEST:
        raise ValueError(f"seed={said(seed)}: give a whole number.")
    return number


def _said(rows: Tensor) -> str:
    return f"queries={rows.tolist() if len(rows) <= 8 else f'{list(rows.shape)} {rows.dtype}'}"


def standard_error(
    values: Float[Tensor, "B H n"], rows: Bool[Tensor, "B H n"], weights: Float[Tensor, " n"]
) -> Float[Tensor, " H"]:
    """Estimate how far off each head's mean over drawn queries may be; NaN of a single one.

    A stretch holds one drawn query, so its neighbours stand in for others from it: half the squared
    difference of two (at either end), a sixth of a squared second difference (between, where no
    even trend adds to it). Their mean is the variance within stretches (Cochran 1977, §5A.12), less
    the share of queries that was looked at; the first and last queries stand for themselves and add
    none. A mean of m squares is rough: as overlapping second differences have about m/2 degrees of
    freedom, the error is widened by t/3, so that three of it hold what three of a normal mean do
    (Abramowitz & Stegun 1964, 26.7.5). Rows that do not count weigh nothing (ratio estimate).
    """
    first, last = _ends(values.shape[2])
    inner = slice(first, values.shape[2] - last)
    count = rows.to(weights.dtype).sum(0)
    total = torch.where(rows, values.to(weights.dtype), 0.0).sum(0)
    all_counts = (count * weights).sum(1, keepdim=True).clamp(min=1)
    mean = (total * weights).sum(1, keepdim=True) / all_counts
    residual, wide = (total - mean * count)[:, inner], weights[inner]
    if len(wide) < 2:
        return values.new_full((values.shape[1],), math.nan)
    pairs, threes = residual.diff(dim=1).square() / 2, residual.diff(n=2, dim=1).square() / 6
    squares = torch.cat([pairs[:, :1], threes, pairs[:, -1:]], dim=1)
    within = squares.mean(1) * (wide * (wide - 1)).sum()
    freedom = len(wide) / 2
    widened = 1 + 2.5 / freedom + 5.75 / freedom**2 + 10.06 / freedom**3
    return widened * within.sqrt() / all_counts[:, 0]
