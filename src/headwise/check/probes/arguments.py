"""Probes of what else a call takes: masks, padding, another sequence, a cache."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..findings.verdict import Example, Finding
from ..target.call_adapter import Caller, MaskForm, tensors_in
from ..target.subject import Subject, told
from .behaviour import NOTHING, POSITIONS, named
from .probe_context import Failed, Lab, failed, passed, skipped

LENGTH = 11
"""Keys of the other sequence in cross-attention."""


def mask(lab: Lab) -> Finding | None:
    """A mask of any pattern hides exactly what it says."""
    if lab.subject.caller.custom is not None:
        return None
    names = lab.subject.caller.named("mask")
    form = lab.subject.mask_form
    if lab.subject.mask_ignored:
        return failed(
            "mask",
            f"The argument {names[0]} changes nothing, whatever is passed.",
            "Use it on the scores, before the softmax: "
            f"scores = scores.masked_fill({names[0]} == 0, float('-inf')).",
        )
    if form is None or form.kind in ("flag", "headwise") or not names:
        return None
    tokens = min(5, lab.tokens)
    draw = torch.Generator().manual_seed(3)
    allowed = torch.rand(1, tokens, tokens, generator=draw) > 0.5
    allowed |= torch.eye(tokens, dtype=torch.bool)
    trial = _masked(lab.exact, allowed)
    try:
        found = trial.influence(lab.exact.input(tokens, 1)).nan_to_num(0.0)
    except Exception as error:
        raise Failed(f"x [1, {tokens}, {lab.x.shape[-1]}] with {form}", error) from error
    leaks = (found > NOTHING * found.max()) & ~allowed[0]
    if not bool(leaks.any()):
        return passed("mask", f"The mask is followed: {form}.")
    i, j = leaks.nonzero()[0].tolist()
    return failed(
        "mask",
        f"With a mask that hides token {j} from token {i}, output {i} still depends on it.",
        "Fill the scores with −inf where it hides, before the softmax, and nowhere else.",
    )


def _masked(subject: Subject, allowed: Tensor) -> Subject:
    """The subject with one mask for every call."""
    form = subject.mask_form
    assert form is not None
    given = form.make(allowed, subject.dtype, subject.num_heads)
    caller = replace(subject.caller, extra={**subject.caller.extra, form.argument: given})
    return replace(subject, caller=caller, mask_form=None, open_form=None)


def padding(lab: Lab) -> Finding | None:
    """Hidden fillings leave the other tokens as if they stood alone."""
    caller = lab.subject.caller
    own = caller.named("padding") + caller.named("lengths")
    if caller.custom is not None or (not own and not caller.named("mask")):
        return None
    if lab.tokens < 4 or caller.layout == "single":
        return skipped("padding", "Its context is too short, or it takes one sequence at a time.")
    tried = False
    for form in _padding_forms(caller):
        for alone in (True, False):
            try:
                fine = _padded(lab, form, alone)
            except Failed:
                continue
            tried = tried or form.argument in own
            if fine:
                return passed("padding", f"Padded tokens change nothing for the others: {form}.")
    if not own:
        return skipped("padding", "No form was found in which its mask hides padding.")
    what = (
        "has no form in which it hides padding" if tried else "cannot be called in any known form"
    )
    return failed(
        "padding",
        f"The argument {own[0]} {what}.",
        "It must hide keys, for all queries of a sequence: "
        f"scores.masked_fill({own[0]}[:, None, None, :], float('-inf')) where True is hidden.",
    )


def _padding_forms(caller: Caller) -> Iterator[MaskForm]:
    for name in caller.named("padding") + caller.named("mask"):
        for kind in ("may", "hidden", "added", "ones", "later"):
            for form in ("[B, S]", "[B, 1, 1, S]", "[B, 1, S]", "[B, T, S]", "[B, 1, T, S]"):
                yield MaskForm(name, kind, form)
        if caller.takes_values(name):
            yield MaskForm(name, "headwise")
    for name in caller.named("lengths"):
        yield MaskForm(name, "lengths")


def _padded(lab: Lab, form: MaskForm, alone: bool) -> bool:
    """Whether, with its first or last three tokens hidden, the second sequence is as without.

    `alone`: the mask speaks of padding alone; else of later tokens as well.
    """
    causal, tokens = lab.subject.causal, lab.tokens
    keep = torch.ones(2, tokens, dtype=torch.bool)
    left = form.kind != "lengths"
    real = slice(3, None) if left else slice(0, tokens - 3)
    keep[1] = False
    keep[1, real] = True
    allowed = keep[:, None].expand(-1, tokens, -1)
    keywords: dict[str, Any] = {}
    if causal and not alone:
        allowed = allowed & torch.ones(tokens, tokens, dtype=torch.bool).tril()
    if form.kind == "lengths":
        keywords[form.argument] = torch.tensor([tokens, tokens - 3])
    else:
        keywords[form.argument] = form.make(allowed, lab.x.dtype, lab.subject.num_heads)
    changed = lab.x.clone()
    hidden = slice(0, 3) if left else slice(tokens - 3, None)
    changed[1, hidden] = 3.0
    wanted = lab.result(lab.x[1:, real]).out[0]
    outs = [lab.result(x, **keywords).out for x in (lab.x, changed)]
    first = [lab.near(out[0], lab.out[0]) for out in outs]
    others = [lab.near(out[1, real], wanted) for out in outs]
    return all(first + others) and not lab.near(lab.out[1, real], wanted)


def cross(lab: Lab) -> Finding | None:
    """T queries, S keys of another sequence."""
    caller = lab.exact.caller
    context = caller.named("context")
    if caller.custom is not None or (not caller.separate and not context):
        return None
    if lab.subject.causal and lab.subject.mask_form is None:
        return skipped("cross", "It masks by itself, so its queries and keys are one sequence.")
    source = torch.randn(
        len(lab.x),
        LENGTH,
        lab.x.shape[-1],
        generator=torch.Generator().manual_seed(8),
        dtype=torch.float64,
    ).to(lab.x.dtype)
    open_subject = replace(lab.exact, causal=False)
    try:
        out = lab.result(lab.x, open_subject, source).out
    except Failed as failure:
        if (context and not caller.separate) or isinstance(failure.error, (ValueError, TypeError)):
            return skipped("cross", f"It refuses: {told(failure.error)}.")
        return failed(
            "cross",
            f"{lab.tokens} queries with {LENGTH} keys: {failure}",
            "Reshape keys and values with their own length S = k.shape[1]: k.view(B, S, H, D).",
        )
    if list(out.shape) != [*lab.x.shape[:2], lab.subject.out_dim]:
        return failed(
            "cross",
            f"{lab.tokens} queries with {LENGTH} keys give {list(out.shape)}.",
            "There is one output a query; the softmax and the sum run over keys.",
        )
    moved = lab.x.clone()
    moved[:, 0] += 1.0
    unused = lab.near(lab.result(lab.x, open_subject, source + 1.0).out, out)
    if unused and not caller.separate:
        return skipped("cross", f"It does not use {context[0]} as it was built.")
    if unused:
        return failed(
            "cross",
            "The other sequence changes nothing.",
            "Make keys and values from it, not from the queries' sequence.",
        )
    if not lab.near(lab.result(moved, open_subject, source).out[:, 1:], out[:, 1:]):
        return failed(
            "cross",
            "A query's output changes when another query is changed.",
            "Keys and values come from the other sequence alone.",
        )
    flipped = lab.result(lab.x, open_subject, source.flip(1)).out
    if not named(lab, POSITIONS) and not lab.near(flipped, out):
        return failed(
            "cross",
            "The output changes when keys and values are put in another order together.",
            "Keys and values must be split into heads alike, with their own length S.",
        )
    return passed("cross")


# --- caches ---------------------------------------------------------------------------------------

Step = Callable[[Tensor, int], Tensor]
"""Gives the output of the next chunk; the second argument is how many tokens came before."""


def cache(lab: Lab) -> Finding | None:
    """Chunks of 3, 2, 1, … tokens against the whole."""
    caller = lab.subject.caller
    plain = caller.custom is None and caller.layout == "batch"
    if not lab.subject.causal or lab.tokens < 6 or not plain:
        return None
    drivers = list(_drivers(lab))
    if not drivers:
        return None
    said = ""
    for make in drivers:
        try:
            outs = _in_chunks(make(), lab.x, (3, 2, 1))
        except Exception as error:
            said = said or told(error)
            continue
        if lab.near(outs, lab.out[:, :6]):
            return passed("cache")
        return _cache_fault(lab, make, outs)
    return skipped("cache", f"No way was found to use its cache ({said}).")


def _cache_fault(lab: Lab, make: Callable[[], Step], outs: Tensor) -> Finding:
    gap = (outs - lab.out[:, :6]).abs().amax((0, 2))
    tolerance = 1e-6 * lab.out.abs().max()
    token = int((~(gap <= tolerance)).nonzero()[0])
    try:
        single = lab.near(_in_chunks(make(), lab.x, (3, 1, 1, 1)), lab.out[:, :6])
    except Exception:
        single = False
    hint = (
        "Single tokens are right, chunks of several are not: the mask must be aligned to the end. "
        "With P tokens cached, query i sees keys up to P + i: triu(diagonal=P + 1)."
        if single
        else "Append the new keys and values behind the old ones, along the tokens' axis, and "
        "attend to all of them."
    )
    said = "  # it goes in as chunks of 3, 2 and 1 tokens"
    example = Example.of(lab.exact.source(lab.tokens, 2) + said, lab.out[0, :6], outs[0])
    return failed(
        "cache",
        f"In chunks of 3, 2 and 1 tokens with the cache, the output differs from token {token} on.",
        hint,
        example,
    )


def _in_chunks(step: Step, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    outs, first = [], 0
    with torch.no_grad():
        for size in sizes:
            outs.append(step(x[:, first : first + size].clone(), first))
            first += size
    return torch.cat(outs, dim=1)


def _drivers(lab: Lab) -> Iterator[Callable[[], Step]]:
    """Ways to use a cache, as far as names and the first results tell."""
    subject, caller = lab.exact, lab.exact.caller
    names, flags = caller.named("cache"), caller.named("use_cache")
    target = caller.target
    if hasattr(target, "attend_cached"):
        yield lambda: _attend_cached(subject)
    library = type(target).__module__.split(".")[0]
    for name in names:
        annotation = str(caller.parameters[name].annotation)
        if library == "transformers":
            yield lambda name=name: _dynamic_cache(subject, name)
        elif "KVCache" in annotation:
            yield lambda name=name: _our_cache(subject, name)
        else:
            yield lambda name=name: _handed_back(subject, name, flags)
            yield lambda name=name: _kept_in(subject, name, flags)
    if flags and not names:
        yield lambda: _kept_inside(subject, flags)


def _masks(subject: Subject, x: Tensor, past: int) -> dict[str, Any]:
    """The causal mask of a chunk, where masks are passed."""
    form = subject.mask_form
    if form is None:
        return {}
    allowed = torch.ones(len(x), x.shape[1], past + x.shape[1], dtype=torch.bool).tril(past)
    return {form.argument: form.make(allowed, x.dtype, subject.num_heads)}


def _attend_cached(subject: Subject) -> Step:
    target: Any = subject.caller.target
    heads, dim = subject.num_heads, subject.head_dim or 1
    past: list[Tensor] = []

    def step(x: Tensor, first: int) -> Tensor:
        empty = x.new_zeros(len(x), heads, 0, dim)
        out, *new = target.attend_cached(x, *(past or [empty, empty]))
        past[:] = new
        return out

    return step


def _our_cache(subject: Subject, name: str) -> Step:
    from ...cache import KVCache

    kept = KVCache()

    def step(x: Tensor, first: int) -> Tensor:
        return subject.caller(x, **{name: kept}, **_masks(subject, x, first)).out

    return step


def _dynamic_cache(subject: Subject, name: str) -> Step:
    kept = sys.modules["transformers"].DynamicCache()
    form = subject.mask_form or MaskForm("attention_mask", "added", "[B, 1, T, S]")
    subject = replace(subject, mask_form=form)

    def step(x: Tensor, first: int) -> Tensor:
        return subject.caller(x, **{name: kept}, **_masks(subject, x, first)).out

    return step


def _handed_back(subject: Subject, name: str, flags: list[str]) -> Step:
    """A cache that comes back with the result and goes in again with the next chunk."""
    kept: list[Any] = [None]

    def step(x: Tensor, first: int) -> Tensor:
        given = {name: kept[0], **dict.fromkeys(flags, True), **_masks(subject, x, first)}
        result = subject.caller(x, **given)
        kept[0] = _present(result.raw, result.out, first + x.shape[1])
        return result.out

    return step


def _present(raw: Any, out: Tensor, length: int) -> Any:
    """The part of a result that can be a cache: it holds tensors with an axis of that length."""
    parts = list(raw.values()) if isinstance(raw, dict) else list(raw)
    for part in parts:
        if part is out or part is None or (isinstance(part, Tensor) and part.ndim < 4):
            continue
        held = list(tensors_in(part)) or list(
            tensors_in(list(getattr(part, "__dict__", {}).values()))
        )
        if held and all(length in t.shape for t in held) and not _are_weights(held, length):
            return part
    raise LookupError("nothing that comes back looks like a cache")


def _are_weights(held: list[Tensor], length: int) -> bool:
    return len(held) == 1 and held[0].shape[-1] == length


def _kept_in(subject: Subject, name: str, flags: list[str]) -> Step:
    """A dictionary that the call fills."""
    kept: dict[Any, Any] = {}

    def step(x: Tensor, first: int) -> Tensor:
        given = {name: kept, **dict.fromkeys(flags, True), **_masks(subject, x, first)}
        out = subject.caller(x, **given).out
        if not kept:
            raise LookupError("the cache that was passed stays empty")
        return out

    return step


def _kept_inside(subject: Subject, flags: list[str]) -> Step:
    """A cache that the module keeps itself."""
    own = subject.fresh()

    def step(x: Tensor, first: int) -> Tensor:
        given = {**dict.fromkeys(flags, True), **_masks(subject, x, first)}
        return own.caller(x, **given).out

    return step
