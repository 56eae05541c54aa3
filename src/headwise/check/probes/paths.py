"""Probe both paths of a layer that has two: with a fused kernel or without, batches first or last.

A layer is called as its constructor has it, so that mistakes on its other path would not be seen.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found, passed
from ..findings.verdict import Finding
from ..target.call_adapter import SINGLE, MaskForm
from ..target.checked_target import Target
from ..target.errors import Broken, is_users, told
from ..target.signatures import signature, source_of
from .mask_effects import HIDDEN, hiding
from .probe_context import Failed, ProbeContext

FUSED = re.compile(r"flash|sdpa|fused|(memory|mem)_?eff|efficient_att|scaled_dot_product")
"""Names of flags that choose a kernel, which changes no number."""
RETURNS = re.compile(r"^(output|return|need|with|get)_?(att|weights|scores|probs)")
"""Names of flags that give something back beside the output, which they do not change."""
ASKS = re.compile(r"hasattr\([\w.]+, *[\"']scaled_dot_product_attention[\"']\)")
"""Code that asks whether PyTorch has a fused attention."""
LAYOUT = "batch_first"
FOREIGN = re.compile(r"cuda|gpu|kernel|backend|not (implemented|supported|available)|triton", re.I)
"""What errors say that speak of a machine or package, not of the layer."""


def paths(ctx: ProbeContext) -> Finding | None:
    """The path that a flag chooses gives the same."""
    tried = False
    for name, value in _flags(ctx.subject):
        call = f"{name}={value}"
        try:
            other = _other(ctx, name, value)
            if other is None:
                continue
            tried = True
            if not ctx.near(_out(ctx, other), _out(ctx, ctx.exact)):
                return found("paths", "differs", call=call)
            if (form := _masked_apart(ctx, other)) is not None:
                return found("paths", "masked", call=call, form=form)
            if _in_their_place(ctx, other):
                return found("paths", "weights", call=call)
        except (Broken, Failed) as failure:
            error = failure.__cause__
            if isinstance(error, RuntimeError) and is_own(error):
                return found("paths", "fails", call=call, error=told(error))
    for name in ctx.subject.caller.named("weights") if ctx.subject.caller.custom is None else ():
        asked: dict[str, Any] = {name: True}
        with contextlib.suppress(Failed):  # which another probe tells
            tried = True
            if not ctx.near(ctx.result(ctx.x, **asked).out, ctx.out):
                return found("paths", "differs", call=f"{name}=True")
    for call, other in _by_itself(ctx):
        with contextlib.suppress(Failed):  # the constructor may have made nothing for that path
            tried = True
            if not ctx.near(ctx.call(ctx.x, other), ctx.out):
                return found("paths", "differs", call=call)
            if (form := _masked_apart(ctx, other)) is not None:
                return found("paths", "masked", call=call, form=form)
    return passed("paths") if tried else None


def _by_itself(ctx: ProbeContext) -> Iterator[tuple[str, Target]]:
    """The layer on the path that it would take on another machine, or with a PyTorch that has no
    fused attention, as it says."""
    for name in _attributes(ctx):
        yield f"self.{name} the other way", _flipped(ctx.exact, name)
    kinds = type(ctx.exact.module).mro()[:-2] if ctx.exact.module is not None else ()
    for known, name in _constants(kinds):
        turned = type(known[name])(not known[name])
        changed = partial(_set, known, name, turned)
        yield f"{name} = {turned!r}", _during(ctx.exact.fresh(), changed)
    if not any(ASKS.search(source_of(kind)) for kind in kinds):  # below nn.Module
        return
    try:
        with _unfused():
            built = ctx.subject.rebuilt()
    except (Broken, ValueError):
        return
    own = ctx.exact.alike(built.module) if built and built.module is not None else None
    if own is not None:
        yield "no F.scaled_dot_product_attention", _during(own, _unfused)


def _constants(kinds: Sequence[type]) -> Iterator[tuple[dict[str, Any], str]]:
    """Flags of a kernel that stand in the file itself, and are read by a call."""
    for kind in kinds:
        call = vars(kind).get("forward")
        known = getattr(call, "__globals__", {})
        for name in getattr(getattr(call, "__code__", None), "co_names", ()):
            if FUSED.search(name.lower()) and known.get(name) in (0, 1):
                yield known, name


@contextlib.contextmanager
def _set(known: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """A file in which a name has another value."""
    before, known[name] = known[name], value
    try:
        yield
    finally:
        known[name] = before


def _during(own: Target, changed: Callable[[], AbstractContextManager[Any]]) -> Target:
    """The same, with something changed while it is called."""
    within = contextlib.ExitStack()

    def enter(*_: Any) -> None:
        within.enter_context(changed())

    if own.module is not None:
        own.module.register_forward_pre_hook(enter)
        own.module.register_forward_hook(lambda *_: within.close(), always_call=True)
    return own


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """A PyTorch without a fused attention."""
    fused = nn.functional.scaled_dot_product_attention
    del nn.functional.scaled_dot_product_attention
    try:
        yield
    finally:
        nn.functional.scaled_dot_product_attention = fused


def _out(ctx: ProbeContext, subject: Target) -> Tensor:
    """The output without a mask that was guessed: what the mistakes of another path look like says
    nothing of masks."""
    own = replace(subject.unmasked(), open_form=ctx.exact.open_form)
    return ctx.call(ctx.x, own)


def _in_their_place(ctx: ProbeContext, other: Target) -> bool:
    """Whether the other path gives back something else where this one gives weights."""
    weights, raw = ctx.result(ctx.x).weights, ctx.result(ctx.x, other).raw
    if weights is None or not isinstance(raw, tuple) or len(raw) != 2:
        return False
    place = raw[1]
    return isinstance(place, Tensor) and place.shape[-1] != weights.shape[-1]


def _masked_apart(ctx: ProbeContext, other: Target) -> MaskForm | None:
    """A mask that the other path does not follow as this one does; None where it refuses it."""
    if ctx.tokens <= HIDDEN or ctx.exact.caller.layout is SINGLE:
        return None
    flag = ctx.unflagged is not ctx  # which goes in instead of a mask
    pair = [one.unmasked() if flag else one for one in (ctx.exact, other)]
    for form, given in hiding(ctx.unflagged):
        with contextlib.suppress(Failed):
            outs = (ctx.result(ctx.x, one, **given).out for one in pair)
            usual, out = (one.nan_to_num() for one in outs)
            rows = [n for n in range(ctx.tokens) if n != HIDDEN]
            if not ctx.near(out[:, rows], usual[:, rows]):
                return form
    return None


def _flags(subject: Target) -> Iterator[tuple[str, bool]]:
    """The constructor's flags that must change no number, with the value that was not taken."""
    if subject.factory is None or subject.module is None:
        return
    for parameter in signature(type(subject.module)):
        name, usual = parameter.name, parameter.default
        both = FUSED.search(name.lower()) or RETURNS.search(name.lower()) or name == LAYOUT
        if isinstance(usual, bool) and both:
            kept = getattr(subject.module, name, usual)
            yield name, not (kept if isinstance(kept, bool) else usual)


def _other(ctx: ProbeContext, name: str, value: bool) -> Target | None:
    """The same with a flag the other way and the same weights; None where it has others, or wants
    another call."""
    try:
        other = ctx.subject.rebuilt(**{name: value})
    except ValueError as error:  # a call that was guessed, and fails, is no mistake
        raise Failed(name, error) from (None if ctx.exact.guesses else error.__cause__)
    if other is None or other.module is None or ctx.exact.module is None:
        return None
    if name != LAYOUT and other.guesses != ctx.exact.guesses:
        return None
    other, kept = other.to(ctx.exact.dtype), dict(ctx.exact.module.named_parameters())
    own = dict(other.module.named_parameters()) if other.module is not None else {}
    if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in kept.items()}:
        return None
    with torch.no_grad():
        for one, parameter in own.items():
            parameter.copy_(kept[one])
    return other


def is_own(error: BaseException) -> bool:
    """Whether a line of somebody's file made it, and it speaks of shapes, not of a machine."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(is_users(one.filename) for one in frames) and not FOREIGN.search(str(error))


def _attributes(ctx: ProbeContext) -> list[str]:
    """Flags that the constructor worked out by itself."""
    module = ctx.exact.module
    taken = {p.name for p in signature(type(module))} if module is not None else set()
    every = (pair for one in module.modules() for pair in vars(one).items()) if module else ()
    names = [
        name for name, value in every if isinstance(value, bool) and FUSED.search(name.lower())
    ]
    return [name for name in dict.fromkeys(names) if name not in taken]


def _flipped(subject: Target, name: str) -> Target:
    own = subject.fresh()
    for one in own.module.modules() if own.module is not None else ():
        if isinstance(vars(one).get(name), bool):
            setattr(one, name, not getattr(one, name))
    return own
