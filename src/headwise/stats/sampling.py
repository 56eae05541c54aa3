"""A few queries in place of all: which ones, their masks, and how far off their mean may be."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.numbers import LONGEST, said, whole


@dataclass(frozen=True)
class Sample:
    """Queries to look at, `rows` `[n]` in ascending order, of `of` in all.

    `drawn` says that they were drawn by chance, one from each of n equal stretches: then their mean
    has a standard error.
    """

    rows: Tensor
    of: int
    drawn: bool


def draw(
    queries: int | Sequence[int] | Tensor, of: int, seed: int, device: torch.device
) -> Sample | None:
    """The sample that a caller asked for: a number of queries, or the queries themselves.

    A number is drawn stratified: one query from each of so many equal stretches. `None` where the
    number is at least that of all queries.

    Raises:
        ValueError: no query, one named twice, or one that there is not.

    >>> draw(4, 100, 0, torch.device("cpu")).rows // 25
    tensor([0, 1, 2, 3])
    """
    queries, seed = check_queries(queries), _checked(seed)
    compiling = torch.compiler.is_compiling()
    if isinstance(queries, int):
        if queries >= of:
            return None
        rows = (_drawn if compiling else _draw)(queries, of, seed)
        return Sample(rows.to(device), of, True)
    rows = torch.as_tensor(queries).flatten()
    ordered = (_sorted if compiling else _sort)(rows, of)
    if len(ordered) == of:
        return None
    return Sample(ordered.to(device), of, False)


def _draw(queries: int, of: int, seed: int) -> Tensor:
    """One query from each of so many equal stretches, in order."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.arange(queries + 1, dtype=torch.float64) * of / queries
    low, high = edges[:-1].ceil().long(), edges[1:].ceil().long()
    inside = torch.rand(queries, generator=generator, dtype=torch.float64)
    return low + (inside * (high - low)).floor().long()


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
    schema="(SymInt queries, SymInt of, SymInt seed) -> Tensor",
)
_sorted = torch.library.custom_op(
    "headwise::named_queries",
    _sort,
    mutates_args=(),
    schema="(Tensor rows, SymInt of) -> Tensor",
)


@_drawn.register_fake
def _(queries: int, of: int, seed: int) -> Tensor:
    return torch.empty(queries, dtype=torch.long)


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
    if not torch.compiler.is_compiling() and len(rows.unique()) < len(rows):
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


def standard_error(values: Tensor, rows: Tensor, of: int) -> Tensor:
    """Of each head's mean over a stratified sample: `[H]`, from values and rows `[B, H, n]`.

    Neighbouring stretches stand in for repeated draws from one: half the squared differences of
    their residuals estimate the variance within (Cochran 1977, §5A.12), less the share of
    queries that was looked at. Rows that do not count weigh nothing (ratio estimate).
    """
    n = values.shape[2]
    if n < 2:
        return values.new_full((values.shape[1],), math.nan)
    count = rows.to(values.dtype).sum(0)
    total = torch.where(rows, values, 0.0).sum(0)
    all_counts = count.sum(1, keepdim=True).clamp(min=1)
    residual = total - total.sum(1, keepdim=True) / all_counts * count
    within = residual.diff(dim=1).square().sum(1) * n / (2 * (n - 1))
    return (max(0.0, 1 - n / of) * within).sqrt() / all_counts[:, 0]
