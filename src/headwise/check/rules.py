"""Look up the rules: their statements, lessons, and messages for each way to break them.

The rows are in `rules.toml`, which explains its fields.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Literal

from .verdict import Example, Finding, Severity


@dataclass(frozen=True)
class CheckRule:
    """One rule; `rules.toml` explains the fields. `ways` are the ways to break the rule."""

    id: str
    statement: str
    lesson: str
    evidence: Literal["probe", "oracle", "file", "step"]
    ways: dict[str, dict[str, Any]]
    about: Literal["numbers", "handling", "advice"] = "numbers"
    explains: tuple[str, ...] = ()
    lines: tuple[str, ...] = field(default=())


def _rule(name: str, row: dict[str, Any]) -> CheckRule:
    texts = {key: value for key, value in row.items() if not isinstance(value, dict)}
    usual = {"message": texts.pop("message", ""), "hint": texts.pop("hint", "")}
    ways = {way: usual | text for way, text in row.items() if isinstance(text, dict)}
    for key in ("explains", "lines"):
        texts[key] = tuple(texts.get(key, ()))
    return CheckRule(name, ways=ways, **texts)


_ROWS = tomllib.loads((files("headwise.check") / "rules.toml").read_text("utf-8"))
ALL: dict[str, CheckRule] = {name: _rule(name, row) for name, row in _ROWS.items()}
RULES = {name: rule for name, rule in ALL.items() if rule.evidence in ("probe", "oracle")}


def violation(rule: str, way: str, example: Example | None = None, /, **words: Any) -> Finding:
    """Return the finding for a rule that is broken in the given way."""
    text = ALL[rule].ways[way]
    severity: Severity = text.get("severity", "error")
    message, hint = text["message"].format(**words), text["hint"].format(**words)
    lines = (*text.get("lines", ()), *ALL[rule].lines)
    return Finding(rule, severity, message, hint, example, lines_at=lines)


def passed(rule: str, message: str = "") -> Finding:
    """Return the finding for a rule that passed."""
    return Finding(rule, "passed", message or ALL[rule].statement)


def skipped(rule: str, message: str) -> Finding:
    """Return the finding for a rule that was not tested, with the reason."""
    return Finding(rule, "skipped", message)


def explain(rule: str) -> str:
    """Return the lesson on a rule.

    Raises:
        ValueError: the rule is unknown; the message lists similar names or, without any, all names.

    >>> print(explain("scale"))  # doctest: +ELLIPSIS
    scale: Scores are divided by the square root of the head width.
    ...
    """
    if rule not in ALL:
        near = difflib.get_close_matches(rule, list(ALL), n=3)
        message = f"did you mean {' or '.join(near)}?" if near else f"rules: {', '.join(ALL)}"
        raise ValueError(f"explain({rule!r}): there is no such rule; {message}")
    return f"{rule}: {ALL[rule].statement}\n\n{ALL[rule].lesson}"
