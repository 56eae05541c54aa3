"""Attention over ranks, built on PyTorch's meshes, DTensors, FSDP2 and distributed checkpoints."""

from .context import ContextParallel, attend, context_plan, positions, shard, unshard
from .merging import largest_logits, merged, share_of
from .split_keys import SeenOfAll, observe_split_keys
from .tensor import ColumnParallel, HeadParallel, RowParallel, plan

__all__ = [
    "ColumnParallel",
    "ContextParallel",
    "HeadParallel",
    "RowParallel",
    "SeenOfAll",
    "attend",
    "context_plan",
    "largest_logits",
    "merged",
    "observe_split_keys",
    "plan",
    "positions",
    "shard",
    "share_of",
    "unshard",
]
