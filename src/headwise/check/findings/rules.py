"""Look up the rules: what each says, a lesson on it, and the words for each way to break it.

The rows stand in `rules.toml`, which says what its fields are.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

from .verdict import Example, Finding, Ground, Severity


@dataclass(frozen=True)
class Wording:
    """One way to break a rule; braces in its words are filled in by `found`."""

    message: str
    hint: str = ""
    severity: Severity = "error"
    ground: Ground = "call"


@dataclass(frozen=True)
class CheckRule:
    """One rule; `rules.toml` says what its fields are, and `ways` are those to break it."""

    id: str
    says: str
    lesson: str
    evidence: Literal["probe", "oracle", "file", "step"]
    ways: dict[str, Wording]
    suspects: dict[str, Any]
    about: Literal["numbers", "handling", "advice"] = "numbers"
    later: bool = False
    explains: Sequence[str] = ()


def _rule(name: str, row: dict[str, Any]) -> CheckRule:
    texts = {key: value for key, value in row.items() if not isinstance(value, dict)}
    stands_on = "weights" if row.get("about", "numbers") == "numbers" else "call"
    usual = {"message": texts.pop("message", ""), "ground": texts.pop("ground", stands_on)}
    like = _ROWS.get(texts.pop("like", ""), {})
    tables = {key: value for key, value in (like | row).items() if isinstance(value, dict)}
    ways = {way: Wording(**usual | text) for way, text in tables.items() if way != "suspects"}
    return CheckRule(name, ways=ways, suspects=row.get("suspects", {}), **texts)


_ROWS = tomllib.loads((files("headwise.check.findings") / "rules.toml").read_text("utf-8"))
ALL: dict[str, CheckRule] = {name: _rule(name, row) for name, row in _ROWS.items()}
PROBE_RULES = tuple(rule for rule in ALL.values() if rule.evidence == "probe")
RULES = {name: rule for name, rule in ALL.items() if rule.evidence in ("probe", "oracle")}


def found(rule: str, way: str, example: Example | None = None, /, **words: Any) -> Finding:
    """Make the finding on a rule that is broken in one of its ways."""
    text = ALL[rule].ways[way]
    message, hint = text.message.format(**words), text.hint.format(**words)
    return Finding(rule, text.severity, message, hint, example, ground=text.ground)


def passed(rule: str, message: str = "") -> Finding:
    """Make the finding on a rule that is kept."""
    return Finding(rule, "passed", message or ALL[rule].says)


def skipped(rule: str, message: str) -> Finding:
    """Make the finding on a rule that was not tried, with the reason."""
    return Finding(rule, "skipped", message)


def explain(rule: str) -> str:
    """Give the lesson on one rule.

    Raises:
        ValueError: an unknown rule; the nearest ones are named, or all of them.
    """
    return _told(rule, RULES, f"explain({rule!r})")


def lesson(rule: str) -> str:
    """Give the lesson on any rule, those on files and steps too.

    Raises:
        ValueError: there is no such rule; the nearest ones are named, or all of them.

    >>> print(lesson("step-linear"))
    step-linear: `linear` is a sum of products for each row.
    <BLANKLINE>
    A matrix times a vector: number i of the result is row i times x, added up.
    """
    return _told(rule, ALL, f"--explain {rule}")


def _told(rule: str, known: Mapping[str, CheckRule], call: str) -> str:
    if rule not in known:
        near = difflib.get_close_matches(rule, list(known), n=3)
        told = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
        raise ValueError(f"{call}: there is no such rule; {told}")
    return f"{rule}: {known[rule].says}\n\n{known[rule].lesson}"
