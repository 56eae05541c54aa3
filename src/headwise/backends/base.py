"""What a backend is, and what one gives that has figures of every row from its one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from ..core.call import (
    Call,
)


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

    def output(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Output and log-sum-exp, or `None` in its place where the backend itself has seen that
        the weights of every row are numbers."""
        return self.run(call)


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


class OnePass(Backend, ABC):
    """A backend that has figures of every row from the pass that makes the output."""

    name: str

    @abstractmethod
    def refuse(self, call: Call) -> list[str]: ...

    @abstractmethod
    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]: ...

    @abstractmethod
    def observe(self, call: Call, wishes: Iterable[str], gradients: bool = True) -> Figures:
        """Output, LSE and the wished figures, in one pass.

        Without `gradients` the figures have none, and the graph of the output keeps the tensors
        that `run()` would keep, no more: a checkpoint that is computed again without figures must
        find the same.
        """

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
