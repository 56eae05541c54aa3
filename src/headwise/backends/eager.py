"""The definition as a backend: any call, with the T×T matrix."""

from __future__ import annotations

from torch import Tensor

from ..core.call import Call
from ..core.index import grid
from ..core.reference import rows
from .base import Backend


class Eager(Backend):
    """Builds the matrix. Slow, plain, and right."""

    name = "eager"

    def refuse(self, call: Call) -> list[str]:
        return []

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        full = rows(
            call.q,
            call.k,
            call.v,
            call.mask,
            call.extent,
            *grid(call.extent, call.q.device),
            scale=call.scale,
            softcap=call.softcap,
            dropout=call.dropout,
            sinks=call.sinks,
            seed=call.seed,
        )
        return full.out, full.lse
