"""Check how weights are kept and numbers dropped: mistakes that leave the arithmetic right."""

from __future__ import annotations

import ast
import contextlib
import linecache
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from ..files.syntax import Source, names, nodes, unused
from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.checked_target import Target, is_users
from ..target.introspect import unregistered
from ..target.names import parts_of
from .call_lines import FUSED, Calls, LineCall, quoted, recorded
from .projections import Projections
from .read_code import late_tests, lost_roles, missing, mixed_roles


def dropout_in_eval(subject: Target) -> tuple[list[Finding], bool]:
    """Whether numbers are dropped in eval mode, and by which call."""
    trial = subject.dropping() or subject.fresh()
    x = trial.input(tokens=min(7, trial.context_length or 7))

    def differs(dropless: bool) -> tuple[bool, list[LineCall]]:
        with Calls(x.shape[1], dropless) as calls:
            once, again = trial(x).nan_to_num(), trial(x).nan_to_num()
        return not torch.equal(once, again), [call for call in calls.made if call.drops]

    try:
        random, dropping = differs(dropless=False)
        if not random or not dropping or differs(dropless=True)[0]:
            return [], False
    except Exception:
        return [], False
    name, line = dropping[0].name, quoted(dropping[0].place)
    way, call = ("fused", name) if name == FUSED else ("called", f"F.{name}")
    return [found("dropout-in-eval", way, call=call, line=line)], True


def softmax_astray(subject: Target) -> list[Finding]:
    """That a softmax runs over another axis than the keys, whatever its scores are made of."""
    places = [call.place for call in recorded(subject, subject.input()) if call.astray]
    return [found("softmax", "axis", line=quoted(places[0]))] if places else []


def read_off(thing: Any) -> Iterator[Finding]:
    """What the source of a class or module tells, which need not be built or called for it."""
    yield from mixed_up(thing)
    yield from unused_results(thing)
    yield from undefined(thing)


def mixed_up(thing: Any) -> Iterator[Finding]:
    """Queries, keys and values that are made by or of another's."""
    for source, parts, _ in _written(thing):
        for kind in nodes(ast.ClassDef, *parts):
            for way, line, words in (*mixed_roles(kind), *lost_roles(kind)):
                yield found("roles", way, **words, line=quoted((source.file, line)))


def unused_results(thing: Any) -> Iterator[Finding]:
    """Lines of its classes whose result nothing takes, on whatever path they stand."""
    for source, classes, _ in _written(thing):
        for line, name in unused(*classes):
            yield found("unused-result", "lost", name=name, line=quoted((source.file, line)))


def undefined(thing: Any) -> Iterator[Finding]:
    """Names and attributes that nothing defines, and arguments that are used before it is asked
    whether they are None."""
    for source, parts, known in _written(thing):
        ways = [way for part in parts for way in late_tests(part)]
        for kind in nodes(ast.ClassDef, *parts):
            ways += missing(kind, source, known.get(kind.name))
        for name, line in source.unbound.items():
            if name not in known and any(k.lineno <= line <= (k.end_lineno or 0) for k in parts):
                ways.append(("undefined", line, {"name": name}))
        for way, line, words in ways:
            yield found("runs", way, **words, line=quoted((source.file, line)))


def _written(thing: Any) -> Iterator[tuple[Source, Sequence[ast.stmt], Mapping[str, Any]]]:
    """The user's files that its classes are written in, these classes and what they mention of
    their file, and what the file knows."""
    parts = thing.modules() if isinstance(thing, nn.Module) else ()
    kinds = {thing} if isinstance(thing, type) else {type(one) for one in parts}
    homes: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for kind in kinds:
        made = vars(kind).get("forward") or vars(kind).get("__init__")
        file = getattr(getattr(made, "__code__", None), "co_filename", "<frozen")
        if is_users(file):
            homes.setdefault(file, (getattr(made, "__globals__", {}), set()))[1].add(kind.__name__)
    for file, (known, waiting) in homes.items():
        with contextlib.suppress(SyntaxError):
            source = _source("".join(linecache.getlines(file, known)), file)
            own: dict[str, ast.stmt] = {}
            while waiting:
                name = waiting.pop()
                if name in source.definitions and name not in own:
                    own[name] = source.definitions[name]
                    waiting |= names(own[name])
            yield source, [own[name] for name in sorted(own)], known


@lru_cache(maxsize=4)
def _source(text: str, file: str) -> Source:
    """A file as it is read, once for all who read mistakes off it."""
    return Source(text, file)


def plain_lists(subject: Target) -> list[Finding]:
    """Modules in a plain list, which PyTorch does not know of."""
    for name, members in unregistered(subject.module) if subject.module is not None else ():
        if all(isinstance(one, nn.Module | nn.Parameter) for one in members):
            wanted = "ParameterList" if isinstance(members[0], nn.Parameter) else "ModuleList"
            words = {"name": name, "count": len(members), "wanted": wanted}
            return [found("registration", "list", **words)]
    return []


def shared_heads(reading: Projections) -> list[Finding]:
    """Heads that are one object."""
    shared = [source.name for source in reading.sources if source.shared]
    return [found("shared-heads", "same", H=reading.num_heads, name=shared[0])] if shared else []


def one_small_linear(subject: Target) -> list[Finding]:
    """A projection as wide as one head, which all heads are put through."""
    module, heads = subject.module, subject.num_heads
    if module is None or heads == 1 or subject.embed_dim % heads:
        return []
    wide = subject.embed_dim // heads
    for name, child in module.named_modules():
        shape = getattr(child.weight, "shape", ()) if isinstance(child, nn.Linear) else ()
        if shape == (wide, wide) and parts_of(name.split(".")[-1]) in ("q", "k", "v"):
            return [found("shared-heads", "small", H=heads, name=name, D=wide, E=subject.embed_dim)]
    return []


def no_output_projection(subject: Target, reading: Projections) -> list[Finding]:
    """That nothing mixes the heads, where they are made together and so belong together."""
    apart = reading.num_heads == 1 or reading.style == "per head"
    joined = subject.projections is not None or apart or bool(subject.idle)
    return [] if joined or reading.out is not None else [found("output-projection", "none")]
