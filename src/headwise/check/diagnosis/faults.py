"""The mistakes that people make with scores: each as a change of the textbook's variant, in words.

A row says under which rule it falls, what it changes in `oracle.Variant`, what was done (one plain
sentence) and what to change. Braces are filled with the module's own names (`{q}` is what it calls
the projection of the queries) and sizes (`{E}` width of the input, `{H}` heads, `{D}` a head's
width, `{W}` all heads together, `{T}` tokens). The likelier of two that look alike stands first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..findings.verdict import Severity
from .variants import Variant


@dataclass(frozen=True)
class Mistake:
    """One known mistake."""

    rule: str
    change: dict[str, Any]
    message: str
    hint: str
    severity: Severity = "error"

    def on(self, variant: Variant) -> Variant:
        """The variant with this mistake in it."""
        changed = replace(variant, **self.change)
        if "fill" in self.change and changed.mask == "none":
            changed = replace(changed, mask="causal")
        return changed

    def adds_to(self, other: Mistake) -> bool:
        """Whether both can be made at once."""
        return not set(self.change) & set(other.change)


def of_scores(base: Variant, head_dim: int, sure: bool = True) -> Iterator[Mistake]:
    """What goes wrong between the heads and their weighted values.

    Args:
        sure: whether it is known that the base's mask, or none, is the right one.
    """
    yield from _SCALE
    if sure:
        yield _other_mask(base)
    yield from _masks()
    yield from _FILLS
    yield from finite_fills(head_dim**-0.5)
    yield from _added(head_dim**-0.5)
    yield from _SOFTMAX


def _scaled(name: str, did: str, why: str) -> Mistake:
    message = (
        f"The scores are {did}; the textbook divides them by √{{D}}, the root of one head's width."
    )
    hint = (
        f"{why} Divide `queries @ keys.transpose(-2, -1)` by the root of the head's width, the "
        "last axis of the keys after the split: `keys.shape[-1] ** 0.5`."
    )
    return Mistake("scale", {"scale": name}, message, hint)


_SCALE = (
    _scaled("nothing", "not scaled at all", "Nothing divides the scores before the softmax."),
    _scaled(
        "√E",
        "divided by √{E}, the root of the whole embedding",
        "The width of the input (d_model, d_in) was taken for the width of one head.",
    ),
    _scaled(
        "√HD",
        "divided by √{W}, the root of the width of all heads together",
        "The width of all heads (d_out) was taken for the width of one.",
    ),
    _scaled(
        "√T",
        "divided by the root of the sequence length (√{T} for {T} tokens)",
        "The axis of the tokens was taken for that of the features: with a batch in front, "
        "`keys.shape[1]` or `shape[-2]` counts tokens.",
    ),
    _scaled(
        "√H",
        "divided by √{H}, the root of the number of heads",
        "The number of heads was taken for their width (in [B, H, T, D], `shape[1]` counts heads).",
    ),
    _scaled(
        "√B",
        "divided by the root of the batch's size",
        "The axis of the batch was taken for that of the features (`shape[0]`).",
    ),
    _scaled(
        "√Dv",
        "divided by the root of the width of a value, {Dv}",
        "Scores are products of queries and keys, so their width counts.",
    ),
    _scaled(
        "D",
        "divided by {D}: by √{D} twice, or by the head's width without the root",
        "Either the root was forgotten, or two lines scale (queries and scores, or your code and "
        "F.scaled_dot_product_attention, which divides by √{D} itself).",
    ),
    _scaled("times √D", "multiplied by √{D} instead", "`*` stands where `/` belongs."),
    _scaled(
        "times √D√D",
        "multiplied by {D}",
        "`* head_dim` stands where `/ head_dim ** 0.5` belongs.",
    ),
    _scaled("times √E", "multiplied by √{E} instead", "`*` stands where `/` belongs."),
    _scaled("D²", "divided by {D} twice", "Two lines divide by the width, none by its root."),
    _scaled(
        "E",
        "divided by {E}, the whole embedding's width without a root",
        "The root was forgotten, and the input's width taken for one head's.",
    ),
    _scaled(
        "HD",
        "divided by {W}, the width of all heads without a root",
        "The root was forgotten, and the width of all heads taken for that of one.",
    ),
    _scaled("T", "divided by the number of tokens, {T} here", "Tokens were counted, not features."),
    _scaled("H", "divided by the number of heads, {H}", "Heads were counted, not features."),
    _scaled("√√D", "divided by the fourth root of {D}", "Queries alone or keys alone were scaled."),
    _scaled(
        "√D √T",
        "divided by √{D} and by the root of the sequence length as well",
        "Two lines scale.",
    ),
    _scaled("√D √E", "divided by √{D} and by √{E} as well", "Two lines scale."),
    Mistake(
        "scale",
        {"scale": "after"},
        "The weights are divided by √{D} after the softmax; the scores go into it unscaled.",
        "Divide before the softmax: `softmax(scores / head_dim ** 0.5)`. Afterwards the rows no "
        "longer sum to 1.",
    ),
)


_TRIU = "`torch.triu(torch.ones(T, T), diagonal=1)` is 1 exactly at later keys"


def _other_mask(base: Variant) -> Mistake:
    if base.mask == "causal":
        return Mistake(
            "causal-mask",
            {"mask": "none"},
            "There is no causal mask: every token sees the tokens after it.",
            f"Before the softmax: `scores.masked_fill(later, -torch.inf)`; {_TRIU}.",
        )
    return Mistake(
        "causal-mask",
        {"mask": "causal"},
        "Later tokens are hidden, though this attention should see all of them.",
        "Leave the causal mask out, or say causal=True if it is meant.",
    )


def _masks() -> Iterator[Mistake]:
    hidden = f"Hide the keys after the query, and no others: {_TRIU}."
    rows = (
        (
            "itself hidden",
            "The mask is off by one: a token does not see itself (and the first sees nothing).",
            f"The diagonal belongs to what is seen. {hidden}",
        ),
        (
            "one ahead",
            "The mask is off by one: every token also sees the one right after it.",
            f"`diagonal=2` (or `tril` with `diagonal=1`) is one too far. {hidden}",
        ),
        (
            "inverted",
            "The mask is inverted: a token sees exactly the tokens after it, and no earlier one.",
            "True was taken for its opposite. `masked_fill` fills where the mask is True, so it "
            f"must be True at later keys; in PyTorch's `attn_mask` True is 'may be seen'. {hidden}",
        ),
        (
            "inverted, itself seen",
            "The mask is inverted: a token sees itself and later tokens, and no earlier one.",
            f"The wrong triangle is hidden (`tril` for `triu`, or 0 for 1). {hidden}",
        ),
        (
            "itself only",
            "A token sees only itself: everything else is masked.",
            hidden,
        ),
        ("others", "A token sees all tokens but itself.", hidden),
        (
            "from the end",
            "The mask is mirrored: the first token sees all, the last only the first.",
            f"It was flipped or turned once too often. {hidden}",
        ),
        (
            "from the end, inverted",
            "The mask is mirrored: the first token sees only the last, and the last sees all.",
            f"It was flipped or turned once too often. {hidden}",
        ),
    )
    for name, message, hint in rows:
        yield Mistake("causal-mask", {"mask": name}, message, hint)


def _filled(fill: str, message: str, hint: str) -> Mistake:
    end = "Before the softmax, fill with −inf: `scores.masked_fill(later, -torch.inf)`."
    return Mistake("mask-fill", {"fill": fill}, message, f"{hint} {end}")


_FILLS = (
    _filled(
        "after",
        "The mask comes after the softmax: hidden weights are 0, but the rows no longer sum to 1.",
        "The softmax has already shared the whole weight out, later tokens included.",
    ),
    _filled(
        "0",
        "Hidden scores are set to 0, and a score of 0 is an ordinary score: e⁰ = 1.",
        "Multiplying scores by a mask of 0 and 1 (or filling with 0 or 1e-9) hides nothing.",
    ),
    *(
        _filled(
            fill,
            "Hidden scores are set to a large positive number, so that they get all the weight.",
            "A sign is missing.",
        )
        for fill in ("1e9", "inf")
    ),
)


def finite_fills(scale: float) -> Iterator[Mistake]:
    """Numbers that hide too little, filled in after the scaling or before it."""
    for number in (-1, -10, -100, -1000, -10000, -100000):
        for value in dict.fromkeys((float(number), number * scale)):
            yield _filled(
                repr(value),
                f"Hidden scores are set to −{-number}, an ordinary number: where other scores are "
                "lower still, later tokens shine through.",
                "Scores have no bound, so no finite number hides every key.",
            )


def _added(scale: float) -> Iterator[Mistake]:
    for value in dict.fromkeys((1.0, scale)):
        yield _filled(
            f"added {value!r}",
            "The mask of ones and zeros is added to the scores (or subtracted), so that what may "
            "be seen only gets 1 more.",
            "An added mask has 0 where a key may be seen and −inf where it is hidden.",
        )


def _soft(name: str, message: str, hint: str) -> Mistake:
    end = "Each query's weights over the keys must sum to 1: `torch.softmax(scores, dim=-1)`."
    return Mistake("softmax", {"softmax": name}, message, f"{hint} {end}")


_SOFTMAX = (
    _soft(
        "queries",
        "The softmax runs over the queries (dim=-2) and not over the keys.",
        "The scores are [..., queries, keys].",
    ),
    *(
        _soft(
            f"heads{cleaned}",
            "The softmax runs over the heads (dim=1) and not over the keys.",
            "With an axis for the heads, dim=1 is theirs: the scores are [B, H, queries, keys].",
        )
        for cleaned in ("", ", NaN to 0")
    ),
    *(
        _soft(
            f"batch{cleaned}",
            "The softmax runs over the batch (dim=0), and the sentences share their weights.",
            "dim=0 is the batch once there is one.",
        )
        for cleaned in ("", ", NaN to 0")
    ),
    _soft("both", "The softmax runs over queries and keys together.", "Do not flatten the scores."),
    _soft(
        "twice",
        "The softmax is applied twice, which makes the weights nearly equal.",
        "One of the two lines must go.",
    ),
    _soft("none", "There is no softmax: the scores themselves weigh the values.", "Add it."),
    _soft("sum", "The scores are divided by their sum, without the exponential.", "Use softmax."),
    _soft("exp", "The exponentials of the scores are not divided by their sum.", "Use softmax."),
    _soft("sigmoid", "A sigmoid stands where the softmax belongs.", "Use softmax."),
    _soft("relu", "A ReLU stands where the softmax belongs.", "Use softmax."),
    _soft("log", "A log_softmax stands where the softmax belongs.", "Use softmax."),
    Mistake(
        "softmax",
        {"values": "turned"},
        "The weights are transposed before they meet the values: keys gather from queries.",
        "Write `weights @ values`, with the weights as [..., queries, keys].",
    ),
    Mistake(
        "head-split",
        {"turned_keys": "reshaped"},
        "The keys are reshaped to [B, H, D, T] and not transposed: features of several tokens mix.",
        "`view` and `reshape` never move numbers. Write `queries @ keys.transpose(-2, -1)`.",
    ),
)
