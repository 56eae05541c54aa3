"""Follow a function of somebody's file line by line: what its variables were given, and where.

From that a fault is laid to the line that made it: the first variable whose shape is not the one
that the step's template names, the first line that makes a NaN, or the line at which it failed; and
the hint is that of the blank to which the line belongs.
"""

from __future__ import annotations

import ast
import difflib
import linecache
import re
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor

from ..files.syntax import Function
from ..findings.verdict import Finding
from ..target.checked_target import told
from .base import StepPart, Trial
from .filling import innermost


@dataclass(frozen=True)
class Given:
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
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        code, function = frame.f_code, self.function
        if function is None or code.co_filename != str(self.trial.path):
            return None
        first = min([function.lineno, *(one.lineno for one in function.decorator_list)])
        if code.co_name != function.name or code.co_firstlineno != first:
            return None
        self.line, self.last = frame.f_lineno, dict(_values(frame))
        return self._follow

    def _follow(self, frame: FrameType, event: str, arg: Any) -> Any:
        for name, (value, version) in _values(frame):
            old = self.last.get(name)
            if old is None or old[0] is not value or old[1] != version:
                nan = isinstance(value, Tensor) and bool((value != value).any())
                self.given.append(Given(self.line, name, lengths(value), nan))
                self.last[name] = value, version
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
            if one.shape is not None and one.shape != want:
                axes = f"[{', '.join(letters.split())}], here {want}"
                right = axes if len(want) > 1 else f"a list of {want[0]}"
                said = f"`{name}` is {_words(one.shape, want)}; it should be {right}"
                return self._finding(f"{said} ({quoted(self.trial, one.line)}).", name)
        return None

    def nan(self) -> Finding | None:
        """The first line that makes a NaN."""
        for one in self.given:
            if one.nan and one.line not in self.trial.ours:
                said = f"`{one.name}` holds NaN from here on ({quoted(self.trial, one.line)})."
                key = key_at(self.function, self.part, one.line)
                return self._finding(
                    said, key, " 0 times infinity is NaN, and so are inf - inf and inf // 2."
                )
        return None

    def _finding(self, said: str, key: str, more: str = "") -> Finding:
        hint = self.trial.step.hint(self.part, key) + more
        return Finding(self.part.rule, "error", said, hint)


def watched(trial: Trial, part: StepPart, sizes: Mapping[str, int], call: Callable[[], Any]) -> Any:
    """Call something; what the part's variables were given is kept in `trial.watch`."""
    watch = trial.watch = Watch(trial, part, sizes)
    try:
        return watch.run(call)
    except Exception:
        watch.failed = True
        raise


def failed(trial: Trial, part: StepPart, error: BaseException) -> Finding | None:
    """A finding on what a part raised; None where headwise's own code in a blank did."""
    watch: Watch | None = trial.watch
    if watch is not None and (misfit := watch.misfit()):
        return misfit
    frames = traceback.extract_tb(error.__traceback__)
    line = next((f.lineno for f in frames[::-1] if f.filename == str(trial.path)), None) or 0
    if line in trial.ours:
        return None
    said = f"`{part.short}` fails: {told(error, trial.path)}."
    return Finding(part.rule, "error", said, _cure(trial, error, line) or _hint(trial, part, line))


def _cure(trial: Trial, error: BaseException, line: int) -> str:
    """What to do about an exception that tells it."""
    if "before Module.__init__() call" in str(error):
        return "Begin `__init__` with `super().__init__()`: it makes room for the layers."
    unknown = re.search(r"object has no attribute '(\w+)'", str(error))
    if isinstance(error, AttributeError) and unknown:
        owner, _ = trial.source.owner_at(line)
        known = trial.source.attributes(owner) if owner else set[str]()
        if near := nearest(unknown[1], known - {unknown[1]}):
            return f"Did you mean `{near}`?"
    return ""


def _hint(trial: Trial, part: StepPart, line: int) -> str:
    """The hint of the blank to which a line belongs, which may be another part's."""
    for other in trial.step.parts:
        function = trial.source.function(trial.names[other.name])
        if function is None:
            if line and trial.source.line(trial.names[other.name]) == line and other.owner:
                return other.hint
        elif function.lineno < line <= (function.end_lineno or 0):
            return trial.step.hint(other, key_at(function, other, line))
    return part.hint


def key_at(function: Function | None, part: StepPart, line: int) -> str:
    """The blank to which a line belongs: the variable first given a value there, or else next."""
    keys, met = [key for key in (part.shapes or part.fill) if key != "return"], set[str]()
    if function is None:
        return ""
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    here = innermost(statements, line)
    if isinstance(here, ast.Return):
        return "return"
    for one in statements:
        if one is not function and one.lineno < line and not isinstance(one, (ast.For, ast.If)):
            met |= _targets(one)
    new = [key for key in keys if key not in met]
    own = [key for key in new if here is not None and key in _targets(here)]
    return [*own, *new, "return"][0]


def quoted(trial: Trial, line: int) -> str:
    return f"line {line} of {trial.path.name}: `{code_of(trial, line)}`"


def code_of(trial: Trial, line: int) -> str:
    return linecache.getline(str(trial.path), line).strip()


def line_of(trial: Trial, part: StepPart, key: str) -> int | None:
    """The line in which a variable is first given a value, or the last that returns one."""
    function = trial.source.function(trial.names[part.name])
    nodes = [*ast.walk(function)] if function is not None else []
    if key == "return":
        return max((n.lineno for n in nodes if isinstance(n, ast.Return)), default=None)
    found = (n.lineno for n in nodes if isinstance(n, ast.stmt) and key in _targets(n))
    return min(found, default=None)


def nearest(name: str, known: Collection[str]) -> str:
    """The name that was meant, perhaps."""
    return next(iter(difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.75)), "")


def meant(trial: Trial, name: str, line: int) -> str:
    """What was meant by a name that nothing gives a meaning to: `self.W_query`, or ``."""
    owner, function = trial.source.owner_at(line)
    own = trial.source.attributes(owner) if owner else set[str]()
    if name in own:
        return f"self.{name}"
    nodes = [*ast.walk(function)] if function is not None else []
    known = {node.id for node in nodes if isinstance(node, ast.Name)} - {name}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)} | trial.source.bound
    near = nearest(name, known | own)
    return near if near in known or not near else f"self.{near}"


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


def _words(got: list[int], want: list[int]) -> str:
    if len(want) > 1:
        return str(got)
    return f"a list of {got[0]}" if len(got) == 1 else "one number" if not got else f"lists, {got}"


def _values(frame: FrameType) -> list[tuple[str, tuple[Any, int]]]:
    """The variables of a function, each with a number that grows where it is changed in place."""

    def version(value: Any) -> int:
        if isinstance(value, Tensor):
            return 0 if value.is_inference() else value._version
        return len(value) if isinstance(value, list) else 0

    return [(name, (value, version(value))) for name, value in frame.f_locals.items()]


def _targets(statement: ast.stmt) -> set[str]:
    """The names that a statement of one line gives a value."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return set()
    nodes = ast.walk(statement)
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
