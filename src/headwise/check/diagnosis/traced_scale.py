"""The number that scores are multiplied by, followed from the projections to the softmax: where
nothing else of the weights can be read, it still tells a wrong width from the right one. Behind the
softmax the weights are followed to their product with the values, and over which axis that sums."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..findings.rules import found
from ..findings.verdict import Finding, Ground
from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.introspect import numbers_in
from .call_lines import FUSED, bare_name, quoted, recorded, users_line
from .faults import GROUPS
from .search import SCALING
from .variants import scale_of

MAKES = {"linear", "conv1d", "conv2d", "batch_norm", "relu", "gelu", "silu", "elu", "leaky_relu"}
"""Functions whose results are projections."""
KEEPS = set(
    (
        "view reshape view_as transpose permute contiguous clone to float double type type_as "
        "chunk split tensor_split unbind getitem get expand expand_as repeat repeat_interleave "
        "squeeze unsqueeze flatten unflatten movedim swapaxes swapdims masked_fill dropout narrow "
        "select detach requires_grad pad"
    ).split()
)
"""Functions that multiply nothing: what they give has the number of what they take."""


LARGE, HIDDEN = 1e3, -1e4
"""By how much weights are made larger, to see whether scores follow; scores below this are
hidden."""


@dataclass(frozen=True)
class Multiplied:
    """What a projection, or a product of two, was multiplied by since; a product is a sum over
    `width` numbers."""

    by: float = 1.0
    width: int = 0

    def times(self, number: float) -> Multiplied:
        return replace(self, by=self.by * number)

    def is_like(self, other: Multiplied) -> bool:
        return self.width == other.width and math.isclose(self.by, other.by, rel_tol=1e-6)


class TracedScale(TorchFunctionMode):
    """Follows the numbers by which projections are multiplied up to the first softmax, and by which
    weights are up to their product with the values.

    Attributes:
        scores: what that softmax is taken of, where it could be followed, with the line.
        after: what weights were multiplied by, with the line that did it last.
        astray: the line of a product that sums weights over the queries.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.scores: tuple[Multiplied, tuple[str, int] | None] | None = None
        self.after: tuple[float, tuple[str, int] | None] | None = None
        self.astray: tuple[str, int] | None = None
        self._weights: dict[int, tuple[float, tuple[str, int] | None]] = {}
        self._known: dict[int, Multiplied] = {}
        self._kept: list[Tensor] = []  # so that no other gets its identity

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = bare_name(func)
        made, weights = self._made(name, args, kwargs), self._weighed(name, args)
        if name == "softmax" and args:
            self._note(self._of(args[0]))
            weights = (1.0, None) if args[0].ndim > 1 else weights
        elif name == FUSED:
            self._note(made)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._kept.append(tensor)
            self._known.pop(id(tensor), None)
            self._weights.pop(id(tensor), None)
            if weights is not None:
                self._weights[id(tensor)] = weights
            if made is not None:
                self._known[id(tensor)] = made
        return result

    def _note(self, scores: Multiplied | None) -> None:
        if scores is not None and scores.width and self.scores is None:
            self.scores = scores, users_line(3)

    def _weighed(self, name: str, args: Any) -> tuple[float, tuple[str, int] | None] | None:
        """What a call makes of weights, where it gives weights; their product is noted."""
        taken = [self._weights[id(one)] for one in args if id(one) in self._weights]
        if len(taken) != 1:
            return None
        by, _ = taken[0]
        if name in KEEPS:
            return taken[0]
        if name in ("mul", "div") and len(args) > 1 and (number := _number(args[1])):
            return (by * number if name == "mul" else by / number), users_line(3)
        if name in ("matmul", "bmm", "einsum") and self.after is None:
            self.after = taken[0]
            place = next(n for n, one in enumerate(args) if id(one) in self._weights)
            axis = _axis_summed(args, place)
            if axis is not None and _is_astray(args[place], axis):
                self.astray = users_line(3)
        return None

    def _of(self, one: Any) -> Multiplied | None:
        return self._known.get(id(one)) if isinstance(one, Tensor) else None

    def _made(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Multiplied | None:
        """What a call gives; None where that is not known."""
        first, second = (*args, None, None)[:2]
        if name in MAKES:
            return Multiplied()
        if name in KEEPS:
            return self._of(first)
        if name == "cat":  # rows of its own beside those of the input
            known = [one for part in first or () if (one := self._of(part)) is not None]
            return known[0] if known and all(map(known[0].is_like, known)) else None
        if name == "where":
            return self._of(second) or self._of((*args, None, None)[2])
        if name == "einsum" and isinstance(first, str):
            operands = args[1] if isinstance(second, list | tuple) else args[1:]
            return self._product(*operands, into=first) if len(operands) == 2 else None
        if name in ("matmul", "bmm"):
            return self._product(first, second)
        if name == FUSED:
            product, scale = self._product(first, second), kwargs.get("scale")
            return product and product.times(product.width**-0.5 if scale is None else scale)
        here, there = self._of(first), self._of(second)
        if name in ("add", "sub"):
            alike = here is None or there is None or here.is_like(there)
            return (here or there) if alike else None
        if name in ("mul", "div"):
            number = _number(second)
            if here is not None and number:
                return here.times(number if name == "mul" else 1 / number)
            number = _number(first)
            return there.times(number) if name == "mul" and there and number else None
        return None

    def _product(self, a: Any, b: Any, into: str = "") -> Multiplied | None:
        here, there = self._of(a), self._of(b)
        if isinstance(a, nn.Parameter) or isinstance(b, nn.Parameter):
            return Multiplied()
        if here is None or there is None or here.width or there.width:
            return None
        return Multiplied(here.by * there.by, _summed(a, into) if into else a.shape[-1])


def _summed(a: Tensor, equation: str) -> int:
    """Over how many numbers an einsum sums."""
    inputs, _, out = equation.replace(" ", "").partition("->")
    letters = inputs.split(",")[0]
    if "." in letters or len(letters) != a.ndim:
        return 0
    sizes = zip(letters, a.shape, strict=True)
    return math.prod(size for letter, size in sizes if letter not in out)


def _axis_summed(args: Any, place: int) -> int | None:
    """Over which axis of its factor at that place a product sums, from the end; None where that is
    not one."""
    if not isinstance(args[0], str):
        return -1 if place == 0 else -2
    sides, _, out = args[0].replace(" ", "").partition("->")
    letters = [*sides.split(","), ""][place - 1]
    summed = [n for n, letter in enumerate(letters) if letter not in out and letter != "."]
    one = len(summed) == 1 and "." not in letters[summed[0] :]
    return summed[0] - len(letters) if one else None


def _is_astray(weights: Tensor, summed: int) -> bool:
    """Whether weights add up to 1 along another axis than the one that a product sums over."""
    if weights.ndim < 2 or min(weights.shape[-2:]) < 2 or summed not in (-1, -2):
        return False
    return _are_whole(weights, -3 - summed) and not _are_whole(weights, summed)


def _are_whole(weights: Tensor, axis: int) -> bool:
    """Whether weights add up to 1 along an axis."""
    return bool(((weights.detach().double().sum(axis) - 1).abs() < 1e-4).all())


def _number(value: Any) -> float:
    """A plain number, or a tensor that holds one and is not trained; 0 for all else."""
    if isinstance(value, Tensor):
        fixed = value.numel() == 1 and not isinstance(value, nn.Parameter)
        return float(value) if fixed and not value.requires_grad else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def _traced(subject: Target, x: Tensor) -> TracedScale:
    trace = TracedScale(x.shape[1])
    with contextlib.suppress(Exception), torch.no_grad(), trace:
        subject(x)
    return trace


def is_scaled_right(subject: Target) -> bool:
    """Whether scores are seen to be divided by the root of what they are summed over."""
    scores = _traced(subject, subject.input()).scores
    return scores is not None and math.isclose(scores[0].by, scores[0].width ** -0.5, rel_tol=1e-4)


def traced_scale(subject: Target) -> list[Finding]:
    """The scale that scores are seen to be given, where it is a known mistake."""
    x = subject.input()
    trace = _traced(subject, x)
    if trace.astray is not None:
        return [found("softmax", "queries", line=quoted(trace.astray))]
    if trace.scores is None:
        return []
    (scores, place), heads = trace.scores, subject.num_heads
    wide = scores.width
    other = scores.by**-2 * wide  # the width of as many heads as the root is taken of
    if heads * wide != x.shape[-1] and math.isclose(other, x.shape[-1], rel_tol=1e-4):
        heads = x.shape[-1] // wide  # more or fewer than its arguments say
    sizes = {"H": heads, "D": wide, "Dv": wide, **dict(zip("BTE", x.shape, strict=True))}
    words = {**sizes, "W": heads * wide}
    by, where = trace.after or (1.0, None)
    if scores.by == 1.0 and not math.isclose(by, 1.0, rel_tol=1e-4):
        place = where
        known = (name for name in ("D", "E") if math.isclose(by, sizes[name] ** -0.5, rel_tol=1e-4))
        name = f"after √{next(known, '')}"
    elif math.isclose(scores.by, wide**-0.5, rel_tol=1e-4):
        return []
    else:
        kept = [] if subject.module is None else numbers_in(subject.module, SCALING.pattern)
        spare = any(math.isclose(number, wide**-0.5, rel_tol=1e-4) for number in kept)
        rows = (one for one in _ROWS if not one.startswith("after"))
        fits = (n for n in rows if math.isclose(scores.by, scale_of(n, sizes), rel_tol=1e-4))
        name = next(fits, "")
        if name == "nothing" and not spare:  # which may have its reasons
            return []
    if name not in _ROWS:
        return []
    message, hint = (text.format(**words) for text in _ROWS[name])
    guessed = name != "nothing" and (subject.made_up or subject.absent)
    ground: Ground = "weights" if guessed else "any"
    return [Finding("scale", "error", message, hint + quoted(place), ground=ground)]


def of_units(subject: Target) -> list[Finding]:
    """Scores of queries and keys of length 1 that are divided by the root of their width as well:
    none is larger than that, however large the weights are."""
    large = subject.fresh()
    if large.module is None or subject.head_dim is None or subject.head_dim < 4:
        return []
    with torch.no_grad():
        for parameter in large.module.parameters():
            if parameter.ndim > 1 and parameter.is_floating_point():
                parameter.mul_(LARGE)
    made = [call for call in recorded(large, large.input()) if call.scores is not None]
    if len(made) != 1 or made[0].scores is None:
        return []
    scores, bound = made[0].scores.detach().double(), subject.head_dim**-0.5
    seen = scores[scores.isfinite() & (scores > HIDDEN)].abs()
    most = float(seen.max()) if seen.numel() else 0.0
    if not 0.2 * bound < most < 1.001 * bound:
        return []
    return [found("scale", "unit", D=subject.head_dim, most=bound, line=quoted(made[0].place))]


_ROWS = {
    name: (group["message"].replace("{0}", said), group["hint"].replace("{1}", hint))
    for group in GROUPS
    if group["field"] == "scale"
    for name, said, hint in group["rows"]
}
"""What is said of each wrong scale: message and hint."""
