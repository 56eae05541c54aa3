"""What a check found: a line a rule, in plain words, and how it prints.

`Verdict.findings` are what is wrong (❌) or unwise (⚠), the likeliest cause first; `results` holds
a line for every rule that was tried, also those that passed, were skipped, or failed only because
of a mistake that is named above them.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Severity = Literal["error", "warning", "passed", "skipped"]
Ground = Literal["any", "call", "weights"]
"""What an error stands on, as `grounds` weighs it."""
SIGNS: dict[str, str] = {"error": "❌", "warning": "⚠", "passed": "✅", "skipped": "–"}
COLOURS = {"error": "red", "warning": "yellow", "passed": "green", "skipped": "dim"}

Nested = list[Any]
"""Nested lists of numbers, as `Tensor.tolist()` gives them."""

NOT_JUDGED = "Not judged for a guess of mine"
UNTRIED = (
    NOT_JUDGED,
    "No form was found",
    "No way was found",
    "Only another input reaches",
    "Which tokens it speaks of",
)
"""How findings begin on what could not be tried."""

SHOWN = 4
"""Features of a token that are printed; all of them are in the JSON."""


@dataclass(frozen=True)
class Example:
    """The smallest input on which it goes wrong.

    `source` is what to type to get the input; `expected` and `actual` are the two outputs
    `[T, features]` of the first sequence, and `where` says in words at which token and feature
    they part.
    """

    source: str
    expected: Nested
    actual: Nested
    where: str
    token: int = 0
    feature: int = 0

    @classmethod
    def of(cls, source: str, expected: Tensor, actual: Tensor) -> Example:
        """From two outputs `[T, features]` or `[1, T, features]` of the same shape.

        >>> Example.of("x = torch.eye(2)", torch.eye(2), torch.zeros(2, 2)).where
        'token 0, feature 0: 1.0000 expected, 0.0000 found'
        """
        expected, actual = (
            x.detach().double().reshape(-1, x.shape[-1]) for x in (expected, actual)
        )
        gap = torch.where(expected == actual, 0.0, (expected - actual).abs()).nan_to_num(torch.inf)
        tokens = (gap.amax(-1) > 1e-3 * gap.max().clamp(max=1e300)).nonzero()
        token = int(tokens[0]) if len(tokens) else 0
        feature = int(gap[token].argmax())
        values = float(expected[token, feature]), float(actual[token, feature])
        where = "token {}, feature {}: {} expected, {} found".format(
            token, feature, *map(_number, values)
        )
        return cls(source, expected.tolist(), actual.tolist(), where, token, feature)

    def lines(self) -> Iterator[str]:
        """The example for people, one line after the other."""
        yield self.source
        first = min(self.feature, max(0, len(self.expected[0]) - SHOWN))
        last = min(first + SHOWN, len(self.expected[0]))
        part = (
            f"features {first} to {last - 1}" if len(self.expected[0]) > SHOWN else "all features"
        )
        width = 10 * (last - first) - 2
        yield f"token  {'expected':<{width}}    found ({part})"
        for token, rows in enumerate(zip(self.expected, self.actual, strict=True)):
            cells = ("  ".join(f"{_number(value):>8}" for value in row[first:last]) for row in rows)
            yield f"{token:>5}  " + "    ".join(cells) + ("  ←" if token == self.token else "")
        yield f"They part at {self.where}."


@dataclass(frozen=True)
class Finding:
    """One rule's result.

    Args:
        rule: its id in `headwise.check.findings.rules.RULES`.
        severity: "error" (wrong), "warning" (legal but unwise), "passed" or "skipped".
        message: one plain sentence: what was seen.
        hint: what to change; empty where nothing is to be done.
        example: the smallest input on which it goes wrong.
        explained_by: the rules of named mistakes that explain this result, joined by "and", so
            that it is no finding of its own.
        ground: what it stands on where it is an error: "any", a "call", or the "weights".
    """

    rule: str
    severity: Severity
    message: str
    hint: str = ""
    example: Example | None = None
    explained_by: str | None = None
    ground: Ground = "call"

    @property
    def open(self) -> bool:
        """Whether it says that something that matters could not be checked."""
        if self.rule == "definition":  # other numbers than attention's may have their reasons
            return self.severity in ("skipped", "warning")
        return self.severity == "skipped" and self.message.startswith(UNTRIED)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The finding for people: sign, rule and message, then hint and example, indented."""
        yield f"{SIGNS[self.severity]} {self.rule}: {self.message}"
        if self.hint:
            yield f"   What to change: {self.hint}"
        if self.example is not None:
            yield "   Smallest example:"
            yield from (f"      {line}" for line in self.example.lines())


@dataclass(frozen=True, repr=False)
class Verdict:
    """What `headwise.check` found about one attention.

    Args:
        subject: what was checked, as a call.
        results: a finding for every rule that was tried, in the order in which to read them.
        notes: what was worked out about it (how it is called, what it was taken for).
    """

    subject: str
    results: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; warnings may be there."""
        return not self.errors

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, then what is unwise; without what a named mistake explains."""
        return self.errors + self.warnings

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self._of("warning")

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """What stays open where nothing is wrong: the definition, or a mask, that was not tried."""
        tried = any(one.rule in ("definition", "shape") for one in self.results)
        closed = self.errors or not tried
        return () if closed else tuple(one for one in self.results if one.open)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        found = (one for one in self.results if one.explained_by is None)
        return tuple(one for one in found if one.severity == severity)

    def __getitem__(self, rule: str) -> Finding:
        """The result of one rule."""
        for one in self.results:
            if one.rule == rule:
                return one
        tried = ", ".join(dict.fromkeys(one.rule for one in self.results))
        raise KeyError(f"{rule!r} was not tried here; tried were {tried}")

    def to_json(self) -> str:
        """The verdict for programs: `subject`, `passed`, `unchecked` (names of rules), `findings`,
        `results` and `notes`."""
        data = {
            "subject": self.subject,
            "passed": self.passed,
            "unchecked": [one.rule for one in self.unchecked],
            "findings": [asdict(one) for one in self.findings],
            "results": [asdict(one) for one in self.results],
            "notes": list(self.notes),
        }
        return json.dumps(_plain(data), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """The verdict that `to_json` wrote."""
        data = json.loads(text)
        results = []
        for row in data["results"]:
            example = row.pop("example")
            results.append(Finding(**row, example=Example(**example) if example else None))
        return cls(data["subject"], tuple(results), tuple(data["notes"]))

    def summary(self) -> str:
        """One line: right or not, and how many of each."""
        errors, warnings = len(self.errors), len(self.warnings)
        kept = sum(one.severity == "passed" for one in self.results)
        right = "right as far as seen" if self.unchecked else "right"
        right += ", with advice" * bool(warnings)
        said = "not right yet" if errors else right
        counts = [f"{errors} ❌"] * bool(errors) + [f"{warnings} ⚠"] * bool(warnings)
        counted = f"{self.subject}: {said} ({', '.join([*counts, f'{kept} ✅'])})"
        return " ".join([f"{counted}." if self.unchecked else counted, *map(_open, self.unchecked)])

    def __repr__(self) -> str:
        return f"<Verdict: {self.summary()}; print() tells all>"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """The verdict for people: the findings in full, then a line for every other rule."""
        yield self.summary()
        for finding in self.findings:
            yield ""
            yield from finding.lines()
        yield ""
        for one in self.results:
            if one.explained_by is not None:
                yield f"↳ {one.rule}: {one.message} This follows from {one.explained_by}."
            elif one.severity == "passed":
                yield f"{SIGNS['passed']} {one.rule}: {one.message}"
        waiting: dict[str, list[str]] = {}
        for one in self.results:
            if one.severity == "skipped" and one.explained_by is None:
                waiting.setdefault(one.message, []).append(one.rule)
        for message, rules in waiting.items():
            yield f"{SIGNS['skipped']} {', '.join(rules)}: {message}"
        yield from (f"  {note}" for note in self.notes)

    def _repr_html_(self) -> str:
        """What a notebook shows: the findings as a table, the other rules folded."""
        found, others = self.findings, [one for one in self.results if one not in self.findings]
        parts = [f"<p><b>{html.escape(self.summary())}</b></p>", _html_rows(found)]
        if others:
            parts.append(f"<details><summary>{len(others)} other rules</summary>")
            parts.append(f"{_html_rows(others)}</details>")
        return "".join([*parts, *(f"<p>{html.escape(note)}</p>" for note in self.notes)])

    def __rich__(self) -> Any:
        """The same lines in colour, for `rich`."""
        from rich.text import Text

        whole = "red" if self.errors else "cyan" if self.unchecked else "green"
        colours = {sign: COLOURS[severity] for severity, sign in SIGNS.items()}
        text = Text()
        for number, line in enumerate(self.lines()):
            style = f"bold {whole}" if number == 0 else colours.get(line[:1], "")
            text.append(line + "\n", style=style)
        text.rstrip()
        return text


def _open(one: Finding) -> str:
    return f"Not checked: {one.rule}. {one.message}"


def _html_rows(findings: Sequence[Finding]) -> str:
    """Findings as a table: sign, rule, and the rest of their lines."""
    rows = []
    for one in findings:
        more = html.escape("\n".join([*one.lines()][1:]))
        rest = f"<pre>{more}</pre>" if more else ""
        sign, rule, message = SIGNS[one.severity], html.escape(one.rule), html.escape(one.message)
        cell = "text-align:left;vertical-align:top"
        rows.append(
            f'<tr><td>{sign}</td><td style="{cell}"><code>{rule}</code></td>'
            f'<td style="{cell}">{message}{rest}</td></tr>'
        )
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _number(value: float | str) -> str:
    """Four decimals, or as many digits as a large or tiny number needs."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def _plain(data: Any) -> Any:
    """Numbers that JSON lacks (NaN, the infinities) as words."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
