"""Follow a function of somebody's file line by line: what its variables were given, and where."""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.syntax import Function, names, nodes
from .base import StepPart, Trial
from .filling import innermost

GROWS = ("append", "extend", "insert")
"""Methods that change a list."""


class Plain(NamedTuple):
    """Numbers, whatever held them: `int`, `float`, `tensor`, or a list of `floats` or `Values`."""

    kind: str
    numbers: Tensor


class Given(NamedTuple):
    """What a variable was given in a line."""

    line: int
    name: str
    shape: list[int] | None
    value: Plain | None

    @classmethod
    def of(cls, line: int, name: str, value: Any) -> Given:
        return cls(line, name, lengths(value), plain(value))

    def is_like(self, other: Given) -> bool:
        values = self.value, other.value
        numbers = [one.numbers for one in values if one is not None]
        return len(numbers) == 2 and numbers[0].equal(numbers[1])


class Watch:
    """Keeps what the variables of one function are given while something is called.

    `call` does it, of a trial: of this one, and of its twin, with which it is compared.
    """

    def __init__(
        self,
        trial: Trial,
        part: StepPart,
        sizes: Mapping[str, int],
        call: Callable[[Trial], Any],
    ) -> None:
        self.trial, self.part, self.sizes, self.call = trial, part, sizes, call
        self.function = trial.source.function(trial.names[part.name])
        self.body = self.function.body if self.function is not None else []
        self.statements = [*nodes(ast.stmt, *self.body)]
        self.given: list[Given] = []
        self.last: dict[str, tuple[Any, Any]] = {}
        self.taken: dict[str, Tensor] = {}  # what it was called with
        self.written: dict[str, int] = {}  # those of them that were changed in place, and where
        self.line = 0
        self.twin: Watch | None = None  # of the same call of the trial's twin
        self.out: Any = None
        self.failed = False  # whether it raised, so that the last line did not come to its end

    @property
    def arguments(self) -> set[str]:
        """The names of what the function takes."""
        return {one.arg for one in nodes(ast.arg, *([self.function] if self.function else []))}

    def loops(self) -> list[ast.For]:
        return [one for one in self.statements if isinstance(one, ast.For)]

    def at(self, line: int) -> ast.stmt | None:
        return innermost(self.statements, line)

    def run(self) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return self.call(self.trial)
        except Exception:
            self.failed = True
            raise
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, function = frame.f_code, self.function
        if function is None or code.co_filename != str(self.trial.path):
            return None
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        if code.co_name != function.name or code.co_firstlineno != first:
            return None
        self.line, self.last = frame.f_lineno, _values(frame)
        taken = {name: value for name, (value, _) in self.last.items()}
        self.taken = {name: one for name, one in taken.items() if isinstance(one, Tensor)}
        return self._follow

    def _follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        values = _values(frame)
        for name, (value, version) in values.items():
            old = self.last.get(name)
            if old is None or old[0] is not value or old[1] != version:
                self.given.append(Given.of(self.line, name, value))
                if old is not None and old[0] is value and value is self.taken.get(name):
                    self.written.setdefault(name, self.line)
        self.last = values
        if event != "exception":
            self.line = frame.f_lineno
        return self._follow


def watched(
    trial: Trial, part: StepPart, sizes: Mapping[str, int], call: Callable[[Trial], Any]
) -> Any:
    """Call something; what the part's variables were given is kept in `trial.watch`."""
    trial.watch = Watch(trial, part, sizes, call)
    return trial.watch.run()


def plain(value: Any) -> Plain | None:
    """The numbers in a value; None where there are none, or in lists of several lengths."""
    if isinstance(value, (bool, int, float)):
        return Plain(type(value).__name__, torch.tensor(float(value)).double())
    if isinstance(value, Tensor):
        return Plain("tensor", value.detach().double().clone())
    leaf = value
    while isinstance(leaf, (list, tuple)) and leaf:
        leaf = leaf[0]
    kind = "Values" if hasattr(leaf, "data") else "floats"
    if not isinstance(value, (list, tuple)):
        kind = "Value"
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        return Plain(kind, torch.tensor(_floats(value)).double())
    return None


def _floats(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_floats(one) for one in value]
    return float(getattr(value, "data", value))


def key_at(function: Function | None, part: StepPart, line: int) -> str:
    """The blank to which a line belongs: the variable that it gives a value first, or that its loop
    fills, or else the next."""
    if function is None:
        return ""
    statements = [*nodes(ast.stmt, function)]
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or line)]
    around.sort(key=lambda one: (one.end_lineno or 0) - one.lineno)
    here = around[0] if around else None
    if isinstance(here, ast.Return):
        return "return"
    begun = (one for one in statements if one.lineno < line and not _is_empty(one))
    met = {name for one in begun for name in changed(one)}
    keys = [key for key in (part.shapes or part.fill) if key != "return"]
    new = keys[max((n for n, key in enumerate(keys, 1) if key in met), default=0) :]
    own = [key for key in new if here is not None and key in changed(here)]
    loops = [one for one in around[:-1] if isinstance(one, (ast.For, ast.While, ast.Expr))]
    inside = (_filled(one) for one in loops)
    grown = [key for filled in inside for key in keys if key in filled]
    if isinstance(here, ast.AugAssign) and loops:
        grown = [key for key in keys if key in changed(here)] + grown
    return [*own, *grown, *new, "return"][0]


def line_of(trial: Trial, part: StepPart, *keys: str) -> int | None:
    """The line that is the last to give a variable a value, the first of some that has one; of
    "return", the last that returns one."""
    function = trial.source.function(trial.names[part.name])
    for key in keys if function is not None else ():
        assert function is not None
        kind = ast.Return if key == "return" else ast.stmt
        lines = [one.lineno for one in nodes(kind, function) if key in ("return", *changed(one))]
        if lines:
            return max(lines)
    return None


def changed(statement: ast.stmt) -> set[str]:
    """The names that a statement gives a value, or whose list it changes."""
    if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        items = (one.value for one in nodes(ast.Subscript, *targets))
        own = {one.id for one in items if isinstance(one, ast.Name)}
        return own | names(*targets, context=ast.Store)
    return _filled(statement) if isinstance(statement, ast.Expr) else set()


def _is_empty(statement: ast.stmt) -> bool:
    """Whether a statement gives a list that is still to be filled: `joined = []`."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.List) and not value.elts


def given_by(statement: ast.stmt | None) -> set[str]:
    """The names that a statement changes, or gives a value at each turn of its loop."""
    if isinstance(statement, ast.For):
        return names(statement.target)
    return changed(statement) if statement is not None else set()


def _filled(statement: ast.stmt) -> set[str]:
    """The names of lists that a statement, or one inside it, appends to."""
    calls = (call.func for call in nodes(ast.Call, statement))
    methods = [one for one in calls if isinstance(one, ast.Attribute) and one.attr in GROWS]
    return {one.value.id for one in methods if isinstance(one.value, ast.Name)}


def lengths(value: Any) -> list[int] | None:
    """The shape of a tensor, of nested lists, or [] of a number; None of anything else.

    >>> lengths([[1.0, 2.0], [3.0, 4.0]]), lengths(1.0), lengths("text")
    ([2, 2], [], None)
    """
    if hasattr(value, "shape"):
        return [int(size) for size in value.shape]
    if isinstance(value, (list, tuple)):
        return [len(value), *(lengths(value[0]) or [] if value else [])]
    return [] if isinstance(value, (int, float)) or hasattr(value, "data") else None


def _values(frame: FrameType) -> dict[str, tuple[Any, Any]]:
    """The variables of a function, each with what is another where it is changed in place."""

    def version(value: Any) -> Any:
        if isinstance(value, Tensor):
            return 0 if value.is_inference() else value._version
        return [id(one) for one in value] if isinstance(value, list) else 0

    return {name: (value, version(value)) for name, value in frame.f_locals.items()}
