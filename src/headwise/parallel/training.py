"""Train a GPT on several ranks: replicated (DDP) or sharded (FSDP2)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ..models.gpt import GPT
from ..models.run import TrainingRanks
from .group import from_first

STRATEGIES = ("ddp", "fsdp")
_T = TypeVar("_T")


class DataParallelRanks(TrainingRanks):
    """The ranks of the default process group, which train one model together.

    Args:
        strategy: `"ddp"`: every rank has the whole model, and gradients are averaged; `"fsdp"`:
            every rank has a shard of each block's weights and moments.

    Raises:
        ValueError: an unknown strategy.
    """

    def __init__(self, strategy: str) -> None:
        if strategy not in STRATEGIES:
            raise ValueError(f"parallel must be {' or '.join(STRATEGIES)}, got {strategy!r}")
        self.strategy = strategy
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def prepared(self, model: GPT) -> nn.Module:
        """Replicate or shard the model; return the module that a training step calls.

        Raises:
            ValueError: ranks would have to share a GPU.
        """
        device = next(model.parameters()).device.type
        number, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if device == "cuda" and number >= gpus:
            raise ValueError(
                f"this machine has {gpus} GPUs but more ranks; start {gpus} "
                f"(--nproc-per-node {gpus}), or train with --device cpu"
            )
        if self.strategy == "ddp":
            return nn.parallel.DistributedDataParallel(model)
        mesh = init_device_mesh(device, (self.size,))
        for block in model.transformer.h:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def full_model(self, model: GPT) -> GPT:
        weights = model.state_dict()
        if not any(isinstance(weight, DTensor) for weight in weights.values()):
            return model
        full = {n: w.full_tensor() if isinstance(w, DTensor) else w for n, w in weights.items()}
        return GPT.of_weights(model.config, full)

    def shared(self, make: Callable[[], _T]) -> _T:
        return from_first(make)

    def total(self, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total
