"""The batch axes and head axes of a call's tensors.

`[…, T, D]` may have any leading axes. If there are two, they are batch and heads, as documented by
PyTorch, unless the running modules imply another order; more than two are resolved by the running
modules. The result is verified from how the outputs are used (`parts`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import combinations
from math import prod

import torch
from torch import Tensor, nn

from .modules import Forward
from .ranks import number_of_heads


@dataclass(frozen=True)
class Leading:
    """The places of batch rows and heads among the axes before the last two.

    Args:
        sizes: the sizes of these axes.
        order: the indices of these axes, those of batch rows first, then those of heads.
        heads: the number of heads.
        sure: the number of heads is known; otherwise it is inferred from the usual order of axes.
        declared: the head axis was given by the user; the others are batch rows.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...]
    heads: int
    sure: bool
    declared: bool = False

    @property
    def rows(self) -> int:
        """The number of batch rows."""
        return prod(self.sizes) // max(self.heads, 1)

    @property
    def plain(self) -> bool:
        """True if the axes are in order."""
        return self.order == tuple(range(len(self.sizes)))

    @property
    def last(self) -> bool:
        """True if the axes are in order and only the last is heads, as PyTorch requires."""
        return self.plain and (len(self.sizes) < 2 or self.heads == self.sizes[-1])

    def resized(self, shape: torch.Size) -> Leading:
        """Return the same axes of an output of another shape, with as many axes."""
        sizes = tuple(shape[:-2])
        if len(sizes) != len(self.sizes):  # rows and heads in one axis
            sizes = prod(sizes) // self.heads, self.heads
        heads, count = 1, 0
        while heads < self.heads:
            count += 1
            heads = prod(self.sizes[axis] for axis in self.order[-count:])
        now = prod(sizes[axis] for axis in self.order[len(sizes) - count :])
        return Leading(sizes, self.order, now, self.sure, self.declared)

    def split(self, x: Tensor) -> Tensor:
        """Reshape `[…, N, D]` to `[B, H, N, D]`."""
        last = x.shape[-2:]
        if not self.plain:
            x = x.reshape(*self.sizes, *last).permute(*self.order, -2, -1)
        return x.reshape(self.rows, self.heads, *last)

    def join(self, x: Tensor, shape: torch.Size) -> Tensor:
        """Restore the shape of a tensor before `split()`."""
        if not self.plain:
            x = x.reshape(*(self.sizes[axis] for axis in self.order), *x.shape[-2:])
            back = [self.order.index(axis) for axis in range(len(self.order))]
            x = x.permute(*back, -2, -1)
        return x.reshape(shape)


def leading(
    shape: torch.Size,
    running: Sequence[Forward],
    values: Tensor | None = None,
    shared: Sequence[bool] = (),
    declared: int | None = None,
) -> Leading | None:
    """Find the axes of batch rows and heads; `None` if heads cannot be distinguished from blocks.

    Args:
        shape: the shape of the heads' outputs, `[…, T, Dv]`.
        running: the running modules, innermost last.
        values: the values, with the same axes; their strides show whether heads are inside rows.
        shared: True for axes that share their values, such as the heads of a group.
        declared: the user's number of heads, or the head axis of `shape`, negative from the end.

    Raises:
        ValueError: there is no such axis, or no axis of this size.
    """
    sizes, (queries, width) = tuple(shape[:-2]), shape[-2:]
    if declared is not None:
        return _as_declared(shape, declared)
    read = {pair for forward in running[-3:] for pair in forward.read}
    rows = {number // queries for number, _ in read if queries and number % queries == 0}
    if len(sizes) < 2:
        return _of_one_axis(prod(sizes), queries, width, running, read)
    known = composite()
    heads = known.heads if known else number_of_heads(*(one.module for one in running[-1:-4:-1]))
    if len(sizes) == 2:
        first = known is None and _heads_first(sizes, heads, rows, values)
        count, others = sizes[not first], sizes[first]
        sure = count == heads or (others in rows and count not in rows)
        return Leading(sizes, (1, 0) if first else (0, 1), count, sure)
    places = _places(sizes, heads, shared or (False,) * len(sizes))
    if places is None:
        return None
    order = (*(axis for axis in range(len(sizes)) if axis not in places), *places)
    count = prod(sizes[axis] for axis in places)
    return Leading(sizes, order, count, count == heads)


def _as_declared(shape: torch.Size, declared: int) -> Leading:
    """Return the axes from a given number of heads, or their given axis."""
    sizes = tuple(shape[:-2])
    axes = [axis for axis, size in enumerate(sizes) if size == declared]
    if declared < 0:
        axes = [axis for axis in range(len(sizes)) if axis - len(shape) == declared]
    if axes:
        order = (*(axis for axis in range(len(sizes)) if axis != axes[-1]), axes[-1])
        return Leading(sizes, order, sizes[axes[-1]], sure=True, declared=len(axes) == 1)
    if declared > 0 and sizes and sizes[0] % declared == 0:  # batch and heads in the first axis
        order = (0, *range(2, len(sizes) + 1), 1)
        split = (sizes[0] // declared, declared, *sizes[1:])
        return Leading(split, order, declared, sure=True, declared=len(sizes) > 1)
    what = (
        f"no axis {declared} before its last two"
        if declared < 0
        else f"no axis of {declared} heads"
    )
    raise ValueError(f"heads={declared}: attention with outputs {list(shape)} has {what}")


def _of_one_axis(
    size: int, queries: int, width: int, running: Sequence[Forward], read: set[tuple[int, int]]
) -> Leading:
    """Resolve a single axis: batch and heads together, or only batch."""
    known, positions = composite(), {number for number, _ in read}
    alone = size * queries in positions
    heads = known.heads if known else number_of_heads(running[-1].module, *_holders(running))
    heads = heads or _projected(size * queries, width, read) or 1
    if known is None and alone and size * queries // heads not in positions:
        heads = 1  # heads are called one by one
    if size % heads or heads == 1:
        return Leading((size,), (0,), 1, alone)
    return Leading((size // heads, heads), (0, 1), heads, sure=True)


def _projected(positions: int, width: int, read: set[tuple[int, int]]) -> int | None:
    """Return the number of heads from the output width of a projection to values, or to values with
    keys or with queries and keys."""
    found = {
        positions // number
        for number, wide in read
        if number
        and positions % number == 0
        and any(wide * number == share * positions * width for share in (1, 2, 3))
    }
    return found.pop() if len(found) == 1 else None


def _heads_first(
    sizes: tuple[int, ...], heads: int | None, rows: set[int], values: Tensor | None
) -> bool:
    """Return True if the first of two axes is heads."""
    fits = [size == heads for size in sizes] if heads else [size in rows for size in sizes[::-1]]
    if fits[0] != fits[1]:
        return fits[0]
    if sizes[0] != sizes[1] or values is None or values.dim() != 4:
        return False
    return 0 < values.stride(0) < values.stride(1)


def _places(
    sizes: tuple[int, ...], heads: int | None, shared: Sequence[bool]
) -> tuple[int, ...] | None:
    """Return the head axes among three or more: those of groups, then those that share values."""
    axes = [axis for axis in range(1, len(sizes)) if sizes[axis] > 1]
    if heads == 1:
        return ()
    if heads is None:
        if len(axes) > 1 and sum(shared[axis] for axis in axes) != len(axes) - 1:
            return None
        found = [tuple(axes)]
    else:
        found = [(axis,) for axis in axes if sizes[axis] == heads]
        found = found or [
            two for two in combinations(axes, 2) if sizes[two[0]] * sizes[two[1]] == heads
        ]
        if not found and sizes[0] == heads:
            found = [(0,)]
    return tuple(sorted(found[0], key=lambda axis: shared[axis])) if len(found) == 1 else None


def _holders(running: Sequence[Forward]) -> list[nn.Module]:
    """Return the attention modules around the innermost module, up to two levels, except those with
    several modules of its class, each of which may be a head."""
    kind = type(running[-1].module)
    return [
        forward.module
        for forward in running[-2:-4:-1]
        if "att" in type(forward.module).__name__.lower()
        and sum(type(part) is kind for part in forward.module.modules()) == 1
    ]


# ── composite functions ───────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Composite:
    """Facts about the attention calls inside a function that also projects.

    heads: the number of heads, for calls with batch and heads in one axis.
    own: True if queries and keys come from the same sequence; `None` if that is unknown.
    behind: the number of keys without a position that follow the others (`bias_k`, zeros).
    projection: the weight of the output projection, `[O, H · Dv]`.
    """

    heads: int
    own: bool | None
    behind: int
    projection: Tensor | None


_INSIDE: ContextVar[Composite | None] = ContextVar("_INSIDE", default=None)


def composite() -> Composite | None:
    """Return the composite function that is running in this thread, if any."""
    return _INSIDE.get()


@contextmanager
def inside(of: Composite) -> Iterator[None]:
    """Mark attention calls in a `with` block as part of a composite function."""
    token = _INSIDE.set(of)
    try:
        yield
    finally:
        _INSIDE.reset(token)


def keys_behind(module: nn.Module) -> int:
    """Return the number of keys without a position that follow the others.

    A composite function states it. If a module writes out its attention itself, the attributes
    that `nn.MultiheadAttention` and fairseq use for such keys show it.
    """
    within = composite()
    if within is not None:
        return within.behind
    learned = isinstance(getattr(module, "bias_k", None), Tensor)
    return learned + (getattr(module, "add_zero_attn", False) is True)
