"""The interface of backends, and the per-query results of one pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

from ..core.call import Call


class Backend(ABC):
    """A way to compute a call. It never falls back: `refuse` names what it cannot do."""

    name: str

    def refuse(self, call: Call) -> list[str]:
        """Return the reasons for which this backend cannot run the call; empty if it can."""
        return []

    @abstractmethod
    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """Return output `[B, H, T, Dv]` and log-sum-exp `[B, H, T]`, sinks included.

        The LSE is in float32 at least, and differentiable at least where `lse_gradient` is set.
        """

    def output(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp, or `None` in its place if the backend has checked that no
        weights are NaN."""
        return self.run(call)


@dataclass(eq=False)
class RowStatistics:
    """The results of one pass; `None` for those that were not requested.

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

    def at(self, rows: Tensor) -> RowStatistics:
        """Return the results of some queries, without the output; each tensor is indexed once."""
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
        """Return the same results, each put through `change`."""
        found = (getattr(self, field.name) for field in fields(self))
        return RowStatistics(*(None if x is None else change(x) for x in found))
