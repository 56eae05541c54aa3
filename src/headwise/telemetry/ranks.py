"""Trainings of several ranks: one records, all clip and stop alike."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist


def several() -> bool:
    """Whether this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Whether this process is the one that records."""
    return not several() or dist.get_rank() == 0


def largest_of_all(largest: dict[str, Tensor]) -> dict[str, Tensor]:
    """The largest scores `[H]` of all ranks, by module; all must ask, of the same modules."""
    if not several() or not largest:
        return largest
    names = sorted(largest)
    every = torch.cat([largest[name].float() for name in names])
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return dict(zip(names, every.split([len(largest[name]) for name in names]), strict=True))


def any_of_all(here: bool, device: torch.device) -> bool:
    """Whether it is so on any rank; every rank must ask."""
    if not several():
        return here
    flag = torch.tensor(int(here), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
