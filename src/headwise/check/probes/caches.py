"""Probe caches of keys and values: chunk after chunk must give what the whole sequence gives.

How a cache is used is worked out in `cache_ways` and settled by numbers: where any way gives the
whole sequence's output, the cache is right. A mistake is certain where single tokens come out right
and larger chunks do not, or where nothing is left open of how the cache is used.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace

import torch
from torch import Tensor

from ..findings.rules import found, passed, skipped
from ..findings.verdict import Example, Finding
from ..target.call_faults import refuses
from ..target.errors import Broken, told
from ..target.layouts import TIME_FIRST, USUAL
from .cache_steps import Chunk, Stale
from .cache_ways import Way, ways
from .probe_context import ProbeContext

CHUNKS, SINGLE = (3, 2, 1), (3, 1, 1, 1)
LEAST = 0.02
"""Share of the largest output that a mistake changes at least: a cache may keep fewer digits."""
WINDOW = re.compile(r"^(sliding_|attention_|attn_|local_)?window(_size|_len(gth)?)?$|^sliding")
"""Arguments of a constructor for how many tokens are seen."""
NARROW = 3
"""Tokens of a window that is narrower than what goes in."""
PROVEN = ("chunks", "refused", "reset", "single")
"""Mistakes that show beside numbers that are right, so that the cache is surely used as meant."""


def cache(ctx: ProbeContext) -> Finding | None:
    """Chunks of 3, 2 and 1 tokens against the whole."""
    caller = ctx.exact.caller
    plain = caller.custom is None and caller.layout in (USUAL, TIME_FIRST)
    if not ctx.subject.causal or ctx.tokens < 6 or not plain:
        return None
    wrong, said, tried = dict[str, Finding](), "", False
    for way in ways(ctx.exact):
        try:
            kind, finding = _with_any_rows(ctx, way)
        except Exception as error:  # it wants another cache, or is used in another way
            open_ = bool(way.switch) or way.loose  # there may be none
            tried = tried or not open_
            unknown = isinstance(error, LookupError) or open_
            said = said or ("" if unknown else told(error))
            continue
        if kind == "passed":
            return _narrow(ctx) or finding
        if ctx.exact.caller.separate:  # keys of another sequence stay as they are
            sure = way.sure and way.grows and _remembers(ctx, way)
        else:
            sure = way.sure or (way.named and _remembers(ctx, way))
        proven = kind in PROVEN and (not way.loose or _remembers(ctx, way))
        if proven or (sure and kind != "chunks"):
            told_so = f"With {way.switch}: {finding.message}" if way.switch else finding.message
            wrong.setdefault(kind, replace(finding, message=told_so))
    if wrong:
        first = next(iter(wrong.values()))
        return next((wrong[kind] for kind in PROVEN if kind in wrong), first)
    if said:
        return skipped("cache", f"No way was found to use its cache ({said}).")
    return skipped("cache", "Nothing that comes back looks like a cache.") if tried else None


def _narrow(ctx: ProbeContext) -> Finding | None:
    """What is wrong with the cache of a window that is narrower than what went in: what it keeps of
    it is another part than the next token sees."""
    windows = ((n, size) for n, size in ctx.subject.settings.items() if WINDOW.search(n.lower()))
    name = next((n for n, size in windows if type(size) is int and size > NARROW), None)
    if name is None:
        return None
    try:
        other = ctx.subject.rebuilt(**{name: NARROW})
    except (Broken, ValueError):
        return None
    if other is None or not other.causal or other.context_length != ctx.subject.context_length:
        return None
    seen = cache(ProbeContext(other))
    if seen is None or seen.severity != "error":
        return None
    return replace(seen, message=f"With {name}={NARROW}: {seen.message}", example=None)


def _with_any_rows(ctx: ProbeContext, way: Way) -> tuple[str, Finding]:
    """What comes of a way; where two sequences do not go in, with one: many caches hold no more."""
    try:
        return _tried(ctx, way, ctx.x)
    except LookupError:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):
            return _tried(ctx, way, ctx.x[:1])
        raise error from None


def _tried(ctx: ProbeContext, way: Way, x: Tensor) -> tuple[str, Finding]:
    """What comes of a way to use the cache: "passed", or how it is wrong.

    Raises:
        Exception: whatever the layer does, where the cache is used in another way.
    """
    try:
        outs = _in_chunks(way.make().step, x, CHUNKS)
    except Stale:
        return "stale", found("cache", "stale")
    except Exception as error:
        if way.own and not refuses(error) and _single(ctx, way, x):
            return "refused", found("cache", "refused", error=told(error))
        raise
    if _is_whole(ctx, outs):
        plain = not {4, 5} & {ctx.subject.num_heads, ctx.subject.num_kv_heads, ctx.subject.head_dim}
        if plain and not _is_whole(ctx, _in_chunks(way.make().step, x, SINGLE)):
            return "single", found("cache", "single")  # no other axis is as long as the cache
        wrong = not _is_emptied(ctx, way, x)
        return ("reset", found("cache", "reset")) if wrong else ("passed", passed("cache"))
    return _compared(ctx, way, x, outs)


def _compared(ctx: ProbeContext, way: Way, x: Tensor, outs: Tensor) -> tuple[str, Finding]:
    """In which way outputs are not those of the whole."""
    gap = (outs - ctx.out[: len(outs), :6]).abs().amax((0, 2))
    size = ctx.out.abs().max()
    if gap.max() <= LEAST * size:
        raise LookupError("it keeps fewer digits")
    token = int((~(gap <= 1e-6 * size)).nonzero()[0])
    kind = "chunks" if _single(ctx, way, x) else "differs"
    said = "  # it goes in as chunks of 3, 2 and 1 tokens"
    example = Example.of(ctx.exact.source(ctx.tokens, 2) + said, ctx.out[0, :6], outs[0])
    return kind, found("cache", kind, example, token=token)


def _is_whole(ctx: ProbeContext, outs: Tensor) -> bool:
    """Whether chunks gave what the whole sequence gives."""
    return ctx.near(outs, ctx.out[: len(outs), :6])


def _single(ctx: ProbeContext, way: Way, x: Tensor) -> bool:
    """Whether token after token is right, behind a first chunk."""
    try:
        return _is_whole(ctx, _in_chunks(way.make().step, x, SINGLE))
    except Exception:
        return False


def _remembers(ctx: ProbeContext, way: Way) -> bool:
    """Whether a chunk's output changes with the chunk before it, so that a cache is at work."""
    others = torch.cat((ctx.x[:, :3].flip(2), ctx.x[:, 3:]), 1)
    try:
        here, there = (_in_chunks(way.make().step, x, CHUNKS[:2]) for x in (ctx.x, others))
    except Exception:
        return False
    return not ctx.near(there[:, 3:], here[:, 3:])


def _is_emptied(ctx: ProbeContext, way: Way, x: Tensor) -> bool:
    """Whether another sequence comes out right behind the method that empties the cache, if there
    is one."""
    use = way.make()
    if use.empty is None:
        return True
    try:
        _in_chunks(use.step, x.flip(1), CHUNKS)
        use.empty()
        return _is_whole(ctx, _in_chunks(use.step, x, CHUNKS))
    except Exception:
        return False


def _in_chunks(step: Chunk, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
    outs, first = [], 0
    with torch.no_grad():
        for size in sizes:
            outs.append(step(x[:, first : first + size].clone(), first))
            first += size
    return torch.cat(outs, dim=1)
