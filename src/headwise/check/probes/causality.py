"""Whether later tokens change an earlier output: by the weights, or around them."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..diagnosis.call_lines import recorded
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Example, Finding
from ..target.checked_target import Target
from ..target.construct import name_of
from ..target.masking import NAMED
from ..target.signatures import source_of
from .probe_context import NOTHING, ProbeContext

LARGE = 20.0
"""Inputs so many times as large make scores of several hundreds, as trained models may have."""

UNCHANGED = 1e-6
"""Share by which an output may move that nothing changed: sums may run in another order."""

FAR = 1e3
"""How far hidden scores lie below the others."""

ROW = r"\[ *\w+ *, *1 *, *1 *, *\w+ *\]|\( *\w+ *, *1 *, *1 *, *\w+ *\)"
"""Axes of a mask that says of every key whether it counts, for all queries alike."""


def causality(ctx: ProbeContext) -> Finding | None:
    """Zeros of the Jacobian, and changed futures at ordinary and at larger scales."""
    if not ctx.subject.causal:
        if ctx.subject.causal_from == "given":
            return skipped("causality", "Not asked for: causal=False.")
        way = "kept" if _is_kept(ctx) else "around" if _is_around(ctx) else ""
        way = "" if ctx.exact.caller.pooled else way  # one for all tokens sees them all
        if way and _sees_future(ctx, 1.0) is not None:
            return found("causality", way)
        said = "Every token sees all others. If it is to be causal, say so: causal=True."
        return skipped("causality", said)
    if (one := _of_keys(ctx)) is not None:
        return one
    influence = ctx.influence.nan_to_num(0.0)
    seen = (influence.triu(1) > NOTHING * influence.max()).nonzero().tolist()
    if seen:
        return _leaks(ctx, 1.0, (seen[0][0], seen[0][1]), seen)
    for scale in (1.0, LARGE, 1000.0):
        late = _sees_future(ctx, scale)
        if late is not None:
            return _leaks(ctx, scale, late, [])
    return passed("causality")


def _of_keys(ctx: ProbeContext) -> Finding | None:
    """That the one mask which could hide later tokens is written to hold a flag for every key,
    `[bs, 1, 1, seq_len]`, where the class is named causal."""
    subject, form = ctx.subject, ctx.subject.mask_form
    target = subject.caller.target
    kind, name = type(target) if isinstance(target, nn.Module) else target, name_of(target)
    if form is None or subject.causal_from != "mask" or not re.search(NAMED, name.lower()):
        return None
    said = re.search(rf"\b{form.argument}\b[^\[(\n]{{0,60}}({ROW})", source_of(kind))
    if said is None or subject.caller.named("causal"):
        return None
    return found("causality", "keys", name=name, mask=form.argument, said=said[1])


def _sees_future(ctx: ProbeContext, scale: float) -> tuple[int, int] | None:
    """The first output that a changed future changes, and the first token that was changed."""
    large = ctx.x * scale
    pairs = ((large, ctx.call(large)), (ctx.x, ctx.out))
    for first in range(1, ctx.tokens):
        for x, plain in pairs:
            changed = x.clone()
            noise = ctx.exact.input(ctx.tokens, len(x), seed=5)[:, first:]
            changed[:, first:] = scale * noise
            out = ctx.call(changed)
            size = plain[:, :first].abs().max().clamp(min=1e-30)
            parts = (out[:, :first] - plain[:, :first]).abs().amax((0, 2)) > UNCHANGED * size
            if bool(parts.any()):
                return int(parts.nonzero()[0]), first
    return None


def _leaks(
    ctx: ProbeContext, scale: float, where: tuple[int, int], seen: list[list[int]]
) -> Finding:
    (i, j), way = where, "leaks"
    if scale > 1:
        way = "large" if scale == LARGE else "far"
    elif seen and all(b == a + 1 for a, b in seen) and len(seen) == ctx.tokens - 1:
        way = "next"
    elif seen and bool((ctx.influence.tril(-1) <= NOTHING * ctx.influence.max()).all()):
        way = "inverted"
    one = found("causality", way, _leak_example(ctx, scale), i=i, j=j, scale=scale)
    form = ctx.subject.mask_form
    if way == "inverted" and form is not None and form.kind == "flag":
        return replace(one, ground="any")  # in whatever order the axes stand
    read = ctx.subject.causal_from == "mask"  # whose form was found by trying
    return replace(one, ground="weights") if read else one


def _leak_example(ctx: ProbeContext, scale: float) -> Example | None:
    last = min(3, ctx.tokens) - 1

    def two(subject: Target, x: Tensor) -> tuple[Tensor, Tensor]:
        changed = scale * x
        changed[:, -1] *= -1
        return subject(scale * x)[:, :-1], subject(changed)[:, :-1]

    times = f"x = {scale:.0f} * x; " if scale > 1 else ""
    said = f"{times}y = x.clone(); y[:, {last}] *= -1; the outputs before token {last} are compared"
    return ctx.example(said, two) if last else None


def _is_kept(ctx: ProbeContext) -> bool:
    """Whether it keeps keys for the tokens to come, as decoders do, and has no mask: within a call
    tokens then see later ones, which they cannot where each has a call of its own."""
    caller = ctx.exact.caller
    if "causal" in ctx.subject.roles:  # what it was built as was chosen here
        return False
    keeps = caller.named("use_cache") or caller.named("cache")
    others = any(caller.named(role) for role in ("padding", "causal", "context"))
    masks = any("mask" in name.lower() or caller.roles[name] == "mask" for name in caller.roles)
    own = not (others or masks or caller.separate or caller.custom is not None)
    return bool(keeps) and own


def _is_around(ctx: ProbeContext) -> bool:
    """Whether every softmax over tokens hides the later ones, in a layer that is not causal."""
    if ctx.tokens < 4 or ctx.subject.open_form is not None:
        return False
    made = [call for call in recorded(ctx.exact, ctx.x) if call.name == "softmax" and call.square]
    scores = [call.scores for call in made if call.scores is not None]
    return bool(scores) and all(map(_is_causal, scores)) and not ctx.exact.caller.turned


def _is_causal(scores: Tensor) -> bool:
    """Whether scores of later keys, and no others, are far below all that are seen."""
    every = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
    later, seen = scores[..., every.triu(1)], scores[..., every.tril(0)]
    return bool(later.max() < seen.min() - FAR) and bool(seen.isfinite().all())
