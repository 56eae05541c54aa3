"""Find relative positions of the layer's own, and make the same layer without them."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.fills import Fill, Place, zeros_of
from ..target.introspect import layer_of, names_called
from ..target.names import parts_of

SAYS = re.compile(
    r"relativ|(?<![a-z])rel_|(?<![a-z])rel(?=[.]|$)|_rel_|relpos|relemb|skew|distance|alibi|bias_table"
)
"""Names of tables and modules that hold relative positions."""
OF_CLASS = re.compile(r"[Rr]elativ|Rel(?=[A-Z]|$)|A[Ll]i[Bb]i|Distance|Skew")
"""Names of classes that say so."""
TURNS = re.compile(r"(rel\w*_?|pos\w*_?)shift|skew|rel\w*_to_abs")
"""Names of functions that move the scores of each query to their keys."""
POSITIONS = re.compile(r"pos|(^|\.)er?$|emb")
"""Names of what holds positions, where the layer moves scores to their keys."""
OTHERWISE = re.compile(r"abs|contextual|cope|fire|token|word|segment|type")
"""Names of other embeddings, and of positions that count by more than a distance."""


@dataclass(frozen=True)
class Pair:
    """A layer, the same without its relative positions, and the tables in it that hold them."""

    layer: Target
    without: Target
    tables: tuple[str, ...] = ()


def pairs(subject: Target) -> Iterator[Pair]:
    """What may be compared: with its own tables, or with each kind of table that it takes."""
    tables, names = _own_tables(subject), list(_handed_in(subject))
    if _is_given_places(subject, names * (not tables)):
        return
    if tables:
        yield Pair(subject, zeroed(subject, tables), tables)
        return
    if not names and (makers := _makers(subject)):
        yield Pair(subject, _without(subject, makers))
    said = any(SAYS.search(name.lower()) for name in names) or _says_relative(subject)
    if not names or not said:
        return
    place = Place(subject.input(), subject.input())
    for kind in (_by_distance, _far_and_wide, _rows):
        fills = {name: kind(subject, name, place) for name in names}
        if any(fill is None for fill in fills.values()):
            continue
        given = {name: fill for name, fill in fills.items() if fill is not None}
        layer = subject.with_fills(given).fresh()
        if all(_runs(layer, *sizes) for sizes in ((7, 2), (5, 4))):
            silent = {name: zeros_of(fill) for name, fill in given.items()}
            yield Pair(layer, subject.with_fills(silent).fresh())


def _own_tables(subject: Target) -> tuple[str, ...]:
    """Names of the parameters and buffers that hold relative positions."""
    module = subject.module
    assert module is not None
    holders = [f"{path}." for path, child in module.named_modules() if _is_table(path, child)]
    numbers = [n for n, one in _numbers(module) if not OTHERWISE.search(n.lower())]

    def says(name: str) -> bool:
        own = SAYS.search(layer_of(name).split(".")[-1].lower())
        return bool(own) or any(name.startswith(path) for path in holders)

    surely = tuple(name for name in numbers if says(name))
    if surely or any(True for _ in _handed_in(subject)) or not _turns(subject):
        return surely
    if len(numbers) < sum(1 for _ in _numbers(module)):
        return ()
    return tuple(name for name in numbers if POSITIONS.search(layer_of(name).lower()))


def _is_table(path: str, module: nn.Module) -> bool:
    """Whether a part that says so holds relative positions, and is no attention itself."""
    name, kind = path.split(".")[-1], type(module).__name__
    parts = {parts_of(layer_of(name)) for name, _ in module.named_parameters()}
    said = SAYS.search(name.lower()) or OF_CLASS.search(kind)
    return bool(path and said) and not parts & {"q", "qk", "qkv"}


def _makers(subject: Target) -> list[str]:
    """Parts that make relative positions of their own, without weights: what they give hangs on
    the number of tokens alone."""
    own = subject.fresh()
    assert own.module is not None
    parts = {path: one for path, one in own.module.named_modules() if _is_table(path, one)}
    parts = {path: one for path, one in parts.items() if not any(True for _ in one.parameters())}
    if not parts:
        return []
    made = {path: list[Any]() for path in parts}
    for path, one in parts.items():
        one.register_forward_hook(lambda *call, path=path: made[path].append(call[-1]))
    with torch.no_grad():
        for x in (own.input(), own.input().flip(-1)):
            own(x)
    return [
        path
        for path, (one, two) in ((path, found) for path, found in made.items() if len(found) == 2)
        if isinstance(one, Tensor) and one.is_floating_point() and torch.equal(one, two)
    ]


def _without(subject: Target, makers: Sequence[str]) -> Target:
    """The same layer with zeros for what some of its parts give."""
    own = subject.fresh()
    assert own.module is not None
    for path in makers:
        own.module.get_submodule(path).register_forward_hook(lambda *call: call[-1] * 0)
    return own


def _numbers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    pairs = itertools.chain(module.named_parameters(), module.named_buffers())
    return ((name, one) for name, one in pairs if one.is_floating_point())


def _says_relative(subject: Target) -> bool:
    """Whether a class of the layer says so, or it moves scores to their keys."""
    module = subject.module
    assert module is not None
    kinds = (type(child).__name__ for child in module.modules())
    return any(OF_CLASS.search(kind) for kind in kinds) or _turns(subject)


def does_without_shift(subject: Target) -> bool:
    """Whether it has a function that moves scores to their keys, and chooses not to use it."""
    names = names_called(subject.module) if subject.module is not None else ()
    return any(TURNS.search(name) for name in names) and not _turns(subject)


def _is_given_places(subject: Target, tables: Sequence[str]) -> bool:
    """Whether it is given numbers for each token that were guessed, such as coordinates."""
    caller, place = subject.caller, Place(subject.input(), subject.input())
    for name in () if caller.custom is not None else caller.guesses:
        if name not in tables and caller.roles[name] not in ("context", "positions", "mask"):
            value = caller.fill(name)(place) if subject.bare else None
            if any(place.x.shape[-2] in one.shape for one in tensors_in(value)):
                return True
    return not subject.bare and caller.custom is None and bool(caller.guesses)


def _turns(subject: Target) -> bool:
    """Whether a call runs a function that moves scores to their keys."""
    before, run = sys.getprofile(), set[str]()
    sys.setprofile(lambda frame, event, _: run.add(frame.f_code.co_name))
    try:
        with torch.no_grad():
            subject.fresh()(subject.input())
    except Exception:  # whatever it raises, another probe says so
        return False
    finally:
        sys.setprofile(before)
    return any(TURNS.search(name) for name in run)


def zeroed(subject: Target, names: Sequence[str]) -> Target:
    """The same layer with zeros in some of its tables."""
    own = subject.fresh()
    assert own.module is not None
    with torch.no_grad():
        for name, one in _numbers(own.module):
            if name in names:
                one.zero_()
    return own


def _handed_in(subject: Target) -> Iterator[str]:
    """Names of arguments that get tables of positions."""
    caller = subject.caller
    for name in () if caller.custom is not None or not subject.bare else caller.parameters:
        said = name not in caller.inputs and name not in caller.extra
        if said and re.search("pos|rel|dist", name.lower()) and "mask" not in name.lower():
            value = caller.fill(name)(Place(subject.input(), subject.input()))
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                yield name


def _runs(subject: Target, tokens: int, batch: int) -> bool:
    try:
        with torch.no_grad():
            subject(subject.input(tokens, batch))
    except Exception:  # whatever a table of the wrong shape raises
        return False
    return True


def _waves(turn: Tensor, width: int) -> Tensor:
    """Numbers `[…, width]` that differ for each number of another, as random ones would."""
    draw = torch.Generator().manual_seed(4)
    speeds, starts = (torch.rand(width, generator=draw, dtype=turn.dtype) * 6 for _ in "ab")
    return (turn[..., None] * speeds + starts).sin()


def _by_distance(subject: Target, name: str, place: Place) -> Fill | None:
    """`[T, S, E]`, or of another width, where each pair of tokens has a row of its distance."""
    value: Tensor = subject.caller.fill(name)(place)
    square = value.ndim > 2 and value.shape[-3:-1] == (place.x.shape[-2], place.source.shape[-2])
    width, lead = value.shape[-1], value.ndim - 3 if square else 0

    def fill(place: Place) -> Tensor:
        away = place.positions[:, None] - place.positions
        table = _waves(away.to(place.x.dtype), width)
        return table[(None,) * lead]

    return fill


def _far_and_wide(subject: Target, name: str, place: Place) -> Fill | None:
    """A row for each distance of two tokens, `[1, 2 T − 1, E]` or as it stands now."""
    value: Tensor = subject.caller.fill(name)(place)
    axis = next((n for n, size in enumerate(value.shape[:-1]) if size == _distances(place)), -1)
    lead, between = (1, 0) if axis < 0 else (axis, value.ndim - axis - 2)

    def fill(place: Place) -> Tensor:
        rows = torch.arange(_distances(place), dtype=place.x.dtype)
        table = _waves(rows, value.shape[-1])
        return table.reshape(*[1] * lead, len(rows), *[1] * between, -1)

    return fill


def _distances(place: Place) -> int:
    return place.x.shape[-2] + place.source.shape[-2] - 1


def _rows(subject: Target, name: str, place: Place) -> Fill | None:
    """The table as it was found, where the layer says that it moves the scores itself."""
    return subject.caller.fill(name) if _turns(subject) else None
