"""Hold what a step is made of, and what goes through it; the rows stand in `steps.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

from ..files.syntax import Source
from ..findings.rules import found, passed
from ..findings.verdict import Finding

Shape = tuple[int, ...]
# What a part's test yields: findings of the part's own rule, most often one.
Test = Callable[["Trial", "StepPart"], Iterator[Finding]]
Whole = Callable[["Trial"], Iterator[Finding]]


@dataclass(frozen=True)
class StepPart:
    """Something that a step asks for.

    Args:
        name: `function`, `Class`, `Class.method` or `Class.attribute`.
        rule: the rule that its test's findings belong to.
        hint: what is to be written there.
        test: how it is tried; None: it is enough that it is there, the whole shows the rest.
        also: other names that will do.
        uses: parts that its code is expected to use; asked only where nothing can be run.
        fill: headwise's own code for each blank, by its key.
        shapes: of the variables of a function, in letters, in the order in which one writes them.
        returns: the hint for what is returned; default: `hint`.
    """

    name: str
    rule: str
    hint: str
    test: Test | None = None
    also: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    fill: Mapping[str, str] = field(default_factory=dict[str, str])
    shapes: Mapping[str, str] = field(default_factory=dict[str, str])
    returns: str = ""

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Step:
    """A step of a tutorial.

    Args:
        name: as `--step` and `--new` take it.
        about: one line.
        parts: in the order in which one writes them.
        blanks: hints for variables of the template that are still None.
        imports: the line that imports a name.
        whole: the last test, of everything together.
        refuses: says why nothing can be run here, or None.
        mistakes: by the rule of a mistake that was named, its hint in this step's own language, the
            variable whose line makes it (`at`), and the rule it goes by here.
    """

    name: str
    about: str
    parts: tuple[StepPart, ...]
    blanks: Mapping[str, str]
    imports: Mapping[str, str]
    whole: Whole
    refuses: Callable[[], str | None]
    mistakes: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])

    def hint(self, part: StepPart, key: str) -> str:
        """What to write in a blank of a part."""
        own = part.returns if key == "return" else self.blanks.get(key)
        return own or part.hint


_ROWS = tomllib.loads((files("headwise.check.steps") / "steps.toml").read_text("utf-8"))


def step(
    name: str,
    tests: Mapping[str, Test],
    whole: Whole,
    refuses: Callable[[], str | None] = lambda: None,
    first: str = "",
) -> Step:
    """Make a step of its rows and of the tests that they name; the part `first` is tried first."""
    row = _ROWS[name]
    like = _ROWS[row.get("like", name)]

    def said(text: str) -> str:
        for word, by in row.get("words", {}).items():
            text = text.replace(f"{{{word}}}", by)
        return text

    parts = []
    for part in like["parts"]:
        test, also, uses = (part.get(key) for key in ("test", "also", "uses"))
        words = part["name"], part["rule"], said(part["hint"])
        names = tuple(also or ()), tuple(uses or ())
        more = {} if "like" in row else {"fill": part.get("fill", {})}
        more |= {"shapes": part.get("shapes", {}), "returns": said(part.get("returns", ""))}
        parts.append(StepPart(*words, tests[test] if test else None, *names, **more))
    parts.sort(key=lambda part: part.name != first)
    blanks = {name: said(hint) for name, hint in like["blanks"].items()}
    imports = _ROWS["imports"][row["library"]]
    mistakes = row.get("mistakes", {})
    return Step(name, row["about"], tuple(parts), blanks, imports, whole, refuses, mistakes)


@dataclass
class Trial:
    """One file on its way through a step."""

    step: Step
    source: Source
    path: Path
    names: dict[str, str]  # of parts, to those that the file uses
    module: ModuleType | None = None
    runs: bool = True  # whether it can be imported at all
    waiting: list[str] = field(default_factory=list)  # parts that are not right yet
    made: dict[str, Any] = field(default_factory=dict)  # what one test leaves to the next
    blank: list[str] = field(default_factory=list)  # parts in which a blank is left
    tree: Any = None  # of the file with its blanks filled
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


def shape_of(value: Any) -> str:
    """What a call gave, for a sentence: its shape, or what it is instead."""
    if hasattr(value, "shape"):
        return str(tuple(int(size) for size in value.shape))
    return f"a {type(value).__name__}" if value is not None else "None"
