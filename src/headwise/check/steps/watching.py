"""Follow a function of somebody's file line by line: what its variables were given, and where.

From that a fault is laid to the line that made it: the first variable whose shape is not the one
that the step's template names, the first line that makes a NaN, or the line at which it failed; and
the hint is that of the blank to which the line belongs.
"""

from __future__ import annotations

import ast
import difflib
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from ..files.syntax import Function, names, nodes, quoted
from ..findings.verdict import Finding
from ..target.checked_target import told
from .base import StepPart, Trial
from .filling import innermost


class Given(NamedTuple):
    """What a variable was given in a line."""

    line: int
    name: str
    shape: list[int] | None
    nan: bool


class Watch:
    """Keeps what the variables of one function are given while it runs."""

    def __init__(self, trial: Trial, part: StepPart, sizes: Mapping[str, int]) -> None:
        self.trial, self.part, self.sizes = trial, part, sizes
        self.function = trial.source.function(trial.names[part.name])
        self.given: list[Given] = []
        self.last: dict[str, tuple[Any, int]] = {}
        self.line = 0
        self.failed = False  # whether it raised, so that the last line did not come to its end

    def run(self, call: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return call()
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
        return self._follow

    def _follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        values = _values(frame)
        for name, (value, version) in values.items():
            old = self.last.get(name)
            if old is None or old[0] is not value or old[1] != version:
                nan = isinstance(value, Tensor) and bool(value.isnan().any())
                self.given.append(Given(self.line, name, lengths(value), nan))
        self.last = values
        if event != "exception":
            self.line = frame.f_lineno
        return self._follow

    def misfit(self) -> Finding | None:
        """The first variable that does not have the shape that the template names."""
        final = {one.name: one for one in self.given}
        ends = key_at(self.function, self.part, self.line) if self.failed else ""
        for name, letters in self.part.shapes.items():
            if name == ends:  # what comes here or later is not whole yet
                break
            one, want = final.get(name), [self.sizes[letter] for letter in letters.split()]
            if one is None or one.line in self.trial.ours:
                continue
            if one.shape not in (None, want):
                right = f"[{', '.join(letters.split())}], here {want}"
                right = right if len(want) > 1 else f"a list of {want[0]}"
                said = f"`{name}` is {_words(one.shape, want)}; it should be {right}"
                return self._finding(f"{said} ({quoted(self.trial.path, one.line)}).", name)
        return None

    def nan(self) -> Finding | None:
        """The first line that makes a NaN."""
        for one in self.given:
            if one.nan and one.line not in self.trial.ours:
                said = f"`{one.name}` holds NaN from here on ({quoted(self.trial.path, one.line)})."
                more = " 0 times infinity is NaN, and so are inf - inf and inf // 2."
                return self._finding(said, key_at(self.function, self.part, one.line), more)
        return None

    def _finding(self, said: str, key: str, more: str = "") -> Finding:
        hint = self.trial.step.hint(self.part, key) + more
        return Finding(self.part.rule, "error", said, hint)


def watched(trial: Trial, part: StepPart, sizes: Mapping[str, int], call: Callable[[], Any]) -> Any:
    """Call something; what the part's variables were given is kept in `trial.watch`."""
    trial.watch = Watch(trial, part, sizes)
    return trial.watch.run(call)


def failed(trial: Trial, part: StepPart, error: BaseException) -> Finding | None:
    """A finding on what a part raised; None where headwise's own code in a blank did."""
    watch: Watch | None = trial.watch
    if watch is not None and (misfit := watch.misfit()):
        return misfit
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in frames[::-1] if f.filename == str(trial.path)), None) or 0
    if line in trial.ours:
        return None
    said, cure = told(error, trial.path), _cure(trial, error, line)
    if cure.startswith("Did you mean"):
        said = re.sub(r"; did you mean `\w+`\?", "", said)  # once is enough
    said = f"`{part.short}` fails: {said}."
    return Finding(part.rule, "error", said, cure or _hint(trial, part, line))


def _cure(trial: Trial, error: BaseException, line: int) -> str:
    """What to do about an exception that tells it."""
    if "before Module.__init__() call" in str(error):
        return "Begin `__init__` with `super().__init__()`: it makes room for the layers."
    unknown = re.search(r"object has no attribute '(\w+)'", str(error))
    if isinstance(error, AttributeError) and unknown:
        own = trial.source.attributes(trial.source.owner_at(line)[0])
        return "".join(f"Did you mean `{one}`?" for one in _near(unknown[1], own))
    return ""


def _hint(trial: Trial, part: StepPart, line: int) -> str:
    """The hint of the blank to which a line belongs, which may be another part's."""
    for other in trial.step.parts:
        name = trial.names[other.name]
        function = trial.source.function(name)
        if function is None:
            if line and other.owner and trial.source.line(name) == line:
                return other.hint
        elif function.lineno < line <= (function.end_lineno or 0):
            return trial.step.hint(other, key_at(function, other, line))
    return part.hint


def key_at(function: Function | None, part: StepPart, line: int) -> str:
    """The blank to which a line belongs: the variable first given a value there, or else next."""
    if function is None:
        return ""
    statements = [*nodes(ast.stmt, function)]
    here = innermost(statements, line)
    if isinstance(here, ast.Return):
        return "return"
    met = {name for one in statements if one.lineno < line for name in _targets(one)}
    new = [key for key in (part.shapes or part.fill) if key not in {"return", *met}]
    own = [key for key in new if here is not None and key in _targets(here)]
    return [*own, *new, "return"][0]


def line_of(trial: Trial, part: StepPart, key: str) -> int | None:
    """The line in which a variable is first given a value, or the last that returns one."""
    function = trial.source.function(trial.names[part.name])
    if function is None:
        return None
    if key == "return":
        return max((node.lineno for node in nodes(ast.Return, function)), default=None)
    found = (one.lineno for one in nodes(ast.stmt, function) if key in _targets(one))
    return min(found, default=None)


def meant(trial: Trial, name: str, line: int) -> str:
    """What was meant by a name that nothing gives a meaning to: `self.W_query`, or ``."""
    owner, function = trial.source.owner_at(line)
    own = trial.source.attributes(owner)
    if name in own:
        return f"self.{name}"
    inside = [function] if function is not None else []
    known = names(*inside) - {name} | {node.arg for node in nodes(ast.arg, *inside)}
    known |= trial.source.bound
    return "".join(one if one in known else f"self.{one}" for one in _near(name, known | own))


def _near(name: str, known: set[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known - {name}), n=1, cutoff=0.75)


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


def _words(got: list[int] | None, want: list[int]) -> str:
    if got is None or len(want) > 1:
        return str(got)
    return f"a list of {got[0]}" if len(got) == 1 else "one number" if not got else f"lists, {got}"


def _values(frame: FrameType) -> dict[str, tuple[Any, int]]:
    """The variables of a function, each with a number that grows where it is changed in place."""

    def version(value: Any) -> int:
        if isinstance(value, Tensor):
            return 0 if value.is_inference() else value._version
        return len(value) if isinstance(value, list) else 0

    return {name: (value, version(value)) for name, value in frame.f_locals.items()}


def _targets(statement: ast.stmt) -> set[str]:
    """The names that a statement of one line gives a value."""
    gives = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign))
    return names(statement, context=ast.Store) if gives else set()
