"""The rank of this process, and the heads of a layer on it (`DTensor`)."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "no_heads")
"""Names of the number of heads in modules and configurations; attention modules also use `h`."""


def rank_of_all() -> int:
    """Return the rank of this process in the default process group; 0 without one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return 0
    return distributed.get_rank()


def number_of_heads(*modules: nn.Module) -> int | None:
    """Return the number of query heads on all ranks, from the first module that has it."""
    for module in modules:
        own = ("h",) if "att" in type(module).__name__.lower() else ()  # otherwise usually a height
        for owner in (module, getattr(module, "config", None)):
            for heads in (getattr(owner, name, None) for name in ("all_heads", *HEADS, *own)):
                if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
                    return heads
    return None


def place_of_heads(module: nn.Module, heads: int) -> tuple[int, int] | None:
    """Return the index of a call's first head in its layer, and the layer's number of heads.

    `None` if the call has all heads. If the rows of a module's weights are sharded over ranks, and
    its number of heads is that of the call times the ranks, the call has the heads of this rank, as
    with a `tp_plan` in transformers or with PyTorch's `ColwiseParallel`.
    """
    every = number_of_heads(module)
    if every is None or every == heads:
        return None
    for weight in module.parameters():
        if weight.dim() != 2 or getattr(weight, "device_mesh", None) is None:
            continue
        rank, ranks = _rank_of_rows(weight)
        if ranks * heads == every:
            return rank * heads, every
    return None


def _rank_of_rows(weight: Any) -> tuple[int, int]:
    """Return the index of this rank's part of the rows, and the number of parts."""
    rank, ranks = 0, 1
    for axis, place in enumerate(weight.placements):
        if place.is_shard(0):
            rank = rank * weight.device_mesh.size(axis) + weight.device_mesh.get_local_rank(axis)
            ranks *= weight.device_mesh.size(axis)
    return rank, ranks
