"""The steps `per_head` and `split`, with the names of the ladder's rungs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import check
from ..findings.verdict import Finding
from .base import Part, Step, Test, Trial, passed, shape_of, wrong
from .gpt2 import IMPORTS

B, T = 2, 7
WIDTH, HEADS, CONTEXT = 24, 3, 16


def _built(owner: str, *sizes: Any) -> Test:
    """The class can be built with the tutorial's arguments, and is a module."""

    def test(trial: Trial) -> Iterator[Finding]:
        torch.manual_seed(0)
        layer = trial.get(owner)(*sizes)
        if isinstance(layer, nn.Module):
            trial.made[owner] = layer.eval()
            yield passed("step-sizes", f"`{owner}{sizes}` can be built.")
        else:
            hint = f"Write `class {owner}(nn.Module):`, and `super().__init__()` first."
            yield wrong("step-sizes", f"`{owner}` is no nn.Module.", hint)

    return test


def _projection(owner: str, name: str, width: int, hint: str) -> Part:
    """A layer from d_in to `width`."""

    def test(trial: Trial) -> Iterator[Finding]:
        shape, want = (B, T, WIDTH), (B, T, width)
        out = getattr(trial.made[owner], name)(torch.randn(shape))
        if shape_of(out) == str(want):
            yield passed("step-projections", f"`{owner}.{name}` makes {width} features of {WIDTH}.")
            return
        said = f"`{owner}.{name}` gives {shape_of(out)} for {shape}, not {want}."
        yield wrong("step-projections", said, hint)

    return Part(f"{owner}.{name}", "step-projections", hint, test)


def _buffer(owner: str) -> Test:
    """The mask moves with the module."""

    def test(trial: Trial) -> Iterator[Finding]:
        layer = trial.made[owner]
        if "mask" in dict(layer.named_buffers()):
            yield passed("step-mask", f"`{owner}.mask` is a buffer: it moves with the module.")
        elif isinstance(getattr(layer, "mask", None), Tensor):
            yield wrong(
                "step-mask",
                f"`{owner}.mask` is a plain tensor: it stays behind when the module is moved.",
                'Register it: `self.register_buffer("mask", …, persistent=False)`.',
            )
        else:
            yield wrong(
                "step-mask", f"`{owner}.mask` is no tensor.", "A matrix of ones above the diagonal."
            )

    return test


def _shape(owner: str, width: int) -> Test:
    def test(trial: Trial) -> Iterator[Finding]:
        shape = (B, T, WIDTH)
        out = trial.made[owner](torch.randn(shape))
        if shape_of(out) == str((B, T, width)):
            yield passed("step-forward", f"`{owner}` makes {(B, T, width)} of {shape}.")
            return
        said = f"`{owner}` gives {shape_of(out)} for {shape}, not {(B, T, width)}."
        yield wrong(
            "step-forward", said, "Follow the shapes line by line, from x to what is returned."
        )

    return test


def _heads(trial: Trial) -> Iterator[Finding]:
    owner = "MultiHeadedAttentionWrapper"
    heads, kind = trial.made[owner].heads, trial.get("CausalAttention")
    if not isinstance(heads, nn.ModuleList):
        said = f"`{owner}.heads` is a {type(heads).__name__}: its parameters are not found."
        yield wrong("step-heads", said, "Put the heads in an `nn.ModuleList`.")
    elif len(heads) != HEADS or not all(isinstance(head, kind) for head in heads):
        said = f"`{owner}.heads` holds {len(heads)} modules; it should be {HEADS} heads."
        yield wrong("step-heads", said, "One `CausalAttention(…)` for each of `range(num_heads)`.")
    elif len({id(head) for head in heads}) < len(heads):
        said = f"`{owner}.heads` holds the same head several times."
        yield wrong("step-heads", said, "Build a new `CausalAttention(…)` for each head.")
    else:
        yield passed("step-heads", f"{len(heads)} heads, each with matrices of its own.")


def _whole(owner: str, *sizes: Any) -> Test:
    """The class goes through every rule."""

    def test(trial: Trial) -> Iterator[Finding]:
        torch.manual_seed(0)
        layer = trial.get(owner)(*sizes)
        yield from check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results

    return test


ONE_HEAD = (WIDTH, WIDTH // HEADS, CONTEXT, 0.0)
WRAPPER = (*ONE_HEAD, HEADS)
ALL_HEADS = (WIDTH, WIDTH, CONTEXT, 0.0, HEADS)
QKV = "A linear layer from d_in to d_out: `nn.Linear(d_in, d_out, bias=qkv_bias)`."
MASK = (
    'A buffer of ones above the diagonal: `self.register_buffer("mask", torch.triu(torch.ones('
    "context_length, context_length), diagonal=1), persistent=False)`."
)
LOCALS = {
    "scores": "Every query with every key: queries @ keys, with the keys' last two axes swapped.",
    "weights": "Scores hidden where the mask is 1 (masked_fill with -inf), over √head_dim, softmax "
    "over the keys (dim=-1).",
    "context": "The weights, through dropout, times the values.",
    "queries": "The projection of x, `view` to [B, T, heads, head_dim], then axes 1 and 2 swapped.",
    "keys": "As the queries, by W_key.",
    "values": "As the queries, by W_value.",
}
_HEAD, _WRAPPER, _MANY = "CausalAttention", "MultiHeadedAttentionWrapper", "MultiHeadAttn"

PER_HEAD = Step(
    "per_head",
    "one module a head, and a loop over the heads",
    (
        Part(_HEAD, "step-sizes", f"Define `class {_HEAD}(nn.Module)`.", _built(_HEAD, *ONE_HEAD)),
        *(
            _projection(_HEAD, name, WIDTH // HEADS, QKV)
            for name in ("W_query", "W_key", "W_value")
        ),
        Part(f"{_HEAD}.dropout", "step-parts", "`nn.Dropout(dropout)`."),
        Part(f"{_HEAD}.mask", "step-mask", MASK, _buffer(_HEAD)),
        Part(
            *(f"{_HEAD}.forward", "step-forward"),
            "Queries, keys and values; scores; hide what comes later; softmax; dropout; values.",
            _shape(_HEAD, WIDTH // HEADS),
            locals=LOCALS
            | {
                "queries": "`self.W_query(x)`.",
                "keys": "`self.W_key(x)`.",
                "values": "`self.W_value(x)`.",
            },
        ),
        Part(
            *(_WRAPPER, "step-sizes", f"Define `class {_WRAPPER}(nn.Module)`."),
            _built(_WRAPPER, *WRAPPER),
            also=("MultiHeadAttentionWrapper",),
        ),
        Part(
            *(f"{_WRAPPER}.heads", "step-heads"),
            f"`nn.ModuleList` of one `{_HEAD}(d_in, d_out, …)` for each of `range(num_heads)`.",
            _heads,
        ),
        Part(
            *(f"{_WRAPPER}.forward", "step-forward"),
            "Every head's output for x, side by side: `torch.cat([...], dim=-1)`.",
            _shape(_WRAPPER, WIDTH),
        ),
    ),
    IMPORTS,
    _whole(_WRAPPER, *WRAPPER),
)

SPLIT = Step(
    "split",
    "one projection for all heads, then split",
    (
        Part(
            *(_MANY, "step-sizes", f"Define `class {_MANY}(nn.Module)`."),
            _built(_MANY, *ALL_HEADS),
            also=("MultiHeadAttention",),
        ),
        *(_projection(_MANY, name, WIDTH, QKV) for name in ("W_query", "W_key", "W_value")),
        _projection(
            *(_MANY, "out_proj", WIDTH),
            "A linear layer that mixes what the heads found: `nn.Linear(d_out, d_out)`.",
        ),
        Part(f"{_MANY}.dropout", "step-parts", "`nn.Dropout(dropout)`."),
        Part(f"{_MANY}.mask", "step-mask", MASK, _buffer(_MANY)),
        Part(
            *(f"{_MANY}.forward", "step-forward"),
            "Project, split into heads, scores, hide what comes later, softmax, values, merge, "
            "out_proj.",
            _shape(_MANY, WIDTH),
            locals=LOCALS
            | {
                "context": "The weights, through dropout, times the values; then the heads side by "
                "side: axes 1 and 2 swapped back, and reshaped to [B, T, d_out]."
            },
        ),
    ),
    IMPORTS,
    _whole(_MANY, *ALL_HEADS),
)
