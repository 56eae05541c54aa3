"""Look up the rules: what each says, a lesson on it, and the words for each way to break it.

The rows stand in `rules.toml`, which says what its fields are.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable
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
    """One rule.

    Args:
        id: its name, as findings and `--explain` use it.
        says: what holds where it is kept, one sentence.
        lesson: why, in a few sentences, for somebody who learns.
        evidence: "probe" (behaviour alone), "oracle" (the weights are read), "file" or "step".
        about: "numbers", "handling" or "advice".
        later: advice that waits until nothing is wrong.
        explains: rules that are broken where it is, beside those about numbers.
        ways: in which it is broken, by name.
        suspects: the calls that the mistake is likely to stand in.
    """

    id: str
    says: str
    lesson: str
    evidence: Literal["probe", "oracle", "file", "step"]
    about: Literal["numbers", "handling", "advice"]
    later: bool
    explains: tuple[str, ...]
    ways: dict[str, Wording]
    suspects: dict[str, Any]


def _rule(name: str, row: dict[str, Any]) -> CheckRule:
    numbers = row.get("about", "numbers") == "numbers"
    usual = {"ground": row.get("ground", "weights" if numbers else "call")}
    usual |= {"message": row.get("message", "")}
    others = _ROWS[row["like"]] if "like" in row else {}
    tables = {way: text for way, text in (others | row).items() if isinstance(text, dict)}
    ways = {way: Wording(**usual | text) for way, text in tables.items() if way != "suspects"}
    texts = name, row["says"], row["lesson"], row["evidence"], row.get("about", "numbers")
    explains = tuple(row.get("explains", ()))
    return CheckRule(*texts, row.get("later", False), explains, ways, row.get("suspects", {}))


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
    if rule not in RULES:
        raise ValueError(f"explain({rule!r}): there is no such rule; {_nearest(rule, RULES)}")
    return lesson(rule)


def lesson(rule: str) -> str:
    """Give the lesson on any rule, those on files and steps too.

    Raises:
        ValueError: there is no such rule; the nearest ones are named, or all of them.

    >>> print(lesson("step-linear"))
    step-linear: `linear` is a sum of products for each row.
    <BLANKLINE>
    A matrix times a vector: number i of the result is row i times x, added up.
    """
    if rule not in ALL:
        raise ValueError(f"--explain {rule}: there is no such rule; {_nearest(rule, ALL)}")
    return f"{rule}: {ALL[rule].says}\n\n{ALL[rule].lesson}"


def _nearest(rule: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(rule, list(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
