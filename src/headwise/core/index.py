"""Index tensors into a call's matrix, and table lookups by index.

`i` indexes queries, `j` keys; they broadcast against each other, as a grid `[t, 1]`, `[1, s]` or as
individual pairs with up to four axes `[B, H, t, s]`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .shapes import Extent


def grid(
    extent: Extent,
    device: torch.device | str | None = None,
    rows: slice | None = None,
    keys: slice | None = None,
) -> tuple[Tensor, Tensor]:
    """Return index tensors `[t, 1]`, `[1, s]` of a block. Default: the whole matrix."""
    i = torch.arange(*_ends(rows, extent.queries), device=device)
    j = torch.arange(*_ends(keys, extent.keys), device=device)
    return i[:, None], j[None, :]


def _ends(block: slice | None, size: int) -> tuple[int, int]:
    """Return a block's start and stop; PyTorch before 2.12 cannot compile `slice.indices()`."""
    if block is None:
        return 0, size
    return block.start or 0, size if block.stop is None else min(block.stop, size)


def take(ids: Tensor, index: Tensor) -> Tensor:
    """Return `ids[b, index]` as `[B, 1, t, s]`, for ids `[B or 1, S]` and up to four index axes."""
    if index.dim() < 3:
        return ids[:, index].unsqueeze(1)
    rows = torch.arange(ids.shape[0], device=ids.device).view(-1, 1, 1, 1)
    return ids[rows, index]


def lookup(table: Tensor, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
    """Return `table[…, i, j]` of a tensor that broadcasts to `[B, H, T, S]`."""
    table = table.to(i.device)
    table = table[(None,) * (4 - table.dim())]
    b, h, t, s = table.shape
    if i.dim() == 2 and j.dim() == 2 and i.shape[1] == 1 and j.shape[0] == 1:  # a grid
        if t > 1 and not _is_whole(i[:, 0], t):
            table = table.index_select(2, i[:, 0])
        if s > 1 and not _is_whole(j[0], s):
            table = table.index_select(3, j[0])
        return table
    device = table.device
    rows = torch.arange(b, device=device).view(-1, 1, 1, 1)
    heads = torch.arange(h, device=device).view(1, -1, 1, 1)
    return table[rows, heads, i if t > 1 else i * 0, j if s > 1 else j * 0]


def _is_whole(index: Tensor, size: int) -> bool:
    return len(index) == size  # a grid's index is strictly increasing
