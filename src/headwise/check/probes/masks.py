"""Probe masks in every form that people give them: do they hide the keys that they say?"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..diagnosis.call_lines import quoted
from ..diagnosis.read_makers import made_for
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding
from ..target.call_adapter import ALL_SHAPES, SINGLE, Caller, MaskForm
from ..target.call_faults import refuses
from ..target.checked_target import Target
from ..target.errors import told
from ..target.introspect import written_code
from ..target.layouts import AXES as CALLED
from ..target.layouts import written_axes
from ..target.signatures import entry, is_read, signature, source_of
from ..target.uses import SAID, said_of
from .mask_effects import (
    HIDDEN,
    KINDS,
    OF_KEYS,
    Effect,
    best,
    effect,
    followed,
    forms,
    hiding_one,
    otherwise,
)
from .probe_context import NOTHING, Failed, ProbeContext, failing
from .spans import spans

BIASES = {"attn_bias", "attention_bias", "bias"}
AXES = r"\b{0}(?:\.dim\(\)|\.ndim| ?\.shape\)|\.size\(\)\)) ?== ?([234])\b"
"""How code asks how many axes a mask has."""
NUMBERS = re.compile(r"\binf|\badd|bias|float|negative|-1e|min\b|large|logit")
"""What is written of a mask of numbers that are added."""
MIXES = re.compile(
    r"conv|rnn|lstm|gru|unfold|pool|shift|roll\(|cum(sum|prod)|fft|(batch|instance|group)_?norm|scan|"
    r"linear_?att|kernel|feature_?map|performer|favor|landmark"
)
"""What code speaks of that hands tokens on to others beside attention, or may."""
OF_NONE = re.compile(r"NoneType|'bool' object|got \(bool,")
"""What is said where a mask is None, or `mask == 0`, which is a plain False then."""
WRITTEN = {2: "[B, S]", 3: "[B, T, S]", 4: "[B, H, T, S]"}
"""Shapes of masks that begin with the batch, by the number of their axes."""


def mask(ctx: ProbeContext) -> Finding | None:
    """A mask of any pattern hides exactly what it says."""
    if (one := _unheeded(ctx) or _needed(ctx) or _bias(ctx.unflagged) or spans(ctx)) is not None:
        return one
    ctx = ctx.unflagged
    caller, form = ctx.subject.caller, ctx.subject.mask_form
    names = [name for name in caller.named("mask") if not caller.takes_values(name)]
    if caller.custom is not None or not names:
        return None
    if form is None or form.argument not in names:
        return _judged(ctx, "mask", names)
    if form.kind == "headwise":
        return None
    tokens = ctx.tokens if ctx.subject.only else min(5, ctx.tokens)
    draw = torch.Generator().manual_seed(3)
    allowed = torch.rand(1, tokens, tokens, generator=draw) > 0.5
    allowed |= torch.eye(tokens, dtype=torch.bool)
    trial = _masked(ctx.exact, allowed)
    with failing(f"x [1, {tokens}, {ctx.x.shape[-1]}] with {form}"):
        influence = trial.influence(ctx.exact.input(tokens, 1)).nan_to_num(0.0)
    leaks = (influence > NOTHING * influence.max()) & ~allowed[0]
    if not bool(leaks.any()):
        closed = _turned(ctx, "mask", form) or _closed(_without_mask(ctx), form)
        return closed or passed("mask", f"The mask is followed: {form}.")
    i, j = leaks.nonzero()[0].tolist()
    return found("mask", "leaks", i=i, j=j)


def padding(ctx: ProbeContext) -> Finding | None:
    """Hidden fillings change nothing for the other tokens."""
    ctx = ctx.unflagged
    caller = ctx.subject.caller
    own = caller.named("padding") + caller.named("lengths")
    masks = caller.named("mask")
    if caller.custom is not None or not (own or masks):
        return None
    if ctx.tokens < 4 or caller.layout is SINGLE:
        return skipped("padding", "Its context is too short, or it takes one sequence at a time.")
    if own:
        return _judged(ctx, "padding", own)
    ctx = _without_mask(ctx)
    for name in masks:
        seen = best(ctx, name)
        if seen is not None and seen.right:
            right = passed("padding", f"Padded tokens change nothing for the others: {seen.form}.")
            return _flat(ctx, seen.form) or _beside(ctx, "padding", seen.form) or right
        for form, alone in forms(caller, name):
            if "B" in form.shape and _mixed(ctx, form, alone):
                one = found("padding", "elsewhere", name=name, form=form)
                return one if form.shape == "[B, S]" else replace(one, ground="call")
            if form.shape in OF_KEYS and _of_queries(ctx, form, alone):
                return found("padding", "queries", name=name, form=form)
    return skipped("padding", "No form was found in which its mask hides padding.")


def _without_mask(ctx: ProbeContext) -> ProbeContext:
    """The same with no mask that is passed, where it goes without: beside one of later tokens there
    is no room for one of padding."""
    with contextlib.suppress(Failed):
        if bool(ctx.unmasked.out.isfinite().all()):
            return ctx.unmasked
    return ctx


def _unheeded(ctx: ProbeContext) -> Finding | None:
    """That a flag of the call which says to hide later tokens changes nothing."""
    caller, form = ctx.subject.caller, ctx.subject.mask_form
    if ctx.subject.causal and form is None:
        return None
    for name in caller.named("causal") if caller.custom is None else ():
        left = caller.parameters[name].default in (False, None) and name not in caller.extra
        if left and is_read(caller.target, name):
            bare = _without_mask(ctx)
            given: dict[str, Any] = {name: True}
            with contextlib.suppress(Failed):
                alone = bare.result(bare.x, **given).out
                own = form is not None and form.argument == name  # by which it is causal
                if not own and bare.near(alone, bare.out):
                    return found("mask", "unheeded", name=name)
                if (mask := _overruling(bare, given, alone)) is not None:
                    return found("mask", "overruled", name=name, mask=mask)
    return None


def _overruling(ctx: ProbeContext, given: dict[str, Any], alone: Tensor) -> str | None:
    """The mask with which a flag hides nothing any more, though it hides nothing itself."""
    for form in (one for one in followed(ctx) if one.kind in KINDS):
        allowed = torch.ones(*ctx.x.shape[:2], ctx.tokens, dtype=torch.bool)
        open_ = {form.argument: form.make(allowed, ctx.exact.dtype, ctx.subject.num_heads)}
        both = ctx.result(ctx.x, **given, **open_).out
        if not ctx.near(both, alone) and ctx.near(both, ctx.out):
            return form.argument
    return None


def _needed(ctx: ProbeContext) -> Finding | None:
    """That a mask is None where nobody gives one, and the call fails for that."""
    form = ctx.subject.open_form or ctx.subject.mask_form
    if form is None or ctx.subject.caller.parameters[form.argument].default is not None:
        return None
    try:
        bare = replace(ctx.subject.unmasked(), open_form=None)
        bare.result(ctx.x.to(ctx.subject.dtype))
    except (AttributeError, TypeError) as error:
        of_none = OF_NONE.search(str(error))
        if of_none and not refuses(error):
            return found("runs", "needed", name=form.argument, error=told(error))
    except Exception:  # another argument is at fault
        return None
    return None


def _is_exchanged(target: Any) -> bool:
    """Whether another class of its file is called with the same arguments, so that one may stand
    for the other: then it takes what others read."""
    own, home = type(target), vars(sys.modules.get(type(target).__module__, sys))
    taken = {"self", *(one.name for one in signature(entry(target)))}
    kinds = [one for one in home.values() if isinstance(one, type) and issubclass(one, nn.Module)]
    parts = [own, *map(type, target.modules() if isinstance(target, nn.Module) else ())]
    inside = {kind for part in parts for kind in part.mro()}
    calls = (vars(one).get("forward") for one in kinds if one not in inside)
    return any(call and {"self", *(p.name for p in signature(call))} == taken for call in calls)


def _bias(ctx: ProbeContext) -> Finding | None:
    """What is wrong with what is added to the scores, by an argument that nobody has to give: zeros
    that change something, or numbers that do not."""
    caller, (batch, tokens, _), heads = ctx.subject.caller, ctx.x.shape, ctx.subject.num_heads
    for name in BIASES & {*caller.named("bias")} - {*caller.fills, *caller.extra}:
        same = {0.0: list[bool](), 30.0: list[bool]()}
        for before in ((1, 1), (batch, heads), (heads,), (batch,), (batch * heads,), ()):
            for number, seen in same.items():
                added = ctx.x.new_zeros(*before, tokens, tokens)
                added[..., 0] = number
                given: dict[str, Any] = {name: added}
                with contextlib.suppress(Failed):
                    out = ctx.result(ctx.x, **given).out
                    seen += [ctx.near(out, ctx.out)] * (out.shape == ctx.out.shape)
        if same[0.0] and not any(same[0.0]):
            return found("mask", "zeros", name=name)
        if same[30.0] and all(same[30.0]):
            return found("mask", "ignored", name=name)
    return None


def _turned(ctx: ProbeContext, rule: str, form: MaskForm) -> Finding | None:
    """That a mask hides what its author's own words say may be seen, or the other way round; or
    that one of numbers does what one of bools does not."""
    if (other := otherwise(ctx, form)) is not None:
        return found(rule, "twofold", form=form, other=other)
    target = ctx.subject.caller.target
    said = "\n".join(
        said_of(one, form.argument, True) for one in (entry(target), type(target))
    ).lower()
    ones_seen = {"may": True, "ones": True, "hidden": False, "later": False}.get(form.kind)
    words = {seen: pattern.search(said) for seen, pattern in SAID.items()}
    ones = (words[True] or words[False]) if not NUMBERS.search(said) else None
    if form.kind == "added" and ones is not None:
        return found(rule, "ones", name=form.argument, said=ones[0].strip(), form=form)
    if ones_seen is None or words[ones_seen]:
        return None
    if (other := words[not ones_seen]) is not None:
        return found(rule, "turned", name=form.argument, said=other[0].strip(), form=form)
    made = made_for(target, form.argument)
    if made is None or made.ones == ("seen" if ones_seen else "hidden"):
        return None
    told = {"name": form.argument, "form": form, "line": quoted(made.place)}
    return found(rule, "made", made=made.code, ones=made.ones, **told)


def _beside(ctx: ProbeContext, rule: str, form: MaskForm) -> Finding | None:
    """What is wrong beside the outputs that count, which are right: NaN among the others or the
    gradients, or weights that come back and show a key as seen that the output does without."""
    if form.kind not in KINDS or "B" not in form.shape:
        return None
    given = hiding_one(ctx, form)
    with contextlib.suppress(Failed):
        if (weights := ctx.result(ctx.x, **given).weights) is not None and weights.ndim > 2:
            rows = [n for n in range(weights.shape[-2]) if n != HIDDEN]  # of a query that is hidden
            shown = weights[-1, ..., rows, HIDDEN]  # nobody reads the row
            whole = ctx.near(weights.sum(-1), torch.ones_like(weights.sum(-1)))
            full = whole and len(weights) == len(ctx.x)
            if full and float(shown.max()) > 0.01 / ctx.tokens:
                return found(rule, "returned", name=form.argument)
    with contextlib.suppress(Failed):
        finite = ctx.result(ctx.x, **given).out.isfinite().all(-1)[-1]
        if not finite[HIDDEN] and int(finite.sum()) == ctx.tokens - 1:
            return found(rule, "nan", name=form.argument)
    x = ctx.x.detach().clone().requires_grad_(True)
    with contextlib.suppress(Exception):  # of a backward, which another probe tells
        out = ctx.exact.result(x, **given).out
        kept = out[:, [n for n in range(ctx.tokens) if n != HIDDEN]]
        slope = torch.autograd.grad(kept.sum(), x)[0]
        if bool(out.isfinite().all()) and not bool(slope.isfinite().all()):
            return found(rule, "slopes", name=form.argument)
    return None


def _masked(subject: Target, allowed: Tensor) -> Target:
    """The subject with one mask for every call."""
    form = subject.mask_form
    assert form is not None
    given = form.make(allowed, subject.dtype, subject.num_heads)
    caller = replace(subject.caller, extra={**subject.caller.extra, form.argument: given})
    return replace(subject, caller=caller, mask_form=None, open_form=None)


def _judged(ctx: ProbeContext, rule: str, names: list[str]) -> Finding:
    """The finding on the first mask argument with which something is wrong; else on the first that
    can be judged."""
    seen = {name: best(ctx, name) for name in names}
    judged = [_finding(ctx, rule, name, one) for name, one in seen.items() if one is not None]
    wrong = (one for one in judged if one.severity == "error")
    if judged:
        return next(wrong, judged[0])
    return skipped(rule, f"No form was found in which {', '.join(names)} can be given.")


def _finding(ctx: ProbeContext, rule: str, name: str, seen: Effect) -> Finding:
    """What is to be said of a mask argument."""
    if seen.error:
        way = "ambiguous" if "ambiguous" in seen.error else "fails"
        return found(rule, way, name=name, error=seen.error)
    if seen.single:
        return found(rule, "single", name=name, form=seen.form, error=seen.single)
    if seen.right:
        other = _flat(ctx, seen.form) if rule == "padding" else _closed(ctx, seen.form)
        if other is not None:
            return other
        right = passed(rule, f"What it hides counts for nothing: {seen.form}.")
        return _turned(ctx, rule, seen.form) or _beside(ctx, rule, seen.form) or right
    if not seen.any and _is_of_another(ctx.subject.caller, name):
        return skipped(rule, f"Only another input reaches {name}.")
    if not seen.any:
        one, target = found(rule, "ignored", name=name), ctx.subject.caller.target
        free = any(its.kind is its.VAR_KEYWORD for its in ctx.subject.caller.parameters.values())
        unread = not is_read(target, name) and not free and not _is_exchanged(target)
        return replace(one, ground="any") if unread else one
    if ctx.subject.caller.streams:
        return skipped(rule, f"Which tokens it speaks of is not known: {name}.")
    way = "queries" if seen.queries else "elsewhere" if seen.elsewhere else "shows"
    way = "lengths" if seen.form.kind == "lengths" and way == "shows" else way
    one = found(rule, way, name=name, form=seen.form)
    plain = name in ("mask", "attention_mask", "attn_mask") and seen.form.shape == "[B, S]"
    of_keys = rule == "padding" or plain  # it speaks of them alone
    sure = way in ("shows", "lengths") and of_keys and _only_attends(ctx.subject)
    return replace(one, ground="call") if sure else one


def _only_attends(subject: Target) -> bool:
    """Whether nothing but attention hands a token on to others, as far as its code says."""
    code = written_code(subject.module) if subject.module is not None else ""
    return bool(code) and not subject.made_up and not MIXES.search(code.lower())


def _is_of_another(caller: Caller, name: str) -> bool:
    """Whether a mask is called after an argument that was not given: `mem_mask` beside `mem`."""
    stem = name.lower().split("mask")[0].strip("_")
    others = (one.lower() for one in caller.parameters if one not in (name, *caller.inputs))
    return stem != "" and any(one.startswith(stem) and "mask" not in one for one in others)


def _mixed(ctx: ProbeContext, form: MaskForm, alone: bool) -> bool:
    """Whether a mask that is right for one sequence hides keys in another one where there are
    two."""
    with contextlib.suppress(Failed):
        return effect(ctx, form, alone).elsewhere and effect(ctx, form, alone, rows=1).right
    return False


def _of_queries(ctx: ProbeContext, form: MaskForm, alone: bool) -> bool:
    """Whether a mask that is the same for all queries changes the hidden token's own output, and
    that alone."""
    with contextlib.suppress(Failed):
        return effect(ctx, form, alone).queries
    return False


def _flat(ctx: ProbeContext, right: MaskForm) -> Finding | None:
    """That a mask of one flag a token speaks of queries, beside a form that is right."""
    flat = replace(right, shape="[B, S]")
    usable = right.kind not in ("headwise", "lengths") and right.shape != flat.shape
    if usable and _of_queries(ctx, flat, True):
        return found("padding", "queries", name=right.argument, form=flat)
    return None


def _closed(ctx: ProbeContext, right: MaskForm) -> Finding | None:
    """That no mask goes in which has as many axes as its code has a way for, or the axes that are
    written of it; or that one goes in and is not heard of."""
    name, target = right.argument, ctx.subject.caller.target
    asked = re.findall(AXES.format(re.escape(name)), source_of(entry(target)))
    for number in sorted({*map(int, asked)}):
        shapes = [shape for shape in ALL_SHAPES if shape.count(",") == number - 1]
        if (error := _refused(ctx, name, shapes)) is not None:
            return found("mask", "axes", name=name, axes=number, error=error)
    for words in written_axes(target, name):
        square = len(words) == 2 and all(re.fullmatch(CALLED["T"], one) for one in words)
        if (
            square
            and words[0] == words[1]
            and (error := _refused(ctx, name, ["[T, S]"])) is not None
        ):
            return found("mask", "said", name=name, said=f"[{', '.join(words)}]", error=error)
        usual = len(words) in WRITTEN and re.fullmatch(CALLED["B"], words[0]) is not None
        error = _refused(ctx, name, [WRITTEN[len(words)]]) if usual else None
        if error is not None:
            way = "promised" if _is_of_inputs(ctx.subject.caller, words) else "said"
            return found("mask", way, name=name, said=f"[{', '.join(words)}]", error=error)
    for shape in sorted({*WRITTEN.values(), "[B, 1, 1, S]"} - {right.shape}):
        with contextlib.suppress(Failed):
            form = replace(right, shape=shape)
            if not effect(ctx, form, True).any:
                return found("mask", "unheard", name=name, form=form)
    return None


def _is_of_inputs(caller: Caller, words: Sequence[str]) -> bool:
    """Whether the axes that are written of a mask, `[B, N, M]`, are those of queries and keys:
    nobody wrote them of another layer."""
    others = (one for one in caller.parameters if "mask" not in one)
    every = [one[:2] for name in others for one in written_axes(caller.target, name)]
    return len(words) == 3 and all([words[0], axis] in every for axis in words[1:])


def _refused(ctx: ProbeContext, name: str, shapes: Sequence[str]) -> str | None:
    """The first error where no mask of these shapes goes in, and none is refused in words."""
    errors: list[Exception] = []
    for form, alone in forms(ctx.subject.caller, name):
        if form.shape in shapes:
            try:
                effect(ctx, form, alone)
                return None
            except Failed as failure:
                errors.append(failure.error)
    return told(errors[0]) if errors and not any(map(refuses, errors)) else None
