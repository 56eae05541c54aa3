"""Learn what arguments of a call want of which only the names are known, by how far the call gets.

Tables of relative positions, biases, flags: each argument is given one thing after the other, what
lets the call make the most steps is kept, and so on until the call goes through, with two numbers
of tokens and sequences.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .call_adapter import Caller
from .checked_target import BATCH, TOKENS, Target
from .fills import FILLS, Fill, Place, angles, left_out, no_value, zeros_of

AXES = """
BSE SE 1SE S1E SBE PE 1PE P1E BPE ME 1ME M1E HD 1HD H1D 1H1D 11HD TS 1TS 11TS BTS B1TS HTS 1HTS BHTS
NTS TSH TS1 BTSH TSD TSE BTSE SD 1SD S1D BHSD 1HSD 11SD BSHD HSD PD HPD 1PD PH HP SH HS E D H S P BE
B1E
"""
"""Axes of the tables that are tried: sequences, queries T, keys S, width E, heads, their width D,
distances P between two tokens, both sequences one behind the other, M, and all heads of all
sequences, N."""
MOST, SECONDS = 800, 4.0
"""After how many calls no new round begins, in which each argument is tried; and how long any are
tried."""
KNOWN = {"mask", "padding", "cache", "lengths", "causal", "use_cache", "weights", "training"}
"""Roles of arguments that are learnt apart, or that nothing else fits."""
PLACES = ((TOKENS, BATCH), (5, 4))
"""Tokens and sequences of the calls that must go through."""
OWN = str(Path(__file__).parents[1])
FEW = 12
"""How many ways of its role an argument is tried with."""


@dataclass(frozen=True)
class Table:
    """Numbers with certain axes. They depend on the place in the table alone, and are the same for
    every sequence; `silent` makes them 0, which says nothing where they are added."""

    axes: str
    heads: int
    dim: int
    silent: bool = False

    def __call__(self, place: Place) -> Tensor:
        keys, queries = place.source.shape[-2], place.x.shape[-2]
        sizes = {"B": len(place.x), "T": queries, "S": keys, "E": place.x.shape[-1], "1": 1}
        sizes |= {"H": self.heads, "D": self.dim, "P": queries + keys - 1, "M": queries + keys}
        sizes["N"] = sizes["B"] * self.heads
        shape = [sizes[axis] for axis in self.axes]
        turn = torch.zeros(shape, dtype=torch.float64, device=place.x.device)
        for number, axis in enumerate(self.axes):
            row = torch.arange(sizes[axis] if axis != "B" else 1, device=turn.device)
            turn = turn + (row * (0.7 + number)).view(-1, *[1] * (len(shape) - number - 1))
        return (turn.sin() * (not self.silent)).to(place.x.dtype)


def _turns(place: Place) -> Callable[..., Tensor]:
    """What turns queries or keys `[…, T, D]` or `[…, T, H, D]` as rotary positions do."""

    def turn(rows: Tensor, *rest: Any, **more: Any) -> Tensor:
        turned = angles(place, rows.shape[-1]).to(rows.dtype)
        turned = turned if rows.shape[-2] == len(turned) else turned[:, None]
        one, two = rows.chunk(2, -1)
        cos, sin = turned.cos(), turned.sin()
        return torch.cat((one * cos - two * sin, one * sin + two * cos), -1)

    return turn


PLAIN: tuple[Fill, ...] = (
    no_value,
    lambda place: torch.cat([_keys(place)] * 2, -1),
    lambda place: place.positions,
    lambda place: _apart(place).abs(),
    lambda place: _apart(place) + place.source.shape[-2] - 1,
    lambda place: place.positions[None],
    lambda place: place.x.new_zeros(place.x.shape[:-1], dtype=torch.long),
    lambda place: place.x.new_ones(place.x.shape[:-1], dtype=torch.bool),
    lambda place: place.x.new_full((len(place.x),), place.source.shape[-2], dtype=torch.long),
    lambda place: place.source.shape[-2],
    _turns,
)
"""What else is tried: nothing, keys and values side by side, numbers of tokens, their distances,
and a function that turns queries and keys."""


def _keys(place: Place) -> Tensor:
    return place.source if place.keys is None else place.keys


def _apart(place: Place) -> Tensor:
    """`[T, S]`: how far apart a query and a key are."""
    return place.positions[:, None] - place.positions


def learn(subject: Target, also: Collection[str] = ()) -> dict[str, Fill] | None:
    """What the arguments get of a call in the layout that is set; None where nothing goes through.

    Args:
        subject: whose `caller.fills` are set to the best that was found.
        also: arguments that a call may leave out, and that are learnt, too.
    """
    caller = subject.caller
    names = [n for n in (*caller.made_up, *also) if caller.roles[n] not in KNOWN]
    if not names or caller.custom is not None:
        return None
    options = {name: list(_candidates(caller, name)) for name in names}
    kept = _LEARNT.setdefault(_kind(caller.target), {})
    if places := kept.get(str(caller.layout)):  # of the same class, built with other sizes
        fills = {n: options[n][place] for n, place in places.items() if n in options}
        if len(fills) == len(names) and _steps(subject, fills) == math.inf:
            return fills
    failed = _FAILED.setdefault(_kind(caller.target), {})
    if (known := failed.get(str(caller.layout))) and {*known[0]} == {*names}:
        fills = {name: options[name][place] for name, place in known[0].items()}
        if _steps(subject, fills) == known[1]:  # other sizes lead no further
            return None
    best = {name: caller.fill(name) for name in names}
    most, before, calls = _steps(subject, best), -1.0, 0
    until = time.thread_time() + SECONDS
    while before < most < math.inf and calls < MOST:
        before = most
        for name in names:
            for fill in options[name] if most < math.inf else ():
                if time.thread_time() > until:
                    caller.fills = best
                    return None
                steps, calls = _steps(subject, trial := {**best, name: fill}), calls + 1
                most, best = max((most, best), (steps, trial), key=lambda pair: pair[0])
    caller.fills = best
    if all(best[name] in options[name] for name in names):
        places = {name: options[name].index(best[name]) for name in names}
        if most < math.inf:
            failed[str(caller.layout)] = (places, most)
        else:
            kept[str(caller.layout)] = places
    return best if most == math.inf else None


_LEARNT: WeakKeyDictionary[Any, dict[str, dict[str, int]]] = WeakKeyDictionary()
"""Which of its candidates each argument got, by the class that is called and the layout of x."""
_FAILED: WeakKeyDictionary[Any, dict[str, tuple[dict[str, int], float]]] = WeakKeyDictionary()
"""The same where nothing goes through: which led furthest, and after how many steps it failed."""


def _kind(target: Any) -> Any:
    return type(target) if isinstance(target, nn.Module) else target


def _candidates(caller: Caller, name: str) -> Iterator[Fill]:
    role, dim = caller.roles[name], caller.head_dim
    if role in FILLS:
        options = FILLS[role](caller.target, dim)
        yield from (fill for fill, _ in zip(options, range(FEW), strict=False))
    yield from (Table(axes, caller.heads, dim) for axes in AXES.split())
    yield from PLAIN


def _steps(subject: Target, fills: dict[str, Fill]) -> float:
    """How many functions of PyTorch a call calls before it fails; without an end where it does
    not."""
    subject.caller.fills, steps = fills, _Steps()
    try:
        with torch.no_grad(), steps:
            for tokens, batch in PLACES:
                subject.result(subject.input(tokens, batch))
    except Exception:  # whatever an argument of the wrong kind raises
        return steps.count
    return math.inf


class _Steps(TorchFunctionMode):
    """Counts the functions of PyTorch that others' code calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        self.count += not sys._getframe(1).f_code.co_filename.startswith(OWN)
        return result


def silenced(caller: Caller) -> tuple[Caller, list[str]]:
    """The same call with zeros in the tables of positions that were made up, and their names."""
    fills = {name: caller.fill(name) for name in caller.parameters if name not in caller.extra}
    tables = {
        name: replace(fill, silent=True) if isinstance(fill, Table) else zeros_of(fill)
        for name, fill in fills.items()
        if isinstance(fill, Table)
        or (caller.roles[name] == "embedding" and fill not in (left_out, no_value))
    }
    return replace(caller, fills={**caller.fills, **tables}), list(tables)
