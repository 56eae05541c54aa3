"""The processes that train one model together: here one, alone. `parallel.training` has several."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor, nn

from .gpt import GPT

_T = TypeVar("_T")


class TrainingRanks:
    """One process that trains alone; a base for several, each of which holds a share.

    rank, size: the number of this process, and how many there are.
    """

    rank = 0
    size = 1

    def prepared(self, model: GPT) -> nn.Module:
        """Shard or replicate the model; return the module that a training step calls."""
        return model

    def whole(self, model: GPT) -> GPT:
        """Gather the model of all shards; every rank must call this."""
        return model

    def shared(self, make: Callable[[], _T]) -> _T:
        """Call the function on rank 0; all ranks return its result, or raise what it raised."""
        return make()

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks; every rank must call this."""
        return values
