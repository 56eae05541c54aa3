"""Findings of a check, one per rule, and their output.

`Verdict.findings` are errors (❌) and advice (⚠), the most likely cause first; `results` holds a
finding for every rule: rules that failed, passed, were skipped, or failed because of a mistake that
another finding names.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Severity = Literal["error", "warning", "passed", "skipped"]
SIGNS: dict[str, str] = {"error": "❌", "warning": "⚠", "passed": "✅", "skipped": "–"}
COLORS = {"error": "red", "warning": "yellow", "passed": "green", "skipped": "dim"}
SHOWN = 4
"""The number of features printed per token; the JSON contains all of them."""
Nested = list[Any]


@dataclass(frozen=True)
class Example:
    """The smallest input on which the rule fails.

    `source` is the code that creates the input; `expected` and `actual` are the outputs `[T,
    features]` of the first sequence, and `where` names the first token and feature that differ.
    """

    source: str
    expected: Nested
    actual: Nested
    where: str
    token: int = 0
    feature: int = 0

    @classmethod
    def of(cls, source: str, expected: Tensor, actual: Tensor) -> Example:
        """Compare two outputs `[T, features]` or `[1, T, features]` of the same shape.

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
        """Yield the printed lines of the example."""
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


@dataclass(frozen=True)
class Finding:
    """One rule's result.

    Args:
        rule: its id in `headwise.check.RULES`.
        severity: "error" (wrong), "warning" (legal but unwise), "passed" or "skipped".
        message: the observation, in one plain sentence.
        hint: the change to make, or "".
        example: the smallest input that fails.
        explained_by: the rule whose violation causes this result; the result is then not listed
            among the findings.
    """

    rule: str
    severity: Severity
    message: str
    hint: str = ""
    example: Example | None = None
    explained_by: str | None = None
    lines_at: tuple[str, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return "\n".join(self.lines(example=True))

    def lines(self, example: bool = False) -> Iterator[str]:
        """Yield the printed lines of the finding; with `example`, the whole example."""
        where = f" ({self.example.where})" if self.example is not None else ""
        yield f"{SIGNS[self.severity]} {self.rule}: {self.message}{where}"
        if self.hint:
            yield f"   Fix: {self.hint}"
        if example and self.example is not None:
            yield from (f"      {line}" for line in self.example.lines())


@dataclass(frozen=True, repr=False)
class Verdict:
    """The findings of `headwise.check` on one attention layer.

    Args:
        subject: the checked layer, as a call.
        results: a finding for every rule that was tried, in reading order.
        notes: phrases that describe the observed contract, to compare with the intended one.
    """

    subject: str
    results: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return True if there are no errors; there may be advice."""
        return not self.errors

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return errors, then advice, without the results that another finding explains."""
        return self.errors + self.warnings

    @property
    def errors(self) -> tuple[Finding, ...]:
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return self._of("warning")

    @property
    def unchecked(self) -> tuple[Finding, ...]:
        """Return the rules that could not be tested."""
        return tuple(
            one for one in self.results if one.severity == "skipped" and not one.explained_by
        )

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        found = (one for one in self.results if one.explained_by is None)
        return tuple(one for one in found if one.severity == severity)

    def __getitem__(self, rule: str) -> Finding:
        """Return the result of one rule.

        Raises:
            KeyError: the rule was not tested.
        """
        for one in self.results:
            if one.rule == rule:
                return one
        tried = ", ".join(dict.fromkeys(one.rule for one in self.results))
        raise KeyError(f"{rule!r} was not tested; the tested rules are {tried}")

    def to_json(self) -> str:
        """Return the verdict as JSON: `subject`, `passed`, `unchecked` (names of rules),
        `findings`, `results` and `notes`."""
        data = {
            "subject": self.subject,
            "passed": self.passed,
            "unchecked": [one.rule for one in self.unchecked],
            "findings": [_row(one) for one in self.findings],
            "results": [_row(one) for one in self.results],
            "notes": list(self.notes),
        }
        return json.dumps(_plain(data), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Return the verdict that `to_json` wrote."""
        data = json.loads(text)
        results = []
        for row in data["results"]:
            example = row.pop("example")
            results.append(Finding(**row, example=Example(**example) if example else None))
        return cls(data["subject"], tuple(results), tuple(data["notes"]))

    def summary(self) -> str:
        """Return a one-line summary: the number of mistakes, and whether there is advice."""
        errors, warnings = len(self.errors), len(self.warnings)
        message = f"{errors} mistake{'s' * (errors > 1)}" if errors else "no mistakes found"
        return f"{self.subject}: {message}" + ", with advice" * bool(warnings)

    def __repr__(self) -> str:
        return f"<Verdict: {self.summary()}; print() shows all>"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, every: bool = False) -> Iterator[str]:
        """Yield the printed lines of the verdict: the findings, or `every` rule with examples."""
        yield self.summary()
        for one in self.findings:
            yield from one.lines(example=every)
        for one in self.results if every else ():
            if one.explained_by is not None:
                yield f"↳ {one.rule}: {one.message} This follows from {one.explained_by}."
            elif one.severity == "passed":
                yield f"{SIGNS['passed']} {one.rule}: {one.message}"
        skipped: dict[str, list[str]] = {}
        for one in self.unchecked:
            skipped.setdefault(one.message, []).append(one.rule)
        for message, rules in skipped.items():
            if message.startswith("Skipped") and not every:
                yield f"{SIGNS['skipped']} {len(rules)} rules: {message}"
                continue
            yield f"{SIGNS['skipped']} Not tested: {', '.join(rules)}. {message}"
        kept = sum(one.severity == "passed" for one in self.results)
        holds = f"{kept} rules hold" + " (--all lists them)" * (not every) if kept else ""
        observed = f"Observed: {' · '.join(self.notes)}" if self.notes else ""
        if last := "    ".join(part for part in (observed, holds) if part):
            yield last

    def _repr_html_(self) -> str:
        """Return the notebook output: the findings as a table, and the other rules collapsed."""
        found, others = self.findings, [one for one in self.results if one not in self.findings]
        parts = [f"<p><b>{html.escape(self.summary())}</b></p>", _html_rows(found)]
        if others:
            folded = f"<summary>{len(others)} other rules</summary>{_html_rows(others)}"
            parts.append(f"<details>{folded}</details>")
        notes = html.escape(" · ".join(self.notes))
        return "".join([*parts, f"<p>Observed: {notes}</p>" if notes else ""])

    def __rich__(self) -> Any:
        return colored(self.lines(), "red" if self.errors else "green")


def _row(one: Finding) -> dict[str, Any]:
    return {name: value for name, value in asdict(one).items() if name != "lines_at"}


def colored(lines: Iterator[str], first: str) -> Any:
    """Return lines in color for `rich`: the first in bold, the others by their signs."""
    from rich.text import Text

    colors = {sign: COLORS[severity] for severity, sign in SIGNS.items()}
    text = Text()
    for number, line in enumerate(lines):
        text.append(line + "\n", style=f"bold {first}" if number == 0 else colors.get(line[:1], ""))
    text.rstrip()
    return text


def _html_rows(findings: Sequence[Finding]) -> str:
    rows = []
    for one in findings:
        more = html.escape("\n".join([*one.lines(example=True)][1:]))
        sign, rule, message = SIGNS[one.severity], html.escape(one.rule), html.escape(one.message)
        cell = "text-align:left;vertical-align:top"
        rest = f"<pre>{more}</pre>" if more else ""
        rows.append(
            f'<tr><td>{sign}</td><td style="{cell}"><code>{rule}</code></td>'
            f'<td style="{cell}">{message}{rest}</td></tr>'
        )
    return f"<table><tbody>{''.join(rows)}</tbody></table>" if rows else ""


def _number(value: float | str) -> str:
    """Return a number with four decimals, or in scientific notation if large or tiny."""
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e4 or value == 0 else f"{value:.2e}"


def _plain(data: Any) -> Any:
    """Return data with the numbers that JSON lacks (NaN, infinities) as strings."""
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, Sequence) and not isinstance(data, str):
        return [_plain(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
