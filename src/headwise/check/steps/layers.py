"""Follow the steps `per_head` and `split`, with the names of the ladder's rungs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import check
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import Step, StepPart, Test, Trial, judge_shape, step

B, T = 2, 7
WIDTH, HEADS, CONTEXT = 24, 3, 16
ONE_HEAD = (WIDTH, WIDTH // HEADS, CONTEXT, 0.0)
SIZES: dict[str, tuple[Any, ...]] = {  # the tutorial's arguments
    "CausalAttention": ONE_HEAD,
    "MultiHeadedAttentionWrapper": (*ONE_HEAD, HEADS),
    "MultiHeadAttn": (WIDTH, WIDTH, CONTEXT, 0.0, HEADS),
}
WIDTHS = {"CausalAttention": WIDTH // HEADS}  # of outputs, where they are not as wide as inputs


def _built(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """The class can be built with the tutorial's arguments, and is a module."""
    torch.manual_seed(0)
    layer = trial.get(part.name)(*SIZES[part.name])
    if isinstance(layer, nn.Module):
        trial.made[part.name] = layer.eval()
        yield passed(part.rule, f"`{part.name}{SIZES[part.name]}` can be built.")
    else:
        yield found(part.rule, "module", owner=part.name)


def _projection(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """A layer from d_in to d_out."""
    width, given = WIDTHS.get(part.owner, WIDTH), (B, T, WIDTH)
    out = getattr(trial.made[part.owner], part.short)(torch.randn(given))
    said = f"`{part.name}` makes {width} features of {WIDTH}."
    yield judge_shape(part, out, given, (B, T, width), said, name=part.name, hint=part.hint)


def _buffer(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """The mask moves with the module."""
    layer = trial.made[part.owner]
    if "mask" in dict(layer.named_buffers()):
        yield passed(part.rule, f"`{part.name}` is a buffer: it moves with the module.")
    else:
        plain = isinstance(getattr(layer, "mask", None), Tensor)
        yield found(part.rule, "plain" if plain else "none", owner=part.owner)


def _shape(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """What comes out has the right shape."""
    given, want = (B, T, WIDTH), (B, T, WIDTHS.get(part.owner, WIDTH))
    out = trial.made[part.owner](torch.randn(given))
    said = f"`{part.owner}` makes {want} of {given}."
    yield judge_shape(part, out, given, want, said, name=part.owner)


def _heads(trial: Trial, part: StepPart) -> Iterator[Finding]:
    heads, kind = trial.made[part.owner].heads, trial.get("CausalAttention")
    if not isinstance(heads, nn.ModuleList):
        yield found(part.rule, "list", owner=part.owner, kind=type(heads).__name__)
    elif len(heads) != HEADS or not all(isinstance(head, kind) for head in heads):
        yield found(part.rule, "count", owner=part.owner, count=len(heads), wanted=HEADS)
    elif len({id(head) for head in heads}) < len(heads):
        yield found(part.rule, "same", owner=part.owner)
    else:
        yield passed(part.rule, f"{len(heads)} heads, each with matrices of its own.")


TESTS: dict[str, Test] = {
    "built": _built,
    "projection": _projection,
    "buffer": _buffer,
    "shape": _shape,
    "heads": _heads,
}


def _step(name: str, owner: str) -> Step:
    """A step whose class, in the end, goes through every rule."""

    def whole(trial: Trial) -> Iterator[Finding]:
        torch.manual_seed(0)
        layer = trial.get(owner)(*SIZES[owner])
        yield from check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results

    return step(name, TESTS, whole)


PER_HEAD = _step("per_head", "MultiHeadedAttentionWrapper")
SPLIT = _step("split", "MultiHeadAttn")
