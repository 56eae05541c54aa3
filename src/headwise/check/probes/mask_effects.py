"""What a mask does that hides one key: its effect, in every form in which people give masks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..target.call_adapter import ALL_SHAPES, Caller, MaskForm, UnusableResult
from ..target.errors import told
from ..target.signatures import entry, source_of
from .probe_context import Failed, ProbeContext

HIDDEN = 2
"""The key that is hidden in the second sequence; lengths hide all from the fifth on."""
SLIPS = (AttributeError, NameError)
"""Errors of misspelt names, whatever goes in."""
REFUSED = re.compile(
    r"masked_fill_?\(\) received an invalid|only supports boolean masks|with a bool tensor|"
    "Boolean value of Tensor with more than one value is ambiguous"
)
"""What PyTorch says where a fill has no value, or a mask of this dtype will not do."""
MISFIT = re.compile("must match the size|number of dimensions|broadcast")
"""What it says where shapes do not fit."""
OF_KEYS = {"[B, 1, S]", "[B, 1, 1, S]"}
"""Shapes with no axis for queries."""
KINDS = ("may", "hidden", "added", "ones", "later")


@dataclass(frozen=True)
class Effect:
    """What a mask in one form does that hides a key of the second sequence.

    Attributes:
        form: of the mask.
        any: it changes some output.
        right: the hidden key counts for nothing, all others as before, other sequences as well.
        elsewhere: outputs of the first sequence change, in which nothing is hidden.
        queries: only the hidden token's own output changes, as if it were a query.
        error: where no form goes in, for a slip of the pen.
        single: the error of two sequences, where the form goes in for one.
    """

    form: MaskForm
    any: bool
    right: bool = False
    elsewhere: bool = False
    queries: bool = False
    error: str = ""
    single: str = ""


def hiding(ctx: ProbeContext) -> Iterator[tuple[MaskForm, dict[str, Any]]]:
    """Masks that are followed as they are given here, each hiding a key of the last sequence."""
    for form in followed(ctx):
        yield form, hiding_one(ctx, form)


def hiding_one(ctx: ProbeContext, form: MaskForm) -> dict[str, Any]:
    """A mask in one form, by its argument, that hides a key of the last sequence."""
    allowed = torch.ones(*ctx.x.shape[:2], ctx.tokens, dtype=torch.bool)
    allowed[-1, :, HIDDEN] = False
    if ctx.subject.causal and "T" in form.shape:  # one of padding has no place for later tokens
        allowed = allowed.tril()
    return {form.argument: form.make(allowed, ctx.exact.dtype, ctx.subject.num_heads)}


def followed(ctx: ProbeContext) -> Iterator[MaskForm]:
    """The form of each mask that is followed, but for lengths."""
    caller = ctx.subject.caller
    for name in (*caller.named("mask"), *caller.named("padding")) if not caller.custom else ():
        seen = best(ctx, name)
        if seen is not None and seen.right and seen.form.kind != "lengths":
            yield seen.form


def otherwise(ctx: ProbeContext, form: MaskForm) -> MaskForm | None:
    """The form of a mask of numbers that is followed as one of bools is, with 0 and 1 the other way
    round."""
    turned = {"may": "later", "hidden": "ones"}.get(form.kind)
    if turned is None:
        return None
    other = MaskForm(form.argument, turned, form.shape)
    with contextlib.suppress(Failed):
        for alone in (True, False):
            if effect(ctx, other, alone).right:
                return other
    return None


def written_masks(ctx: ProbeContext) -> set[str]:
    """Arguments whose masks are others after a call."""
    caller = ctx.subject.caller
    for name in (*caller.named("mask"), *caller.named("padding")) if not caller.custom else ():
        best(ctx, name)
    return ctx.written


def best(ctx: ProbeContext, name: str) -> Effect | None:
    """The effect in the form that is understood best; None where no form goes in."""
    if name in ctx.effects:
        return ctx.effects[name]
    best: Effect | None = None
    errors: list[tuple[str, Exception]] = []
    for form, alone in forms(ctx.subject.caller, name):
        try:
            seen = effect(ctx, form, alone)
        except Failed as failure:
            errors.append((form.kind, failure.error))
            continue
        if best is None or _rank(seen) > _rank(best):
            best = seen
        if seen.right:
            break
    error = _slip(errors) if best is None and not _is_object(ctx, name) else None
    if error is not None:
        best = Effect(MaskForm(name, "may"), any=False, error=told(error))
    if best is None:
        best = _alone(ctx, name)
    ctx.effects[name] = best
    return best


def _is_object(ctx: ProbeContext, name: str) -> bool:
    """Whether its code takes the mask out of what is handed in: `attn_mask.mask`."""
    code = source_of(entry(ctx.subject.caller.target))
    return re.search(rf"\b{name}\.mask\b", code) is not None


def _slip(errors: Sequence[tuple[str, Exception]]) -> Exception | None:
    """The error of a name that is misspelt, a fill that has no value, or a line that no dtype suits
    where a shape does; what is looked for on a tensor may be there on masks of
    another class."""
    slips = {kind: error for kind, error in errors if _is_slip(error)}
    rest = [str(error) for kind, error in errors if not _is_slip(error)]
    every = {"may", "ones"} <= {*slips} if rest else bool(slips)
    return next(iter(slips.values())) if every and all(map(MISFIT.search, rest)) else None


def _is_slip(error: Exception) -> bool:
    misspelt = isinstance(error, SLIPS) and not isinstance(getattr(error, "obj", None), Tensor)
    return misspelt or REFUSED.search(str(error)) is not None


def _alone(ctx: ProbeContext, name: str) -> Effect | None:
    """The effect of a mask that goes in for one sequence, though for two it does not."""
    for form, alone in forms(ctx.subject.caller, name):
        if "B" not in form.shape:
            continue
        with contextlib.suppress(Failed):
            if effect(ctx, form, alone, rows=1).right:
                try:
                    effect(ctx, form, alone)
                except Failed as failure:
                    return Effect(form, any=False, single=told(failure.error))
    return None


def _rank(seen: Effect) -> tuple[bool, bool, bool, bool]:
    return seen.right, seen.any, seen.queries, not seen.elsewhere


def forms(caller: Caller, name: str) -> Iterator[tuple[MaskForm, bool]]:
    """Every form, with a mask of padding alone and with one of later tokens as well."""
    role = caller.roles[name]
    if role == "lengths":
        yield MaskForm(name, "lengths"), True
        yield from ((MaskForm(name, "may", shape), True) for shape in sorted(OF_KEYS))
        return
    if caller.takes_values(name):
        yield MaskForm(name, "headwise"), True
        yield MaskForm(name, "headwise"), False
    for alone, shape, kind in product((True, False), ALL_SHAPES, KINDS):
        yield MaskForm(name, kind, shape), alone


def effect(ctx: ProbeContext, form: MaskForm, alone: bool, rows: int = 2) -> Effect:
    """What hiding a key of the second sequence does.

    Args:
        alone: the mask speaks of padding alone; else of later tokens as well.
        rows: 1: the second sequence is given alone.
    """
    tokens = ctx.tokens
    if tokens <= HIDDEN:
        raise Failed(f"{tokens} tokens", UnusableResult("has no room for one that is hidden"))
    hidden = list(range(4, tokens)) if form.kind == "lengths" else [HIDDEN]
    others = [i for i in range(tokens) if i not in hidden]
    keep = torch.ones(rows, tokens, dtype=torch.bool)
    keep[-1, hidden] = False
    later = torch.ones(tokens, tokens, dtype=torch.bool)
    if ctx.subject.causal and not alone:
        later = later.tril()
    if "B" not in form.shape:  # the same for all sequences
        keep = keep[-1:].expand(rows, -1)

    def out(x: Tensor, keep: Tensor) -> Tensor:
        allowed = keep[:, None] & later
        given = torch.tensor([tokens, 4][-rows:])
        if form.kind != "lengths":
            given = form.make(allowed, x.dtype, ctx.subject.num_heads)
        if form.kind == "added":  # −inf would hide in an arithmetic that is wrong for numbers
            given = given.clamp(min=-1e4)
        named: dict[str, Any] = {form.argument: given}
        if not isinstance(given, Tensor):
            return ctx.result(x, **named).out
        named[form.argument] = written = given.clone(memory_format=torch.contiguous_format)
        result = ctx.result(x, **named)
        if not torch.equal(given, written):
            ctx.written.add(form.argument)
        return result.out

    x, full = ctx.x[-rows:], ctx.out[-rows:]
    changed = x.clone()
    changed[-1, hidden] = 3.0
    after, moved = out(x, keep), out(changed, keep)
    kept = ctx.near(moved[-1, others], after[-1, others])
    same = ctx.near(after[-1, others], full[-1, others])
    first = rows == 1 or "B" not in form.shape or ctx.near(after[0], full[0])
    own = ctx.near(after[-1, hidden], full[-1, hidden])
    return Effect(
        form,
        any=not (same and first and own),
        right=kept and not same and first,
        elsewhere=not first,
        queries=same and first and not own,
    )
