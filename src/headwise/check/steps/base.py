"""Hold what a step is made of, and what goes through it; the rows stand in `steps.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..files.syntax import Source
from ..findings.rules import found, passed
from ..findings.verdict import Finding

Shape = tuple[int, ...]
# What a part's test finds, of the part's own rule: most often one finding.
Test = Callable[["Trial", "StepPart"], Finding | Iterable[Finding]]


@dataclass(frozen=True)
class StepPart:
    """Something that a step asks for: a row of `steps.toml`, which says what its fields are."""

    name: str
    rule: str
    hint: str = ""
    test: str = ""
    also: Sequence[str] = ()
    uses: Sequence[str] = ()
    fill: Mapping[str, str] = field(default_factory=dict[str, str])
    shapes: Mapping[str, str] = field(default_factory=dict[str, str])
    same: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    ways: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    wrong: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    returns: str = ""

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Step:
    """A step of a tutorial, as `steps.toml` has it.

    `tests` are those that its parts name, and that of the `whole` at the end; `refuses` says why
    nothing can be run here, or None.
    """

    name: str
    tests: Mapping[str, Test]
    parts: Sequence[StepPart]
    blanks: Mapping[str, str]
    imports: Mapping[str, str]
    mistakes: Mapping[str, Mapping[str, Any]]
    refuses: Callable[[], str | None]

    def hint(self, part: StepPart, key: str) -> str:
        """What to write in a blank of a part."""
        own = part.returns if key == "return" else self.blanks.get(key)
        return own or part.hint


_ROWS = tomllib.loads((files("headwise.check.steps") / "steps.toml").read_text("utf-8"))


def step(
    name: str, tests: Mapping[str, Test], refuses: Callable[[], str | None] = lambda: None
) -> Step:
    """Make a step of its rows and of the tests that they name."""
    row = _ROWS[name]
    like = _ROWS[row.get("like", name)]

    def said(text: Any) -> Any:
        for word, by in row.get("words", {}).items() if isinstance(text, str) else ():
            text = text.replace(f"{{{word}}}", by)
        return text

    rows = [{key: said(value) for key, value in part.items()} for part in like["parts"]]
    if like is not row:  # headwise has code for the blanks of the other one alone
        rows = [part | {"fill": {}} for part in rows]
    parts = sorted(
        (StepPart(**part) for part in rows), key=lambda one: one.name != row.get("first")
    )
    blanks = {key: said(hint) for key, hint in like["blanks"].items()}
    imports, mistakes = (_ROWS[kind].get(row["library"], {}) for kind in ("imports", "mistakes"))
    return Step(name, tests, parts, blanks, imports, mistakes, refuses)


def template(name: str) -> str:
    """The file with blanks that a step starts from."""
    return (files("headwise.check") / "templates" / f"{name}.py.txt").read_text("utf-8")


@dataclass
class Trial:
    """One file on its way through a step."""

    step: Step
    source: Source
    path: Path
    names: dict[str, str]  # of parts, to those that the file uses
    module: ModuleType | None = None
    waiting: dict[str, None] = field(default_factory=dict)  # parts that are not right yet
    blank: list[str] = field(default_factory=list)  # parts in which a blank is left
    made: dict[str, Any] = field(default_factory=dict)  # what one test leaves to the next
    ours: set[int] = field(default_factory=set)  # lines of blanks that headwise filled
    watch: Any = None  # of the part that is being tried, where its variables are followed

    def get(self, name: str) -> Any:
        """What the file has under a part's name."""
        thing: Any = self.module
        for word in self.names.get(name, name).split("."):
            thing = getattr(thing, word)
        return thing


def judge_shape(
    part: StepPart, out: Any, given: Shape, want: Shape, said: str, **words: Any
) -> Finding:
    """Make the finding on what a part gives for an input of shape `given`, by its shape alone."""
    if shape_of(out) == str(want):
        return passed(part.rule, said)
    return found(part.rule, "shape", got=shape_of(out), given=given, want=want, **words)


def hidden_wrongly(hidden: Tensor) -> int | None:
    """Which of five usual mistakes a mask `[T, T]` holds, True where a key is hidden; 5: another
    one; None where just later keys are hidden."""
    ones = torch.ones_like(hidden)
    if torch.equal(hidden, ones.triu(1)):
        return None
    usual = ones.triu(0), ones.triu(2), ones.tril(-1), ones.tril(0), ~ones
    return next((n for n, one in enumerate(usual) if torch.equal(hidden, one)), len(usual))


def shape_of(value: Any) -> str:
    """What a call gave, for a sentence: its shape, or what it is instead."""
    if hasattr(value, "shape"):
        return str(tuple(int(size) for size in value.shape))
    return f"a {type(value).__name__}" if value is not None else "None"
