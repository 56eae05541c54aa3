"""Which route answers each need of a call: a pure function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from .engine import Reducer
from .needs import ENTROPY, POSITION, Need, Reduced, Setting
from .results import CALL, KERNEL, PASS, ROWS, Route

TOGETHER = Route(CALL, "the same for entropy and distance")


@dataclass(frozen=True)
class Plan:
    """A route for each need, in the order of the needs.

    `fields` are those that a one-pass backend gives with the call; `reducers` are the needs that a
    pass over the scores answers; with `positions_too`, one extra call answers two needs; those
    that are `waiting` are told before anything runs; `masses` are those on chosen keys.
    """

    routes: Mapping[Need, Route]
    fields: tuple[str, ...]
    reducers: tuple[Reducer, ...]
    positions_too: bool
    waiting: tuple[Need, ...]
    masses: tuple[Need, ...]


def plan(setting: Setting, needs: tuple[Need, ...]) -> Plan:
    """Take a route for each need of a call.

    A one-pass backend has its figures from its own pass. Elsewhere entropy and position are one
    extra call each; both together are one, a little wider. Beside a pass over the scores that is
    made anyhow, both come from that; of few queries too, for whom a call would pad and copy all
    keys.
    """
    routes = {need: need.route(setting) for need in needs}
    two = [need for need in (ENTROPY, POSITION) if need in routes]
    if two and not setting.kernel:
        why = "" if setting.gradients else _why_pass(setting, routes)
        for need in two if why else ():
            nonlinear = setting.nonlinear if need is ENTROPY else ""
            routes[need] = Route(PASS, nonlinear or why)
        if len(two) == 2 and {routes[need].kind for need in two} == {CALL}:
            routes |= dict.fromkeys(two, TOGETHER)
    kernel = [need for need, route in routes.items() if route.kind == KERNEL]
    return Plan(
        routes,
        fields=tuple(need.kernel for need in kernel if need.kernel is not None),
        reducers=tuple(cast(Reducer, need) for need, route in routes.items() if route.kind == PASS),
        positions_too=routes.get(POSITION) is TOGETHER,
        waiting=tuple(n for n, r in routes.items() if r.kind == ROWS or not setting.readable),
        masses=tuple(need for need in routes if need.mass),
    )


def _why_pass(setting: Setting, routes: Mapping[Need, Route]) -> str:
    """Why entropy and position come from a pass over the scores; empty if they do not."""
    for need, route in routes.items():
        apart = isinstance(need, Reduced) and need.among_keys and setting.sinks
        if route.kind == PASS and not apart:
            return f"it is made for {need.name} anyhow"
    if setting.nonlinear and ENTROPY in routes:
        return "it is made for entropy anyhow"
    if setting.output and setting.extent.queries * 8 <= setting.extent.keys:
        return "of few queries it costs less than a call, which pads and copies all keys"
    return ""
