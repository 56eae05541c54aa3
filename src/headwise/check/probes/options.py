"""Probe the options of a layer: built with another one, it must still run and keep its rules.

A layer is checked as its constructor's defaults have it, where a mistake in what an option switches
on does not show. Only what holds of every layer is asked of one with another option.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain, repeat, takewhile
from typing import Any

import torch
from torch import nn

from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.call_faults import refuses
from ..target.checked_target import Target
from ..target.construct import words_of
from ..target.errors import Broken, failing_line
from ..target.names import building_role
from ..target.signatures import signature, source_of
from ..target.sizes import flat, shown
from .behaviour import finite, gradients, past_used
from .causality import causality
from .mask_effects import REFUSED
from .paths import FOREIGN, LAYOUT, is_own
from .probe_context import Failed, ProbeContext
from .robustness import deterministic, move, registered, reload, train_eval
from .switched_on import misturned, rotating

KEPT = (finite, deterministic, gradients, registered, reload, train_eval, move)
"""What holds whichever option is taken; the first that does not is the finding."""
SECONDS = 1.0
"""How long options are tried."""
BLOCKS = re.compile(
    r"(block|chunk|tile|bucket)_?(size|len)|^(block|chunk|tile|bucket)s?$|^(q|k|kv|key|query)_?(block|chunk)"
)
"""Names of how many keys are taken at once."""
BLOCK = 3
OF_VALUES = re.compile(r"(^|_)v(al(ue)?s?)?(_|$)")
OWN_WIDTHS = re.compile(r"(^|_)(q|k|qk|query|key|query_key|att|attn|attention|inner)(_|$)")
"""Names of widths that queries and keys may have for themselves."""
OF_INPUT = re.compile(r"^(d_?|dim_?)?in(put)?(_|$)|^in_?(dim|channels|features|size)")
"""Names of the width of what comes in, beside that of what it is projected to."""
HIDES_LATER = re.compile(
    r"^(is_|use_)?causal|autoregressive|unidirectional|(mask|hide|no)_?(the_)?future|future_?mask"
)
"""Options that hide later tokens, with no mask from outside."""
OTHER_KIND = re.compile(
    r"causal|direction|mask|cross|encoder|decoder|future|stream|window|local|cache"
)
"""Options that say who sees whom, or make it another layer."""


def options(subject: Target, kept: Collection[str]) -> Finding | None:
    """The first rule that the layer breaks with another option; None where it breaks none.

    Args:
        kept: the rules that it keeps as it is.
    """
    if subject.projections is not None and "definition" in kept and not subject.guesses:
        return next((_with(changes, one) for changes, one in _in_blocks(subject)), None)
    if subject.factory is None or subject.module is None or subject.guesses:
        return None
    if subject.made_up:  # flags may as well be the other way, and each word is meant
        kind, made_up = type(subject.module), subject.made_up.items()
        sure = all(isinstance(v, bool) or v in words_of(kind, name) for name, v in made_up)
        wrong = ((one, _turned(subject, one)) for one in rotating(subject)) if sure else ()
        return next((_with(changes, one) for changes, one in wrong if one is not None), None)
    if isinstance(subject.roles.get("window"), tuple):  # chosen here; one may want a square
        return None
    for changes, one in _found(subject, kept):
        if one is not None:
            return _with(changes, one)
    return None


def _with(changes: dict[str, Any], one: Finding) -> Finding:
    return replace(one, message=f"With {shown(changes)}: {one.message}", ground="any")


def _found(
    subject: Target, kept: Collection[str]
) -> Iterator[tuple[dict[str, Any], Finding | None]]:
    """Every other option, and what is wrong with it."""
    if "definition" in kept:
        yield from ((changes, _leaky(subject, changes)) for changes in _hiding(subject))
    if "definition" in kept:
        yield from _in_blocks(subject)
    yield from ((changes, _turned(subject, changes)) for changes in rotating(subject))
    yield from _widths_of_keys(subject)
    shown = subject.caller.custom is not None  # and may be made for these sizes
    if not shown and ("definition" in kept or "scale" in kept):
        yield from ((changes, _misscaled(subject, changes)) for changes in _inner(subject))
        yield from ((changes, _scaled_alone(subject, changes)) for changes in _head_widths(subject))
    end = time.thread_time() + SECONDS
    sizes = () if shown else _sizes(subject)
    tried = chain(zip(_options(subject), repeat(False)), zip(sizes, repeat(True)))
    for changes, resized in takewhile(lambda _: time.thread_time() < end, tried):
        one = _broken(subject, changes, resized)
        yield changes, one if one is not None and one.rule in kept else None


def guesses_that_count(subject: Target) -> list[str]:
    """What was guessed to build a layer, for people: without flags and numbers that change no
    output, and words that its code asks for, for with each of them it must be right."""
    kind = type(subject.module)
    own = {n for n, v in subject.made_up.items() if isinstance(v, str) and v in words_of(kind, n)}
    made_up = {n: v for n, v in subject.made_up.items() if n not in own}
    return [f"{n}={v!r}" for n, v in made_up.items() if not _is_idle(subject, n, v)]


def despite_guesses(subject: Target, probed: list[Finding]) -> list[Finding]:
    """The findings; one that comes as well where other numbers were made up to build the layer
    stands on none of them."""
    made_up = subject.made_up
    numbers = {name: n for name, n in made_up.items() if type(n) is int and n > 0}
    if subject.guesses or len(numbers) < len(made_up) or not numbers:
        return probed
    others = [other for name, n in numbers.items() if (other := _other(subject, {name: 2 * n}))]
    if not others:
        return probed

    def stands(one: Finding) -> Finding:
        if one.severity != "error" or one.ground != "call":
            return one
        again = [_found_again(one, other) for other in others]
        return replace(one, ground="any") if all(again) else one

    return [*map(stands, probed)]


def _other(subject: Target, changes: dict[str, Any]) -> Target | None:
    """The layer with other numbers; None where it wants these."""
    with contextlib.suppress(ValueError, Broken):
        return subject.rebuilt(**changes)
    return None


def _found_again(one: Finding, other: Target) -> bool:
    """Whether a layer breaks the same rule with other numbers."""
    from . import PROBES

    with contextlib.suppress(Failed):
        probe = PROBES.get(one.rule)
        again = None if probe is None else probe(ProbeContext(other))
        return again is not None and again.severity == "error"
    return False


def _is_idle(subject: Target, name: str, value: Any) -> bool:
    """Whether the same weights give the same output where a flag is turned, or a number doubled."""
    other = not value if isinstance(value, bool) else 2 * value if isinstance(value, int) else None
    try:
        built = None if other is None else subject.rebuilt(**{name: other})
        plain = subject.unmasked()
        module = None if built is None else built.module
        own = None if module is None or subject.module is None else plain.alike(module)
        x = subject.input()
        return own is not None and torch.equal(own(x), plain(x))
    except Exception:  # it wants this one
        return False


def _hiding(subject: Target) -> Iterator[dict[str, Any]]:
    """Flags of the constructor that make it causal, where it is not."""
    own = subject.causal and subject.mask_form is None
    for parameter in () if own else signature(type(subject.module)):
        if parameter.default in (False, None) and _may_hide(parameter.name):
            yield {parameter.name: True}


def _may_hide(name: str) -> bool:
    return HIDES_LATER.search(name.lower()) is not None or building_role(name) == "causal"


def _leaky(subject: Target, changes: dict[str, Any]) -> Finding | None:
    """What is wrong with the mask of the same layer where it is causal: as its option says, or as
    is seen where that may speak of another mask."""
    from ..diagnosis import run as diagnose

    said = all(HIDES_LATER.search(name.lower()) for name in changes)
    try:
        other = subject.rebuilt(**changes)
    except ValueError:  # it wants a length, or another call
        return None
    except Broken as broken:
        of_dtype = REFUSED.search(str(broken.__cause__)) is not None
        return broken.finding if of_dtype or _is_sure(broken.__cause__, said) else None
    if other is None or other.guesses or not (said or other.causal_from == "seen"):
        return None
    if all(_is_idle(subject, name, False) for name in changes):  # others may ask for it
        return None
    other = _staying(subject, other, changes, causal=True, causal_from="given", mask_form=None)
    named = [one for one in diagnose(other) if one.severity == "error"]
    if sharp := [one for one in named if one.rule != "definition"]:
        return sharp[0]
    try:
        seen = (probe(ProbeContext(other)) for probe in (causality, past_used, registered, move))
        return next((one for one in seen if one is not None and one.severity == "error"), None)
    except Failed:  # whether the call or the option is at fault cannot be told
        return None


def _turned(subject: Target, changes: dict[str, Any]) -> Finding | None:
    """What is wrong with rotary positions that these arguments switch on."""
    handed = [*subject.caller.tables, *subject.caller.named("positions")]
    for name, value in changes.items():
        if value is True and not handed and _is_idle(subject, name, False):
            return found("rotary", "unheard", name=name)
    try:
        built = subject.rebuilt(**changes)
    except Broken as broken:
        return misturned(subject, broken)
    except ValueError:  # it wants another call
        return None
    return None if built is None else misturned(subject, built)


def _options(subject: Target) -> Iterator[dict[str, Any]]:
    """Arguments of the constructor, and fields of its configuration, with values that were not
    taken."""
    assert subject.module is not None
    kind = type(subject.module)
    for parameter in signature(kind):
        name, usual = parameter.name, parameter.default
        if OTHER_KIND.search(name.lower()) or name == LAYOUT:
            continue
        if isinstance(usual, bool):
            yield {name: not usual}
        elif usual is None and subject.arguments.get(name) is not None:
            yield {name: None}
        elif usual is None or isinstance(usual, str):
            yield from ({name: word} for word in words_of(kind, name) if word != usual)
    code = source_of(kind)
    for name, value in flat(subject.arguments):
        read = name not in subject.arguments and re.search(rf"\b{name}\b", code)
        if isinstance(value, bool) and read and not OTHER_KIND.search(name.lower()):
            yield {name: not value}


def _sizes(subject: Target) -> Iterator[dict[str, Any]]:
    """Arguments of the constructor that may have another size, with such a size: where there are
    names for them, all that must agree go together."""
    parameters = signature(type(subject.module))
    names = [parameter.name for parameter in parameters]
    roles = {name: building_role(name, beside=names) for name in names}
    dims = [name for name, role in roles.items() if role == "head_dim"]
    values = [name for name in dims if OF_VALUES.search(name.lower())]
    keys = [name for name in dims if name not in values]
    for group in (keys, values) if "width" in roles.values() else ():  # else it is given elsewhere
        if group and subject.head_dim is not None:
            yield dict.fromkeys(group, subject.head_dim + 4)
    heads, groups = (
        [name for name, role in roles.items() if role == wanted] for wanted in ("heads", "kv_heads")
    )
    if subject.num_heads == subject.num_kv_heads != 1 and groups:  # it may run for no fewer
        yield {groups[0]: 1}
        yield {**dict.fromkeys(heads[:1], 2 * subject.num_heads), groups[0]: subject.num_heads}
    for one in parameters:  # a side of a window that all tokens are in
        side = subject.arguments.get(one.name, one.default)
        if roles[one.name] == "window" and type(side) is int and side**2 == subject.room:
            yield {one.name: side - 2}
    wide = [name for name, role in roles.items() if role == "width"]
    if len(wide) > 1 and (own := [name for name in wide if OF_INPUT.search(name.lower())]):
        others = [name for name in wide if name not in own]
        yield dict.fromkeys(own, 2 * subject.embed_dim) | dict.fromkeys(others, subject.embed_dim)
    if wide:
        wider = [name for name, role in roles.items() if role == "out_width"]
        yield from ({name: 2 * subject.embed_dim} for name in wider)


def _inner(subject: Target) -> Iterator[dict[str, Any]]:
    """Widths of queries and keys that have a name of their own and got that of the input, with
    another."""
    names = [parameter.name for parameter in signature(type(subject.module))]
    same = [name for name in names if subject.arguments.get(name) == subject.embed_dim]
    roles = {name: building_role(name, True, names) for name in same}
    wide = [name for name, role in roles.items() if role == "width"]
    code = source_of(type(subject.module))
    rooted = any(re.search(rf"(sqrt\(|\*\*).*\b{one}\b|\b{one}\b.*\*\*", code) for one in wide)
    wide += [name for name, role in roles.items() if role == "out_width" and rooted]
    own = [name for name in wide if OWN_WIDTHS.search(name.lower()) or roles[name] == "out_width"]
    single = len(wide) == 1 and subject.num_heads == 1  # the input's may be the file's own number
    if single or (own and len(own) < len(wide)):
        wider = subject.embed_dim + 4 * (subject.num_heads or 1)
        yield {wide[0]: 2 * wider} if single else dict.fromkeys(own, wider)


def _head_widths(subject: Target) -> Iterator[dict[str, Any]]:
    """The width of a head, where it has a name of its own, with another."""
    names = [parameter.name for parameter in signature(type(subject.module))]
    own = [name for name in names if building_role(name, beside=names) == "head_dim"]
    if own and subject.head_dim is not None:
        yield dict.fromkeys(own, subject.head_dim + 4)


def _widths_of_keys(subject: Target) -> Iterator[tuple[dict[str, Any], Finding]]:
    """Widths of another sequence that a constructor takes, and that no matrix gets, whatever its
    flags are: with `context_dim=32` none takes inputs so wide."""
    assert subject.module is not None
    kind, wide = type(subject.module), subject.embed_dim + 8
    taken = signature(kind) if subject.caller.named("context") else ()
    flags = {one.name: True for one in taken if one.default is False}
    for name in [one.name for one in taken if building_role(one.name) == "kv_width"]:
        shapes = list[tuple[int, ...]]()
        code = source_of(kind)
        read = len(re.findall(rf"\b{name}\b", code)) > 1
        if read and not re.search(rf"(Linear|Norm)\([^()]*\b{name}\b", code):
            continue  # it may only say that there is another sequence
        try:
            for more in ({}, flags):
                built = kind(**{**subject.arguments, **more, name: wide})
                shapes += [tuple(one.shape) for one in built.parameters()]
        except Exception:  # the constructor refuses it, or its flags
            continue
        if not any(wide in shape for shape in shapes if len(shape) > 1):
            yield {name: wide}, found("cross", "width", name=name, wide=wide)


def _in_blocks(subject: Target) -> Iterator[tuple[dict[str, Any], Finding]]:
    """That the same weights give something else where keys are taken in smaller blocks, though
    every token still sees those that it saw: what was summed up before is not rescaled."""
    plain, x = subject.unmasked(), subject.input()
    called, given = subject.projections is not None, subject.arguments | subject.caller.extra
    made = [*subject.caller.parameters.values()] if called else signature(type(subject.module))
    for parameter in made:
        name, size = parameter.name, given.get(parameter.name, parameter.default)
        if not BLOCKS.search(name.lower()) or type(size) is not int or size < x.shape[1]:
            continue
        with contextlib.suppress(Exception):  # it may have no room for what goes in
            own = _cut(plain, name) if called else _rebuilt(plain, name)
            if own is None or torch.allclose(own(x), plain(x), atol=1e-4, rtol=1e-3):
                continue
            here, there = (one.influence(0.1 * x) > 0 for one in (plain, own))
            if torch.equal(here, there):
                yield {name: BLOCK}, found("definition", "blocks", name=name, usual=size)


def _cut(function: Target, name: str) -> Target:
    """A function that takes its keys in smaller blocks."""
    caller = function.caller
    return replace(function, caller=replace(caller, extra=caller.extra | {name: BLOCK}))


def _rebuilt(layer: Target, name: str) -> Target | None:
    """The same for a layer, with its weights."""
    built = layer.rebuilt(**{name: BLOCK})
    return None if built is None or built.module is None else layer.alike(built.module)


def _scaled_alone(subject: Target, changes: dict[str, Any]) -> Finding | None:
    """What is wrong with the scale where a head is said to be of another width, and only the scale
    follows."""
    from ..diagnosis import run as diagnose

    other = _other(subject, changes)
    named = [] if other is None or other.guesses else diagnose(other)
    scales = named and {one.rule for one in named if one.severity in ("error", "warning")} == {
        "scale"
    }
    return replace(named[0], severity="error") if scales else None


def _misscaled(subject: Target, changes: dict[str, Any]) -> Finding | None:
    """What is wrong with the scale where queries and keys have another width than the input."""
    from ..diagnosis import run as diagnose

    try:
        other = subject.rebuilt(**changes)
    except (ValueError, Broken):  # this width must be that of the input
        return None
    if other is None or other.guesses:
        return None
    named = [one for one in diagnose(other) if one.severity == "error"]
    return named[0] if [one.rule for one in named] == ["scale"] else None


def _broken(subject: Target, changes: dict[str, Any], resized: bool) -> Finding | None:
    """The first rule that it breaks with an option."""
    try:
        other = subject.rebuilt(**changes)
    except ValueError:  # it wants another call
        return None
    except Broken as broken:
        sure = _is_sure(broken.__cause__, resized) and not (resized and _is_added(subject, broken))
        return broken.finding if sure else None
    if other is None or other.guesses or resized:
        return None
    same = {"causal": subject.causal, "causal_from": "given", "mask_form": subject.mask_form}
    ctx = ProbeContext(_staying(subject, other, changes, **same))
    off = not any(changes.values())  # what is switched off never learns
    for probe in KEPT:
        try:
            one = None if off and probe is gradients else probe(ctx)
        except Failed:  # whether the call or the option is at fault cannot be told
            continue
        if one is not None and one.severity == "error":
            return one
    return None


def _is_added(subject: Target, broken: Broken) -> bool:
    """Whether what fails is the sum with x itself, which wants an output as wide as that."""
    line = failing_line(broken.__cause__) if broken.__cause__ else ""
    words = {*re.findall(r"\w+", line)}
    return "+" in line and bool(words & {*subject.caller.inputs})


def _staying(subject: Target, other: Target, changes: dict[str, Any], **same: Any) -> Target:
    """The subject with another option, which it has also when it is built anew."""

    def alike(**more: Any) -> Target:
        assert subject.factory is not None
        return replace(subject.factory(**changes, **more), **same)

    return replace(other, **same, factory=alike)


def _is_sure(error: BaseException | None, resized: bool) -> bool:
    """Whether an error is one whatever the call: a name that nothing defines or the layer lacks;
    and where only sizes are others, or what later tokens may be seen, what does not fit."""
    if error is None or refuses(error) or FOREIGN.search(str(error)):
        return False
    absent = isinstance(error, AttributeError) and isinstance(error.obj, nn.Module)
    return (
        isinstance(error, NameError)
        or absent
        or (resized and isinstance(error, RuntimeError | IndexError) and is_own(error))
    )
