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
"""A call whose needs are being answered: the `Work` of `run.py`, which plans do not import."""

KERNEL = "the kernel's own"
CALL = "identity: one more call"
PASS = "a pass over the scores"
KERNEL_PASS = "the kernel's pass over the scores"
ROWS = "rows of scores"
PAIRS = "the chosen scores alone"
OUTPUT = "from the output"
VIA = "from another metric"
"""The kinds of routes (`Route.kind`)."""

UNREADABLE = "numbers cannot be read here, so the route must not depend on them"


@dataclass(frozen=True)
class Route:
    """The route by which a need is answered in a call, and why, if other routes exist."""

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.why}" if self.why else self.kind


TOGETHER = Route(CALL, "the same for entropy and distance")


@dataclass(frozen=True)
class Setting:
    """The properties of a call that routes depend on.

    Args:
        extent: the sizes, with the number of observed queries.
        dim: the head dimension.
        output: the call computes its output.
        kernel: a one-pass backend runs the call.
        kernel_pass: a one-pass backend runs the passes over the scores.
        nonlinear: why the scores are not linear in the keys; empty if they are.
        gradients: metrics have gradients.
        sinks: there are learned sinks.
        behind: the visible keys of each query are one range without keys ahead of it; determined
            only if a need depends on it.
        readable: values of the call's tensors can be read; otherwise routes do not depend on them.
        whole: all queries are observed.
        near: probabilities can be computed from the log-sum-exp (`blocks.near`).
        direct: a one-pass backend reads the call unchanged, without a graph.
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
    """Raw numbers that statistics read from a call. Equal needs are answered once.

    `name` is its name in routes, and `kernel` the field of a one-pass backend that holds it.
    """

    name: str
    kernel: str | None = None
    via: Need | None = None
    """The need whose answer is used if the route is `VIA`."""
    passes = False
    """A one-pass backend answers it by a separate pass."""
    scores = True
    """It reads scores or their log-sum-exp; otherwise it requires no call."""
    mass = False
    """It is a mass on chosen keys, which may be concentrated in a few queries."""
    vectors = False
    """True if it needs the queries and keys themselves, not only the scores."""
    output = False
    """It reads the heads' outputs."""
    flexible = False
    """It is answered by an extra call or by a pass made for another need, whichever costs less."""
    among_keys = False
    """Its pass is over the probabilities of the keys alone, as if there were no sink."""

    @abstractmethod
    def route(self, setting: Setting) -> Route:
        """Return the route that answers it in a call with these properties."""

    @abstractmethod
    def answer(self, route: Route, work: Work) -> Any:
        """Return the numbers, `[B, H, n]` if there is one per query."""

    def resolve(self, view: View) -> None:  # noqa: B027
        """Compute now what its metric reads from masks, whose values may change later."""

    def shown(self, route: Route, work: Work) -> Route:
        """Return the route as `explain()` shows it, which may depend on values."""
        return route

    def row_figure(self, work: Work) -> RowFigure:
        """Return the sums over keys `[heads, t]` that answer it, from blocks of probabilities."""
        raise NotImplementedError(f"{self.name} is not a sum over keys")

    def accumulator(self, work: Work) -> Accumulator:
        """Return the accumulator that a pass feeds with every block of P."""
        return RowSums(self.row_figure(work), work.view.zeros(work.view.extent.queries))

    def available(self, route: Route, every: Work, drawn: Work) -> bool:
        """Return True if the answer for all queries is nearly free once their LSE is known.

        For example, if there are few queries besides those `drawn`, or if the pass that computed
        the LSE returned its field too.
        """
        given = every.given
        return route.kind == KERNEL and getattr(given, self.kernel or "", None) is not None


class OfPass(Need):
    """A need that is answered by a pass over the scores, without a gradient."""

    def route(self, setting: Setting) -> Route:
        return Route(PASS)

    def answer(self, route: Route, work: Work) -> Any:
        return work.by_head(work.reduced(self).total)


@dataclass(frozen=True)
class RowSum(OfPass):
    """A custom sum over keys of a function of P, `[B, H, n]`: the sum of `figure(block)`.

    `figure` maps a block to `[heads, t]`; `block.p` and `block.log_p` are `[heads, t, s]` at the
    queries `block.rows` and the keys `block.keys`. No gradient.
    """

    name: str
    figure: Callable[[ScoreBlock], Tensor]

    def row_figure(self, work: Work) -> RowFigure:
        return self.figure


@dataclass(frozen=True)
class Plan:
    """A route for each need, in the order of the needs.

    `steps` holds each need and route with the field of a one-pass backend that answers it, if any;
    `fields` are those fields. `reduced` are the needs answered by a pass over the scores, `rows`
    those answered by a pass over whole rows. With `together`, one extra call answers two needs.
    `scores` is True if a need reads scores, `masses` if one is a mass, and `direct` if a one-pass
    backend can take the call unchanged. `far` is the plan for calls whose log-sum-exp is not
    `near`, if it differs.
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

    A one-pass backend computes its numbers in its own pass. Otherwise entropy and position take one
    extra call each, or a single, slightly wider call for both. If another need requires a pass over
    the scores, both come from that pass. The same holds for few queries, for which an extra call
    would pad and copy all keys.
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
            return f"it is needed for {need.name} anyway"
    if setting.nonlinear and any(n.flexible and r.kind == ROWS for n, r in routes.items()):
        return "it is needed for entropy anyway"
    if setting.output and setting.extent.queries * 8 <= setting.extent.keys:
        return "for few queries it costs less than a call, which pads and copies all keys"
    return ""
