"""One attention call, and what a backend is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
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
    sinks: Tensor | None = None

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
        sinks: Tensor | None = None,
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
        if sinks is not None and (fault := _fault_of(sinks, q)):
            raise ValueError(f"{quote(q, k, v, function)}: {fault}.")
        factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
        return cls(q, k, v, mask, factor, softcap, float(dropout), extent, sinks)

    @property
    def needs_grad(self) -> bool:
        """Whether autograd will come back for any part of the call."""
        sinks = () if self.sinks is None else (self.sinks,)
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in (self.q, self.k, self.v, *sinks, *self.mask.tensors())
        )

    def with_(self, **changes: object) -> Call:
        """The same call with other parts."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _fault_of(sinks: object, q: Tensor) -> str | None:
    """What is wrong with a call's sinks, in words."""
    want = f"one logit per query head, a floating-point tensor [{q.shape[1]}] on {q.device}"
    if not isinstance(sinks, Tensor):
        return f"sinks is a {type(sinks).__name__} and must be {want}"
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        given = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        return f"sinks is {given} and must be {want}"
    return None


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE with one more outcome that has no value, from those over the keys alone.

    `lse' = log(exp(lse) + exp(sink))` and `out' = out · exp(lse − lse')`; dead rows stay dead.
    """
    dead = lse == -torch.inf
    base, sink = lse.masked_fill(dead, 0.0), sinks.to(lse.dtype)[:, None]
    total = torch.logaddexp(base, sink).masked_fill(dead, -torch.inf)
    return (out * torch.sigmoid(base - sink)[..., None]).to(out.dtype), total


@runtime_checkable
class Backend(Protocol):
    """A way to compute a call. It never falls back: what it cannot do, `refuse` says."""

    name: str

    def refuse(self, call: Call) -> list[str]:
        """The reasons for which this backend cannot serve the call; empty if it can."""
        ...

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Output `[B, H, T, Dv]` and log-sum-exp `[B, H, T]` (float32 at least), sinks included.

        The LSE is differentiable where `lse_gradient` asks for it, and may be otherwise.
        """
        ...


@dataclass(frozen=True)
class Figures:
    """What one pass gave; `None` for what was not wished for.

    In rows that may attend to nothing `lse` and `max` are −inf and all else is 0. `entropy` is that
    of keys and sink together, `ahead` is `E[j − position]`, `first`, `previous` and `self` are
    probabilities of single keys. Everything but `max` is differentiable.
    """

    out: Float[Tensor, "B H T Dv"] | None
    lse: Float[Tensor, "B H T"] | None
    max: Float[Tensor, "B H T"] | None = None
    entropy: Float[Tensor, "B H T"] | None = None
    ahead: Float[Tensor, "B H T"] | None = None
    first: Float[Tensor, "B H T"] | None = None
    previous: Float[Tensor, "B H T"] | None = None
    self: Float[Tensor, "B H T"] | None = None

    def map(self, change: Callable[[Tensor], Tensor]) -> Figures:
        """The same figures, each put through `change`."""
        found = (getattr(self, field.name) for field in fields(self))
        return Figures(*(None if x is None else change(x) for x in found))


class OnePass(ABC):
    """A backend that has figures of every row from the pass that makes the output."""

    name: str

    @abstractmethod
    def refuse(self, call: Call) -> list[str]: ...

    @abstractmethod
    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def observe(self, call: Call, wishes: Iterable[str]) -> Figures:
        """Output, LSE and the wished figures, in one pass."""

    @abstractmethod
    def figures(self, call: Call, wishes: Iterable[str]) -> Figures:
        """The same without the output; the values are not read."""

    @abstractmethod
    def received(self, call: Call, lse: Tensor, weight: Tensor | None = None) -> Tensor:
        """`Σ_i weight_i p_ij` `[B, H, S]`, given the LSE (with the sinks in it)."""

    @abstractmethod
    def block_map(
        self,
        call: Call,
        lse: Tensor,
        query_block: Tensor,
        key_block: Tensor,
        blocks: int,
        weight: Tensor | None = None,
    ) -> Tensor:
        """`Σ weight_i p_ij` `[B, H, n, n]` over each block of queries and each of keys."""
