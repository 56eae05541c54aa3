"""The default statistics of a `Monitor`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..stats.entropy import Entropy
from ..stats.mass import Mass
from ..stats.max_logit import MaxLogit, Norms
from ..stats.output_norm import OutputLength
from ..stats.patterns import First, Previous
from ..stats.statistic import Statistic


class _OutputSize(Statistic):
    """Length of each head's output `[B, H, T]`, before the output projection."""

    names = raw = ("output_norm",)
    needs = MappingProxyType({"output_norm": OutputLength()})
    free = deferred = True

    def define(self, full: Any) -> dict[str, Tensor]:
        out = full.out.to(full.weights.dtype)
        return {"output_norm": torch.linalg.vector_norm(out, dim=-1)}


DEFAULT_STATISTICS: tuple[Statistic, ...] = (
    Entropy(),
    Mass(First()),
    Mass(Previous()),
    _OutputSize(),
    MaxLogit(),
    Norms(),
)
