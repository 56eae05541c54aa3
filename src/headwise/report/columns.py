"""The figures of a head that `headwise look` shows: as data, so that the terminal and the page say
the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["COLUMNS", "Column"]


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


def _offset(key: str, title: str, steps: int, meaning: str) -> Column:
    formula = f"p_{{i,i{'−' if steps < 0 else '+'}{abs(steps)}}}"
    brief = key.replace("_", " ")
    return Column(key, title, brief, brief, "share", formula, meaning)


COLUMNS: tuple[Column, ...] = (
    Column(
        *("entropy", "Entropy", "entropy", "ent.", "nats", "H_{i} = −Σ_{j} p_{ij} ln p_{ij}"),
        "How widely a query spreads its weight: 0 when all of it is on one key.",
    ),
    Column(
        *("entropy_share", "Entropy, share of its bound", "entropy share", "ent. share", "share"),
        "H_{i} / ln n_{i}, with n_{i} keys in sight",
        "1 is even attention over all keys in sight, whatever their number.",
    ),
    Column(
        *("first", "First token", "first", "first", "share", "p_{i0}"),
        "Weight on the very first token, where idle heads often rest (a sink).",
    ),
    Column(
        *("previous", "Previous token", "previous", "prev.", "share", "p_{i,i−1}"),
        "Weight on the token just before.",
    ),
    Column(
        *("self", "Itself", "itself", "self", "share", "p_{ii}"), "Weight on the query's own token."
    ),
    _offset("next", "Next token", 1, "Weight on the token just after."),
    _offset("back_2", "Two back", -2, "Weight on the token two before."),
    _offset("ahead_2", "Two ahead", 2, "Weight on the token two after."),
    _offset("back_3", "Three back", -3, "Weight on the token three before."),
    _offset("ahead_3", "Three ahead", 3, "Weight on the token three after."),
    Column(
        *("same_token", "Same token", "same", "same", "share"),
        "Σ_{j} p_{ij} over j ≠ i with t_{j} = t_{i}",
        "Weight on other occurrences of the query's token.",
    ),
    Column(
        *("induction", "Induction", "induction", "ind.", "share"),
        "Σ_{j} p_{ij} over j ≠ i + 1 with t_{j−1} = t_{i}",
        "Weight on what followed other occurrences of the query's token.",
    ),
    Column(
        *("delimiters", "Delimiters", "delimiters", "delim.", "share"),
        "Σ_{j} p_{ij} over punctuation, line breaks, separators",
        "Weight on the tokens between words and sentences.",
    ),
    Column(
        *("previous_random", "Previous token, on random repeats", "previous", "prev.", "share"),
        "p_{i,i−1}",
        _RANDOM,
    ),
    Column(
        *("same_token_random", "Same token, on random repeats", "same", "same", "share"),
        "Σ_{j} p_{ij} over j ≠ i with t_{j} = t_{i}",
        _RANDOM,
    ),
    Column(
        *("induction_random", "Induction, on random repeats", "induction", "ind.", "share"),
        "Σ_{j} p_{ij} over j ≠ i + 1 with t_{j−1} = t_{i}",
        _RANDOM + " The prefix-matching score of Olsson et al. 2022.",
    ),
    Column(
        *("distance", "Mean distance", "distance", "dist.", "tokens", "Σ_{j} p_{ij} (i − j)"),
        "How many tokens back the weight lies, on average; what lies ahead counts below 0.",
    ),
    Column(
        *("distance_absolute", "Mean distance, either way", "distance either way", "dist. ±"),
        "tokens",
        "Σ_{j} p_{ij} |i − j|",
        "How many tokens away the weight lies, on average, ahead or behind.",
    ),
    Column(
        *("distance_share", "Distance, share of even attention's", "distance share", "dist. share"),
        "share",
        "Σ_{j} p_{ij} |i − j| / mean_{j} |i − j|",
        "1 is as far as even attention over all keys in sight; above it lies farther.",
    ),
    Column(
        *("max_logit", "Largest logit", "max logit", "max logit", "logit", "max_{i,j} s_{ij}"),
        "The largest score before the softmax. It grows without bound when training goes wrong.",
    ),
    Column(
        *("importance", "Importance", "importance", "imp.", "nats", "E |⟨o_{h}, ∂L/∂o_{h}⟩|"),
        "How fast the loss moves as the head is turned up or down (Michel et al. 2019).",
    ),
    Column(
        *("ablation_estimate", "Ablation, by gradient", "ablation estimate", "abl. est.", "nats"),
        "E −⟨o_{h}, ∂L/∂o_{h}⟩",
        "To first order, what the loss gains when the head gives 0.",
    ),
    Column(
        *("ablation", "Ablation", "ablation", "abl.", "nats", "E L(without head h) − E L"),
        "What the loss gains when the head's output is replaced; below 0 it is better off without.",
    ),
)
