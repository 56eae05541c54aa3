"""Training a GPT on several ranks: copies of it (DDP) or shards (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..models.gpt import GPT
from ..models.ranks import TrainingRanks
from .group import Heartbeat, from_first

WAYS = ("ddp", "fsdp")
_T = TypeVar("_T")


class DataParallelRanks(TrainingRanks):
    """The ranks of the default process group, which train one model together.

    Args:
        how: `"ddp"`: every rank has the whole model, and gradients are averaged; `"fsdp"`: every
            rank has a share of each block's weights and moments.
        heartbeat: is told of steps, where there is one.

    Raises:
        ValueError: there is no such way.
    """

    def __init__(self, how: str, heartbeat: Heartbeat | None = None) -> None:
        from torch import distributed as dist

        if how not in WAYS:
            raise ValueError(f"parallel={how!r}: must be {' or '.join(WAYS)}")
        self.how = how
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._heartbeat = heartbeat

    def prepared(self, model: GPT) -> nn.Module:
        """Shard the model, or copy it; gives the module that a training step calls.

        Raises:
            ValueError: ranks would have to share a GPU.
        """
        device = next(model.parameters()).device.type
        number, there = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if device == "cuda" and number >= there:
            raise ValueError(
                f"{there} GPUs and more ranks on this machine; start {there} "
                f"(--nproc-per-node {there}), or train with --device cpu"
            )
        if self.how == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(device, (self.size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def whole(self, model: GPT) -> GPT:
        from torch.distributed.tensor import DTensor

        weights = model.state_dict()
        if not any(isinstance(weight, DTensor) for weight in weights.values()):
            return model
        full = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}
        return GPT.of_weights(model.config, full)

    def shared(self, make: Callable[[], _T]) -> _T:
        return from_first(make)

    def total(self, values: Tensor) -> Tensor:
        from torch import distributed as dist

        total = values.clone()
        dist.all_reduce(total)
        return total

    def begins(self, step: int) -> None:
        if self._heartbeat is not None:
            self._heartbeat.at(f"step {step:,}")
