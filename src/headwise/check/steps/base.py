"""A step, its parts, and the trial of a file in it; `steps.toml` defines the steps."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from ..syntax import ParsedFile
from ..verdict import Finding, Severity

ROWS = tomllib.loads((files("headwise.check.steps") / "steps.toml").read_text("utf-8"))


@dataclass(frozen=True)
class StepPart:
    """A function, a class, a layer or a method that a step requires: a row of `steps.toml`."""

    name: str
    rule: str
    hints: Mapping[str, Sequence[str]]
    also: Sequence[str] = ()
    fill: Mapping[str, str] = field(default_factory=dict[str, str])
    shapes: Mapping[str, str] = field(default_factory=dict[str, str])
    right: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    def hint(self, key: str, level: int) -> str:
        """Return the hint for a variable, an attribute or "return": the purpose of the line, how to
        write it, or, at level 3, the line itself."""
        key = key if key in self.hints else [*self.hints][-1]
        texts, code = self.hints[key], self.fill.get(key, "").strip()
        if level < 3 or not (code or len(texts) > 2):
            return texts[min(level, len(texts)) - 1]
        if len(texts) > 2:
            code = texts[2]
        elif isinstance(ast.parse(code).body[0], ast.Expr):
            target = f"{'self.' * (key == self.short)}{key} ="
            code = f"{'return' if key == 'return' else target} {code}"
        lines = code.splitlines()
        return f"Write `{code}`." if len(lines) == 1 else "\n      ".join(["Write:", *lines])


class StepCall(NamedTuple):
    """One call of a part and of its twin; `words` begins the message about a difference."""

    run: Callable[[Trial], Any]
    severity: Severity = "error"
    words: str = ""
    hint: str = ""


class Wrong(NamedTuple):
    """A fault other than wrong numbers: its part or line, and a description."""

    at: str | int
    message: str
    severity: Severity = "error"


@dataclass(frozen=True)
class Step:
    """A step of a tutorial.

    Args:
        like: the step whose template is the twin.
        sizes: the number for each letter of shapes, and for each variable that holds such a number.
        calls: the calls that test a part.
        final: the findings about all parts together, once every part is correct.
        judge: the faults of a part other than wrong numbers.
        refuses: the reason why no part can run, or None.
    """

    name: str
    like: str
    parts: Sequence[StepPart]
    imports: Mapping[str, str]
    sizes: Mapping[str, int]
    calls: Callable[[Trial, StepPart], Iterable[StepCall]]
    final: Callable[[Trial], Iterable[Finding]]
    judge: Callable[..., Wrong | None]
    refuses: Callable[[], str | None] = lambda: None


def step(name: str, sizes: Mapping[str, int], *functions: Any) -> Step:
    """Create a step from its rows."""
    row = ROWS[name]
    like = row.get("like", name)
    parts = [StepPart(**part) for part in ROWS[like]["parts"]]
    if like != name:  # only the other step has code for the blanks
        cut = ({key: texts[:2] for key, texts in one.hints.items()} for one in parts)
        parts = [
            StepPart(p.name, p.rule, hints, p.also) for p, hints in zip(parts, cut, strict=True)
        ]
        parts.sort(key=lambda one: one.name != row["first"])
    known = {each: size for n, size in sizes.items() for each in (n, *ROWS["sizes"].get(n, ()))}
    return Step(name, like, parts, ROWS["imports"][row["library"]], known, *functions)


def template(name: str) -> str:
    """Return the template of a step."""
    return (files("headwise.check") / "templates" / f"{name}.py.txt").read_text("utf-8")


@dataclass
class Trial:
    """One file tested in a step; the twin is also a trial, that of the filled template."""

    step: Step
    source: ParsedFile
    path: Path
    names: dict[str, str]  # from the names of parts to names in the file
    module: ModuleType | None = None
    blank: list[str] = field(default_factory=list)  # parts with a blank
    # Lines of filled blanks, each with the names that it reads.
    ours: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    results: dict[str, Any] = field(default_factory=dict)  # kept from one call for later ones

    def get(self, name: str) -> Any:
        """Return the object of a part in the file."""
        thing: Any = self.module
        for word in self.names.get(name, name).split("."):
            thing = getattr(thing, word)
        return thing
