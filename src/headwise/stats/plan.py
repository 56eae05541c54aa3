"""Needs of statistics, and the route by which each is answered: pure functions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..core.shapes import Extent
from .blocks import Accumulator, RowFigure, RowSums, ScoreBlock
from .view import View

Work = Any
"""A call while its needs are answered: that of `run.py`, of which plans know nothing."""

KERNEL = "the kernel's own"
CALL = "identity: one more call"
PASS = "a pass over the scores"
KERNEL_PASS = "the kernel's pass over the scores"
ROWS = "rows of scores"
PAIRS = "the chosen scores alone"
OUTPUT = "from the output"
VIA = "from another figure"
"""The ways in which a need is answered (`Route.kind`)."""

UNREADABLE = "where numbers cannot be read, it may not depend on them"


@dataclass(frozen=True)
class Route:
    """The way in which a need is answered in a call, and the reason if there are others."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


TOGETHER = Route(CALL, "the same for entropy and distance")


@dataclass(frozen=True)
class Setting:
    """The properties of a call that routes depend on.

    Args:
        extent: the sizes, with the number of queries that are looked at.
        dim: the head dimension.
        output: the call is made with its output.
        kernel: a one-pass backend makes the call.
        kernel_pass: a one-pass backend makes the passes over the scores.
        nonlinear: why the scores are not linear in the keys; empty if they are.
        gradients: metrics are to have gradients.
        sinks: there are learned sinks.
        behind: visible keys are ranges with none ahead of their query; only looked into where a
            need depends on it.
        readable: the numbers in the call's tensors can be read; else routes are taken that do not
            depend on them.
        whole: all queries are looked at.
        near: probabilities can be computed from the log-sum-exp (`blocks.near`).
        direct: a one-pass backend reads the call as it is, without a graph.
    """

    extent: Extent
    dim: int
    output: bool
    kernel: bool
    kernel_pass: bool
    nonlinear: str
    gradients: bool
    sinks: bool
    behind: bool
    readable: bool
    whole: bool
    near: bool = True
    direct: bool = False


class Need(ABC):
    """Raw numbers of a call that statistics read. Needs that are equal are one.

    `name` is what it is called in routes, `kernel` the field of a one-pass backend that holds it.
    """

    name: str
    kernel: str | None = None
    via: Need | None = None
    """The need whose answer serves where the route is `VIA`."""
    passes = False
    """A one-pass backend answers it by a pass of its own."""
    scores = True
    """It reads scores, or their log-sum-exp: else no call is made for its sake."""
    mass = False
    """It is a mass on chosen keys, of which few queries may hold most."""
    vectors = False
    """True if it needs the queries and keys themselves, not only the scores."""
    output = False
    """It reads the heads' outputs."""
    flexible = False
    """An extra call or a pass that is made anyhow answers it, whichever costs less."""
    among_keys = False
    """Its pass is over probabilities among the keys alone, as if there were no sink."""

    @abstractmethod
    def route(self, setting: Setting) -> Route:
        """Return the way in which such a call answers it."""

    @abstractmethod
    def answer(self, route: Route, work: Work) -> Any:
        """Return the numbers, `[B, H, n]` where they are one for each query."""

    def resolve(self, view: View) -> None:  # noqa: B027
        """Work out now what its metric reads of masks, which may hold other numbers later."""

    def shown(self, route: Route, work: Work) -> Route:
        """Return the route as `explain()` shows it, where that depends on numbers."""
        return route

    def row_figure(self, work: Work) -> RowFigure:
        """Return the sums over keys `[heads, t]` that answer it, from blocks of probabilities."""
        raise NotImplementedError(f"{self.name} is no sum over keys")

    def accumulator(self, work: Work) -> Accumulator:
        """Return what takes in every block of P, before a pass."""
        return RowSums(self.row_figure(work), work.view.zeros(work.view.extent.queries))

    def available(self, route: Route, every: Work, drawn: Work) -> bool:
        """Return True if the answer of all queries costs next to nothing, their LSE being known.

        They may be few beside those `drawn`, or have a pass behind them that gave fields too.
        """
        given = every.given
        return route.kind == KERNEL and getattr(given, self.kernel or "", None) is not None


class OfPass(Need):
    """A need that a pass over the scores answers. No gradient."""

    def route(self, setting: Setting) -> Route:
        return Route(PASS)

    def answer(self, route: Route, work: Work) -> Any:
        return work.by_head(work.reduced(self).total)


@dataclass(frozen=True)
class RowSum(OfPass):
    """A sum over keys of anything made of P, `[B, H, n]`: `figure(block)` `[heads, t]`, summed.

    `block.p` and `block.log_p` are `[heads, t, s]` at the queries `block.rows` and the keys
    `block.keys`. No gradient.
    """

    name: str
    figure: Callable[[ScoreBlock], Tensor]

    def row_figure(self, work: Work) -> RowFigure:
        return self.figure


@dataclass(frozen=True)
class Plan:
    """A route for each need, in the order of the needs.

    `steps` are these once more, each with the field of a one-pass backend that answers it, if one
    does: `fields` are those fields; `reduced` are the needs that a pass over the scores answers,
    `rows` those that one over whole rows does; with `together`, one extra call answers two needs.
    `scores` and `masses` say that some need reads scores, or is a mass, `direct` that a one-pass
    backend may be given the call as it is. `far` is the plan for calls whose log-sum-exp is not
    `near`, where that is another.
    """

    routes: Mapping[Need, Route]
    steps: tuple[tuple[Need, Route, str | None], ...]
    fields: tuple[str, ...]
    reduced: tuple[Need, ...]
    rows: tuple[Need, ...]
    together: bool
    scores: bool
    masses: bool
    direct: bool
    far: Plan | None = None


def plan(setting: Setting, needs: tuple[Need, ...]) -> Plan:
    """Choose a route for each need of a call.

    A one-pass backend has its numbers from its own pass. Elsewhere entropy and position are one
    extra call each; both together are one, a little wider. Beside a pass over the scores that is
    made anyhow, both come from that; of few queries too, for whom a call would pad and copy all
    keys.
    """
    routes = {need: need.route(setting) for need in needs}
    two = [need for need in routes if need.flexible and routes[need].kind != KERNEL]
    why = "" if setting.gradients or not two else _why_pass(setting, routes)
    for need in two if why else ():
        routes[need] = Route(PASS, (routes[need].kind == ROWS and setting.nonlinear) or why)
    together = len(two) == 2 and {routes[need].kind for need in two} == {CALL}
    if together:
        routes |= dict.fromkeys(two, TOGETHER)
    own = Need.row_figure
    steps = tuple((n, r, n.kernel if r.kind == KERNEL else None) for n, r in routes.items())
    made = Plan(
        routes,
        steps=steps,
        fields=tuple(field for _, _, field in steps if field),
        reduced=tuple(n for n, r in routes.items() if r.kind == PASS),
        rows=tuple(
            n for n, r in routes.items() if r.kind == ROWS and type(n).row_figure is not own
        ),
        together=together,
        scores=any(need.scores for need in routes),
        masses=any(need.mass for need in routes),
        direct=setting.direct,
    )
    if not setting.near:
        return made
    far = plan(replace(setting, near=False), needs)
    return made if far.routes == routes else replace(made, far=far)


def _why_pass(setting: Setting, routes: Mapping[Need, Route]) -> str:
    """Return why entropy and position come from a pass over the scores; empty if they do not."""
    for need, route in routes.items():
        if route.kind == PASS and not (need.among_keys and setting.sinks):
            return f"it is made for {need.name} anyhow"
    if setting.nonlinear and any(n.flexible and r.kind == ROWS for n, r in routes.items()):
        return "it is made for entropy anyhow"
    if setting.output and setting.extent.queries * 8 <= setting.extent.keys:
        return "of few queries it costs less than a call, which pads and copies all keys"
    return ""
