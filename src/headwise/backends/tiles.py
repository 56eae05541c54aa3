"""Calls cut into tiles that fused kernels accept: without a mask, causal, or with a bias.

Fused kernels accept only a square causal mask or a float bias of T×S numbers. With tiles, any mask
needs bounded memory: keys hidden from all rows of a tile are skipped, keys visible to all rows need
no bias, and all other keys need a bias of a few MiB at a time. Tiles of the same rows are merged by
their log-sum-exps (Dao et al. 2022, §3.1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.index import grid
from ..core.mask_algebra import Mask
from ..core.masks import Causal, Everything
from ..core.modes import readable
from ..core.shapes import Extent, statistics_dtype

BIAS_AT_A_TIME = 1 << 22
"""The largest number of elements in the bias of a tile (16 MiB in float32)."""

ROWS_AT_A_TIME = 512
"""The largest number of queries in a tile with a bias; a small one skips more hidden keys."""


@dataclass(frozen=True)
class Tile:
    """Some queries and keys, with a `causal` mask (square, upper-left), a bias, or neither.

    The bias is −inf at masked pairs. `dead` `[B or 1, H or 1, t]` marks rows in which it is −inf
    everywhere; `None` if there are none.
    """

    rows: slice
    keys: slice
    causal: bool = False
    bias: Tensor | None = None
    dead: Tensor | None = None

    def covers(self, extent: Extent) -> bool:
        """Return True if the tile covers the whole call."""
        return (self.rows, self.keys) == (slice(0, extent.queries), slice(0, extent.keys))


def tiles(mask: Mask, extent: Extent, like: Tensor) -> Iterator[Tile]:
    """Return the tiles of a call, grouped by rows; `like` is q.

    Rows in no tile have no visible key. There is a single tile if a flag of the kernel, or a bias
    of moderate size, expresses the mask.
    """
    one = single_tile(mask, extent, like.device)
    return iter((one,)) if one is not None else cut(mask, extent, like)


def single_tile(mask: Mask, extent: Extent, device: torch.device) -> Tile | None:
    """Return the one tile of a call that needs no bias; `None` if it needs one."""
    causal = flag(mask, extent, device)
    return None if causal is None else Tile(slice(0, extent.queries), slice(0, extent.keys), causal)


def cut(mask: Mask, extent: Extent, like: Tensor) -> Iterator[Tile]:
    """Yield the tiles of a call whose mask cannot be expressed by a flag of the kernel."""
    device, every, all_keys = like.device, slice(0, extent.queries), slice(0, extent.keys)
    offset = extent.offset
    end = offset + extent.queries
    if (
        type(mask) is Causal and 0 < end <= extent.keys
    ):  # all queries see the keys before the causal square
        if offset > 0:
            yield Tile(every, slice(0, offset))
        yield Tile(slice(max(0, -offset), extent.queries), slice(max(0, offset), end), True)
    elif bias_size(mask, extent, device) <= BIAS_AT_A_TIME // 4 or not readable(like):
        yield with_bias(mask, extent, like, every, all_keys)
    else:
        bounds = Bounds.of(mask, extent, device)
        for start in range(0, extent.queries, ROWS_AT_A_TIME):
            stop = min(start + ROWS_AT_A_TIME, extent.queries)
            yield from _cut(mask, extent, like, bounds, slice(start, stop))


def _cut(mask: Mask, extent: Extent, like: Tensor, bounds: Bounds, rows: slice) -> Iterator[Tile]:
    """Yield the tiles of some rows; rows whose bias would be too large are halved first."""
    edges = bounds.edges(rows)
    width = bias_size(mask, extent, like.device) // (extent.queries * extent.keys)
    needed = max((stop - start for start, stop, open_ in edges if not open_), default=0)
    size = rows.stop - rows.start
    if size > 1 and size * needed * width > BIAS_AT_A_TIME:
        middle = rows.start + size // 2
        yield from _cut(mask, extent, like, bounds, slice(rows.start, middle))
        yield from _cut(mask, extent, like, bounds, slice(middle, rows.stop))
        return
    step = max(1, BIAS_AT_A_TIME // (size * width))
    for start, stop, open_ in edges:
        if open_:
            yield Tile(rows, slice(start, stop))
            continue
        for first in range(start, stop, step):
            keys = slice(first, min(first + step, stop))
            yield with_bias(mask, extent, like, rows, keys)


@dataclass(frozen=True)
class Bounds:
    """Each query's first and last visible key in any batch row or head, and those seen in all."""

    first: list[int]
    open_first: list[int]
    open_last: list[int]
    last: list[int]

    @classmethod
    def of(cls, mask: Mask, extent: Extent, device: torch.device) -> Bounds:
        nothing = [0] * extent.queries
        everything = [extent.keys] * extent.queries
        found = mask.key_ranges(extent, device) if extent.batch else None
        if found is None or not all(map(readable, found)):
            return cls(nothing, nothing, nothing, everything)
        low, high = found
        empty = high == low  # empty rows must not widen the range of others
        first = low.masked_fill(empty, extent.keys).amin((0, 1)).tolist()
        last = high.masked_fill(empty, 0).amax((0, 1)).tolist()
        if mask.biased:
            return cls(first, nothing, nothing, last)
        return cls(first, low.amax((0, 1)).tolist(), high.amin((0, 1)).tolist(), last)

    def edges(self, rows: slice) -> list[tuple[int, int, bool]]:
        """Return key ranges `(start, stop, open)` for these rows; open ranges need no bias."""
        first, last = min(self.first[rows]), max(self.last[rows])
        low, high = max(self.open_first[rows]), min(self.open_last[rows])
        if last <= first:
            return []
        if high - low < 128:  # too small for a separate tile
            return [(first, last, False)]
        edges = [(first, low, False), (low, high, True), (high, last, False)]
        return [edge for edge in edges if edge[1] > edge[0]]


def flag(mask: Mask, extent: Extent, device: torch.device) -> bool | None:
    """Return the kernel's causal flag if the mask needs no bias, else `None`."""
    square = extent.queries == extent.keys
    if type(mask) is Everything or (type(mask) is Causal and 0 < extent.keys <= extent.offset + 1):
        return False if extent.keys else None
    if type(mask) is Causal:
        return True if square and not extent.offset else None
    if mask.biased or not square:
        return None
    # Other masks may be equivalent to these, such as a window wider than the sequence.
    ranges = mask.key_ranges(extent, device)
    if ranges is None or not all(map(readable, ranges)) or bool((ranges[0] != 0).any()):
        return None
    if bool((ranges[1] == extent.keys).all()):
        return False
    after = torch.arange(1, extent.queries + 1, device=device)
    return True if bool((ranges[1] == after).all()) else None


def with_bias(mask: Mask, extent: Extent, like: Tensor, rows: slice, keys: slice) -> Tile:
    """Return the tile of these rows and keys, with its mask as a bias."""
    i, j = grid(extent, like.device, rows, keys)
    allowed, bias = mask.allowed(i, j, extent), mask.bias(i, j, extent)
    dtype = statistics_dtype(like.dtype)
    if like.device.type != "cpu" and (bias is None or bias.dtype == like.dtype):
        dtype = like.dtype  # required by the kernels, and exact for 0, −∞ and the bias
    if allowed is None:
        return Tile(rows, keys, bias=None if bias is None else _four(bias.to(dtype)))
    allowed = _four(allowed)
    dead = ~allowed.any(-1)
    ground = torch.zeros((), dtype=dtype, device=like.device) if bias is None else bias.to(dtype)
    return Tile(rows, keys, bias=_four(torch.where(allowed, ground, -torch.inf)), dead=dead)


def bias_size(mask: Mask, extent: Extent, device: torch.device) -> int:
    """Return the number of elements in a bias for the whole mask."""
    # One query and one key show whether the mask has batch and head axes.
    i, j = grid(extent, device, slice(0, 1), slice(0, 1))
    axes = [1, 1]
    for part in (mask.allowed(i, j, extent), mask.bias(i, j, extent)):
        if part is not None:
            axes = [max(a, b) for a, b in zip(axes, _four(part).shape[:2], strict=True)]
    return axes[0] * axes[1] * extent.queries * extent.keys


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]
