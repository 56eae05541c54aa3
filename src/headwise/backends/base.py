"""The interface of backends, and the per-query results of one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

from ..core.call import Call


class Backend(ABC):
    """An implementation of attention calls. It never falls back to another."""

    name: str

    def refuse(self, call: Call) -> list[str]:
        """Return the reasons why this backend cannot run the call; empty if it can."""
        return []

    @abstractmethod
    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return output `[B, H, T, Dv]` and log-sum-exp `[B, H, T]`, sinks included.

        The LSE is in at least float32, and differentiable if `lse_gradient` is set.
        """

    def output(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return the output and the log-sum-exp, which is `None` if the backend has checked that no
        weights are NaN."""
        return self.run(call)


@dataclass(eq=False)
class RowStatistics:
    """The results of one pass; `None` for those that were not requested.

    In rows without a visible key, `lse` and `max` are −inf and all others are 0. `entropy` is over
    keys and sink, `ahead` is `E[j − position]`, and `first`, `previous` and `self` are weights on
    single keys. All but `max` are differentiable.
    """

    out: Float[Tensor, "B H T Dv"] | None
    lse: Float[Tensor, "B H T"] | None
    max: Float[Tensor, "B H T"] | None = None
    entropy: Float[Tensor, "B H T"] | None = None
    ahead: Float[Tensor, "B H T"] | None = None
    first: Float[Tensor, "B H T"] | None = None
    previous: Float[Tensor, "B H T"] | None = None
    self: Float[Tensor, "B H T"] | None = None

    def at(self, rows: Tensor) -> RowStatistics:
        """Return the results of the queries `rows`, without the output."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "out"}
        given = {name: x for name, x in given.items() if x is not None}
        some: dict[int, Tensor] = {}
        for name, x in given.items():
            base = x._base
            if base is None or base.dim() != 4 or base.requires_grad:
                given[name] = x[:, :, rows]
                continue
            if id(base) not in some:
                some[id(base)] = base[..., rows]
            place = (x.storage_offset() - base.storage_offset()) // base.stride(0)
            given[name] = some[id(base)][place]
        return RowStatistics(None, **{"lse": None} | given)

    def map(self, change: Callable[[Tensor], Tensor]) -> RowStatistics:
        """Return the results with `change` applied to each."""
        found = (getattr(self, field.name) for field in fields(self))
        return RowStatistics(*(None if x is None else change(x) for x in found))
