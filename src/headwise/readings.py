"""What statistics give: a reading of one call, how it was read, a head's figure over several."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

KERNEL = "the kernel's own"
CALL = "identity: one more call"
PASS = "a pass over the scores"
KERNEL_PASS = "the kernel's pass over the scores"
ROWS = "rows of scores"
PAIRS = "the chosen scores alone"
OUTPUT = "from the output"
"""The roads by which figures are read (`Way.road`)."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One figure of every head: its tensor, and the rows that count in a mean.

    `values` is `[B, H, T]` per query or `[B, H, …]` per head. `rows` (broadcastable to
    `[B, H, T]`) holds the queries that have what is measured; `None` means that the figure is not
    per query. `among` holds the queries that could have had it, where that is news: the share of
    `rows` in it is the coverage. Of a figure that is the `largest`, heads keep the maximum. `error`
    is the standard error of each head's mean `[H]`, where queries were drawn by chance.

    For figures that are not per query, so that they can be joined over calls: `per_key` says that
    `values` `[B, H, S]` are sums over queries; `over` says of means over how many queries they
    were taken, entry by entry (broadcastable to `values`).
    """

    values: Tensor
    rows: Tensor | None = None
    among: Tensor | None = None
    largest: bool = False
    error: Tensor | None = None
    per_key: bool = False
    over: Tensor | None = None


@dataclass(frozen=True)
class Way:
    """How a figure is read in a call: the road taken, and why that one where there are others."""

    road: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.road}: {self.why}" if self.why else self.road


@dataclass(frozen=True)
class Figure:
    """A statistic in one number per head `[H]`, over batch, valid queries and calls."""

    mean: Tensor
    coverage: Tensor | None = None
    error: Tensor | None = None


def summarise(readings: list[Reading]) -> Figure | None:
    """The figure of each head over the readings of one or more calls; `None` for maps."""
    first = readings[0]
    if first.largest:
        return Figure(torch.stack([r.values.amax(0) for r in readings]).amax(0))
    if first.values.dim() != (2 if first.rows is None else 3):
        return None
    if first.rows is None:
        return Figure(torch.cat([r.values for r in readings]).mean(0))
    total = _sum_of_heads([torch.where(_held(r.rows, r), r.values, 0.0) for r in readings])
    count = _sum_of_heads([_held(r.rows, r) for r in readings])
    coverage = None
    if first.among is not None:
        coverage = count / _sum_of_heads([_held(r.among, r) for r in readings]).clamp(min=1)
    errors = [r.error for r in readings if r.error is not None]
    error = None
    if len(errors) == len(readings):
        shares = [_sum_of_heads([_held(r.rows, r)]) / count.clamp(min=1) for r in readings]
        parts = [share * part.cpu() for share, part in zip(shares, errors, strict=True)]
        error = torch.linalg.vector_norm(torch.stack(parts), dim=0)
    return Figure(total / count.clamp(min=1), coverage, error)


def _sum_of_heads(tensors: list[Tensor]) -> Tensor:
    """The sum over batch, queries and calls of tensors `[B, H, T]`: `[H]`, in float64."""
    return torch.stack([tensor.sum((0, 2)).cpu().double() for tensor in tensors]).sum(0)


def _held(rows: Tensor | None, reading: Reading) -> Tensor:
    assert rows is not None  # readings of one statistic are all per query, or none is
    return rows.expand(reading.values.shape)
