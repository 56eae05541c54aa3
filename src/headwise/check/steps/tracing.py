"""Trace a function of a file: the values of its variables, line by line."""

from __future__ import annotations

import ast
import contextlib
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..syntax import Function, names, nodes
from .base import StepPart, Trial
from .filling import innermost

GROWS = ("append", "extend", "insert")
"""Methods that change a list."""
HIDDEN = -1e4
"""Scores below this value count as hidden."""
LISTS = {"floats", "Values", "new Values", "tensors"}


class Numbers(NamedTuple):
    """Numbers and their container: an `int`, a `tensor`, a list of `floats` or of `Values`.

    `new Values` have no inputs, so no gradient passes through them.
    """

    kind: str
    numbers: Tensor

    @property
    def shape(self) -> list[int]:
        return [*self.numbers.shape]

    @property
    def cut(self) -> bool:
        """Return True if no gradient passes through a list."""
        return self.kind in ("floats", "new Values") and self.numbers.numel() > 0

    def fits(self, right: Numbers) -> bool:
        """Return True if these numbers equal the right ones, or the beginning of the right list."""
        if (right.kind == "int") != (self.kind == "int") or (self.cut and right.kind == "Values"):
            return False
        a, b = self.numbers, right.numbers
        if right.kind in LISTS:
            if self.kind not in LISTS or not a.numel() or a.dim() != b.dim():
                return self.kind in LISTS and not a.numel()
            b = b[: len(a)]
        sizes, others = ([size for size in one.shape if size != 1] for one in (a, b))
        a, b = (one.flatten().clamp(min=HIDDEN) for one in (a, b))
        return sizes == others and torch.allclose(a, b, rtol=1e-4, atol=1e-5)

    def is_one_of(self, known: list[Numbers]) -> bool:
        """Return True if these numbers are right; a list must be complete."""
        final = self.shape[:1] if self.kind in LISTS else None
        return any(self.fits(one) and (not final or final == one.shape[:1]) for one in known)


def plain(value: Any) -> Numbers | None:
    """Return the numbers in a value; None if there are none, or if its lists differ in length."""
    if isinstance(value, Tensor):
        return Numbers("tensor", value.detach().double().clone())
    leaf = value
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    kind = "new Values" if getattr(leaf, "inputs", None) == () else "Values"
    kind = kind if hasattr(leaf, "data") else "floats"
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if isinstance(value, (list, tuple)) and isinstance(leaf, Tensor):
            return Numbers("tensors", torch.stack([*value]).detach().double())
        kind = kind if isinstance(value, (list, tuple)) else type(value).__name__
        return Numbers(kind, torch.tensor(_floats(value)).double())
    return None


def _floats(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_floats(one) for one in value]
    return float(getattr(value, "data", value))


class Event(NamedTuple):
    """A new value of a variable at a line or, with the name "return", the result of a function.

    `frame` identifies the call, `time` counts executed lines; `caller`, only of "return", is the
    frame and the time of the calling line.
    """

    name: str
    line: int
    frame: int
    time: int
    value: Numbers | None
    raw: Any
    caller: tuple[int, int] = (0, 0)


@dataclass
class _Frame:
    function: Function
    frame: FrameType  # kept, so that its id is not reused
    line: int
    time: int  # when the line began
    caller: tuple[int, int]
    last: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])


class Watch:
    """Record the values of the variables of a part, and of its helpers, during a call."""

    def __init__(self, trial: Trial, part: StepPart) -> None:
        self.trial, source, name = trial, trial.source, trial.names[part.name]
        self.function = source.function(name) or source.function(f"{name}.__init__")
        others = {id(source.function(one)) for one in trial.names.values()} - {id(self.function)}
        self.followed = {
            min([one.lineno, *(each.lineno for each in one.decorator_list)]): one
            for one in nodes(ast.FunctionDef, source.tree)
            if id(one) not in others and (one.name != "__init__" or one is self.function)
        }
        self.events, self.returns = list[Event](), list[Event]()  # returns of the part itself
        self.frames, self.lines = dict[int, _Frame](), dict[int, ast.stmt | None]()
        self.time, self.ran = 0, list[tuple[int, int, int]]()  # frames, lines and times
        self.failed: tuple[int, int, Exception] | None = None  # the frame, the line, the error

    def run(self, call: Callable[[Trial], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call(self.trial)
        except Exception as error:
            every = [*traceback.walk_tb(error.__traceback__)]
            own = [(id(frame), line) for frame, line in every if id(frame) in self.frames]
            file = [
                line for frame, line in every if frame.f_code.co_filename == str(self.trial.path)
            ]
            self.failed = *(own[-1] if own else (0, [0, *file][-1])), error
            raise
        finally:
            sys.settrace(before)

    def statement(self, frame: int, line: int) -> ast.stmt | None:
        if line not in self.lines:
            self.lines[line] = innermost(nodes(ast.stmt, *self.frames[frame].function.body), line)
        return self.lines[line]

    def loops(self, one: Event) -> list[ast.For]:
        """Return the loops that contain an event's line."""
        loops = nodes(ast.For, *self.frames[one.frame].function.body)
        return [each for each in loops if each.lineno < one.line <= (each.end_lineno or 0)]

    def turns(self, name: str) -> list[list[Event]]:
        """Return the events of a variable, one list for each new assignment."""
        turns: list[list[Event]] = []
        for one in (each for each in self.events if each.name == name):
            grows = turns and is_growth(self.statement(one.frame, one.line))
            turns[-1:] = [[*turns[-1], one]] if grows else [*turns[-1:], [one]]
        return turns

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, caller = frame.f_code, frame.f_back
        function = self.followed.get(code.co_firstlineno)
        if code.co_filename != str(self.trial.path) or function is None:
            return None
        if code.co_name != function.name:  # a lambda or a comprehension in its first line
            return None
        while caller is not None and id(caller) not in self.frames:
            caller = caller.f_back
        above = (id(caller), self.frames[id(caller)].time) if caller is not None else (0, 0)
        self.frames[id(frame)] = _Frame(function, frame, frame.f_lineno, self.time, above)
        return self._follow(frame, "line", None)

    def _follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        number = id(frame)
        here = self.frames[number]
        for name, value in [*frame.f_locals.items()]:
            kept, version = value, None
            if isinstance(value, Tensor) and not value.is_inference():
                kept, version = value.detach().clone(), value._version
            elif isinstance(value, list):
                kept, version = [*value], [id(one) for one in value]
            last = here.last.get(name, (here, None))
            if last[0] is not value or last[1] != version:
                self.events.append(Event(name, here.line, number, here.time, plain(value), kept))
                here.last[name] = value, version
        if event == "return" and arg is not None:
            done = Event("return", here.line, number, here.time, plain(arg), arg, here.caller)
            (self.returns if here.function is self.function else self.events).append(done)
        if event != "exception":
            self.time += 1
            here.line, here.time = frame.f_lineno, self.time
            self.ran.append((number, here.line, self.time))
        return self._follow


def is_growth(statement: ast.stmt | None) -> bool:
    """Return True if a statement changes the value of an existing variable."""
    targets = getattr(statement, "targets", [None])
    return isinstance(statement, (ast.AugAssign, ast.Expr)) or isinstance(targets[0], ast.Subscript)


def changed(statement: ast.stmt | None) -> set[str]:
    """Return the names that a statement assigns, or whose list or tensor it changes."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        items = names(*(one.value for one in nodes(ast.Subscript, *targets)))
        return items | names(*targets, context=ast.Store)
    calls = nodes(ast.Call, statement) if isinstance(statement, ast.Expr) else ()
    methods = [one.func for one in calls if isinstance(one.func, ast.Attribute)]
    grown = (one.value for one in methods if one.attr in GROWS or one.attr.endswith("_"))
    return {one.id for one in grown if isinstance(one, ast.Name)}
