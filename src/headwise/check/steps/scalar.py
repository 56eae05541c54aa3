"""Test the step `scalar`: attention in plain Python, number by number, token by token.

The numbers may be the file's own `Value`, that of `headwise.systems.scalar`, or plain floats.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import passed
from ..syntax import nodes
from ..verdict import Finding
from .base import StepCall, StepPart, Trial, Wrong, step
from .blame import Search
from .tracing import changed

T, E, H, D = 4, 12, 3, 4
WEIGHTS = ("wq", "wk", "wv", "wo")


def _numbers(one: Trial, value: Any) -> Any:
    """Return lists of floats as lists of the file's numbers."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Sequence):
        return [_numbers(one, each) for each in value]
    kind = getattr(one.module, "Value", None)
    return value if kind is None else kind(value)


def _flat(value: Any) -> list[Any]:
    many = isinstance(value, (list, tuple))
    return [one for each in value for one in _flat(each)] if many else [value]


def _calls(trial: Trial, part: StepPart) -> Iterator[StepCall]:
    draw = torch.Generator().manual_seed(0)
    given: list[dict[str, Any]] = [{"scores": [0.5, -1.0, 2.0]}, {"scores": [0.0, 1000.0, 1001.0]}]
    if part.name == "linear":
        sizes = {"x": (3,), "weight": (2, 3)}
        given = [{name: torch.randn(size, generator=draw) for name, size in sizes.items()}]
    if part.name != "attention":
        for each in given:
            yield StepCall(lambda one, each=each: _keep(one, part.name, each))
        return
    x = torch.randn(T, E, generator=draw)
    weights = {name: torch.randn(E, E, generator=draw) / E**0.5 for name in WEIGHTS}

    def attend(one: Trial) -> Any:
        rows, numbers = _numbers(one, x), {name: _numbers(one, w) for name, w in weights.items()}
        keys, values, attention = [], [], one.get("attention")
        outs = [attention(row, *numbers.values(), keys, values, H) for row in rows]
        one.results |= {"out": outs, "given": {"x": rows, **numbers}}
        return outs

    yield StepCall(attend)


def _keep(one: Trial, name: str, given: dict[str, Any]) -> Any:
    """Call a function; store its arguments and result for `_judge`."""
    one.results["given"] = {key: _numbers(one, value) for key, value in given.items()}
    one.results["out"] = out = one.get(name)(*one.results["given"].values())
    return out


def _judge(trial: Trial, _: Trial, part: StepPart, search: Search | None) -> Wrong | None:
    """Return a fault other than wrong numbers: missing keys or values, or a disconnected graph."""
    results = trial.results
    if search is not None:
        return _wrong_cache(search) if part.name == "attention" else None
    if not hasattr(getattr(trial.module, "Value", None), "backward"):
        return None
    for number in _flat(results["out"])[:: max(1, len(_flat(results["out"])) - 1)]:
        if hasattr(number, "backward"):
            number.backward()
    for name, value in results["given"].items():
        if not any(one.grad for one in _flat(value)):
            message = f"`{part.name}` gives the correct numbers, but no gradient reaches `{name}`"
            return Wrong(part.name, message)
    return None


def _wrong_cache(search: Search) -> Wrong | None:
    """Return the fault that `keys` or `values` lacks the first token when it is used."""
    events = [one for one in search.watch.events if one.frame == search.watch.events[0].frame]
    first = {one.name: one for one in reversed(events)}
    if not {"query", "key", "value"} <= {*first}:
        return None
    uses = [first[name].time for name in ("scores", "shares", "out") if name in first]
    for name, row in (("keys", "key"), ("values", "value")):
        grown = [one.time for one in events if one.name == name and one.raw]
        if not grown or grown[0] > min(uses, default=search.watch.time):
            statements = nodes(ast.stmt, search.watch.function or ast.Pass())
            lines = [one.lineno for one in statements if name in changed(one)]
            message = f"`{name}` does not contain the token itself when the scores are computed"
            return Wrong([*lines, first[row].line][0], message)
    return None


def _final(_: Trial) -> list[Finding]:
    return [passed("step-whole", "In this step, only the single parts are tested.")]


SCALAR = step("scalar", {"E": E, "D": D}, _calls, _final, _judge)
