"""`LSE` and `Sink`: the log-sum-exp of each row, and the weight on its learned sink."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..core.reference import Definition
from . import identities
from .blocks import RowFigure, ScoreBlock
from .plan import KERNEL, ROWS, UNREADABLE, Need, Route, Setting
from .run import Work
from .statistic import Statistic


class _LogSumExp(Need):
    """The log-sum-exp of each query's scores and sink, `[B, H, n]`."""

    name = "lse"

    def route(self, setting: Setting) -> Route:
        if setting.output:
            return Route(KERNEL)
        return Route("one more call", "there is no output to take it from")

    def answer(self, route: Route, work: Work) -> Tensor:
        return work.lse

    def available(self, route: Route, every: Work, drawn: Work) -> bool:
        return True


class _SinkMass(Need):
    """The weight on the learned sink, `exp(sink − lse)`; 0 in dead rows and without sinks."""

    name = "sink"

    def route(self, setting: Setting) -> Route:
        if setting.sinks and not setting.near:
            return Route(ROWS, "" if setting.readable else UNREADABLE)
        return Route("from the log-sum-exp")

    def row_figure(self, work: Work) -> RowFigure:
        def sink(block: ScoreBlock) -> Tensor:
            assert block.log_sink is not None
            return torch.exp(block.log_sink)

        return sink

    def answer(self, route: Route, work: Work) -> Tensor:
        if route.kind == ROWS:
            return work.by_rows(self)
        if work.view.sinks is None:
            return torch.zeros_like(work.lse)
        return torch.exp(identities.log_sink(work.lse, work.view.sinks))

    def available(self, route: Route, every: Work, drawn: Work) -> bool:
        return route.kind != ROWS


LOG_SUM_EXP, SINK_MASS = _LogSumExp(), _SinkMass()


@dataclass(frozen=True)
class LSE(Statistic):
    """Log-sum-exp of each row's scores and learned sink, in nats: `[B, H, T]`, −inf in dead rows.

    Source: Dao et al. 2022, algorithm 1 (kept there for the backward pass).
    """

    names = raw = ("lse",)
    needs = MappingProxyType({"lse": LOG_SUM_EXP})
    free = deferred = True

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"lse": full.lse}


@dataclass(frozen=True)
class Sink(Statistic):
    """The attention to the learned sink: `[B, H, T]`, `exp(sink_h − lse_i)`.

    This weight goes to no key; it is 0 in a call without `sinks`. (For attention to the first
    token, to which heads without a learned sink often attend, use `Mass(First())`.)

    Source: GPT-OSS 2025; Xiao et al. 2023.
    """

    names = raw = ("sink",)
    needs = MappingProxyType({"sink": SINK_MASS})
    free = deferred = True

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"sink": torch.zeros_like(full.lse) if full.sink is None else full.sink}
