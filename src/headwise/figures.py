"""The figures of a head that `headwise look` shows, and the rule that names a head by them.

Both are data, so that the terminal, the page and the label say the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["COLUMNS", "NO_LABEL", "RULES", "Column", "HeadName", "Rule", "name_head"]


@dataclass(frozen=True)
class Column:
    """A figure of a head: its key in a row, and how to show and explain it."""

    key: str
    title: str
    short: str
    brief: str  # for terminals: a word a line
    unit: Literal["share", "nats", "tokens", "logit"]
    formula: str  # `_{…}` stands for a subscript
    meaning: str


_RANDOM = "The same on random tokens that come twice, where no meaning can help."

COLUMNS: tuple[Column, ...] = (
    Column(
        "entropy",
        "Entropy",
        "entropy",
        "ent.",
        "nats",
        "H_{i} = −Σ_{j} p_{ij} ln p_{ij}",
        "How widely a query spreads its weight: 0 when all of it is on one key.",
    ),
    Column(
        "entropy_share",
        "Entropy, share of its bound",
        "entropy share",
        "ent. share",
        "share",
        "H_{i} / ln n_{i}, with n_{i} keys in sight",
        "1 is even attention over all keys in sight, whatever their number.",
    ),
    Column(
        "first",
        "First token",
        "first",
        "first",
        "share",
        "p_{i0}",
        "Weight on the very first token, where idle heads often rest (a sink).",
    ),
    Column(
        "previous",
        "Previous token",
        "previous",
        "prev.",
        "share",
        "p_{i,i−1}",
        "Weight on the token just before.",
    ),
    Column(
        "self", "Itself", "itself", "self", "share", "p_{ii}", "Weight on the query's own token."
    ),
    Column(
        "same_token",
        "Same token",
        "same",
        "same",
        "share",
        "Σ_{j} p_{ij} over j < i with t_{j} = t_{i}",
        "Weight on earlier occurrences of the query's token.",
    ),
    Column(
        "induction",
        "Induction",
        "induction",
        "ind.",
        "share",
        "Σ_{j} p_{ij} over j ≤ i with t_{j−1} = t_{i}",
        "Weight on what followed earlier occurrences of the query's token.",
    ),
    Column(
        "previous_random",
        "Previous token, on random repeats",
        "previous",
        "prev.",
        "share",
        "p_{i,i−1}",
        _RANDOM,
    ),
    Column(
        "same_token_random",
        "Same token, on random repeats",
        "same",
        "same",
        "share",
        "Σ_{j} p_{ij} over j < i with t_{j} = t_{i}",
        _RANDOM,
    ),
    Column(
        "induction_random",
        "Induction, on random repeats",
        "induction",
        "ind.",
        "share",
        "Σ_{j} p_{ij} over j ≤ i with t_{j−1} = t_{i}",
        _RANDOM + " The prefix-matching score of Olsson et al. 2022.",
    ),
    Column(
        "distance",
        "Mean distance",
        "distance",
        "dist.",
        "tokens",
        "Σ_{j} p_{ij} (i − j)",
        "How many tokens back the weight lies, on average.",
    ),
    Column(
        "max_logit",
        "Largest logit",
        "max logit",
        "max logit",
        "logit",
        "max_{i,j} s_{ij}",
        "The largest score before the softmax. It grows without bound when training goes wrong.",
    ),
)


@dataclass(frozen=True)
class Rule:
    """`label` holds when the figure `key` is at least (or at most) `threshold`."""

    label: str
    brief: str
    key: str
    sign: Literal["≥", "≤"]
    threshold: float
    why: str

    def holds(self, scores: Mapping[str, Any]) -> bool:
        """Whether the rule names a head with these figures. A missing figure names nothing."""
        score = scores.get(self.key)
        if score is None or not math.isfinite(score):
            return False
        return score >= self.threshold if self.sign == "≥" else score <= self.threshold


RULES: tuple[Rule, ...] = (
    Rule(
        "induction",
        "ind.",
        "induction_random",
        "≥",
        0.4,
        "finds the last time this token stood here and looks at what came next",
    ),
    Rule(
        "duplicate token",
        "dup.",
        "same_token_random",
        "≥",
        0.4,
        "looks at the token's earlier self",
    ),
    Rule("previous token", "prev.", "previous", "≥", 0.4, "looks one token back"),
    Rule("first token", "first", "first", "≥", 0.5, "rests on the first token: a sink"),
    Rule("itself", "self", "self", "≥", 0.4, "stays on its own token"),
    Rule("broad", "broad", "entropy_share", "≥", 0.8, "spreads nearly evenly over all it can see"),
    Rule("local", "local", "distance", "≤", 8.0, "stays within a few tokens"),
)
NO_LABEL = "none of these"


@dataclass(frozen=True)
class HeadName:
    """A head's label and the figure that gave it; `score` is None where no rule holds."""

    label: str
    key: str | None = None
    score: float | None = None
    coverage: float | None = None


def name_head(scores: Mapping[str, Any]) -> HeadName:
    """Name a head by the first of `RULES` that its figures satisfy.

    Labels rest on figures with a target on nearly every row, or on random repeats, where half of
    the rows have one; the coverage is given beside the score.

    >>> name_head({"previous": 0.62, "previous_coverage": 0.99, "distance": 3.0})
    HeadName(label='previous token', key='previous', score=0.62, coverage=0.99)
    >>> name_head({"previous": 0.1, "distance": 20.0}).label
    'none of these'
    """
    for rule in RULES:
        if rule.holds(scores):
            coverage = scores.get(f"{rule.key}_coverage", 1.0)
            return HeadName(rule.label, rule.key, scores[rule.key], coverage)
    return HeadName(NO_LABEL)
