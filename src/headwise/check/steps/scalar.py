"""The step `scalar`: attention in plain Python, number by number, one token's turn at a time.

The numbers may be the file's own `Value`, that of `headwise.systems.scalar`, or plain floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..diagnosis.projections import Matrix, Reading
from ..findings.verdict import Finding
from .base import Part, Step, Trial, passed, wrong
from .naming import from_weights, is_right, named

T, E, H, D = 5, 12, 3, 4
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
    return len(got) == len(want) and all(
        math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9) for a, b in zip(got, want, strict=True)
    )


def _linear(trial: Trial) -> Iterator[Finding]:
    x, weight = torch.randn(3), torch.randn(2, 3)
    got = _floats(trial.get("linear")(_numbers(trial, x), _numbers(trial, weight)))
    if _near(got, (weight.double() @ x.double()).tolist()):
        yield passed("step-linear", "`linear` gives a sum of products for each row of the weight.")
        return
    yield wrong(
        "step-linear",
        f"`linear` of 3 numbers by 2 rows gives {_shown(got)}; it should be "
        f"{_shown((weight @ x).tolist())}.",
        "One number a row: the row's products with x, added up.",
    )


def _softmax(trial: Trial) -> Iterator[Finding]:
    scores = [0.5, -1.0, 2.0]
    softmax = trial.get("softmax")
    got = _floats(softmax(_numbers(trial, scores)))
    want = torch.tensor(scores).double().softmax(0).tolist()
    if not _near(got, want):
        total = f" (they add up to {sum(got):.4g})" if not math.isclose(sum(got), 1.0) else ""
        yield wrong(
            "step-softmax",
            f"`softmax` of {scores} gives {_shown(got)}{total}; it should be {_shown(want)}.",
            "exp of each score, divided by the sum of all of them.",
        )
        return
    try:
        large = _floats(softmax(_numbers(trial, [1000.0, 1001.0])))
        finite = _near(large, torch.tensor([1000.0, 1001.0]).double().softmax(0).tolist())
    except (OverflowError, ZeroDivisionError):
        finite = False
    if not finite:
        yield wrong(
            "step-softmax",
            "`softmax` is right for small scores, but not for 1000 and 1001: exp overflows.",
            "Take the largest score from each before exp: it changes nothing else.",
        )
        return
    yield passed("step-softmax", "`softmax` gives shares that add up to 1, of large scores too.")


def _attention(trial: Trial) -> Iterator[Finding]:
    x = torch.randn(T, E, dtype=torch.float64)
    weights = {name: torch.randn(E, E, dtype=torch.float64) / E**0.5 for name in NAMES.values()}
    numbers = {name: _numbers(trial, weight) for name, weight in weights.items()}
    keys: list[Any] = []
    values: list[Any] = []
    rows = []
    for token in x:
        fault = None
        try:
            out = trial.get("attention")(_numbers(trial, token), *numbers.values(), keys, values, H)
            rows.append(_floats(out))
        except Exception as error:
            fault = error
        met = len(rows) + (fault is not None)
        if (len(keys), len(values)) != (met, met):
            yield wrong(
                "step-attention",
                f"Of {met} tokens there are {len(keys)} keys and {len(values)} values.",
                "Append the token's own key and value to the lists, once: all that comes later "
                "sees them.",
            )
            return
        if fault is not None:
            raise fault
    widths = {len(row) for row in rows}
    if widths != {E}:
        yield wrong(
            "step-attention",
            f"`attention` gives {min(widths)} numbers for a token of {E}.",
            "Put the heads' outputs side by side, then `linear` with wo.",
        )
        return
    yield _judged(torch.tensor(rows, dtype=torch.float64)[None], x[None], weights)


def _judged(out: Tensor, x: Tensor, weights: dict[str, Tensor]) -> Finding:
    matrices = {part: Matrix(name, part, weights[name].T) for part, name in NAMES.items()}
    sources = tuple(matrices[part] for part in "qkv")
    reading = Reading(sources, matrices["o"], H, H, D, D, E)
    give = from_weights(reading, x)
    if is_right(give, out):
        said = f"`attention` gives each of {T} tokens what it sees of itself and those before."
        return passed("step-attention", said)
    found = named(give, out, reading, T)
    if found is not None:
        said = f"`attention` gives other numbers. {found.message}"
        return Finding(found.rule, "error", said, found.hint)
    return wrong(
        "step-attention",
        "`attention` gives other numbers than attention with these weights.",
        "For each head the slice hs : hs + head_dim of query, keys and values: scores over "
        "√head_dim, softmax, values added up in these shares. Then wo.",
    )


def _shown(numbers: Sequence[float]) -> str:
    return f"[{', '.join(f'{number:.4g}' for number in numbers)}]"


def _whole(trial: Trial) -> Iterator[Finding]:
    """Every part alone is all there is; what is left is that nothing was changed on the way."""
    x = _numbers(trial, torch.randn(E))
    before = _floats(x)
    weights = [_numbers(trial, torch.randn(E, E)) for _ in NAMES]
    once = _floats(trial.get("attention")(x, *weights, [], [], H))
    again = _floats(trial.get("attention")(x, *weights, [], [], H))
    if once == again and _floats(x) == before:
        yield passed("step-whole", "The same token gives the same again, and is left as it was.")
        return
    yield wrong(
        "step-whole",
        "Called twice with the same token, `attention` gives two answers.",
        "Make new lists for what a head gives; change neither the token nor the weights.",
    )


SCALAR = Step(
    "scalar",
    "attention in plain Python, number by number",
    (
        Part(
            *("linear", "step-linear"),
            "One number for each row of the weight: `dot(row, x)`.",
            _linear,
        ),
        Part(
            *("softmax", "step-softmax"),
            "Take the largest score from each, exp of each, divide by their sum.",
            _softmax,
        ),
        Part(
            *("attention", "step-attention"),
            "Query, key and value of the token by `linear`; append key and value; for each head "
            "scores, softmax, values; then wo.",
            _attention,
            locals={
                "query": "`linear(x, wq)`.",
                "key": "`linear(x, wk)`.",
                "value": "`linear(x, wv)`.",
                "scores": "For every key so far: `dot` of the two slices, over √head_dim.",
                "shares": "`softmax(scores)`.",
                "out": "For each place of the head: that number of every value, in these shares.",
            },
        ),
    ),
    {
        "math": "Write at the top: `import math`.",
        "Value": "Write at the top: `from headwise.systems.scalar import Value, dot`.",
        "dot": "Write at the top: `from headwise.systems.scalar import Value, dot`.",
    },
    _whole,
)
