"""What a forward pass calls, and from which line of somebody's file, so that hints can quote it."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..files.syntax import code_at
from ..files.syntax import quoted as line_said
from ..findings.rules import ALL
from ..target.checked_target import Target
from ..target.errors import is_users
from ..target.vectors import softmax_axis

CHECK = str(Path(__file__).parents[1])
FUSED = "scaled_dot_product_attention"
PLAIN_FUNCTIONS = set(
    (
        "linear matmul bmm baddbmm einsum softmax dropout layer_norm mul div add sub pow sqrt view "
        "reshape transpose permute movedim swapaxes contiguous clone flatten unflatten unsqueeze "
        "squeeze expand expand_as repeat repeat_interleave split chunk unbind stack cat getitem "
        "masked_fill where triu tril ones ones_like zeros zeros_like full full_like tensor bool to "
        "float type_as type logical_not eq ne lt gt le ge size dim numel get len iter "
        "is_floating_point"
    ).split()
)
"""Functions of an attention that puts in no positions and mixes no tokens but by its weights."""


@dataclass(frozen=True)
class LineCall:
    """One call of PyTorch's, and the line of the user's file that made it, if one did."""

    name: str
    place: tuple[str, int] | None
    square: bool  # whether its result is [..., T, T], as scores and weights are
    drops: bool  # whether it drops numbers
    scores: Tensor | None = None  # what a softmax is taken of
    astray: bool = False  # whether it is a softmax, and not over the keys, which lie last
    empty: bool = False  # whether it takes a part of a table, of which there is none
    single: bool = False  # whether it is a softmax of single numbers, all of which become 1


class Calls(TorchFunctionMode):
    """Records the calls that a forward pass makes, and switches off those that drop numbers."""

    def __init__(self, tokens: int, dropless: bool = False) -> None:
        super().__init__()
        self.tokens, self.dropless = tokens, dropless
        self.made: list[LineCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = bare_name(func), dict(kwargs or {})
        if name == FUSED:
            kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args, drops = args[:3], kwargs.get("dropout_p", 0.0) > 0.0
            kwargs |= {"dropout_p": 0.0} if drops and self.dropless else {}
        else:
            training = kwargs.get("training", args[2] if len(args) > 2 else True)
            drops = "dropout" in name and bool(training)
            if drops and self.dropless:
                return args[0] if args else kwargs["input"]
        result = func(*args, **kwargs)
        square = isinstance(result, Tensor) and result.shape[-2:] == (self.tokens, self.tokens)
        scores = softmax_input(name, args, kwargs) if square or name == FUSED else None
        astray = name == "softmax" and self._is_astray(result.shape, args, kwargs)
        table = name in ("triu", "tril") and isinstance(result, Tensor) and result.ndim > 1
        empty = table and result.shape[-2] > 1 and not bool(result.any())
        single = name == "softmax" and self._is_single(result.shape, args, kwargs)
        line = users_line()
        self.made.append(LineCall(name, line, square, drops, scores, astray, empty, single))
        return result

    def _is_single(self, shape: torch.Size, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a softmax over tokens runs over an axis of one number."""
        axis = softmax_axis(shape, args, kwargs)
        first = axis in (0, -len(shape)) and len(shape) > 1  # tokens may come before sequences
        return self.tokens > 1 and self.tokens in shape and shape[axis] == 1 and not first

    def _is_astray(self, shape: torch.Size, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a softmax over rows of keys runs over heads, sequences, or all rows at once."""
        axis = softmax_axis(shape, args, kwargs)
        rows = len(shape) > 1 and shape[-1] == self.tokens and shape[-2] % self.tokens == 0
        return rows and shape[axis] != self.tokens


def softmax_input(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """What a softmax is taken of, or what the fused function takes its own of."""
    if name == "softmax":
        return args[0] if args else kwargs.get("input")
    if name != FUSED or len(args) < 2:
        return None
    q, k = args[:2]
    if q.ndim == 4 and q.shape[1] % k.shape[1] == 0:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    scale = kwargs.get("scale")
    return q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)


def recorded(subject: Target, x: Tensor, dropless: bool = True) -> list[LineCall]:
    """What a call calls of PyTorch's, as far as it goes; a compiled kernel cannot be recorded."""
    calls = Calls(x.shape[1], dropless)
    with contextlib.suppress(Exception), torch.no_grad(), calls:
        subject(x)
    return calls.made


def lines_run(subject: Target) -> set[tuple[str, int]]:
    """The lines of somebody's files that a call reaches."""
    reached, before = set[tuple[str, int]](), sys.gettrace()

    def follow(frame: FrameType, event: str, value: object) -> Any:
        file = frame.f_code.co_filename
        if event == "call" and not is_users(file):
            return None
        reached.add((file, frame.f_lineno))
        return follow

    sys.settrace(follow)
    try:
        with contextlib.suppress(Exception), torch.no_grad():
            subject(subject.input())
    finally:
        sys.settrace(before)
    return reached


def lines_of(subject: Target, x: Tensor, rule: str, which: int = 0) -> str:
    """Quote the likeliest line for a mistake of this rule, or nothing.

    Args:
        which: of the lines for queries, keys and values.
    """
    suspects = ALL[rule].suspects
    if not suspects:
        return ""
    made = recorded(subject, x, dropless=False)
    for name in suspects["calls"]:
        square = suspects.get("square", False) and name != FUSED
        fits = [call for call in made if call.name == name and (call.square or not square)]
        if places := [call.place for call in fits if call.place is not None]:
            apart = list(dict.fromkeys(places))
            first = which if len(apart) >= 3 else 0
            return quoted(apart[-1 if suspects.get("last") else first])
    return ""


def quoted(place: tuple[str, int] | None) -> str:
    return f" Look at {line_said(*place)}" if place and code_at(*place) else ""


def users_line(above: int = 2) -> tuple[str, int] | None:
    """The innermost frame below the check's own call that belongs to the user's own file."""
    frame = sys._getframe(above)
    while frame is not None and not frame.f_code.co_filename.startswith(CHECK):
        file = frame.f_code.co_filename
        if is_users(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def bare_name(func: Callable[..., Any]) -> str:
    """`mul` for `__mul__`, `__rmul__`, `__imul__` and `mul_`, and so on."""
    name = getattr(func, "__name__", str(func))
    operator = re.fullmatch(r"__[ri]?(mul|add|sub|matmul|truediv)__", name)
    bare = operator[1] if operator else name.strip("_")
    return {"truediv": "div", "true_divide": "div"}.get(bare, bare)
