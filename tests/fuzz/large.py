"""Tensors of more than 2³¹ numbers, most of which nobody reads and no memory holds.

A view with huge strides touches a page for each row; zeros that the system has not given out yet
are all one page of it. So both calls cross 2³¹ at the cost of a few MiB.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

EDGE = 2**31


def zeros(count: int, dtype: torch.dtype) -> Tensor | None:
    """So many zeros that nothing has touched; `None` where the machine does not give them out."""
    try:
        room = np.zeros(count, {2: np.int16, 4: np.int32}[dtype.itemsize])
    except MemoryError:
        return None
    return torch.from_numpy(room).view(dtype)


def far_apart(x: Tensor, axis: int) -> Tensor | None:
    """The same tensor with the last index of an axis more than 2³¹ numbers behind the first."""
    steps = x.shape[axis] - 1
    step = -(-(EDGE + 4096) // steps)
    room = zeros(steps * step + x.numel() + 4096, x.dtype)
    if room is None:
        return None
    strides = list(x.contiguous().stride())
    strides[axis] = step
    view = room.as_strided(x.shape, strides)
    return view.copy_(x)
