"""Nested tensors, of which each batch row has a length of its own, as padded ones and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one tensor with zeros behind them, and the lengths `[B]`.

    The axis of length is the last but one.
    """
    rows = nested.unbind()
    lengths = [row.shape[-2] for row in rows]
    wide = [
        torch.nn.functional.pad(row, (0, 0, 0, max(lengths) - length))
        for row, length in zip(rows, lengths, strict=True)
    ]
    return torch.stack(wide), torch.tensor(lengths, device=nested.device)


def nested_like(wide: Tensor, like: Any) -> Tensor:
    """What `padded` made wide, nested as `like` is: `[B, T, E]` or `[B, H, T, E]`."""
    rows = [row[..., : part.shape[-2], :] for row, part in zip(wide, like.unbind(), strict=True)]
    if like.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    values = torch.cat([row if row.dim() == 2 else row.transpose(0, 1) for row in rows])
    found = torch.nested.nested_tensor_from_jagged(values, offsets=like.offsets())
    return found if like.dim() == 3 else found.transpose(1, 2)
