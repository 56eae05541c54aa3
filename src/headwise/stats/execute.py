"""Run a plan: everything once, and all that it gave as one immutable `Pass`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.modes import no_graph, readable
from ..core.shapes import Extent
from .engine import Engine
from .needs import HEAD_OUTPUT, Need
from .plan import Plan
from .view import View


@dataclass(frozen=True, eq=False)
class Pass:
    """What one execution gave. Statistics are formulas on it: `found[need]` is a need's answer.

    There is an output where the call was made with one.
    """

    view: View
    out: Float[Tensor, "B H T Dv"] | None
    answers: Mapping[Need, Any]
    engine: Engine | None = field(repr=False)
    """`None` where only the answers are kept."""
    every: Pass | None = None
    """Of drawn queries, the same of all, with the needs whose figures of all are at hand."""

    def __getitem__(self, need: Need) -> Any:
        return self.answers[need]

    @property
    def lse(self) -> Float[Tensor, "B H _"]:
        """The log-sum-exp of all queries where the call was made with its output, else of those
        looked at; worked out now, if nothing needed it."""
        assert self.engine is not None
        return self.engine.lse_of_call

    @property
    def of_rows(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of the queries that are looked at, in the dtype of statistics."""
        assert self.engine is not None
        _ = self.engine.lse_of_call  # from the call itself, where that gives it
        return self.engine.lse

    def without_tensors(self, output: bool) -> Pass:
        """Return the answers alone, for statistics that are formulas on them.

        Without `output`, the heads' outputs are not among these: they are as large as the model's.
        """
        every = None if self.every is None else self.every.without_tensors(output)
        answers = dict(self.answers)
        if not output:
            answers.pop(HEAD_OUTPUT, None)
        return Pass(self.view.without_tensors(), None, answers, None, every)

    @property
    def extent(self) -> Extent:
        """The call's sizes, with as many queries as are looked at."""
        return self.view.extent

    @property
    def counts(self) -> Int[Tensor, "#B #H n"]:
        """How many keys each query may attend to."""
        return self.view.counts

    @property
    def valid_rows(self) -> Bool[Tensor, "#B #H n"]:
        """Queries that may attend to something."""
        return self.view.valid_rows


def execute(plan: Plan, engine: Engine) -> Pass:
    """Answer every need of a plan.

    Raises:
        ValueError: scores of finite q and k are no finite numbers; a need does not fit the call.
    """
    view = engine.view
    engine.fields, engine.reducers = plan.fields, plan.reducers
    engine.positions_too = plan.positions_too
    for need in plan.waiting:
        need.prepare(plan.routes[need], engine)
    wanted = view.drawn is not None and not engine.output and plan.masses
    if wanted and engine.few and readable(view.asked.q):
        engine.look_at_every_query()
    if engine.output or any(need.scores for need in plan.routes):
        _ = engine.lse_of_call
    with nullcontext() if view.gradients else no_graph():
        answers = {need: need.answer(route, engine) for need, route in plan.routes.items()}
        every = _of_every_query(plan, engine)
        return Pass(view, engine.whole_out, answers, engine, every)


def _of_every_query(plan: Plan, drawn: Engine) -> Pass | None:
    """The figures of all queries, where they cost next to nothing."""
    every = drawn.every
    if every is None:
        return None
    with no_graph():
        answers = {
            need: need.answer(route, every)
            for need, route in plan.routes.items()
            if need.at_hand(route, every, drawn)
        }
        return Pass(every.view, None, answers, every)
