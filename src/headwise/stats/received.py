"""`Received`: column sums of P, by which heavy-hitter caches rank their keys."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.modes import readable
from ..core.numbers import check_whole
from ..core.reference import Definition
from .blocks import ScoreBlock
from .plan import KERNEL_PASS, PASS, Need, OfPass, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


@dataclass(frozen=True)
class Received(Statistic):
    """The attention that every key receives: `[B, H, S]`, column sums of P. No gradient.

    It sums to the number of valid queries minus the weight on learned sinks. Sampled queries are
    weighted by the number of queries they represent.

    Args:
        last: count only this many of the last queries (SnapKV's observation window). Default: all.

    Source: Zhang et al. 2023 (H2O), Li et al. 2024 (SnapKV).
    """

    last: int | None = None
    names = ("received",)

    def __post_init__(self) -> None:
        if self.last is not None:
            check_whole(self, "last", 1)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return {"received": _ReceivedFrom(self.last)}

    def metric(self, record: Record) -> dict[str, Reading]:
        return {"received": Reading(record[_ReceivedFrom(self.last)], per_key=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        first = 0 if self.last is None else max(0, full.extent.queries - self.last)
        return {"received": full.weights[:, :, first:].sum(2)}


@dataclass(frozen=True)
class _ReceivedFrom(OfPass):
    """`Σ_i p_ij` `[B, H, S]` over the `last` queries, or over all if `last` is `None`."""

    last: int | None
    name = "received"
    passes = True

    def route(self, setting: Setting) -> Route:
        return Route(KERNEL_PASS if setting.kernel_pass else PASS)

    def _counts(self, work: Work) -> Tensor:
        """Return the weight of each query: 0 before the `last` ones, else its sampling weight."""
        view = work.view
        first = 0 if self.last is None else view.whole.queries - self.last
        return (view.queries >= first) * view.weights.float()

    def accumulator(self, work: Work) -> _Columns:
        return _Columns(work.view.zeros(work.view.extent.keys), self._counts(work))

    def answer(self, route: Route, work: Work) -> Tensor:
        if route.kind == PASS:
            return super().answer(route, work)
        backend, call, lse = work.one_pass
        return backend.received(call, lse, self._counts(work))


class _Columns:
    """Sums of P over queries, weighted by `counts` `[n]`."""

    def __init__(self, total: Tensor, counts: Tensor) -> None:
        self.total, self.counts = total, counts.to(total.dtype)
        self.all = not readable(counts) or bool((counts == 1).all())

    def add(self, block: ScoreBlock) -> None:
        weights = self.counts[block.rows]
        if self.all or bool(weights.any()):
            self.total[block.heads, block.keys] += weights @ block.p
