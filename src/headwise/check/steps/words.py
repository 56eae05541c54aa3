"""Describe a fault in a part: the line, the value it computes and the value it should compute."""

from __future__ import annotations

import ast
import difflib
import itertools
import re
from typing import Any

import torch

from ..syntax import Function, nodes, quoted, unused
from ..verdict import Finding
from .base import ROWS, StepCall, StepPart, Trial
from .blame import BlamedLine, Search
from .tracing import Event, Numbers, changed, plain

TRAINING = "In training, "
SIGNS = {ast.Div: "/", ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.MatMult: "@"}


def shape_of(value: Any) -> str:
    """Return the shape of a result, or its type, as a phrase."""
    numbers = value if isinstance(value, Numbers) else plain(value)
    if numbers is None or type(value) is tuple:
        return f"a {type(value).__name__}" if value is not None else "None"
    return str(numbers.shape) if len(numbers.shape) != 1 else f"a list of {numbers.shape[0]}"


def failure(
    trial: Trial, part: StepPart, call: StepCall, search: Search, out: Any, level: int
) -> Finding:
    """Return the finding about a call that fails or differs from its twin."""
    fault = search.fault(call.words == TRAINING)
    error = search.watch.failed[2] if search.watch.failed is not None else None
    message = f"`{part.short}` gives {_other(out, search.twin.out)}"
    hint = call.hint or part.hint(key_of(search, fault) if fault else "return", level)
    if error is not None:
        message = f"`{part.short}` fails: {type(error).__name__}: {' '.join(str(error).split())}"
        hint = f"{_fix(trial, error)} {hint}".strip()
    failed = search.watch.failed[1] if search.watch.failed is not None else 0
    line = fault.line if fault else failed or trial.source.line(trial.names[part.name])
    if fault is not None and (lost := thrown(trial, search.watch.function, fault.line)):
        return Finding(part.rule, call.severity, lost, hint)
    if fault is not None and fault.event is not None and fault.event.name != "return":
        message = _variable(search, fault.event)
    at = f" ({quoted(trial.path, line)})" if line else ""
    if failed not in (0, line):
        at += f", which makes line {failed} fail"
    return Finding(part.rule, call.severity, f"{call.words}{message.rstrip('.')}{at}.", hint)


def _variable(search: Search, one: Event) -> str:
    """Return a sentence about a wrong variable."""
    twin, name, value = search.twin, one.name, one.value
    finals = {each: twin.finals(each) for each in twin.named}
    if value is not None and name in search.sizes and not value.shape:
        return f"`{name}` is {value.numbers.item():g}; it should be {search.sizes[name]}"
    if not (right := finals.get(name)):
        return f"`{name}` has a value that does not occur in the correct step"
    turn = search.turn(one)
    alike = (each for each in right if value and each.shape == value.shape)
    letters = ", ".join(twin.part.shapes.get(name, "").split())
    letters = f"[{letters}], here " if letters else ""
    message = _other(one.raw, turn or next(alike, right[-1]), letters)
    for other, values in finals.items():
        if value and value.shape and other != name and any(value.fits(each) for each in values):
            return f"`{name}` is {message}; it holds what `{other}` should hold"
    return f"`{name}` is {message}"


def _other(value: Any, right: Any, letters: str = "") -> str:
    """Describe how a value differs from the correct one."""
    got, want = plain(value), right if isinstance(right, Numbers) else plain(right)
    if got is None or want is None or got.shape != want.shape:
        return f"{shape_of(value)}; it should be {letters}{shape_of(want or right)}"
    if not want.shape:
        kind = f" (a {got.kind})" if got.numbers.equal(want.numbers) else ""
        return f"{got.numbers.item():g}{kind}; it should be {want.numbers.item():g}"
    if got.cut and want.kind == "Values":
        return "a list of plain numbers, through which no gradient passes"
    a, b = got.numbers, want.numbers
    if bool(a.isnan().any() and not b.isnan().any()):
        return f"{got.shape} with NaN: 0 times infinity is NaN, and so is inf - inf"
    different = ~torch.isclose(a, b, rtol=1e-4, atol=1e-5)
    first = tuple(different.nonzero()[0].tolist()) if bool(different.any()) else (0,) * a.dim()
    message = f"{got.shape} with other numbers: {[*first]} is {a[first]:.4g}, not {b[first]:.4g}"
    ratio = (a / b)[(b.abs() > 1e-6) & b.isfinite()]
    if ratio.numel() > 1 and torch.allclose(ratio, ratio[:1].clamp(-1e9, 1e9), rtol=1e-3):
        return f"{message}; each is {ratio[0]:.4g} times the correct value"
    for one, other in itertools.combinations(range(a.dim()), 2):
        turned = a.transpose(one, other)
        if turned.shape == b.shape and torch.allclose(turned, b, rtol=1e-4, atol=1e-5):
            return f"{message}; axes {one} and {other} are swapped"
    return message


def key_of(search: Search, fault: BlamedLine) -> str:
    """Return the key of the hint: a variable that the line changes, or the next with a hint."""
    hints, results = search.twin.part.hints, changed(fault.statement)
    results |= {fault.event.name} if fault.event is not None else set()
    lines = {one.name: one.line for one in search.watch.events}
    if results & {*hints} or isinstance(fault.statement, ast.Return):
        return next((key for key in hints if key in results), "return")
    return next((key for key in hints if lines.get(key, 0) >= fault.line), "return")


def thrown(trial: Trial, function: Function | None, before: int) -> str:
    """Return a sentence about the first line whose result is unused, or ""."""
    roots = [function] if function is not None else []
    lines = [*unused(*roots)]
    for node in nodes(ast.Expr, *roots):
        if isinstance(node.value, ast.BinOp):
            lines.append((node.lineno, SIGNS.get(type(node.value.op), "it")))
        elif isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            attributes = trial.source.attributes(trial.source.owner_at(node.lineno)[0])
            if called in {*trial.names.values(), *(f"self.{one}" for one in attributes)}:
                lines.append((node.lineno, called))
    for line, name in sorted(one for one in lines if one[0] <= before):
        return f"The result of `{name}` is not used ({quoted(trial.path, line)})."
    return ""


def near(name: str, known: set[str]) -> str:
    """Return the most similar known name, or ""."""
    return next(iter(difflib.get_close_matches(name, sorted(known - {name}), 1, 0.75)), "")


def _fix(trial: Trial, error: Exception) -> str:
    """Return the fix for an exception with a known message."""
    if unknown := re.search(r"'(\w+)' object has no attribute '(\w+)'", str(error)):
        meant = near(unknown[2], trial.source.attributes(unknown[1]))
        if meant:
            return f"Did you mean `{meant}`?"
    return next((cure for words, cure in ROWS["errors"].items() if words in str(error)), "")
