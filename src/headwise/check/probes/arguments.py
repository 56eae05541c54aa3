"""Probe what else a call takes: masks, padding, another sequence, a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...layers.kv_cache import KVCache
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Example, Finding
from ..target.call_adapter import PADDING_SHAPES, Caller, MaskForm, tensors_in
from ..target.checked_target import Target, told
from .behaviour import NOTHING, POSITIONS, named
from .probe_context import Failed, ProbeContext, failing

LENGTH = 11
"""Keys of the other sequence in cross-attention."""


def mask(ctx: ProbeContext) -> Finding | None:
    """A mask of any pattern hides exactly what it says."""
    if ctx.subject.caller.custom is not None:
        return None
    names, form = ctx.subject.caller.named("mask"), ctx.subject.mask_form
    if ctx.subject.mask_ignored:
        return found("mask", "ignored", name=names[0])
    if form is None or form.kind in ("flag", "headwise") or not names:
        return None
    tokens = min(5, ctx.tokens)
    draw = torch.Generator().manual_seed(3)
    allowed = torch.rand(1, tokens, tokens, generator=draw) > 0.5
    allowed |= torch.eye(tokens, dtype=torch.bool)
    trial = _masked(ctx.exact, allowed)
    with failing(f"x [1, {tokens}, {ctx.x.shape[-1]}] with {form}"):
        influence = trial.influence(ctx.exact.input(tokens, 1)).nan_to_num(0.0)
    leaks = (influence > NOTHING * influence.max()) & ~allowed[0]
    if not bool(leaks.any()):
        return passed("mask", f"The mask is followed: {form}.")
    i, j = leaks.nonzero()[0].tolist()
    return found("mask", "leaks", i=i, j=j)


def _masked(subject: Target, allowed: Tensor) -> Target:
    """The subject with one mask for every call."""
    form = subject.mask_form
    assert form is not None
    given = form.make(allowed, subject.dtype, subject.num_heads)
    caller = replace(subject.caller, extra={**subject.caller.extra, form.argument: given})
    return replace(subject, caller=caller, mask_form=None, open_form=None)


def padding(ctx: ProbeContext) -> Finding | None:
    """Hidden fillings leave the other tokens as if they stood alone."""
    caller = ctx.subject.caller
    own = caller.named("padding") + caller.named("lengths")
    if caller.custom is not None or (not own and not caller.named("mask")):
        return None
    if ctx.tokens < 4 or caller.layout == "single":
        return skipped("padding", "Its context is too short, or it takes one sequence at a time.")
    what = "cannot be called in any known form"
    for form in _padding_forms(caller):
        for alone in (True, False):
            try:
                fine = _padded(ctx, form, alone)
            except Failed:
                continue
            if form.argument in own:
                what = "has no form in which it hides padding"
            if fine:
                return passed("padding", f"Padded tokens change nothing for the others: {form}.")
    if own:
        return found("padding", "shows", name=own[0], what=what)
    return skipped("padding", "No form was found in which its mask hides padding.")


def _padding_forms(caller: Caller) -> Iterator[MaskForm]:
    for name in caller.named("padding") + caller.named("mask"):
        for kind in ("may", "hidden", "added", "ones", "later"):
            for form in PADDING_SHAPES:
                yield MaskForm(name, kind, form)
        if caller.takes_values(name):
            yield MaskForm(name, "headwise")
    for name in caller.named("lengths"):
        yield MaskForm(name, "lengths")


def _padded(ctx: ProbeContext, form: MaskForm, alone: bool) -> bool:
    """Whether, with its first or last three tokens hidden, the second sequence is as without.

    `alone`: the mask speaks of padding alone; else of later tokens as well.
    """
    tokens, left = ctx.tokens, form.kind != "lengths"
    real = slice(3, None) if left else slice(0, tokens - 3)
    hidden = slice(0, 3) if left else slice(tokens - 3, None)
    keep = torch.ones(2, tokens, dtype=torch.bool)
    keep[1, hidden] = False
    allowed = keep[:, None].expand(-1, tokens, -1)
    if ctx.subject.causal and not alone:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    given: Any = torch.tensor([tokens, tokens - 3])
    if left:
        given = form.make(allowed, ctx.x.dtype, ctx.subject.num_heads)
    changed = ctx.x.clone()
    changed[1, hidden] = 3.0
    wanted = ctx.result(ctx.x[1:, real]).out[0]
    for x in (ctx.x, changed):
        out = ctx.result(x, **{form.argument: given}).out
        if not (ctx.near(out[0], ctx.out[0]) and ctx.near(out[1, real], wanted)):
            return False
    return not ctx.near(ctx.out[1, real], wanted)


def cross(ctx: ProbeContext) -> Finding | None:
    """T queries, S keys of another sequence."""
    caller = ctx.exact.caller
    context = caller.named("context")
    if caller.custom is not None or (not caller.separate and not context):
        return None
    if ctx.subject.causal and ctx.subject.mask_form is None:
        return skipped("cross", "It masks by itself, so its queries and keys are one sequence.")
    x, (batch, tokens, width) = ctx.x, ctx.x.shape
    draw = torch.Generator().manual_seed(8)
    source = torch.randn(batch, LENGTH, width, generator=draw, dtype=torch.float64).to(x.dtype)
    subject, sizes = replace(ctx.exact, causal=False), {"T": tokens, "S": LENGTH}
    try:
        out = ctx.result(x, subject, source).out
    except Failed as failure:
        if (context and not caller.separate) or isinstance(failure.error, (ValueError, TypeError)):
            return skipped("cross", f"It refuses: {told(failure.error)}.")
        return found("cross", "fails", error=failure, **sizes)
    if list(out.shape) != [batch, tokens, ctx.subject.out_dim]:
        return found("cross", "shape", out=list(out.shape), **sizes)
    if ctx.near(ctx.result(x, subject, source + 1.0).out, out):
        if not caller.separate:
            return skipped("cross", f"It does not use {context[0]} as it was built.")
        return found("cross", "unused")
    moved = x.clone()
    moved[:, 0] += 1.0
    if not ctx.near(ctx.result(moved, subject, source).out[:, 1:], out[:, 1:]):
        return found("cross", "queries")
    flipped = ctx.result(x, subject, source.flip(1)).out
    if not named(ctx, POSITIONS) and not ctx.near(flipped, out):
        return found("cross", "order")
    return passed("cross")


# --- caches ---------------------------------------------------------------------------------------

Chunk = Callable[[Tensor, int], Tensor]
"""Gives the output of the next chunk; the second argument is how many tokens came before."""


def cache(ctx: ProbeContext) -> Finding | None:
    """Chunks of 3, 2, 1, … tokens against the whole."""
    if not ctx.subject.causal or ctx.tokens < 6 or not ctx.subject.bare:
        return None
    said, wanted, drivers = "", ctx.out[:, :6], list(_drivers(ctx.exact))
    for make in drivers:
        try:
            outs = _in_chunks(make(), ctx.x, (3, 2, 1))
        except Exception as error:
            said = said or told(error)
            continue
        return passed("cache") if ctx.near(outs, wanted) else _cache_fault(ctx, make, outs)
    return skipped("cache", f"No way was found to use its cache ({said}).") if drivers else None


def _cache_fault(ctx: ProbeContext, make: Callable[[], Chunk], outs: Tensor) -> Finding:
    gap = (outs - ctx.out[:, :6]).abs().amax((0, 2))
    token = int((~(gap <= 1e-6 * ctx.out.abs().max())).nonzero()[0])
    try:
        single = ctx.near(_in_chunks(make(), ctx.x, (3, 1, 1, 1)), ctx.out[:, :6])
    except Exception:
        single = False
    said = "  # it goes in as chunks of 3, 2 and 1 tokens"
    example = Example.of(ctx.exact.source(ctx.tokens, 2) + said, ctx.out[0, :6], outs[0])
    return found("cache", "chunks" if single else "differs", example, token=token)


def _in_chunks(step: Chunk, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    outs, first = [], 0
    with torch.no_grad():
        for size in sizes:
            outs.append(step(x[:, first : first + size].clone(), first))
            first += size
    return torch.cat(outs, dim=1)


def _drivers(subject: Target) -> Iterator[Callable[[], Chunk]]:
    """Ways to use a cache, as far as names and the first results tell."""
    caller, target = subject.caller, subject.caller.target
    names, flags = caller.named("cache"), dict.fromkeys(caller.named("use_cache"), True)
    if hasattr(target, "attend_cached"):
        yield lambda: _attend_cached(subject)
    for name in names:
        if type(target).__module__.split(".")[0] == "transformers":
            yield lambda name=name: _dynamic_cache(subject, name)
        elif "KVCache" in str(caller.parameters[name].annotation):
            yield lambda name=name: _kept(subject, {name: KVCache()}, {})
        else:
            yield lambda name=name: _handed_back(subject, name, flags)
            yield lambda name=name: _kept(subject, {name: {}}, flags)
    if flags and not names:
        yield lambda: _kept(subject.fresh(), {}, flags)


def _called(subject: Target, x: Tensor, past: int, **given: Any) -> Any:
    """The result on a chunk, with its causal mask where masks are passed."""
    form = subject.mask_form
    if form is not None:
        allowed = torch.ones(len(x), x.shape[1], past + x.shape[1], dtype=torch.bool).tril(past)
        given[form.argument] = form.make(allowed, x.dtype, subject.num_heads)
    return subject.caller(x, **given)


def _attend_cached(subject: Target) -> Chunk:
    target: Any = subject.caller.target
    heads, dim = subject.num_heads, subject.head_dim or 1
    past: list[Tensor] = []

    def step(x: Tensor, first: int) -> Tensor:
        empty = x.new_zeros(len(x), heads, 0, dim)
        out, *new = target.attend_cached(x, *(past or [empty, empty]))
        past[:] = new
        return out

    return step


def _dynamic_cache(subject: Target, name: str) -> Chunk:
    kept = {name: sys.modules["transformers"].DynamicCache()}
    form = subject.mask_form or MaskForm("attention_mask", "added", "[B, 1, T, S]")
    return _kept(replace(subject, mask_form=form), kept, {})


def _handed_back(subject: Target, name: str, flags: dict[str, bool]) -> Chunk:
    """A cache that comes back with the result and goes in again with the next chunk."""
    kept: list[Any] = [None]

    def step(x: Tensor, first: int) -> Tensor:
        result = _called(subject, x, first, **{name: kept[0]}, **flags)
        kept[0] = _present(result.raw, result.out, first + x.shape[1])
        return result.out

    return step


def _present(raw: Any, out: Tensor, length: int) -> Any:
    """The part of a result that can be a cache: it holds tensors with an axis of that length."""
    for part in list(raw.values()) if isinstance(raw, dict) else list(raw):
        if part is out or part is None or (isinstance(part, Tensor) and part.ndim < 4):
            continue
        fields = list(getattr(part, "__dict__", {}).values())
        held = list(tensors_in(part)) or list(tensors_in(fields))
        are_weights = len(held) == 1 and held[0].shape[-1] == length
        if held and all(length in t.shape for t in held) and not are_weights:
            return part
    raise LookupError("nothing that comes back looks like a cache")


def _kept(subject: Target, kept: dict[str, Any], flags: dict[str, bool]) -> Chunk:
    """A cache that the call fills, or one that the module keeps itself."""

    def step(x: Tensor, first: int) -> Tensor:
        out = _called(subject, x, first, **kept, **flags).out
        if not all(kept.values()):
            raise LookupError("the cache that was passed stays empty")
        return out

    return step
