"""The findings of a look: the heads of each label, strongest first, and a summary sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from ..capture.head_address import head_label

Row = Mapping[str, Any]


def labeled_heads(rows: Sequence[Row], rules: Sequence[Row]) -> dict[str, list[int]]:
    """Return the rows of each label, in the order of the rules, the strongest head first.

    The strongest head is the one whose score is furthest past the threshold of the rule.

    >>> def row(score):
    ...     return {"labels": [{"label": "local", "score": score, "threshold": 0.5}]}
    >>> labeled_heads([row(0.6), row(0.9), {"labels": []}], [{"label": "local"}])
    {'local': [1, 0]}
    """
    heads: dict[str, list[int]] = {}
    labels = (one["label"] for one in chain(rules, *(row["labels"] for row in rows)))
    for label in dict.fromkeys(labels):
        margins = {
            place: _margin(one)
            for place, row in enumerate(rows)
            if (one := _named(row, label)) is not None
        }
        if margins:
            heads[label] = sorted(margins, key=lambda place: -margins[place])
    return heads


def opening_head(rows: Sequence[Row], rules: Sequence[Row]) -> int:
    """Return the row of the head to show first: the strongest head of the first label for which
    it is far past the threshold, else the strongest of all; without labels, the most important.

    >>> def row(label, score):
    ...     return {"labels": [{"label": label, "score": score, "threshold": 0.5}]}
    >>> rules = [{"label": "induction"}, {"label": "local"}]
    >>> opening_head([row("local", 0.9), row("induction", 0.6)], rules)
    0
    >>> opening_head([row("local", 0.9), row("induction", 0.8)], rules)
    1
    """
    best = [
        (heads[0], _margin(_named(rows[heads[0]], label) or {}))
        for label, heads in labeled_heads(rows, rules).items()
    ]
    clear = [place for place, margin in best if margin >= 0.5]
    if not best:
        return _most_important(rows)[1]
    return clear[0] if clear else max(best, key=lambda one: one[1])[0]


def _most_important(rows: Sequence[Row]) -> tuple[str, int]:
    """Return the first available importance metric and the row where it is largest; or `""`, 0."""
    for metric in EFFECTS:
        known = {
            n: row[metric]
            for n, row in enumerate(rows)
            if math.isfinite(row.get(metric) or math.nan)
        }
        if known:
            return metric, max(known, key=lambda place: known[place])
    return "", 0


def _named(row: Row, label: str) -> Row | None:
    """Return the first of a row's labels of that name."""
    return next((one for one in row["labels"] if one["label"] == label), None)


def _margin(label: Row) -> float:
    """Return the margin of a score past its threshold, as a share of the remaining range."""
    score, threshold = label.get("score", 0.0), label.get("threshold", 0.0)
    if label.get("sign") == "≤":
        return (threshold - score) / (threshold or 1.0)
    return (score - threshold) / max(1e-9, 1.0 - threshold)


def finding(rows: Sequence[Row], rules: Sequence[Row]) -> str:
    """Return one or two sentences: the first labels, and the most important head.

    >>> label = {"label": "local", "score": 0.9, "threshold": 0.5}
    >>> rows = [{"layer": 2, "head": 1, "labels": [label], "ablation": 0.41}]
    >>> finding(rows, [{"label": "local"}])
    '1 of 1 head is labeled local (L2H1). Ablating L2H1 costs most: +0.41 nats of loss.'
    """
    found = [
        f"{_count(len(heads), len(rows)) if not place else len(heads)} {label} "
        f"({'strongest: ' * (len(heads) > 1)}{_name(rows[heads[0]])})"
        for place, (label, heads) in enumerate(list(labeled_heads(rows, rules).items())[:3])
    ]
    text = f"{', '.join(found)}." if found else "No head has a label."
    metric, most = _most_important(rows)
    if not metric or rows[most][metric] <= 0:
        return text
    return f"{text} {EFFECTS[metric].format(_name(rows[most]), rows[most][metric])}"


EFFECTS = {
    "ablation": "Ablating {} costs most: {:+.2g} nats of loss.",
    "importance": "The loss is most sensitive to {}.",
}
"""The metrics that measure importance, most direct first, with a sentence for each."""


def _count(heads: int, of: int) -> str:
    return f"{heads:,} of {of:,} head{'s' * (of > 1)} {'are' if heads > 1 else 'is'} labeled"


def _name(row: Row) -> str:
    return head_label(row["layer"], row["head"])
