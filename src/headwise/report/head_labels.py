"""Label heads by declarative rules.

A rule compares a metric of a head with a threshold. A head may have several labels, or none.
A metric averages the valid queries for which it is defined; their fraction of all queries is its
coverage.

Sources: Clark et al. 2019 (previous and next token, `[CLS]`, separators, delimiters, broad heads),
Voita et al. 2019 (positional heads), Olsson et al. 2022 (induction), Wang et al. 2022 (duplicate
tokens), Xiao et al. 2023 (sinks), Gu et al. 2024 (a sink takes 0.3 of the weight), Raganato and
Tiedemann 2018 (local heads), Dosovitskiy et al. 2020 (mean attention distance). The patterns
are from these papers; the thresholds, on means of exact weights, are headwise's, except for sinks.

With randomly initialized weights, attention is uniform to within `UNEVEN` nats. In a short text,
uniform attention puts much weight on the first token and on other single tokens, which is not a
property of a head. Such labels, and `broad`, therefore require attention at least `UNEVEN` nats
from uniform.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxtyping import Bool, Int
from torch import Tensor

from ..capture.captured import Watched
from ..capture.head_address import head_label
from ..core.masks import Dense
from ..stats.distance import Distance
from ..stats.entropy import Entropy
from ..stats.mass import Mass
from ..stats.patterns import At, First, Induction, Previous, SameToken, Self
from ..stats.statistic import Statistic

__all__ = [
    "NOT_EVALUATED",
    "NO_LABEL",
    "RULES",
    "HeadName",
    "Label",
    "LabelRule",
    "is_delimiter",
    "label_head",
    "name_heads",
    "naming_statistics",
]

NO_LABEL = "unlabeled"
"""The name of a head for which all rules were evaluated and none holds."""

NOT_EVALUATED = "not evaluated"
"""The name of a head without a label, if some rules could not be evaluated."""

MIN_COVERAGE = 0.1
"""The minimum coverage: rules on metrics with a lower coverage are not evaluated."""

OFFSETS = (1, -2, 2, -3, 3)
"""The fixed offsets of positional heads; −1 and 0 have their own labels."""

UNEVEN = 0.35
"""The entropy gap in nats above which attention is not called uniform. It was smaller for all heads
of models with random weights (σ = 0.02) and widths from 64 to 2,048 (docs/watching.md)."""

LARGEST_GAP = 1e3  # of a head that attends to a single key

BARELY = 0.1
"""Labels with a smaller margin on random tokens are listed after those on the user's text."""

_NEAR = ("self", "previous", "next", "back_2", "ahead_2", "back_3", "ahead_3")

Sign = Literal["≥", "≤"]


@dataclass(frozen=True)
class LabelRule:
    """A label that holds if the metric `key` is at least (or at most) `threshold`.

    `given` is a second condition on another metric: its key, sign and threshold. Several rules may
    give the same label; its score is from the first that holds. A key that ends in `_random` is a
    metric on repeated random tokens. `encoders` marks metrics that only encoders have.
    """

    label: str
    brief: str
    key: str
    sign: Sign
    threshold: float
    why: str
    source: str
    given: tuple[str, Sign, float] | None = None
    encoders: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of the metrics that the rule needs."""
        return (self.key,) if self.given is None else (self.key, self.given[0])

    def holds(self, figures: Mapping[str, Any]) -> bool:
        """Return True if the rule's metrics are all known and satisfy it."""
        conditions = [(self.key, self.sign, self.threshold), *([self.given] if self.given else [])]
        return all(_meets(figures, *condition) for condition in conditions)


def _meets(figures: Mapping[str, Any], key: str, sign: Sign, threshold: float) -> bool:
    if not _known(figures, key):
        return False
    return figures[key] >= threshold if sign == "≥" else figures[key] <= threshold


def _known(figures: Mapping[str, Any], key: str) -> bool:
    """Return True if the metric `key` is finite and its coverage is sufficient."""
    score, coverage = figures.get(key), figures.get(f"{key}_coverage", 1.0)
    return score is not None and math.isfinite(score) and coverage >= MIN_COVERAGE


_FOLLOWERS = "attends to the token after another occurrence of its own token"
_SAME = "attends to other copies of its own token"
_CLARK, _VOITA, _OLSSON = "Clark et al. 2019", "Voita et al. 2019", "Olsson et al. 2022"
_WANG, _XIAO, _GU = "Wang et al. 2022", "Xiao et al. 2023", "Gu et al. 2024"
_NOT_EVEN: tuple[str, Sign, float] = ("entropy_gap", "≥", UNEVEN)


def _positional(offset: int) -> LabelRule:
    where = f"{abs(offset)} token{'s' * (abs(offset) > 1)} {'ahead' if offset > 0 else 'back'}"
    return LabelRule(
        "positional",
        "pos.",
        At(offset).name,
        "≥",
        0.4,
        why=f"attends {where}, at every position",
        source=_VOITA,
    )


RULES: tuple[LabelRule, ...] = (
    LabelRule("induction", "ind.", "induction_random", "≥", 0.4, _FOLLOWERS, _OLSSON),
    LabelRule("duplicate token", "dup.", "same_token_random", "≥", 0.4, _SAME, _WANG),
    LabelRule(
        "previous token", "prev.", "previous", "≥", 0.4, "attends to the previous token", _CLARK
    ),
    *(_positional(offset) for offset in OFFSETS),
    LabelRule("self", "self", "self", "≥", 0.4, "attends to itself", _CLARK),
    LabelRule("induction", "ind.", "induction", "≥", 0.4, _FOLLOWERS, _OLSSON),
    LabelRule("duplicate token", "dup.", "same_token", "≥", 0.4, _SAME, _WANG),
    LabelRule(
        "local",
        "local",
        "distance_absolute",
        "≤",
        8.0,
        why="stays within a few tokens, and within half the distance of uniform attention",
        source="Dosovitskiy et al. 2020",
        given=("distance_share", "≤", 0.5),
    ),
    LabelRule(
        "local",
        "local",
        "near",
        "≥",
        0.4,
        why="stays within three tokens, and nearer than uniform attention",
        source="Raganato and Tiedemann 2018",
        given=("distance_share", "≤", 0.75),
    ),
    LabelRule(
        "[CLS]",
        "CLS",
        "cls",
        "≥",
        0.3,
        why="attends to the token that the tokenizer puts first",
        source=f"{_CLARK}; {_GU}",
        given=_NOT_EVEN,
        encoders=True,
    ),
    LabelRule(
        "special tokens",
        "spec.",
        "separators",
        "≥",
        0.3,
        why="attends to the tokens that the tokenizer puts between and after texts",
        source=f"{_CLARK}; {_GU}",
        given=_NOT_EVEN,
        encoders=True,
    ),
    LabelRule(
        "first token",
        "first",
        "first",
        "≥",
        0.3,
        why="attends to the first token: a sink",
        source=f"{_XIAO}; {_GU}",
        given=_NOT_EVEN,
    ),
    LabelRule(
        "punctuation",
        "punct.",
        "delimiters",
        "≥",
        0.5,
        why="attends to punctuation or line breaks",
        source=_CLARK,
        given=_NOT_EVEN,
    ),
    LabelRule(
        "broad",
        "broad",
        "entropy_share",
        "≥",
        0.7,
        why="spreads over much of what it can see, but not uniformly",
        source=_CLARK,
        given=_NOT_EVEN,
    ),
)
"""The rules, in the order of a head's labels; if there is room for only one, the first is shown."""


@dataclass(frozen=True)
class Label:
    """A label of a head: the metric `key` that gave it, its score and the threshold of its rule.

    `coverage` is the fraction of queries for which `key` is defined.
    """

    label: str
    key: str
    score: float
    sign: Sign
    threshold: float
    coverage: float = 1.0


@dataclass(frozen=True, repr=False)
class HeadName:
    """The labels of a head, if any; `missing` are the labels that could not be evaluated.

    >>> HeadName(0, 3)
    <HeadName: L0H3: unlabeled>
    >>> HeadName(0, 3, missing=("induction", "punctuation"))
    <HeadName: L0H3: not evaluated: induction, punctuation>
    """

    layer: int
    head: int
    labels: tuple[Label, ...] = ()
    missing: tuple[str, ...] = ()
    module: str = ""

    @property
    def label(self) -> str:
        """The first label, if any; else `not evaluated` or, if nothing is missing, `unlabeled`."""
        if self.labels:
            return self.labels[0].label
        return NOT_EVALUATED if self.missing else NO_LABEL

    def __repr__(self) -> str:
        parts = [", ".join(one.label for one in self.labels)] if self.labels else []
        if self.missing:
            parts.append(f"{NOT_EVALUATED}: {', '.join(self.missing)}")
        return f"<HeadName: {head_label(self.layer, self.head)}: {'; '.join(parts) or NO_LABEL}>"


def label_head(figures: Mapping[str, Any]) -> tuple[Label, ...]:
    """Return every label of a head with these metrics, in the order of `RULES`.

    Args:
        figures: a row of a table: metrics, and `<name>_coverage` for those that some queries lack.
            Names of metrics on repeated random tokens end in `_random`.

    >>> [(label.label, label.score) for label in label_head({"previous": 0.6, "self": 0.4})]
    [('previous token', 0.6), ('self', 0.4)]
    >>> label_head({"previous": 0.39})
    ()
    """
    figures = {**derived(figures), **figures}
    labels: dict[str, Label] = {}
    barely: dict[str, Label] = {}
    for rule in RULES:
        named = rule.key == "first" and figures.get("cls") is not None  # it is the same token
        if named or rule.label in labels or not rule.holds(figures):
            continue
        score = figures[rule.key]
        coverage = figures.get(f"{rule.key}_coverage", 1.0)
        label = Label(rule.label, rule.key, score, rule.sign, rule.threshold, coverage)
        late = rule.key.endswith("_random") and score < rule.threshold + BARELY
        (barely if late else labels)[rule.label] = label
    return tuple(
        {**labels, **{name: one for name, one in barely.items() if name not in labels}}.values()
    )


def derived(figures: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics that follow from other metrics.

    `near` is the weight on keys at most three tokens away, the query's own included: the sum of the
    weights at these distances, each times its coverage. `entropy_gap` is how far entropy lies below
    that of uniform attention, in nats: `H / h − H` of the means, with the normalized entropy h.

    >>> made = derived({"entropy": 2.0, "entropy_share": 0.8})
    >>> round(made["entropy_gap"], 9)
    0.5
    """
    made = {}
    shares = [figures.get(key) for key in _NEAR]
    if None not in (figures.get("self"), figures.get("previous"), figures.get("back_3")):
        covered = [figures.get(f"{key}_coverage", 1.0) for key in _NEAR]
        made["near"] = sum(
            share * coverage
            for share, coverage in zip(shares, covered, strict=True)
            if share is not None and coverage > 0
        )
    entropy, share = figures.get("entropy"), figures.get("entropy_share")
    if entropy is not None and share is not None:
        # Entropy 0 is the maximal distance from uniform; the gap itself cannot be computed.
        made["entropy_gap"] = LARGEST_GAP if share == 0 else entropy / share - entropy
    return made


def unevaluated_labels(figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the labels whose rules all lack metrics, except labels that only encoders have."""
    figures = {**derived(figures), **figures}
    evaluated = {rule.label for rule in RULES if all(_known(figures, key) for key in rule.keys)}
    every = dict.fromkeys(rule.label for rule in RULES if not rule.encoders)
    return tuple(label for label in every if label not in evaluated)


def name_heads(seen: Watched, repeats: Watched | None = None) -> list[HeadName]:
    """Label every head by its statistics: one entry per (layer, head), as in `seen.table()`.

    Rules whose metrics were not observed are left out, and their labels are in `missing`: a head
    without a label is then called `not evaluated`. Induction and duplicate tokens are evaluated on
    repeated random tokens if given, as meaning does not help there, else on the text (see
    `Label.key`).

    Args:
        seen: the result of `watch()` on a text, with `naming_statistics()` or some of them.
        repeats: the result of `watch()` on repeated random tokens, with at least
            `Mass(SameToken(ids))` and `Mass(Induction(ids))`. Default: none.

    Raises:
        ValueError: no attention was captured; `seen` is a table and not the result of `watch()`.

    >>> import torch, headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> with hw.watch(layer, *naming_statistics()) as seen:
    ...     out = layer(torch.zeros(1, 9, 24), mask=hw.Causal())
    >>> name_heads(seen)[0].label  # attention is uniform, but the statistics know no tokens
    'not evaluated'
    >>> name_heads(seen)[0].missing
    ('induction', 'duplicate token', 'punctuation')
    """
    for given in (seen, *(() if repeats is None else (repeats,))):
        if not isinstance(given, Watched):
            kind = type(given).__name__
            raise ValueError(
                f"name_heads({kind}): pass the result of watch() itself; for a row of its table, "
                f"use label_head(row)."
            )
    on_random: dict[tuple[str, int], dict[str, Any]] = {}
    for row in repeats.table() if repeats is not None else ():
        on_random[row["module"], row["head"]] = _at_random(row)
    names = []
    for row in seen.table():
        module, head = row["module"], row["head"]
        figures = row | on_random.get((module, head), {})
        labels, missing = label_head(figures), unevaluated_labels(figures)
        names.append(HeadName(row["layer"], head, labels, missing, module))
    return names


def _at_random(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row's metrics under their names on random tokens, `first_random`, …"""
    figures = {}
    for key, value in row.items():
        name, coverage = key.removesuffix("_coverage"), key.endswith("_coverage")
        figures[f"{name}_random_coverage" if coverage else f"{name}_random"] = value
    return figures


def naming_statistics(
    tokens: Int[Tensor, "*B S"] | None = None,
    delimiters: Bool[Tensor, "*B S"] | None = None,
    separators: Bool[Tensor, "*B S"] | None = None,
) -> tuple[Statistic, ...]:
    """Return the statistics that `watch()` must record to evaluate all rules of self-attention.

    Args:
        tokens: ids `[B, S]` or `[S]`, one per key; without them, induction and duplicate tokens are
            left out (as for images).
        delimiters: a mask of the same shape, True for punctuation and line breaks
            (`is_delimiter`); without it, that label is left out.
        separators: a mask of the same shape, True for tokens added by the tokenizer, such as
            `[SEP]`, except the first; without it, that label is left out.

    For cross-attention, only entropy, the first token and delimiters are meaningful.

    >>> import torch
    >>> ids = torch.tensor([5, 6, 7, 5, 6, 7])
    >>> [name for s in naming_statistics(ids, ids == 7) for name in s.names][-3:]
    ['same_token', 'induction', 'delimiters']
    """
    statistics: list[Statistic] = [
        Entropy(),
        Distance(absolute=True),
        *(Mass(pattern) for pattern in (First(), Previous(), Self())),
        *(Mass(At(offset)) for offset in OFFSETS),
    ]
    if tokens is not None:
        statistics += [Mass(SameToken(tokens)), Mass(Induction(tokens))]
    for name, there in (("delimiters", delimiters), ("separators", separators)):
        if there is not None:
            where = there[None, None, None] if there.dim() == 1 else there[:, None, None]
            statistics.append(Mass(Dense(where), name=name))
    return tuple(statistics)


def is_delimiter(text: str) -> bool:
    """Return True if a token's text is only punctuation or line breaks.

    Punctuation is the Unicode general category P. Separators that a tokenizer adds, such as
    `[SEP]`, cannot be recognized from their text.

    >>> [is_delimiter(text) for text in (",", " .", "...", "\\n", "end.", " ", "+")]
    [True, True, True, True, False, False, False]
    """
    bare = text.strip(" \t")
    return bool(bare) and all(
        letter in "\n\r" or unicodedata.category(letter).startswith("P") for letter in bare
    )
