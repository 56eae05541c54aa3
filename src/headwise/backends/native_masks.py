"""Masks in the form that the native kernel takes: flags, a range of keys per query, tables.

Causal masks and windows become flags without tensors. Masks with an interval become `[low, high)`
per query, and all others a table over the axes on which they depend. Each part of an `&` takes its
cheapest form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.index import grid
from ..core.mask_algebra import And, Interval, Mask, Rows, added
from ..core.masks import (
    ALiBi,
    Bias,
    Causal,
    Dense,
    Documents,
    Everything,
    Padding,
    Window,
    alibi_slopes,
)
from ..core.shapes import Extent
from ..kernels.interface import LARGEST, Terms

TABLE_LIMIT = 256 * 2**20
"""The largest size of a mask's tables, in bytes."""

_FAR = 2**62
"""Beyond any key; a query may be past the last key by more than the number of keys."""

_Part = tuple[Mask, Tensor | None, Extent]
"""A mask without `&` at its top, the queries of the whole call it applies to, and that call."""


def terms_of(mask: Mask, extent: Extent, device: torch.device) -> Terms:
    """Return the kernel's terms for a mask that was checked against the call.

    >>> from headwise.core.masks import Causal, Padding, Window
    >>> call = Extent(2, 1, 1, 5, 7)
    >>> terms_of(Causal() & Window(3), call, torch.device("cpu"))[6:]
    (2, True, 3)
    >>> terms_of(Padding(torch.tensor([4, 7])), call, torch.device("cpu")).high.flatten()
    tensor([4, 7])
    """
    if type(mask) in (Causal, Everything):
        return Terms(offset=extent.offset, causal=type(mask) is Causal)
    parts = list(_parts(mask, None, extent))
    rows, whole = next(((r, of) for _, r, of in parts if r is not None), (None, extent))
    causal, window = False, 0
    lows, highs, tables, biases, slopes = ([] for _ in range(5))
    for part, some, of in parts:
        kind, flags = type(part), some is rows and of == whole
        if kind is Causal and flags:
            causal = True
        elif isinstance(part, Window) and kind is Window and flags:
            size = min(part.size, _FAR)
            causal, window = True, min(window or size, size)
        elif kind is ALiBi and flags:
            slopes.append(alibi_slopes(extent.heads, device))
        elif isinstance(part, Padding) and kind is Padding:  # the same for all queries
            length = _per_query(part.lengths.to(device).view(-1, 1, 1, 1))
            right = part.side == "right"
            (highs if right else lows).append(length if right else of.keys - length)
        elif isinstance(part, Dense) and _is(part, Dense) and some is None:
            tables.append(part.mask.to(device))
        elif isinstance(part, Bias) and _is(part, Bias) and some is None:  # it has −inf already
            biases.append(part.values.to(device))
        elif kind is not Everything:
            i, j = _grid(some, of, device)
            interval = _interval(part, i, of)
            if interval is not None:
                lows.append(_per_query(interval[0]))
                highs.append(_per_query(interval[1]))
            if not _is(part, Bias) and (interval is None or part.biased):  # it has −inf already
                tables.append(part.allowed(i, j, of))
            if part.biased:
                biases.append(part.bias(i, j, of))
    tables = [allowed.bool() for allowed in tables if allowed is not None]
    biases = [_in_float32(bias.detach()) for bias in biases if bias is not None]
    return Terms(
        None if rows is None else rows + whole.offset,
        functools.reduce(torch.maximum, lows) if lows else None,
        functools.reduce(torch.minimum, highs) if highs else None,
        _table(functools.reduce(torch.logical_and, tables)) if tables else None,
        _table(functools.reduce(added, biases)) if biases else None,
        sum(slopes[1:], slopes[0]) if slopes else None,
        whole.offset,
        causal,
        window,
    )


def table_bytes(mask: Mask, extent: Extent, device: torch.device) -> int:
    """Return the size of the tables that `terms_of` would build; 0 if it builds none."""
    cells = extent.batch * extent.heads * extent.queries * extent.keys
    if cells * 5 <= TABLE_LIMIT:  # small enough in any case
        return 0
    tables, biases = [], []
    for part, rows, of in _parts(mask, None, extent):
        kind = type(part)
        if kind in (Everything, Causal, Window, ALiBi, Padding):
            continue
        if isinstance(part, Dense) and _is(part, Dense):
            tables.append((part.mask, rows is not None))
            continue
        if isinstance(part, Bias) and _is(part, Bias):
            biases.append((part.values, rows is not None or part.values.dtype != torch.float32))
            continue
        i, j = _grid(rows, of, device)
        few = i[:2], j[:, :2], of  # enough to find the axes of the parts
        if part.biased or _interval(part, i, of) is None:
            tables.append((part.allowed(*few), True))
        if part.biased:
            biases.append((part.bias(*few), True))
    return _bytes(tables, extent, 1) + _bytes(biases, extent, 4)


def _bytes(answers: list[tuple[Tensor | None, bool]], extent: Extent, each: int) -> int:
    """Return the size of the joint table; 0 for a table that need not be copied."""
    found = [(x, copied) for x, copied in answers if x is not None]
    if len(found) < 2 and not any(copied for _, copied in found):
        return 0
    sizes, axes = (extent.batch, extent.heads, extent.queries, extent.keys), [1, 1, 1, 1]
    for x, _ in found:
        for axis, size in enumerate(x.shape, start=4 - x.dim()):
            axes[axis] = max(axes[axis], sizes[axis] if size > 1 else 1)
    return each * math.prod(axes)


def _parts(mask: Mask, rows: Tensor | None, whole: Extent) -> Iterator[_Part]:
    if type(mask) is And:
        for part in mask.parts:
            yield from _parts(part, rows, whole)
    elif type(mask) is Rows:
        yield from _parts(mask.mask, mask.rows if rows is None else mask.rows[rows], mask.whole)
    else:
        yield mask, rows, whole


def _is(part: Mask, kind: type[Mask]) -> bool:
    """Return True for a mask of this kind, or of a subclass with the same meaning."""
    return isinstance(part, kind) and type(part).allowed is kind.allowed


def _interval(part: Mask, i: Tensor, of: Extent) -> Interval | None:
    return part.runs(i, of) if type(part) is Documents else part.interval(i, of)


def _grid(rows: Tensor | None, whole: Extent, device: torch.device) -> tuple[Tensor, Tensor]:
    i, j = grid(whole, device)
    return (i if rows is None else rows[:, None]), j


def _in_float32(bias: Tensor) -> Tensor:
    """Return a bias in float32 in which only −inf masks a key, not a number that overflows."""
    if bias.dtype == torch.float64:
        bias = torch.where(bias.isfinite(), bias.clamp(-LARGEST, LARGEST), bias)
    return bias.to(torch.float32)


def _per_query(edge: Tensor) -> Tensor:
    """Return `[B, H, T]` (int64), with size 1 where an axis is shared."""
    return edge[(None,) * (4 - edge.dim())][..., 0].long()


def _table(table: Tensor) -> Tensor:
    """Return `[B, H, T, S]`, with size 1 where an axis is shared, dense along the keys."""
    table = table[(None,) * (4 - table.dim())]
    return table if table.stride(3) == 1 or table.shape[3] == 1 else table.contiguous()
