"""Test caches of keys and values: chunks must give the same output as the whole sequence.

A shown call with `past` defines how the cache is used. For a plain call, the usual ways are tried:
the result is passed to the next call, the call fills its argument, or the layer keeps a cache. If
one of them gives the output of the whole sequence, the cache is correct.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.kv_cache import KVCache
from .call import PlainCall
from .code import SPEAKS_OF_ROPE, describe, names_in, numbers_in, required, signature
from .names import building_role
from .probing import Probing
from .rules import passed, skipped, violation
from .target import Target, causal_mask, copied, read, tensors_in
from .verdict import Example, Finding

CHUNKS, SINGLE = (3, 2, 1), (3, 1, 1, 1)
ROOM = 16
BARE = re.compile(r"kvs?|key_?values?|(layer_|attn_)?state|prev")
"""Names of arguments that may be caches if the call returns what looks like a cache."""

Step = Callable[[Tensor, int], tuple[Tensor, Any]]
"""Run a chunk; return its output and the whole result. The second argument counts the earlier
tokens."""


@dataclass(frozen=True)
class Way:
    """One way to use a cache: `start` begins with an empty cache. If `sure`, no other use can be
    intended, so wrong numbers mean a mistake."""

    start: Callable[[], Step]
    sure: bool


def cache(ctx: Probing) -> Finding | None:
    """Compare chunks of 3, 2 and 1 tokens with the whole sequence."""
    target = ctx.target
    if ctx.tokens < 6 or not (target.causal or "past" in target.takes):
        return None
    wrong: Finding | None = None
    failed: Finding | None = None
    tried = False
    for way in _ways(ctx.exact):
        try:
            try:
                outs, raw = _in_chunks(way.start(), ctx.x, CHUNKS)
            except (ValueError, AssertionError, NotImplementedError):  # try one token at a time
                outs, raw = _in_chunks(way.start(), ctx.x, SINGLE)
        except LookupError:
            continue
        except Exception as error:
            tried = True
            if way.sure:
                failed = failed or violation("cache", "fails", error=describe(error))
            continue
        if ctx.near(outs, ctx.out[:, :6]) or _is_window(ctx, way):
            target.observed.append("cache")
            return passed("cache")
        tried = True
        if way.sure and _remembers(ctx, way):
            wrong = wrong or _named(ctx, way, outs, raw)
        elif way.sure:
            wrong = wrong or violation("cache", "ignored")
    if wrong or failed:
        return wrong or failed
    if tried:
        shown = "lambda layer, x, past: layer(x, past[1] if past else None)"
        return skipped("cache", f"No usual way to use its cache works; show one: {shown}.")
    return None


def _is_window(ctx: Probing, way: Way) -> bool:
    """Return True if the layer has a window and its trimmed cache is correct for single tokens."""
    if not any(True for _ in numbers_in(ctx.exact.layer, r"window|local|span")):
        return False
    try:
        return ctx.near(_in_chunks(way.start(), ctx.x, SINGLE)[0], ctx.out[:, :6])
    except Exception:
        return False


def _in_chunks(step: Step, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Any]:
    outs, first, raw = [], 0, None
    with torch.no_grad():
        for size in sizes:
            out, raw = step(x[:, first : first + size].clone(), first)
            outs.append(out)
            first += size
    return torch.cat(outs, dim=1), raw


def _remembers(ctx: Probing, way: Way) -> bool:
    """Return True if a chunk's output changes with the chunk before it."""
    others = torch.cat((ctx.x[:, :3].flip(2), ctx.x[:, 3:]), 1)
    try:
        here, there = (_in_chunks(way.start(), x, CHUNKS[:2])[0] for x in (ctx.x, others))
    except Exception:
        return False
    return not ctx.near(there[:, 3:], here[:, 3:])


def _named(ctx: Probing, way: Way, outs: Tensor, raw: Any) -> Finding:
    """Return the finding about outputs that differ from those of the whole sequence."""
    gap = (outs - ctx.out[:, :6]).abs().amax((0, 2))
    token = int((~(gap <= 1e-6 * ctx.out.abs().max())).nonzero()[0])
    message = "  # passed in chunks of 3, 2 and 1 tokens"
    example = Example.of(ctx.exact.source(ctx.tokens, 2) + message, ctx.out[0, :6], outs[0])
    return violation("cache", _kind(ctx, way, raw), example, token=token)


def _kind(ctx: Probing, way: Way, raw: Any) -> str:
    with torch.no_grad():
        try:
            if ctx.near(_in_chunks(way.start(), ctx.x, SINGLE)[0], ctx.out[:, :6]):
                return "mask"
            whole = _held(way.start()(ctx.x[:, :6], 0)[1], 6)
            alone = _held(way.start()(ctx.x[:, 3:5], 0)[1], 2)
            moved = ctx.x.clone()
            moved[:, 3] += 1.0
            one, other = (_in_chunks(way.start(), x, (3, 1))[0][:, 3] for x in (ctx.x, moved))
        except Exception:
            return "differs"
    kept = _held(raw, 6)
    if len(kept) == len(whole) and kept:
        same = [ctx.near(a, b) for a, b in zip(kept, whole, strict=True)]
        if all(same):
            return "first" if ctx.near(one, other) else "differs"
        turned = [n for n, right in enumerate(same) if not right]
        rope = any(SPEAKS_OF_ROPE.search(n.lower()) for n in names_in(ctx.exact.layer))
        for n in turned if len(alone) == len(kept) else ():
            axis = list(kept[n].shape).index(6)
            if ctx.near(kept[n].narrow(axis, 3, 2), alone[n]) and (rope or len(turned) < len(same)):
                return "positions"
    return "first" if ctx.near(one, other) else "differs"


def _held(raw: Any, length: int) -> list[Tensor]:
    """Return a result's tensors that have an axis as long as the number of cached tokens."""
    parts = [one for one in tensors_in(raw) if one.ndim >= 3]
    return [one for one in parts[1:] if length in one.shape and one.shape[-1] != length]


# --- ways to use a cache --------------------------------------------------------------------------


def _ways(target: Target) -> Iterator[Way]:
    """Yield ways to use a cache, the most likely first."""
    if "past" in target.takes:
        yield Way(lambda: _shown(target), True)
        yield Way(lambda: _shown(target, whole=False), True)
        return
    call = target.call
    if not isinstance(call, PlainCall) or target.shown:
        return
    others = [n for n, its in call.parameters.items() if its.default is None and not call.roles[n]]
    names = [*call.named("cache"), *(n for n in others if BARE.fullmatch(n))]
    flags = dict.fromkeys(call.named("use_cache"), True)
    starts = call.named("start")
    if hasattr(target.layer, "attend_cached"):
        yield Way(lambda: _attend_cached(target), True)
    home = sys.modules.get(type(target.layer).__module__)  # the file of the layer's class
    for name in names:
        annotation = str(call.parameters[name].annotation)
        kinds = list(_own_caches(target, annotation))
        if type(target.layer).__module__.split(".")[0] == "transformers":
            theirs = sys.modules["transformers"].DynamicCache
            yield Way(lambda n=name, m=theirs: _filled(target, {n: m()}, flags), False)
        elif "KVCache" in annotation and getattr(home, "KVCache", None) is KVCache:
            yield Way(lambda n=name: _filled(target, {n: KVCache()}, flags), True)
        else:
            plain = not kinds and not re.match("(typing.)?([dD]ict|[lL]ist)", annotation)
            yield Way(lambda n=name: _handed_back(target, n, flags), plain)
            for make in (*kinds, dict, list) if call.roles[name] else ():
                yield Way(lambda n=name, m=make: _filled(target, {n: m()}, flags), False)
    if not names and (flags or starts):
        yield Way(lambda: _filled(target, {}, flags), bool(flags and starts))


def _given(target: Target, x: Tensor, first: int) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if "start" in target.takes:
        given["start"] = first
    if "allow" in target.takes or (target.causal_from == "mask" and first):
        given["allow"] = causal_mask(x.shape[1], first + x.shape[1])
    return given


def _shown(target: Target, whole: bool = True) -> Step:
    """Pass the last result as `past`; if not `whole`, only its second element, after the output."""
    own = target.fresh()
    kept: list[Any] = [None]

    def step(x: Tensor, first: int) -> tuple[Tensor, Any]:
        given = _given(own, x, first) | {"past": kept[0]}
        raw = own.call(own.layer, x, given)
        if not (whole or (isinstance(raw, tuple) and len(raw) == 2)):
            raise LookupError
        kept[0] = raw if whole else raw[1]
        return read(raw, x, first + x.shape[1]).out, raw

    return step


def _handed_back(target: Target, name: str, flags: dict[str, bool]) -> Step:
    """Pass the cache that a call returns to the call on the next chunk."""
    own, kept = target.fresh(), [None]

    def step(x: Tensor, first: int) -> tuple[Tensor, Any]:
        extra = {name: kept[0], **flags}
        raw = own.call(own.layer, x, _given(own, x, first) | {"extra": extra})
        result = read(raw, x, first + x.shape[1])
        kept[0] = _present(raw, result.out, first + x.shape[1], kept[0])
        return result.out, raw

    return step


def _present(raw: Any, out: Tensor, length: int, before: Any) -> Any:
    """Return the part of a result that can be a cache: tensors of three or more axes, not weights.

    Raises:
        LookupError: the result contains no such part.
    """
    raw = list(raw.values()) if isinstance(raw, dict) else raw
    parts = raw if isinstance(raw, tuple | list) else ()
    rest = [part for part in parts if part is not out and part is not None]
    caches = []
    for part in rest:
        held = list(tensors_in(part)) or list(
            tensors_in(list(getattr(part, "__dict__", {}).values()))
        )
        weights = len(held) == 1 and held[0].shape[-1] == length
        if held and not weights and all(one.ndim >= 3 for one in held):
            caches.append(part)
    if len(caches) == 2 and all(isinstance(one, Tensor) for one in caches):
        return tuple(caches)  # keys and values that are returned separately are passed as a pair
    if caches:
        return caches[-1]
    raise LookupError("no part of the result looks like a cache")


def _filled(target: Target, given: dict[str, Any], flags: dict[str, bool]) -> Step:
    """Use a cache that the call fills, or one that the layer keeps itself."""
    own = target.fresh()

    def step(x: Tensor, first: int) -> tuple[Tensor, Any]:
        raw = own.call(own.layer, x, _given(own, x, first) | {"extra": {**given, **flags}})
        if any(isinstance(one, dict | list) and not one for one in given.values()):
            raise LookupError("the cache that was passed stays empty")
        return read(raw, x, first + x.shape[1]).out, raw

    return step


def _attend_cached(target: Target) -> Step:
    own = copied(target.layer)
    past: list[Tensor] = []

    def step(x: Tensor, first: int) -> tuple[Tensor, Any]:
        empty = x.new_zeros(len(x), target.num_heads, 0, target.head_dim or 1)
        layer: Any = own
        out, *new = layer.attend_cached(x, *(past or [empty, empty]))
        past[:] = new
        return out, (out, *new)

    return step


def _own_caches(target: Target, annotation: str) -> Iterator[Callable[[], Any]]:
    """Yield constructors of empty caches: classes from the layer's file that the annotation
    allows."""
    open_ = "_empty" in annotation or "Any" in annotation
    home = sys.modules.get(type(target.layer).__module__)
    sizes = {
        "batch": 2,
        "heads": target.num_heads,
        "kv_heads": target.num_kv_heads or target.num_heads,
        "head_dim": target.head_dim or 1,
        "width": target.embed_dim,
        "context": ROOM,
        "dtype": target.dtype,
        "device": None,
        "layers": 1,
        "layer": 0,
    }
    for name, kind in list(vars(home).items()) if home is not None else ():
        if not (inspect.isclass(kind) and "cache" in name.lower()) or kind is KVCache:
            continue
        if not open_ and name not in annotation:
            continue
        forward = getattr(kind, "forward", nn.Module.forward)
        if forward is not nn.Module.forward:  # a layer that has a cache
            continue
        needed = [one.name for one in signature(kind) if required(one)]
        roles = {one: building_role(one) for one in needed}
        if all(role in sizes for role in roles.values()):
            given = {name: sizes[str(role)] for name, role in roles.items()}
            yield lambda k=kind, g=given: k(**g)
