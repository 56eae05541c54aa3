"""Probe what else a call takes: another sequence, rotary tables."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnosis.call_lines import Calls
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding
from ..target.call_adapter import ALL_SHAPES, Caller, MaskForm
from ..target.call_faults import refuses
from ..target.checked_target import Target
from ..target.errors import told, users_frames
from ..target.fills import left_out, reversed_rows
from ..target.introspect import SPEAKS_OF_ROPE, TURNS, names_in
from ..target.layouts import AXES, written_axes
from ..target.names import building_role
from ..target.signatures import is_read
from .behaviour import POSITIONS, named
from .mask_effects import HIDDEN, KINDS, MISFIT, followed
from .probe_context import Failed, ProbeContext

EITHER = {"y", "other"}
"""Names of another sequence that do not say whether queries or keys are made of it."""

SPEAKS_OF_ANOTHER = re.compile(r"cross|enc(oder)?_?dec")
"""Names of what a layer keeps to know whether it attends to another sequence."""

LENGTH = 11
"""Keys of the other sequence in cross-attention."""


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
        crossed = "cross" in type(caller.target).__name__.lower()
        crossed = crossed and _has_length_of_queries(failure.error, tokens)
        other = context and context[0] in caller.guessed and not crossed
        if other and f"[{batch}, {LENGTH}, " in str(failure):
            return skipped("cross", f"Its queries are made of {context[0]}, its keys of x.")
        if caller.layout is not caller.usual:
            return skipped(
                "cross", f"With axes that were guessed it refuses: {told(failure.error)}."
            )
        if _keys_from_queries(ctx, subject, source[:, :tokens]):
            return _queries_apart(ctx, subject, context)
        refused = isinstance(failure.error, ValueError | TypeError | AssertionError)
        loose = refused or caller.made_up or (context and not caller.separate)
        surely = caller.separate or crossed or context[0] not in caller.guessed
        square = _meets_length(failure.error, tokens)
        own = square or _has_length_of_queries(failure.error, tokens)
        if loose and not (surely and own):
            return skipped("cross", f"It refuses: {told(failure.error)}.")
        if _says_causal(caller.target):
            return skipped("cross", "It says that it is causal: all comes from one sequence.")
        return found("cross", "square" if square else "fails", error=failure, **sizes)
    if list(out.shape) != [batch, tokens, ctx.subject.out_dim]:
        return found("cross", "shape", out=list(out.shape), **sizes)
    if ctx.near(ctx.result(x, subject, -source).out, out):
        known = caller.separate or (
            caller.required(context[0])
            and not (caller.guessed or ctx.subject.idle or _built_without(caller.target))
        )
        if known or not is_read(caller.target, context[0]):
            return found("cross", "unused")
        return skipped("cross", f"It does not use {context[0]} as it was built.")
    if _keys_from_queries(ctx, subject, source):
        if not caller.separate:
            return skipped("cross", "It attends to its own tokens as well as to others.")
        return found("cross", "queries")
    flipped = ctx.result(x, subject, source.flip(1)).out
    if not named(ctx, POSITIONS) and not ctx.near(flipped, out):
        return found("cross", "order")
    return _masked(ctx, subject, source, out) or passed("cross")


def _masked(ctx: ProbeContext, subject: Target, source: Tensor, out: Tensor) -> Finding | None:
    """What is wrong with the masks of another sequence: of queries, keys and values that are given
    apart, in the form that is followed where all are of one length; else those that are named
    after it, in any form."""
    caller = subject.caller
    for form in followed(ctx.unflagged) if caller.separate else ():
        if form.kind not in KINDS:
            continue
        try:
            if not _is_heard(ctx, subject, source, out, form):
                return found("cross", "mask", name=form.argument, form=form)
        except Failed as failure:
            if not refuses(failure.error):
                return found("cross", "misfit", name=form.argument, form=form)
    for name in _masks_of(caller.named("context")[0], caller) if not caller.separate else ():
        forms = [MaskForm(name, *one) for one in product(KINDS, ALL_SHAPES) if "B" in one[1]]
        heard = {form: _heard(ctx, subject, source, out, form) for form in forms}
        if any(heard.values()):
            continue
        if goes_in := [form for form, one in heard.items() if one is not None]:
            return found("cross", "mask", name=name, form=goes_in[0])
        as_many = source[:, : ctx.x.shape[1]]
        same = ctx.result(ctx.x, subject, as_many).out
        fits = (form for form in forms if _heard(ctx, subject, as_many, same, form) is not None)
        if (form := next(fits, None)) is not None:
            return found("cross", "misfit", name=name, form=form)
    return None


def _masks_of(context: str, caller: Caller) -> Iterator[str]:
    """Masks that are named after a sequence, not after x or a third one: `enc_mask` beside
    `enc_out`."""
    for name in caller.parameters:
        stem = re.split("_|mask", name.lower())[0]
        if name.lower().endswith("mask") and stem and context.lower().startswith(stem):
            yield name


def _heard(
    ctx: ProbeContext, subject: Target, source: Tensor, out: Tensor, form: MaskForm
) -> bool | None:
    """The same as `_is_heard`; None where the mask does not go in."""
    with contextlib.suppress(Failed):
        return _is_heard(ctx, subject, source, out, form)
    return None


def _is_heard(
    ctx: ProbeContext, subject: Target, source: Tensor, out: Tensor, form: MaskForm
) -> bool:
    """Whether a mask that hides one key of the last sequence hides it, and nothing else."""
    keep = torch.ones(source.shape[:2], dtype=torch.bool)
    alone = "B" in form.shape
    keep[-1 if alone else slice(None), HIDDEN] = False
    allowed = keep[:, None].expand(-1, ctx.x.shape[1], -1)
    given = form.make(allowed, ctx.x.dtype, subject.num_heads)
    rest: dict[str, Any] = {form.argument: given.clamp(min=-1e4) if form.kind == "added" else given}
    moved = source.clone()
    moved[:, HIDDEN] = torch.where(keep[:, HIDDEN, None], moved[:, HIDDEN], 3.0)
    one, other = (ctx.result(ctx.x, subject, keys, **rest).out for keys in (source, moved))
    as_before = not alone or ctx.near(one[0], out[0])
    return ctx.near(one, other) and as_before and not ctx.near(one[-1], out[-1])


def _keys_from_queries(ctx: ProbeContext, subject: Target, source: Tensor) -> bool:
    """Whether an output changes with another token of the sequence that queries are made of."""
    moved = ctx.x.clone()
    moved[:, 0] += 1.0
    try:
        out, after = (ctx.result(x, subject, source).out for x in (ctx.x, moved))
    except Failed:
        return False
    return out.shape[1] == ctx.tokens and not ctx.near(after[:, 1:], out[:, 1:])


def _has_length_of_queries(error: Exception, tokens: int) -> bool:
    """Whether an error says that what has `LENGTH` tokens is reshaped as if it had the queries'."""
    said = re.search(r"shape '\[([-\d, ]+)\]' is invalid for input of size (\d+)", str(error))
    sizes = [abs(int(size)) for size in said[1].split(",")] if said else []  # -1: as many as fit
    if said is None or tokens not in sizes:
        return False
    return int(said[2]) * tokens % (math.prod(sizes) * LENGTH) == 0


def _meets_length(error: Exception, tokens: int) -> bool:
    """Whether an error says that what has `LENGTH` places meets what has as many as queries."""
    sizes = re.findall(r"size of tensor \w \((\d+)\)", str(error))
    return {*map(int, sizes)} == {LENGTH, tokens}


def _queries_apart(ctx: ProbeContext, subject: Target, context: list[str]) -> Finding:
    """What to say where keys come from x: of (x, y) it may be y that queries are made of."""
    if context and context[0] in EITHER:
        moved = ctx.x.clone()
        moved[:, 0] += 1.0
        other = ctx.x.flip(0)
        out, after = (ctx.result(other, subject, y).out for y in (ctx.x, moved))
        if ctx.near(after[:, 1:], out[:, 1:]) and not ctx.near(after[:, :1], out[:, :1]):
            return passed("cross", f"Queries are made of {context[0]}, keys and values of x.")
    return found("cross", "queries")


def _says_causal(target: Any) -> bool:
    """Whether an attribute of its own says that it is causal."""
    own = vars(target) if hasattr(target, "__dict__") else {}
    return any(value is True and building_role(name) == "causal" for name, value in own.items())


def _built_without(target: Any) -> bool:
    """Whether a layer was built to attend to its own tokens alone, where it could do otherwise."""
    said = vars(target) if hasattr(target, "__dict__") else {}
    return any(value is False and SPEAKS_OF_ANOTHER.search(name) for name, value in said.items())


def _needs_positions(ctx: ProbeContext) -> Finding | None:
    """That positions which are None by default have to be given: without them the layer's own do
    not fit."""
    caller = ctx.exact.caller
    for name in caller.named("positions"):
        if name not in caller.fills or caller.parameters[name].default is not None:
            continue
        own = replace(caller, fills={**caller.fills, name: left_out})
        try:
            replace(ctx.exact, caller=own).result(ctx.x)
        except RuntimeError as error:
            if _is_misfit(error):
                return found("rotary", "needed", name=name, error=told(error))
        except Exception:  # another argument is at fault, or they are asked for
            return None
    return None


def _is_misfit(error: RuntimeError) -> bool:
    """Whether shapes do not meet in the layer's own code, which did not refuse them itself."""
    own = bool(users_frames(error)) and not refuses(error)
    return own and MISFIT.search(str(error)) is not None


def _of_each_sequence(ctx: ProbeContext) -> Finding | None:
    """That positions which are written to be `[batch, seq]` do not go in so."""
    caller, x = ctx.exact.caller, ctx.x
    for name in caller.named("positions"):
        said = [*written_axes(caller.target, name)]
        batched = [one for one in said if re.fullmatch(AXES["B"], one[0])]
        if not said or len(batched) < len(said) or len(x) == ctx.exact.num_heads:
            continue
        rows = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        given: dict[str, Any] = {name: rows}
        try:
            ctx.exact.result(x, **given)
        except RuntimeError as error:
            if _is_misfit(error):
                said_so = f"[{', '.join(said[0])}]"
                return found("rotary", "rows", name=name, said=said_so, error=told(error))
        except Exception:  # another argument is at fault
            return None
    return None


def rotary(ctx: ProbeContext) -> Finding | None:
    """Rotary tables that are handed in: they count, and only by the distance of tokens."""
    if (one := _needs_positions(ctx) or _of_each_sequence(ctx)) is not None:
        return one
    caller = ctx.exact.caller
    if caller.custom is not None or ctx.tokens < 4:
        return None
    if not any(caller.required(name) for name in caller.tables):
        one = _by_distance(ctx, ctx.exact.with_fills(dict.fromkeys(caller.tables, left_out)))
        if not caller.tables or (one is not None and one.severity == "error"):
            return one
    others = {name: reversed_rows(fill) for name, fill in caller.tables.items()}
    moved = replace(ctx.exact, caller=caller.shifted())
    other = ctx.exact.with_fills(others)
    try:
        here, there = ctx.call(ctx.x, moved.fresh()), ctx.call(ctx.x, other.fresh())
    except Failed:  # the table holds no more positions
        return None
    names = ", ".join(caller.tables)
    if ctx.near(there, ctx.out):
        if not any(caller.required(name) for name in caller.tables):
            return skipped("rotary", f"It does not use {names} as it was built.")
        return found("rotary", "unused", names=names)
    return passed("rotary") if ctx.near(here, ctx.out) else found("rotary", "shift", names=names)


def _by_distance(ctx: ProbeContext, subject: Target) -> Finding | None:
    """Rotary positions of the layer's own: where all tokens are equal, a score is settled by the
    distance of two of them, and changes with it."""
    module, turning = subject.module, list[str]()
    if module is None:
        return None
    speaks = SPEAKS_OF_ROPE if ctx.subject.causal else TURNS  # others may hold sinusoids
    if not any(speaks.search(name.lower()) for name in names_in(module)):
        return None
    turns = (one for name, one in module.named_modules() if SPEAKS_OF_ROPE.search(name.lower()))
    if any(isinstance(one, nn.Identity) for one in turns):  # in the place of what was handed in
        return None
    calls = Calls(ctx.tokens)
    hooks = [
        child.register_forward_hook(lambda *_, path=path: turning.append(path))
        for path, child in module.named_modules()
        if SPEAKS_OF_ROPE.search(path.split(".")[-1].lower())
    ]
    try:
        with calls:
            ctx.call(ctx.x[:, :1].expand_as(ctx.x), subject)
    except Failed:
        if turning:  # with tables from elsewhere it runs
            raise
    finally:
        for hook in hooks:
            hook.remove()
    scores = [call.scores for call in calls.made if call.scores is not None]
    seen = torch.ones(ctx.tokens, ctx.tokens, dtype=torch.bool)
    seen = seen.tril() if ctx.subject.causal else seen
    if not scores or scores[0].shape[-2:] != seen.shape:
        return None
    last = scores[0][..., -1, :]
    if ctx.near(last, last[..., :1].expand_as(last)):  # no position counts, and no distance
        unused = found("rotary", "unused", names=turning[0]) if turning else None
        return None if unused is None else replace(unused, ground="any")
    later = scores[0].masked_fill(~seen, 0.0)[..., 1:, 1:]  # before the first there is no token
    one, other = later[..., 1:, 1:], later[..., :-1, :-1]
    alike = ctx.near(*((one.tril(), other.tril()) if ctx.subject.causal else (one, other)))
    said = "Its rotary positions count by the distance of two tokens alone."
    if alike:
        return passed("rotary", said)
    gains = any(
        one.ndim < 2 and not name.endswith("bias") for name, one in module.named_parameters()
    )
    wrong = found("rotary", "distance")  # gains behind the turning have reasons of their own
    return wrong if gains else replace(wrong, ground="call")
