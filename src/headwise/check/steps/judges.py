"""The parts of GPT-2's attention, judged by what they give, whatever library made it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..findings.verdict import Finding
from .base import Part, Test, passed, shape_of, wrong

# The tutorial's sizes, in which no two axes are alike.
B, T, E, H, D = 2, 8, 768, 12, 64


def judge_split(out: Any, x: Tensor) -> Finding:
    """`out` is what `_split_heads(x, H, D)` gave."""
    by_shape = {
        (B, T, H, D): "The heads still stand after the tokens: end with `.transpose(-3, -2)`.",
        (B, H, D, T): "Tokens and features changed places: swap heads and tokens, axes -3 and -2.",
        (B, T, E): "Nothing is split yet: reshape the last axis to (num_heads, attn_head_size).",
    }
    by_numbers = (
        (
            x.view(B, H, T, D),
            "`view` straight to [batch, heads, tokens, head_size] mixes tokens with features",
            "Reshape to [batch, tokens, heads, head_size] first, then swap axes -3 and -2.",
        ),
        (
            x.view(B, T, D, H).permute(0, 3, 1, 2),
            "the heads take their features in turns",
            "Reshape to (num_heads, attn_head_size), in this order: a head's lie together.",
        ),
        (
            None,
            f"other numbers: head h holds the features from h · {D} to (h + 1) · {D} of each token",
            "Reshape to [batch, tokens, heads, head_size], swap axes -3 and -2; change no number.",
        ),
    )
    call, did = ("_split_heads", (B, T, E)), "gives every head its slice"
    right = x.view(B, T, H, D).transpose(1, 2)
    return _judged("step-split", call, did, out, right, by_shape, by_numbers)


def judge_merge(out: Any, heads: Tensor) -> Finding:
    """`out` is what `_merge_heads(heads, H, D)` gave."""
    by_shape = {
        (B, T, H, D): "The heads are behind the tokens; now reshape the last two axes into one.",
        (B, H, T, D): "Nothing is merged: swap axes -3 and -2, then reshape the last two into one.",
        (B, H * T, D): "Tokens and heads were joined: swap axes -3 and -2 before the reshape.",
    }
    by_numbers = (
        (
            heads.reshape(B, T, E),
            "it reshapes without moving the heads back, which mixes tokens with heads",
            "Swap axes -3 and -2 first, as `_split_heads` did; then reshape.",
        ),
        (
            heads.permute(0, 2, 3, 1).reshape(B, T, E),
            "the heads' features are dealt out in turns",
            "Move the heads to axis -2, before their features: a head's features lie together.",
        ),
        (
            None,
            "it does not undo the split",
            "Do what `_split_heads` does, backwards: swap axes -3 and -2, then reshape.",
        ),
    )
    call, did = ("_merge_heads", (B, H, T, D)), "puts the heads side by side"
    right = heads.transpose(1, 2).reshape(B, T, E)
    return _judged("step-merge", call, did, out, right, by_shape, by_numbers)


def _judged(
    rule: str,
    call: tuple[str, tuple[int, ...]],
    did: str,
    out: Any,
    right: Tensor,
    by_shape: Mapping[tuple[int, ...], str],
    by_numbers: Sequence[tuple[Tensor | None, str, str]],
) -> Finding:
    """Shape first, then numbers; hints for the shapes and numbers that common mistakes give."""
    (name, given), want = call, tuple(right.shape)
    if shape_of(out) != str(want):
        otherwise = by_numbers[-1][2]
        hint = next((by_shape[s] for s in by_shape if shape_of(out) == str(s)), otherwise)
        return wrong(rule, f"`{name}` gives {shape_of(out)} for {given}, not {want}.", hint)
    if torch.allclose(out, right):
        return passed(rule, f"`{name}` {did}: {given} to {want}.")
    said, hint = next(
        (said, hint)
        for other, said, hint in by_numbers
        if other is None or torch.allclose(out, other)
    )
    return wrong(rule, f"`{name}` gives the right shape, but {said}.", hint)


def judge_mask(mask: Any, cached: Any) -> Finding:
    """`mask` is what `causal_mask(T, 0)` gave, `cached` `causal_mask(3, 2)` or None."""
    rule = "step-mask"
    if shape_of(mask) != str((T, T)):
        return wrong(
            rule,
            f"`causal_mask({T}, 0)` gives {shape_of(mask)}, not {(T, T)}.",
            "It has a row for each query and a column for each key: the cached ones and the new.",
        )
    later = torch.ones(T, T).triu(1).bool()
    if mask.dtype == torch.bool:
        return wrong(
            rule,
            "`causal_mask` gives True and False, but `_attn` adds it to the scores.",
            "Fill a matrix with -inf and keep it above the diagonal: 0 where a key may be seen.",
        )
    hidden = mask <= -1e4
    finite = bool((mask[hidden] > -torch.inf).any())
    if torch.equal(hidden, later) and bool((mask[~later] == 0).all()):
        if cached is not None and (early := _cached_mask(cached)) is not None:
            return early
        if finite:
            return Finding(
                rule,
                "warning",
                "`causal_mask` hides with a large negative number rather than -inf.",
                "Use float('-inf'): a finite number lets a row of large scores see what is hidden.",
            )
        return passed(rule, "`causal_mask` hides what comes later with -inf, and nothing else.")
    others = {
        "it hides the token itself, too": later | torch.eye(T).bool(),
        "it lets every token see the next one": torch.ones(T, T).triu(2).bool(),
        "it hides the past and shows the future": torch.ones(T, T).tril(-1).bool(),
        "it hides the past and the token itself": torch.ones(T, T).tril(0).bool(),
        "it hides nothing": torch.zeros(T, T).bool(),
    }
    for said, other in others.items():
        if torch.equal(hidden, other) and bool((mask[~hidden] == 0).all()):
            hint = (
                "Keep -inf strictly above the diagonal: key j is hidden from query i where j > i."
            )
            return wrong(rule, f"`causal_mask` is not causal: {said}.", hint)
    return wrong(
        rule,
        "`causal_mask` gives something else than 0 for seen and -inf for hidden.",
        "Start from a matrix full of -inf and keep what is strictly above the diagonal.",
    )


def _cached_mask(cached: Tensor) -> Finding | None:
    """Three new tokens after two that are cached: a mask aligned to the start is a trap."""
    if tuple(cached.shape) == (3, 5) and bool((cached[-1] == 0).all()):
        return None
    return Finding(
        "step-mask",
        "warning",
        "`causal_mask` is right without a cache; with 2 tokens cached it is not aligned to the "
        "end, so that the last token does not see itself.",
        "It does no harm in this step. With a cache, keep what is above diagonal num_tokens: query "
        "i stands at position num_tokens + i.",
    )


def judge_projection(name: str, out: Any, width: int) -> Finding:
    """`out` is what the layer gave for `[B, T, E]`."""
    want, what = (B, T, width), "queries, keys and values" if width == 3 * E else "the output"
    if shape_of(out) == str(want):
        return passed("step-projections", f"`{name}` makes {what}: {(B, T, E)} to {want}.")
    times = "3 * self.embed_dim" if width == 3 * E else "self.embed_dim"
    return wrong(
        "step-projections",
        f"`{name}` gives {shape_of(out)} for {(B, T, E)}, not {want}.",
        f"It is a linear layer from self.embed_dim to {times}, with a bias.",
    )


def judge_sizes(layer: Any) -> Iterator[Finding]:
    """The three numbers that the rest of the class is written with."""
    right = True
    hints = {
        "embed_dim": (E, "config.n_embd"),
        "num_heads": (H, "config.n_head"),
        "head_dim": (D, "self.embed_dim // self.num_heads"),
    }
    for name, (value, source) in hints.items():
        mask = getattr(layer, name, None)
        if mask != value:
            right = False
            said = "is missing" if mask is None else f"is {mask}"
            yield wrong(
                "step-sizes",
                f"`self.{name}` {said} for GPT-2's sizes; it should be {value}.",
                f"In `__init__`: `self.{name} = {source}`.",
            )
    if right:
        yield passed("step-sizes", f"{E} features are {H} heads of {D}.")


ATTENTION_HINT = (
    "In this order: scores query @ key.transpose(-1, -2), divided by √head_dim, plus causal_mask, "
    "softmax over the keys, times value."
)


def gpt2_parts(
    linear: str, split: str, tests: Mapping[str, Test], builds_first: bool = False
) -> tuple[Part, ...]:
    """The parts of the step, with the words of one library.

    Args:
        linear: what it calls a linear layer.
        split: how it cuts a tensor in three.
        tests: for each part, by its short name.
        builds_first: the class comes before the mask, because its test runs all others.
    """
    owner = "GPT2MultiHeadAttention"
    mask = Part(
        "causal_mask",
        "step-mask",
        "Fill a matrix [sequence_length, num_tokens + sequence_length] with -inf and keep only "
        "what is above the diagonal: 0 where a key may be seen.",
        tests["causal_mask"],
    )
    kind = Part(
        owner, "step-sizes", f"Define `class {owner}` with `__init__(self, config)`.", tests[owner]
    )
    rows = {
        "c_attn": (
            "step-projections",
            "One layer for queries, keys and values: "
            f"`{linear}(self.embed_dim, 3 * self.embed_dim)`.",
        ),
        "c_proj": (
            "step-projections",
            f"The output projection: `{linear}(self.embed_dim, self.embed_dim)`.",
        ),
        "_split_heads": (
            "step-split",
            "Reshape the last axis to (num_heads, attn_head_size), then swap axes -3 and -2.",
        ),
        "_merge_heads": (
            "step-merge",
            "Swap axes -3 and -2 back, then reshape the last two axes into one.",
        ),
        "_attn": ("step-attention", ATTENTION_HINT),
        "forward": (
            "step-forward",
            f"`c_attn`, {split} into query, key and value, `_split_heads` of each, `_attn`, "
            "`_merge_heads`, `c_proj`.",
        ),
    }
    blanks = {
        "scores": "Every query with every key: query @ key.transpose(-1, -2), over √head_dim.",
        "weights": "The scores plus causal_mask(…), through softmax over the keys.",
        "query": f"Three equal parts of what `c_attn` gives, by {split}; `_split_heads` of each.",
        "heads": "What `_attn` gives for query, key and value.",
    }
    also = {"forward": ("__call__",)}
    uses = {
        "_attn": ("causal_mask",),
        "forward": ("c_attn", "_split_heads", "_attn", "_merge_heads", "c_proj"),
    }
    inside = [
        Part(
            *(f"{owner}.{name}", rule, hint, tests[name]),
            also=also.get(name, ()),
            locals=blanks,
            uses=uses.get(name, ()),
        )
        for name, (rule, hint) in rows.items()
    ]
    return (*((kind, mask) if builds_first else (mask, kind)), *inside)
