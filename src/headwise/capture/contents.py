"""Whether a tensor still holds what it held.

PyTorch counts changes in place, but not those through `.data` or `.numpy()`, and in inference mode
it counts none. So numbers are compared: exactly where a copy is cheap, else by sums.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 64


def checksum(x: Tensor) -> Tensor:
    """Sums of the bits of a tensor `[…, T, S]`: of each row, and of each column over some rows.

    A view with other axes before the last two has the same. In place of a copy, for tensors as
    large as scores.

    >>> x = torch.rand(2, 3, 4)
    >>> before = checksum(x)
    >>> torch.equal(checksum(x.view(1, 2, 3, 4)), before), torch.equal(checksum(x.mul_(2)), before)
    (True, False)
    """
    bits = x.detach().resolve_neg().view(_INTEGERS[x.element_size()])
    each = 8 // x.element_size()
    sizes = (bits.shape[-1], bits.storage_offset(), *bits.stride()[:-1])
    if bits.stride(-1) == 1 and not any(size % each for size in sizes):
        bits = bits.view(torch.int64)  # sums of whole words are several times as fast
    some = bits[..., :: max(1, bits.shape[-2] // _ROWS), :]
    return torch.cat([bits.sum(-1).flatten(), some.sum(-2).flatten()])


class Copy:
    """A copy of a tensor, without what is only repeated."""

    def __init__(self, x: Tensor) -> None:
        self._kept = once(x).clone()

    def same(self, x: Tensor) -> bool:
        """Whether a tensor of the same layout holds the same numbers."""
        return torch.equal(self._kept, once(x))


def once(x: Tensor) -> Tensor:
    """A tensor with one entry along the axes on which it repeats itself."""
    x = x.detach()
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


def captured(function: Callable[..., Any]) -> list[Any] | None:
    """Tensors and plain values that a function reads beside its arguments, those of the functions
    that it calls included; `None` where it reads something else, which may change unseen.

    >>> size = 3
    >>> captured(lambda i: i < size)
    [3]
    """
    found, todo, known = [], [function], set()
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, types.FunctionType):
            try:
                read = getclosurevars(one)
            except ValueError:  # a cell that is empty yet
                return None
            todo += [*read.nonlocals.values(), *read.globals.values()]
        elif isinstance(one, tuple | list):
            todo += one
        elif isinstance(one, Tensor | int | float | str | torch.dtype | torch.device | None):
            found.append(one)
        elif not isinstance(one, types.ModuleType | types.BuiltinFunctionType | type):
            return None
    return found
