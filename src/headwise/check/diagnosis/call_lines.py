"""What a forward pass calls, and from which line of somebody's file, so that hints can quote it."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..findings.rules import ALL
from ..target.checked_target import Target, is_users


@dataclass(frozen=True)
class LineCall:
    """One call of PyTorch's, and the line of the user's file that made it."""

    name: str
    file: str
    line: int
    square: bool  # whether its result is [..., T, T], as scores and weights are


class Lines(TorchFunctionMode):
    """Records the calls that a forward pass makes from files that are not libraries'."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.calls: list[LineCall] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        place = _users_line()
        if place is not None:
            square = isinstance(result, Tensor) and result.shape[-2:] == (self.tokens, self.tokens)
            self.calls.append(LineCall(_name(func), *place, square))
        return result


class Dropouts(TorchFunctionMode):
    """Records calls that drop numbers, and switches them off where asked to."""

    def __init__(self, off: bool) -> None:
        super().__init__()
        self.off = off
        self.dropped: list[tuple[str, str]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = _name(func)
        if "dropout" in name:
            working = kwargs.get("training", args[2] if len(args) > 2 else True)
            if working and self.off:
                return args[0] if args else kwargs["input"]
            if working:
                self.dropped.append((f"F.{name}", _quoted(_users_line())))
        if name == "scaled_dot_product_attention":
            kwargs |= dict(zip(("attn_mask", "dropout_p", "is_causal"), args[3:], strict=False))
            args = args[:3]
            if kwargs.get("dropout_p", 0.0) > 0.0:
                if self.off:
                    kwargs["dropout_p"] = 0.0
                else:
                    self.dropped.append((name, _quoted(_users_line())))
        return func(*args, **kwargs)


def lines_of(subject: Target, x: Tensor, rule: str) -> str:
    """Quote the likeliest line for a mistake of this rule, or nothing."""
    suspects = ALL[rule].suspects
    if not suspects:
        return ""
    try:
        with Lines(x.shape[1]) as seen:
            subject(x)
    except Exception:  # where it fails there is nothing to quote
        return ""
    for name in suspects["calls"]:
        square = suspects.get("square", False) and name != "scaled_dot_product_attention"
        calls = [call for call in seen.calls if call.name == name and (call.square or not square)]
        if calls:
            call = calls[-1 if suspects.get("last") else 0]
            return _quoted((call.file, call.line))
    return ""


def _quoted(place: tuple[str, int] | None) -> str:
    if place is None:
        return ""
    code = linecache.getline(*place).strip()
    return f" Look at line {place[1]} of {Path(place[0]).name}: `{code}`" if code else ""


def _users_line() -> tuple[str, int] | None:
    """The innermost frame that belongs to the user's own file."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return None


def _name(func: Callable[..., Any]) -> str:
    """`mul` for `__mul__`, `__rmul__`, `__imul__` and `mul_`, and so on."""
    name = getattr(func, "__name__", str(func))
    bare = name.strip("_")
    if name.startswith("__"):
        bare = bare.removeprefix("r" if bare[1:] in _OPERATORS else "")
        bare = bare.removeprefix("i" if bare[1:] in _OPERATORS else "")
    return {"truediv": "div", "true_divide": "div"}.get(bare, bare)


_OPERATORS = {"mul", "add", "sub", "matmul", "truediv"}
