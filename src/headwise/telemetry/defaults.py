"""What a monitor records that is told nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ..stats.base import Statistic
from ..stats.execute import Pass
from ..stats.needs import HEAD_OUTPUT, Need
from ..stats.patterns import First, Previous
from ..stats.per_head import MaxLogit, Norms
from ..stats.per_query import Entropy, Mass
from ..stats.results import Reading


class _OutputSize:
    """Length of each head's output `[B, H, T]`, before the output projection."""

    names = ("output_norm",)
    free = True
    needs: Mapping[str, Need] = MappingProxyType({"output_norm": HEAD_OUTPUT})

    def read(self, found: Pass) -> dict[str, Reading]:
        out = found[HEAD_OUTPUT][0].to(found.view.dtype)
        return {"output_norm": Reading(torch.linalg.vector_norm(out, dim=-1), found.valid_rows)}

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
"""What a `Monitor` records that is told nothing else."""
