"""Find the ways in which a layer's cache of keys and values may be used, by its names and by what
comes back from a call.

A cache goes into the call and comes back, is filled by the call, or is kept by the layer itself,
switched on in the call, in the constructor or by an attribute. Each way starts from a copy that was
never called, so that nothing is left in it of another call.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...layers.kv_cache import KVCache
from ..target.call_adapter import Caller
from ..target.checked_target import Target
from ..target.construct import build
from ..target.fills import FILLS, Fill, Place
from ..target.names import parts_of
from ..target.signatures import keys_read, signature
from ..target.sizes import BuildSizes
from .cache_steps import (
    Use,
    asked,
    attend_cached,
    dynamic_cache,
    filled,
    handed_back,
    is_free,
    itself,
    methods,
    pair_back,
)

SWITCH = re.compile(r"cache|(^|_)kv(_|$)|infer|decod(e|ing)|incremental|generat|streaming")
"""Names of flags that may switch a cache on."""
KEPT = re.compile(r"cache|past|prev|(^|_)kv(_|$)")
"""Names of keys and values from before."""
BARE = re.compile(r"(past_?|cached_?)?(kvs?|key_?values?|past)")
"""The same, of names that no other argument has."""
PLACE = re.compile(
    r"(^|_)(pos|start|offset|idx|index|step|seen|cur|current|i)(_|$)|past_len|cache_len"
)
"""Names of what may say where a chunk begins."""
GIVES = re.compile(r"return|output|give")
"""Names of flags that may only say what comes back."""
PREPARES = re.compile(r"^(set_?up|init|enable|start|allocate|use|make|create|build)_.*(cache|kv)")
"""Names of methods that make one, or switch it on."""
ROOM = 16
"""Tokens that a cache has room for which is made before the first call."""


@dataclass(frozen=True)
class Way:
    """One way to use a cache.

    `make` begins anew, with an empty cache. `sure` is whether only a mistake makes its numbers
    wrong, and `named` whether that is so if they hang on the chunks before; `own` is whether the
    layer keeps the cache itself; `grows` is whether the cache must hold all tokens so far, which
    keys of another sequence do not; `loose` is whether it goes by a name that may mean another
    thing, used token by token perhaps; `switch` says what switched it on, for people.
    """

    make: Callable[[], Use]
    sure: bool = True
    named: bool = False
    own: bool = False
    switch: str = ""
    grows: bool = False
    loose: bool = False


def ways(subject: Target) -> Iterator[Way]:
    """Ways to use a cache, the likeliest first."""
    first = subject.untouched()
    for placed, known in _placed(first):
        for way in _of_call(placed):
            yield replace(way, sure=way.sure and known, named=way.named and known)
    for switched, said, named in _switched(first):
        for placed, known in _placed(switched):
            for flags in _flags(placed.caller):
                yield Way(itself(placed, flags), False, named and known, True, said)


def _of_call(subject: Target) -> Iterator[Way]:
    """Ways that the arguments of a call speak of."""
    caller = subject.caller
    names, starts = caller.named("cache"), caller.named("start")
    if hasattr(caller.target, "attend_cached"):
        yield Way(lambda: attend_cached(subject.fresh()))
    for number, flags in enumerate(_flags(caller)):
        for name in names:
            for way in _passed(subject, name, flags):
                yield replace(way, sure=way.sure and not number)
        for name in _others(caller):
            for way in _passed(subject, name, flags):
                yield replace(way, sure=False, named=way.grows, loose=True)
        if pair := _pair(caller):
            yield Way(lambda f=flags, p=pair: pair_back(subject.fresh(), p, f), False, True)
            for zeros in _made_before(subject):
                given = dict(zip(pair, zeros, strict=True))
                yield Way(filled(subject, dict, given, flags), False)
        elif (flags or starts) and not names:
            sure = not number and _is_told(caller)
            yield Way(itself(subject, flags), sure, True, bool(caller.named("use_cache")))


def _others(caller: Caller) -> list[str]:
    """Arguments of other roles whose names may speak of keys and values from before: `kv=None`."""
    known = {*caller.inputs, *caller.named("cache"), *caller.named("use_cache"), *caller.extra}
    return [
        name
        for name, its in caller.parameters.items()
        if its.default is None and BARE.fullmatch(name.lower()) and name not in known
    ]


def _is_told(caller: Caller) -> bool:
    """Whether a flag says that a layer keeps its own cache, and no argument is left that may be
    one."""
    asks = [name for name in caller.named("use_cache") if not GIVES.match(name.lower())]
    others = (n for n, its in caller.parameters.items() if its.default is None)
    return bool(asks) and not any(caller.roles[name] in ("", "other") for name in others)


def _passed(subject: Target, name: str, flags: dict[str, bool]) -> Iterator[Way]:
    """Ways to hand a cache in under a name."""
    caller = subject.caller
    if type(caller.target).__module__.split(".")[0] == "transformers":
        yield Way(lambda: dynamic_cache(subject.fresh(), name))
        return
    home = sys.modules.get(type(caller.target).__module__)
    ours = getattr(home, "KVCache", KVCache) is KVCache
    if ours and "KVCache" in str(caller.parameters[name].annotation):
        yield Way(filled(subject, lambda: {name: KVCache()}, {}, {}))
    else:
        yield Way(lambda: handed_back(subject.fresh(), name, None, flags), grows=True)
        nothing = (None, None)
        yield Way(lambda: handed_back(subject.fresh(), name, nothing, flags), grows=True)
        for keys in ((), keys_read(caller.target, name)):
            yield Way(filled(subject, lambda keys=keys: {name: dict.fromkeys(keys)}, {}, flags))
        yield Way(filled(subject, lambda: {name: []}, {}, flags), False)
    for kind in _own_caches(subject):
        yield Way(filled(subject, lambda kind=kind: {name: kind()}, {}, flags))
    for empty in _made_before(subject, 0):
        yield Way(lambda empty=empty: handed_back(subject.fresh(), name, empty, flags), False)
    for zeros in _made_before(subject) if _places(caller) or caller.named("start") else ():
        yield Way(filled(subject, dict, {name: zeros}, flags), False)


# --- what a call is told --------------------------------------------------------------------------


def _flags(caller: Caller) -> list[dict[str, bool]]:
    """Flags of a call that switch a cache on: the known one, and with all that may do so."""
    known = dict.fromkeys(caller.named("use_cache"), True)
    others = (n for n, its in caller.parameters.items() if isinstance(its.default, bool))
    more = known | {n: True for n in others if SWITCH.search(n.lower()) and is_free(n)}
    return [known] + [more] * (more != known)


def _pair(caller: Caller) -> tuple[str, str] | None:
    """The arguments for keys and for values from before, where they go in apart."""
    free = [n for n in caller.parameters if n not in caller.inputs and KEPT.search(n.lower())]
    keys, values = ([n for n in free if parts_of(n) == part] for part in "kv")
    return (keys[0], values[0]) if len(keys) == len(values) == 1 else None


def _places(caller: Caller) -> list[str]:
    """Arguments of unknown names that may say where a chunk begins."""
    return [
        name
        for name, its in caller.parameters.items()
        if caller.roles[name] in ("", "other", "tokens", "nothing")
        and name not in caller.inputs
        and PLACE.search(name.lower())
        and (its.default is None or type(its.default) is int or its.annotation in (int, "int"))
    ]


def _placed(subject: Target) -> Iterator[tuple[Target, bool]]:
    """The call with what may say where a chunk begins, and whether all of it is known."""
    caller = subject.caller
    fills: dict[str, Fill] = dict.fromkeys(caller.named("start"), lambda place: place.start)
    fills = {name: fill for name, fill in fills.items() if not caller.required(name)}
    guessed = _places(caller)
    own = [n for n in caller.named("positions") if not caller.required(n)]
    if guessed:
        start: Fill = lambda place: place.start  # noqa: E731
        yield subject.with_fills(fills | dict.fromkeys(guessed, start)), False
    for fill in FILLS["positions"](caller.target, caller.head_dim) if own else ():
        yield subject.with_fills(fills | dict.fromkeys(own, fill)), not guessed
    yield subject.with_fills(fills), not guessed and not own
    if fills and caller.tables:  # which the layer cuts from there on itself
        whole = {name: _from_first(fill) for name, fill in caller.tables.items()}
        yield subject.with_fills(fills | whole), not guessed and not own


def _from_first(fill: Fill) -> Fill:
    """A table with rows of all positions so far."""

    def whole(place: Place) -> Any:
        *lead, tokens, wide = place.x.shape
        x = place.x.new_zeros(*lead, place.start + tokens, wide)
        return fill(replace(place, x=x, start=0))

    return whole


# --- caches of the layer's own --------------------------------------------------------------------


def _switched(subject: Target) -> Iterator[tuple[Target, str, bool]]:
    """The layer with a cache switched on or made for it, by what, and whether that says so."""
    module, done = subject.module, set[str]()
    if module is None:
        return
    for name, value in _options(subject):
        done.add(name)
        with contextlib.suppress(Exception):  # the constructor may refuse it
            built = type(module)(**{**subject.arguments, name: value})
            if isinstance(built, nn.Module) and (other := subject.alike(built)):
                yield other, f"{name}={value!r}", "cache" in name.lower()
    for place, name, value in _attributes(module):
        if value is False and _is_switch(name) and name not in done:
            own = _with(subject, place, name, lambda: True)
            yield own, f"self.{name} = True", "cache" in name.lower()
        elif value is None and "cache" in name.lower() and is_free(name):
            for kind in _own_caches(subject):
                with contextlib.suppress(Exception):  # it may want what is not known
                    yield _with(subject, place, name, kind), f"a cache in self.{name}", False
    for name in methods(module, PREPARES):
        own = subject.fresh()
        with contextlib.suppress(Exception):
            method = getattr(own.module, name)
            method(**{one.name: _size(one.name, own) for one in signature(method) if asked(one)})
            yield own, f"its {name}()", False


def _options(subject: Target) -> Iterator[tuple[str, Any]]:
    """Arguments of the constructor that may switch a cache on, with what does so."""
    for one in signature(type(subject.module)):
        usual = subject.arguments.get(one.name, one.default)
        if _is_switch(one.name) and (usual is False or (usual == 0 and type(usual) is int)):
            yield one.name, usual is False or 1


def _is_switch(name: str) -> bool:
    return SWITCH.search(name.lower()) is not None and is_free(name)


def _attributes(module: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The plain attributes of a layer and of its parts, each with the part's name."""
    for place, one in module.named_modules():
        if not type(one).__module__.startswith("torch."):
            yield from ((place, name, value) for name, value in vars(one).items())


def _with(subject: Target, place: str, name: str, value: Callable[[], Any]) -> Target:
    """A copy with an attribute of a part that holds something else."""
    own = subject.fresh()
    setattr(own.module.get_submodule(place) if own.module else None, name, value())
    return own


def _size(name: str, subject: Target) -> Any:
    """What a method that makes a cache wants under a name."""
    if "batch" in name or name in ("b", "bsz", "bs"):
        return 2
    if "dtype" in name:
        return subject.dtype
    return "cpu" if "device" in name else ROOM


def _own_caches(subject: Target) -> Iterator[Callable[[], Any]]:
    """What makes an empty cache of a class that the layer's file knows."""
    home = sys.modules.get(type(subject.caller.target).__module__)
    sizes = BuildSizes(subject.embed_dim, subject.num_heads, subject.num_kv_heads)
    sizes = replace(sizes, head_dim=subject.head_dim, context_length=subject.context_length)
    for name, kind in list(vars(home).items()) if home is not None else ():
        if inspect.isclass(kind) and "cache" in name.lower() and kind is not KVCache:
            given = {one.name: 1 for one in signature(kind) if "layer" in one.name}
            yield lambda kind=kind, given=given: _in_dtype(
                build(kind, (), given, sizes)[0], subject.dtype
            )


def _in_dtype(cache: Any, dtype: torch.dtype) -> Any:
    """The same with its numbers in another dtype."""
    if isinstance(cache, nn.Module):
        return cache.to(dtype)
    for name, value in vars(cache).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            setattr(cache, name, value.to(dtype))
        elif isinstance(value, list):
            value[:] = [one.to(dtype) if isinstance(one, Tensor) else one for one in value]
    return cache


def _made_before(subject: Target, tokens: int = ROOM) -> Iterator[tuple[Tensor, Tensor]]:
    """Keys and values that are all 0, with room for so many tokens, in the usual shapes."""
    groups, dim = subject.num_kv_heads or subject.num_heads, subject.head_dim or 1
    for shape in ((2, groups, tokens, dim), (2, tokens, groups, dim), (2, tokens, groups * dim)):
        yield torch.zeros(shape, dtype=subject.dtype), torch.zeros(shape, dtype=subject.dtype)
