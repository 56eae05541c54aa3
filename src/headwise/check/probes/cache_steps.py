"""Use a cache of keys and values, chunk after chunk, in a way that `cache_ways` has found."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..target.call_adapter import MaskForm, tensors_in
from ..target.checked_target import Target
from ..target.signatures import signature

Chunk = Callable[[Tensor, int], Tensor]
"""Gives the output of the next chunk; the second argument is how many tokens came before."""

OF_TABLES = re.compile(r"rope|rot|freq|cos|sin|mask|bias|pos|emb")
"""Names that speak of a cache of something else."""
EMPTIES = re.compile(r"^(reset|clear|empty|flush)_.*(cache|kv)")
"""Names of methods that empty a cache."""


class Stale(Exception):
    """A cache comes back as it went in."""


@dataclass
class Use:
    """A cache in use: what gives the next chunk's output, and what empties the cache."""

    step: Chunk
    empty: Callable[[], Any] | None = None


def _called(subject: Target, x: Tensor, past: int, /, **given: Any) -> Any:
    """The result on a chunk, with its causal mask where masks are passed."""
    form = subject.mask_form
    if form is not None:
        allowed = torch.ones(len(x), x.shape[1], past + x.shape[1], dtype=torch.bool).tril(past)
        given[form.argument] = form.make(allowed, x.dtype, subject.num_heads)
    return replace(subject.caller, start=past)(x, **given)


def attend_cached(subject: Target) -> Use:
    target: Any = subject.caller.target
    heads, dim = subject.num_heads, subject.head_dim or 1
    past: list[Tensor] = []

    def step(x: Tensor, first: int) -> Tensor:
        empty = x.new_zeros(len(x), heads, 0, dim)
        out, *new = target.attend_cached(x, *(past or [empty, empty]))
        past[:] = new
        return out

    return Use(step)


def dynamic_cache(subject: Target, name: str) -> Use:
    form = subject.mask_form or MaskForm("attention_mask", "added", "[B, 1, T, S]")
    kept = {name: sys.modules["transformers"].DynamicCache()}
    return filled(replace(subject, mask_form=form), lambda: kept, {}, {})()


def handed_back(subject: Target, name: str, empty: Any, flags: dict[str, bool]) -> Use:
    """A cache that comes back with the result and goes in again with the next chunk; where only
    the chunk's own part of it comes back, behind what was there before."""
    kept: list[Any] = [empty]
    left = not subject.caller.required(name)

    def step(x: Tensor, first: int) -> Tensor:
        given = {} if kept[0] is None and left else {name: kept[0]}
        result, tokens = _called(subject, x, first, **given, **flags), x.shape[1]
        try:
            kept[0] = _present(result.raw, result.out, first + tokens)
        except LookupError:
            if not first:
                raise
            for length in (first, tokens):
                with contextlib.suppress(LookupError):
                    part = _present(result.raw, result.out, length)
                    if _is_same(part, kept[0]):
                        raise Stale from None
                    kept[0] = _joined(kept[0], part, first, tokens)
                    return result.out
            kept[0] = _as_large(result.raw, kept[0])
        return result.out

    return Use(step)


def _is_same(one: Any, other: Any) -> bool:
    pairs = list(zip(tensors_in(one), tensors_in(other), strict=False))
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


def _as_large(raw: Any, before: Any) -> Any:
    """The part of a result that holds as many tokens as the cache before it: a window's."""
    shapes = [one.shape for one in tensors_in(before)]
    for part in list(raw.values()) if isinstance(raw, dict) else list(raw):
        if shapes and [one.shape for one in tensors_in(part)] == shapes:
            return part
    raise LookupError("nothing that comes back looks like a cache")


def _joined(before: Any, new: Any, first: int, tokens: int) -> Any:
    """What a cache held, with what came back of a chunk behind it, token after token."""
    if isinstance(before, tuple | list) and isinstance(new, tuple | list):
        return type(before)(_joined(*pair, first, tokens) for pair in zip(before, new, strict=True))
    if isinstance(before, Tensor) and isinstance(new, Tensor) and before.ndim == new.ndim:
        for axis in range(new.ndim):
            rest = before.shape[:axis] + before.shape[axis + 1 :]
            lengths = (before.shape[axis], new.shape[axis])
            if lengths == (first, tokens) and rest == new.shape[:axis] + new.shape[axis + 1 :]:
                return torch.cat((before, new), axis)
    raise LookupError("nothing that comes back looks like a cache")


def pair_back(subject: Target, names: tuple[str, str], flags: dict[str, bool]) -> Use:
    """Keys and values that come back with the result, and go in again apart."""
    kept: list[Tensor] = []

    def step(x: Tensor, first: int) -> Tensor:
        given = dict(zip(names, kept, strict=False))
        result = _called(subject, x, first, **given, **flags)
        length = first + x.shape[1]
        held = [t for t in tensors_in(result.raw) if t.ndim > 2 and length in t.shape[1:]]
        held = [t for t in held if t.shape[-1] != length and not torch.equal(t, result.out)]
        if len(held) != 2:
            raise LookupError("nothing that comes back looks like a cache")
        kept[:] = held
        return result.out

    return Use(step)


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


def filled(
    subject: Target,
    empty: Callable[[], dict[str, Any]],
    zeros: dict[str, Any],
    flags: dict[str, bool],
) -> Callable[[], Use]:
    """A cache that the call fills: an empty one, or one of zeros with room for all tokens."""

    def make() -> Use:
        kept, own = empty(), subject.fresh()
        single = {name: _cloned(given) for name, given in zeros.items()}

        def step(x: Tensor, first: int) -> Tensor:
            out = _called(own, x, first, **kept, **single, **flags).out
            if not all(kept.values()):
                raise LookupError("the cache that was passed stays empty")
            return out

        return Use(step)

    return make


def _cloned(given: Any) -> Any:
    return given.clone() if isinstance(given, Tensor) else tuple(map(_cloned, given))


def itself(subject: Target, flags: dict[str, bool]) -> Callable[[], Use]:
    """A cache that the layer keeps itself."""

    def make() -> Use:
        own = subject.fresh()
        empties = [getattr(own.module, name) for name in methods(own.module, EMPTIES)]
        plain = [one for one in empties if not any(map(asked, signature(one)))]

        def step(x: Tensor, first: int) -> Tensor:
            return _called(own, x, first, **flags).out

        return Use(step, plain[0] if plain else None)

    return make


def is_free(name: str) -> bool:
    return not OF_TABLES.search(name.lower())


def methods(module: nn.Module | None, names: re.Pattern[str]) -> list[str]:
    """Methods of such names that a class of somebody's defines."""
    known = (name for kind in type(module).__mro__ for name in vars(kind))
    return [name for name in dict.fromkeys(known) if names.search(name) and is_free(name)]


def asked(one: inspect.Parameter) -> bool:
    return one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD
