"""Follow the step `scalar`: attention in plain Python, number by number, token by token.

The numbers may be the file's own `Value`, that of `headwise.systems.scalar`, or plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..diagnosis.projections import Matrix, Projections
from ..files.syntax import quoted
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import StepPart, Trial, step
from .hints import laid
from .naming import from_weights, is_right, named
from .watching import key_at, lengths, line_of, watched

T, E, H, D = 5, 12, 3, 4
MADE = ("query", "key", "value")
NAMES = {"q": "wq", "k": "wk", "v": "wv", "o": "wo"}


def _numbers(trial: Trial, value: Any) -> Any:
    """Lists of floats as lists of what the file calculates with."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, Sequence):
        return [_numbers(trial, each) for each in value]
    kind = getattr(trial.module, "Value", None)
    return value if kind is None else kind(value)


def _floats(value: Any) -> list[float]:
    return [float(getattr(number, "data", number)) for number in value]


def _near(got: Sequence[float], want: Sequence[float]) -> bool:
    near = (math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(got, want, strict=False))
    return len(got) == len(want) and all(near)


def _no_list(part: StepPart, got: Any, want: int) -> Finding | None:
    """A finding on what gives no list of numbers."""
    shape = lengths(got)
    if isinstance(got, (list, tuple)) and len(shape or ()) == 1:
        return None
    said = "None" if got is None else "one number" if shape == [] else type(got).__name__
    said = f"lists, {shape}" if shape else said
    return found(part.rule, "list", got=said, want=want)


def _cut(trial: Trial, out: Any, inputs: dict[str, Any]) -> list[str]:
    """The inputs to which no slope leads back from an output, where numbers remember."""
    if not hasattr(getattr(trial.module, "Value", None), "backward"):
        return []
    if hasattr(out, "backward"):
        out.backward()
    return [name for name, value in inputs.items() if not any(one.grad for one in _flat(value))]


def _flat(value: Any) -> list[Any]:
    return [one for each in value for one in _flat(each)] if isinstance(value, list) else [value]


def _linear(trial: Trial, part: StepPart) -> Finding:
    x, weight = torch.randn(3), torch.randn(2, 3)

    def call(one: Trial) -> Any:
        return one.get("linear")(_numbers(one, x), _numbers(one, weight))

    out = watched(trial, part, {}, call)
    if bad := _no_list(part, out, 2):
        return bad
    got, want = _floats(out), (weight.double() @ x.double()).tolist()
    if _near(got, want):
        return passed(part.rule, "`linear` gives a sum of products for each row of the weight.")
    words = {"got": _shown(got), "want": _shown(want)}
    return found(part.rule, "numbers" if len(got) == len(want) else "length", **words)


def _softmax(trial: Trial, part: StepPart) -> Finding:
    scores = [0.5, -1.0, 2.0]
    given = _numbers(trial, scores)

    def call(one: Trial) -> Any:
        return one.get("softmax")(given if one is trial else _numbers(one, scores))

    out = watched(trial, part, {"t": len(scores)}, call)
    if bad := _no_list(part, out, len(scores)):
        return bad
    got, want = _floats(out), torch.tensor(scores).double().softmax(0).tolist()
    if not _near(got, want):
        total = f" (they add up to {sum(got):.4g})" if not math.isclose(sum(got), 1.0) else ""
        words = {"scores": scores, "got": _shown(got), "total": total, "want": _shown(want)}
        return found(part.rule, "numbers", **words)
    if _cut(trial, out[0], {"scores": given}):
        last = trial.watch.last.items()
        known = {
            name: value
            for name, (value, _) in last
            if name in part.shapes and isinstance(value, list)
        }
        cut = (name for name, value in known.items() if _cut(trial, value[0], {"scores": given}))
        line = line_of(trial, part, next(cut, "return"))
        one = found(part.rule, "cut")
        return replace(one, hint=f"{one.hint} Look at {quoted(trial.path, line or 0)}")
    large = [0.0, 1000.0, 1001.0]
    try:
        out = watched(trial, part, {}, lambda one: one.get("softmax")(_numbers(one, large)))
        finite = _near(_floats(out), torch.tensor(large).double().softmax(0).tolist())
    except (OverflowError, ZeroDivisionError):
        finite = False
    said = "`softmax` gives shares that add up to 1, of large scores too."
    return passed(part.rule, said) if finite else found(part.rule, "large")


def _attention(trial: Trial, part: StepPart) -> Finding:
    x = torch.randn(T, E, dtype=torch.float64)
    weights = {name: torch.randn(E, E, dtype=torch.float64) / E**0.5 for name in NAMES.values()}
    numbers = {name: _numbers(trial, weight) for name, weight in weights.items()}
    keys, values, rows = [], [], []
    out = token = fault = None
    for met, row in enumerate(x, 1):
        token = _numbers(trial, row)

        def call(one: Trial, token: Any = token, met: int = met) -> Any:
            if one is trial:
                return one.get("attention")(token, *numbers.values(), keys, values, H)
            given = [*(_numbers(one, weight) for weight in weights.values()), [], [], H]
            return [one.get("attention")(_numbers(one, row), *given) for row in x[:met]]

        try:
            out = watched(trial, part, {"E": E, "D": D, "t": met}, call)
            if bad := _no_list(part, out, E):
                return bad
            rows.append(_floats(out))
        except Exception as error:
            fault = error
        early = fault and key_at(trial.watch.function, part, trial.watch.line) in MADE
        if (len(keys), len(values)) != (met, met) and not early:
            line = line_of(trial, part, "keys" if len(keys) != met else "values", "value")
            words = {"keys": len(keys), "values": len(values), "met": met}
            return found(part.rule, "appended", at=quoted(trial.path, line or 0), **words)
        if fault is not None:
            raise fault
    widths = {len(row) for row in rows}
    if widths != {E}:
        return laid(trial, part, None, found(part.rule, "width", got=min(widths), want=E))
    outs = torch.tensor(rows, dtype=torch.float64)[None]
    if (wrong := _judged(trial, part, outs, x[None], weights)) is not None:
        return wrong
    if cut := _cut(trial, out and out[0], {**numbers, "x": token}):
        return found(part.rule, "cut", names=", ".join(cut))
    said = f"`attention` gives each of {T} tokens what it sees of itself and those before."
    return passed(part.rule, said)


def _judged(
    trial: Trial, part: StepPart, out: Tensor, x: Tensor, weights: dict[str, Tensor]
) -> Finding | None:
    """The mistake in the numbers; None where they are right."""
    *sources, last = (Matrix(name, role, weights[name].T) for role, name in NAMES.items())
    reading = Projections(tuple(sources), last, H, H, D, D, E)
    give = from_weights(reading, x)
    if is_right(give, out):
        return None
    one = named(give, out, reading, T)
    if one is not None:
        one = replace(one, message=f"`attention` gives other numbers. {one.message}")
    return laid(trial, part, one, found(part.rule, "scalar"))


def _shown(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in numbers)}]"


def _whole(trial: Trial, part: StepPart) -> Finding:
    """Every part alone is all there is; what is left is that nothing was changed on the way."""
    x = _numbers(trial, torch.randn(E))
    before = _floats(x)
    weights = [_numbers(trial, torch.randn(E, E)) for _ in NAMES]
    once, again = (_floats(trial.get("attention")(x, *weights, [], [], H)) for _ in range(2))
    if once == again and _floats(x) == before:
        return passed(part.rule, "The same token gives the same again, and is left as it was.")
    return found(part.rule, "changed")


TESTS = {"linear": _linear, "softmax": _softmax, "attention": _attention, "whole": _whole}
SCALAR = step("scalar", TESTS)
