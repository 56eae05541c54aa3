"""The number that scores are multiplied by, followed from the projections to the softmax: where
nothing else of the weights can be read, it still tells a wrong width from the right one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..findings.verdict import Finding, Ground
from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.introspect import numbers_in
from .call_lines import FUSED, bare_name, quoted, users_line
from .faults import GROUPS
from .search import SCALING
from .variants import scale_of

MAKES = {"linear", "conv1d", "conv2d"}
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
    """Follows the numbers by which projections are multiplied, up to the first softmax.

    Attributes:
        scores: what that softmax is taken of, where it could be followed, with the line.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.scores: tuple[Multiplied, tuple[str, int] | None] | None = None
        self._known: dict[int, Multiplied] = {}
        self._kept: list[Tensor] = []  # so that no other gets its identity

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = bare_name(func)
        made = self._made(name, args, kwargs)
        if name == "softmax" and args and self.tokens == args[0].shape[-1] in args[0].shape[:-1]:
            self._note(self._of(args[0]))
        elif name == FUSED:
            self._note(made)
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._kept.append(tensor)
            self._known.pop(id(tensor), None)
            if made is not None:
                self._known[id(tensor)] = made
        return result

    def _note(self, scores: Multiplied | None) -> None:
        if scores is not None and scores.width and self.scores is None:
            self.scores = scores, users_line(3)

    def _of(self, one: Any) -> Multiplied | None:
        return self._known.get(id(one)) if isinstance(one, Tensor) else None

    def _made(self, name: str, args: Any, kwargs: Mapping[str, Any]) -> Multiplied | None:
        """What a call gives; None where that is not known."""
        first, second = (*args, None, None)[:2]
        if name in MAKES:
            return Multiplied()
        if name in KEEPS:
            return self._of(first)
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


def _number(value: Any) -> float:
    """A plain number, or a tensor that holds one and is not trained; 0 for all else."""
    if isinstance(value, Tensor):
        fixed = value.numel() == 1 and not isinstance(value, nn.Parameter)
        return float(value) if fixed and not value.requires_grad else 0.0
    return float(value) if isinstance(value, int | float) else 0.0


def traced_scale(subject: Target) -> list[Finding]:
    """The scale that scores are seen to be given, where it is a known mistake."""
    x = subject.input()
    trace = TracedScale(x.shape[1])
    with contextlib.suppress(Exception), torch.no_grad(), trace:
        subject(x)
    if trace.scores is None:
        return []
    (scores, place), heads = trace.scores, subject.num_heads
    wide = scores.width
    sizes = {"H": heads, "D": wide, "Dv": wide, **dict(zip("BTE", x.shape, strict=True))}
    if math.isclose(scores.by, wide**-0.5, rel_tol=1e-4):
        return []
    group = next(group for group in GROUPS if group["field"] == "scale")
    words = {**sizes, "W": heads * wide}
    kept = [] if subject.module is None else numbers_in(subject.module, SCALING.pattern)
    spare = any(math.isclose(number, wide**-0.5, rel_tol=1e-4) for number in kept)
    for name, *said in group["rows"]:
        meant = name != "nothing" or spare  # no scale at all may have its reasons
        if meant and math.isclose(scores.by, scale_of(name, sizes), rel_tol=1e-4):
            message, hint = group["message"].replace("{0}", said[0]), said[1]
            hint = group["hint"].replace("{1}", hint).format(**words) + quoted(place)
            ground: Ground = "weights" if subject.made_up else "any"
            return [Finding("scale", "error", message.format(**words), hint, ground=ground)]
    return []
