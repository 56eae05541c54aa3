"""Check how weights are kept and numbers dropped: mistakes that leave the arithmetic right."""

from __future__ import annotations

import ast
import contextlib
import copy
import linecache
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..files.syntax import Source, names, nodes
from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.errors import is_users
from ..target.first_call import mixes
from ..target.introspect import unregistered
from ..target.names import parts_of
from .call_lines import FUSED, Calls, LineCall, bare_name, quoted, recorded
from .projections import Projections
from .readers import READERS

PRODUCTS = {"matmul", "bmm", "einsum", "baddbmm"}
LINEAR = PRODUCTS | set(
    (
        "linear conv1d conv2d conv3d add sub mul div neg sum mean sqrt rsqrt pow tensor get set "
        "getitem setitem size dim view reshape transpose permute contiguous flatten unflatten "
        "squeeze unsqueeze expand repeat repeat_interleave cat stack chunk split unbind float to "
        "type dropout masked_fill where tril triu ones zeros eye len t shape addmm mm clone detach"
    ).split()
)
"""Functions that bend nothing."""
ABSENT = {"undefined", "function", "missing"}
"""What is not there, and stops a constructor that speaks of it."""
BENDS_NOT = re.compile(
    "linear|galerkin|retention|delta|kernel|polynomial|non_?local|bilinear|memory|hopfield|state"
)
"""Names of attention that does without a softmax on purpose."""


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


def dropout_lost(subject: Target) -> list[Finding]:
    """Whether the output, or each of several, takes nothing of what a dropout gives."""
    trial = subject.randomised()
    x = trial.input(tokens=min(7, trial.context_length or 7))

    def outputs() -> list[Tensor]:
        result = trial.result(x)
        beside = (one for one in tensors_in(result.raw) if one.shape == result.out.shape)
        return [one.nan_to_num() for one in (result.out, *beside)]

    try:
        with torch.no_grad():
            usual = outputs()
            drops = [call for call in recorded(trial, x, dropless=False) if _is_dropout(call.name)]
            for number, call in enumerate(drops):
                with _Drawn(number):
                    now = outputs()
                if call.place is not None and all(map(torch.equal, now, usual)):
                    words = {"name": "dropout", "line": quoted(call.place)}
                    return [found("unused-result", "dropped", **words)]
    except Exception:  # what is checked may raise anything; the probes say what and where
        return []
    return []


class _Drawn(TorchFunctionMode):
    """Lets one of the calls of dropout give random numbers."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.left = which

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not _is_dropout(bare_name(func)):
            return result
        self.left -= 1
        return torch.rand_like(result) if self.left == -1 else result


def _is_dropout(name: str) -> bool:
    return name in ("dropout", "alpha_dropout", "feature_dropout")


def empty_triangle(subject: Target) -> list[Finding]:
    """Whether the only part of a table that is taken for a mask has no entry."""
    x = subject.input()
    parts = [call for call in recorded(subject, x) if call.name in ("triu", "tril")]
    if not parts or not all(call.empty and call.name == "triu" for call in parts):
        return []
    line = quoted(parts[0].place)
    return [found("causal-mask", "empty", T=x.shape[1], line=line)] if line else []


def softmax_astray(subject: Target) -> list[Finding]:
    """That a softmax runs over another axis than the keys, whatever its scores are made of."""
    made = recorded(subject, subject.input())
    for way, call in (("axis" if one.astray else "single", one) for one in made):
        single = call.single and (subject.vectors or not subject.guesses)
        if call.astray or (single and "H" not in subject.caller.layout.axes):  # a map of one column
            return [found("softmax", way, line=quoted(call.place))]
    return []


def samples_mixed(subject: Target) -> list[Finding]:
    """That vectors of other samples change an output, in a layer that takes one of each."""
    if not subject.vectors or not mixes(subject)[0]:
        return []
    made = [call for call in recorded(subject, subject.input()) if call.name == "softmax"]
    return [found("batch", "samples", line=quoted(made[0].place) if made else "")]


def softmax_missing(subject: Target) -> list[Finding]:
    """That scores go to the values as they are, and nothing in a call but sums and products bends
    them, in an attention that does not speak of doing so."""
    kinds = {type(subject.caller.target), *map(type, getattr(subject.module, "modules", list)())}
    if any(BENDS_NOT.search(kind.__name__.lower()) for kind in kinds):
        return []
    made = [call for call in recorded(subject, subject.input()) if call.place is not None]
    scores = [call for call in made if call.square and call.name in PRODUCTS]
    if not scores or not all(call.name in LINEAR for call in made):
        return []
    return [found("softmax", "none", line=quoted(scores[0].place))]


def read_off(
    thing: Any, *rules: str, besides: Collection[tuple[str, int]] = ()
) -> Iterator[Finding]:
    """What the source of a class, module or function tells, which need not be built or called for
    it: on these rules, or on all that can be read, but of some lines, by file and number."""
    for source, parts, known in _written(thing):
        for rule in rules or READERS:
            for reader, part in product(READERS[rule], parts):
                for way, line, words in reader(part, source, known):
                    if (source.file, line) in besides:
                        continue
                    one = found(rule, way, **words, line=quoted((source.file, line)))
                    home = getattr(source.owner_at(line)[1], "name", "")
                    unbuilt = (rule, home) == ("runs", "__init__") and way in ABSENT
                    yield replace(one, rule="builds") if unbuilt else one


def _written(thing: Any) -> Iterator[tuple[Source, Sequence[ast.stmt], Mapping[str, Any]]]:
    """The user's files that its classes are written in, these classes and what they mention of
    their file, and what the file knows."""
    parts = thing.modules() if isinstance(thing, nn.Module) else ()
    alone = isinstance(thing, type | FunctionType)
    kinds = {thing} if alone else {type(one) for one in parts}
    homes: dict[str, tuple[dict[str, Any], set[str]]] = {}
    for kind in kinds:
        said = vars(kind)
        others = (one for one in said.values() if isinstance(one, FunctionType))
        made = said.get("forward") or said.get("__init__") or next(others, kind)
        file = getattr(getattr(made, "__code__", None), "co_filename", "<frozen")
        known = getattr(made, "__globals__", {})
        home = sys.modules.get(kind.__module__)
        if made is not kind and kind.__name__ not in made.__qualname__ and home is not None:
            file, known = getattr(home, "__file__", None) or file, vars(home)  # it was decorated
        if is_users(file):
            homes.setdefault(file, (known, set()))[1].add(kind.__name__)
    for file, (known, waiting) in homes.items():
        with contextlib.suppress(SyntaxError):
            source = _source("".join(linecache.getlines(file, known)), file)
            own: dict[str, ast.stmt] = {}
            while waiting:
                name = waiting.pop()
                if name in source.definitions and name not in own:
                    own[name] = source.definitions[name]
                    waiting |= names(own[name])
            parts = [own[n] for n in sorted(own) if not _is_begun(source, own[n])]
            yield source, [_in_force(one, parts) for one in parts], known


def _in_force(part: ast.stmt, parts: Sequence[ast.stmt]) -> ast.stmt:
    """A class that others are only derived from, without the methods that all of them write anew
    and do not call."""
    name = getattr(part, "name", "")
    heirs = [
        one
        for one in parts
        if isinstance(one, ast.ClassDef) and name in {ast.unparse(base) for base in one.bases}
    ]
    said = [one.id for one in nodes(ast.Name, *parts) if one.id == name]
    if not isinstance(part, ast.ClassDef) or not heirs or len(said) > len(heirs):
        return part
    body = [
        one
        for one in part.body
        if not isinstance(one, ast.FunctionDef) or not all(_replaces(heir, one) for heir in heirs)
    ]
    shorter = copy.copy(part)
    shorter.body = body
    return shorter


def _replaces(heir: ast.ClassDef, method: ast.FunctionDef) -> bool:
    written = any(isinstance(one, ast.FunctionDef) and one.name == method.name for one in heir.body)
    called = re.search(rf"super\([^)]*\)\.{method.name}\b", ast.unparse(heir))
    return written and called is None


def _is_begun(source: Source, part: ast.stmt) -> bool:
    """Whether something in it is still None that is to be filled in, and may read the rest."""
    methods = (f"{getattr(part, 'name', '')}.{one.name}" for one in nodes(ast.FunctionDef, part))
    owners = [getattr(part, "name", "")] if isinstance(part, ast.FunctionDef) else methods
    blanks = ((name, blank.key) for name in owners for blank in source.blanks(name))
    return any(key and (key != "return" or not name.endswith("__init__")) for name, key in blanks)


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
            return [found("registered", "members", **words)]
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
        if not isinstance(child, nn.Linear):
            continue
        (out, taken), parts = child.weight.shape, parts_of(name.split(".")[-1])
        if taken == wide and parts and {*parts} <= {*"qkv"} and out == len(parts) * wide:
            words = {"H": heads, "name": name, "D": wide, "E": subject.embed_dim, "out": out}
            return [found("shared-heads", "small", **words)]
    return []


def no_output_projection(subject: Target, reading: Projections) -> list[Finding]:
    """That nothing mixes the heads, where they are made together and so belong together."""
    apart = reading.num_heads == 1 or reading.style == "per head"
    joined = subject.projections is not None or apart or bool(subject.idle)
    return [] if joined or reading.out is not None else [found("output-projection", "none")]
