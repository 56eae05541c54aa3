"""One attention call, and what a backend is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from .._axes import Extent, extent_of, quote
from ..masks import Mask, as_mask


@dataclass(frozen=True)
class Call:
    """A checked attention call: everything a backend needs to know, and nothing else."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    extent: Extent

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        function: str = "attend",
    ) -> Call:
        """Check the parts of a call against each other.

        Raises:
            ValueError: one clear line for shapes, masks or numbers that do not fit.
        """
        extent = extent_of(q, k, v, function)
        mask = as_mask(mask)
        mask.check(extent)
        if softcap is not None and not softcap > 0:
            raise ValueError(f"{quote(q, k, v, function)}: softcap={softcap} must be over 0.")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"{quote(q, k, v, function)}: dropout={dropout} must be in [0, 1).")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        return cls(q, k, v, mask, factor, softcap, float(dropout), extent)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will come back for any part of the call."""
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in (self.q, self.k, self.v, *self.mask.tensors())
        )

    def with_(self, **changes: object) -> Call:
        """The same call with other parts."""
        return replace(self, **changes)  # type: ignore[arg-type]


@runtime_checkable
class Backend(Protocol):
    """A way to compute a call. It never falls back: what it cannot do, `refuse` says."""

    name: str

    def refuse(self, call: Call) -> list[str]:
        """The reasons for which this backend cannot serve the call; empty if it can."""
        ...

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Output `[B, H, T, Dv]` and log-sum-exp `[B, H, T]` (float32 at least).

        The LSE is differentiable where `lse_gradient` asks for it, and may be otherwise.
        """
        ...
