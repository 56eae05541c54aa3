"""What a step is made of, and what goes through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..files.syntax import Source
from ..findings.verdict import Finding

# What a part's test yields: findings of the part's own rule, most often one.
Test = Callable[["Trial"], Iterator[Finding]]


@dataclass(frozen=True)
class Part:
    """Something that a step asks for.

    Args:
        name: `function`, `Class`, `Class.method` or `Class.attribute`.
        rule: the rule that its test's findings belong to.
        hint: what is to be written there.
        test: how it is tried; None: it is enough that it is there, the whole shows the rest.
        also: other names that will do.
        locals: hints for variables of the template that are still None.
        uses: parts that its code is expected to use; asked only where nothing can be run.
    """

    name: str
    rule: str
    hint: str
    test: Test | None = None
    also: tuple[str, ...] = ()
    locals: Mapping[str, str] = field(default_factory=dict)
    uses: tuple[str, ...] = ()

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
        imports: the line that imports a name.
        whole: the last test, of everything together.
        refuses: says why nothing can be run here, or None.
    """

    name: str
    about: str
    parts: tuple[Part, ...]
    imports: Mapping[str, str]
    whole: Test
    refuses: Callable[[], str | None] = lambda: None


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

    def get(self, name: str) -> Any:
        """What the file has under a part's name."""
        found: Any = self.module
        for word in self.names.get(name, name).split("."):
            found = getattr(found, word)
        return found


def passed(rule: str, message: str) -> Finding:
    return Finding(rule, "passed", message)


def wrong(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule, "error", message, hint)


def shape_of(value: Any) -> str:
    """What a call gave, for a sentence: its shape, or what it is instead."""
    if hasattr(value, "shape"):
        return str(tuple(int(size) for size in value.shape))
    return f"a {type(value).__name__}" if value is not None else "None"
