"""`explain()`: the backend of a call, and how its statistics would be computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from ..backends import Call, Choice, consider
from ..core.call import OPTIONS, AttendOptions
from ..core.unknown import refuse_unknown
from ..kernels import ctypes_api as cpu
from .observe import planned
from .plan import VIA
from .run import Work
from .sampling import draw
from .statistic import Statistic, Statistics
from .view import View


@dataclass(frozen=True, repr=False)
class Explanation:
    """The backend of a call, why each other backend was not chosen, and the routes of statistics.

    `unit` is the instruction set that the native kernel would use for the call on a CPU.
    `statistics` maps each metric to its route, such as `"identity: one more call"` or `"a pass over
    the scores"`, with the reason if there is a choice.
    """

    chosen: str
    choices: tuple[Choice, ...]
    statistics: dict[str, str] = field(default_factory=dict)
    unit: str = ""

    def __repr__(self) -> str:
        return f"<Explanation: {self.chosen}; print() shows the reasons>"

    def __str__(self) -> str:
        lines = []
        for choice in self.choices:
            verdict = "; ".join(choice.reasons) or "can run this call"
            if choice.name == "native" and self.unit:
                verdict += f" with {self.unit}"
            arrow = "→" if choice.name == self.chosen else " "
            lines.append(f"{arrow} {choice.name:8} {verdict}")
        wide = max((len(name) for name in self.statistics), default=0)
        lines += [f"  {name:{wide}}  {way}" for name, way in self.statistics.items()]
        return "\n".join(lines)


def explain(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *statistics: Statistic,
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
    **options: Unpack[AttendOptions],
) -> Explanation:
    """List every backend with the reasons why it cannot run the call, and mark the chosen one.

    If statistics are given, also list how `observe()` would compute each of them. The arguments
    are those of `observe()`. Nothing is computed.

    Raises:
        ValueError: for the same reasons as `observe()`.

    >>> import torch
    >>> q = k = v = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    >>> print(explain(q, k, v, softcap=30.0))
      native   ...
      sdpa     softcap is not linear in the scores
    → blocked  can run this call
      eager    can run this call
    >>> from headwise.stats.entropy import Entropy
    >>> from headwise.stats.max_logit import MaxLogit
    >>> for name, way in explain(q, k, v, Entropy(), MaxLogit(), softcap=30.0).statistics.items():
    ...     print(f"{name}: {way}")
    entropy: a pass over the scores: softcap is not linear in the scores
    entropy_share: a pass over the scores: softcap is not linear in the scores
    max_logit: rows of scores: only those that can contain the largest score
    """
    if unknown := [option for option in options if option not in OPTIONS]:
        refuse_unknown("explain(q, k, v", explain, unknown, shared=OPTIONS)
    call = Call.of(q, k, v, function="explain", **options)
    choices = tuple(consider(call))
    sample = None if queries is None else draw(queries, call.extent.queries, seed, q.device)
    keeps_graph = call.needs_grad
    view = View(call, sample, gradients and keeps_graph)
    work = Work(view, keeps_graph, output, projection)
    routes = planned(work, Statistics.of(statistics), backend, "explain").routes
    reasons: dict[str, str] = {}
    for statistic in statistics:
        reasons |= dict.fromkeys(statistic.names, "as defined by the statistic")
        for name, need in statistic.needs.items():
            route = routes[need]
            if route.kind == VIA and need.via is not None:
                route = routes[need.via]
            reasons[name] = str(need.shown(route, work))
    native = next(choice for choice in choices if choice.name == "native")
    unit = "" if native.reasons or q.is_cuda else cpu.unit(q.dtype)
    return Explanation(work.chosen.name, choices, reasons, unit)
