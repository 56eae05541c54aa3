"""Rotations tried by themselves, and as they run: two quarter turns turn a vector round, and what
turns a query or a key leaves it as long as it was (Su et al. 2021, RoFormer, eq. 14)."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..files.syntax import Source
from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.errors import is_users
from ..target.introspect import IS_MORE, TURNS
from ..target.signatures import source_of
from ..target.ways import table_options
from .call_lines import quoted
from .read_pieces import Known, Said, callables

HALF = re.compile(
    r"rotate_?(half|pair|every|interleav|adjacent|neighbou?r)|(half|pairs?)_?rotat|neg_half"
)
"""Names of functions that turn each pair of features by a quarter."""
SIGNED = re.compile(r"[(,\[=]\s*-\s*(\w+\.)*sin\w*\b|sin\(.*\* *\(?-1\b")
"""Tables that hold the sign instead."""
STRETCHES = re.compile(r"norm|xpos|scale_base|decay|cache", re.I)
"""What code of a rotation speaks of that gives other lengths."""
NEAR = 0.02
FEW = 4
"""With fewer tokens their order says nothing."""


def quarter_turns(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Functions that turn pairs of features by a quarter, and twice give back what went in: a sign
    is lost, or stands on the wrong half."""
    if SIGNED.search(source.text):
        return
    for name, line, turn in callables(part, known, lambda name: HALF.search(name.lower())):
        if _gives_back(turn):
            yield "half", line, {"name": name}


def _gives_back(turn: Callable[..., Any]) -> bool:
    """Whether a function moves features and changes signs, and done twice does nothing."""
    x = torch.linspace(1.0, 2.0, 48, dtype=torch.float64).reshape(1, 2, 3, 8)
    try:
        once = turn(x.clone())
        twice = turn(once.clone())
        moved = torch.equal(once.abs().sort(-1).values, x) and not torch.equal(once, x)
        return moved and torch.equal(twice, x)
    except Exception:  # it is called in another way
        return False


@dataclass
class _Turn:
    """One call of a function that turns: where it was written, and what went in and came out."""

    name: str
    place: tuple[str, int]
    given: list[Tensor]
    gave: list[Tensor] = field(default_factory=list)


def stretched(subject: Target) -> list[Finding]:
    """Whether a function that is named after a rotation gives vectors of other lengths than it was
    given; with tables from outside, whichever it is given."""
    subject = subject.randomised()
    caller, home = subject.caller, sys.modules.get(type(subject.module).__module__)
    if subject.module is None or caller.proven or SIGNED.search(source_of(home)):
        return []
    first: _Turn | None = None
    for fills in table_options(caller, list(caller.tables)) if caller.tables else ({},):
        try:
            longer = _longer(subject.with_fills(fills))
        except Exception:  # what is checked may raise anything; the probes say what and where
            continue
        if longer is None:
            return []
        first = first or longer
    if first is None:
        return []
    return [found("rotation", "stretched", name=first.name, line=quoted(first.place))]


def idle_turns(subject: Target) -> list[Finding]:
    """Whether queries and keys are turned, and the order of the tokens counts for nothing: all
    tokens of a head were turned alike."""
    subject = subject.randomised()
    if subject.module is None or subject.guesses or subject.caller.tables:
        return []
    x = subject.input()
    earlier, last = x[:, :-1], x[:, -1:]
    try:
        with torch.no_grad(), _turning(alone=False) as turns:
            out = subject(x)[:, -1]
        with torch.no_grad():
            turned = subject(torch.cat((earlier.flip(1), last), 1))[:, -1]
            others = subject(torch.cat((earlier.flip(-1), last), 1))[:, -1]
    except Exception:  # what is checked may raise anything; the probes say what and where
        return []
    told = sorted(filter(_moves, turns), key=lambda one: bool(HALF.search(one.name)))
    if x.shape[1] < FEW or not told or not torch.allclose(turned, out, atol=1e-4, rtol=1e-3):
        return []
    seen = not torch.allclose(others, out, atol=1e-2)
    return [found("rotary", "idle", name=told[0].name, line=quoted(told[0].place))] * seen


def _moves(turn: _Turn) -> bool:
    """Whether a call gave something else of the shape of what it was given."""
    pairs = ((one, gave) for one in turn.given for gave in turn.gave if one.shape == gave.shape)
    return any(not torch.equal(one, gave) for one, gave in pairs)


def _longer(subject: Target) -> _Turn | None:
    """The first call that gives vectors of other lengths."""
    x = subject.input()
    with torch.no_grad(), _turning() as turns:
        subject(x)
    with torch.no_grad(), _turning() as others:
        subject(x.flip(1) - 1)
    for turn, other in zip(turns, others, strict=False):
        for now, then in zip(turn.gave, other.gave, strict=False):
            alike = [one for one in turn.given if one.shape == now.shape]
            if not alike or now.shape != then.shape or torch.equal(now, then):
                continue  # a table, which no query changes
            if not any(_is_as_long(one, now) for one in alike):
                return turn
    return None


def _is_as_long(before: Tensor, after: Tensor) -> bool:
    """Whether vectors along some axis are as long as they were, up to one number for all; they may
    hold anything before their weights are set."""
    if not (before.isfinite().all() and after.isfinite().all()):
        return True
    for axis in range(-1, -before.ndim - 1, -1):
        was, now = before.norm(dim=axis), after.norm(dim=axis)
        ratio = (now / was.clamp(min=1e-12)).double()
        if bool((ratio - ratio.mean()).abs().max() <= NEAR * ratio.mean()):
            return True
    return False


@contextmanager
def _turning(alone: bool = True) -> Iterator[list[_Turn]]:
    """Notes the calls of functions that turn; `alone`: of those that do no more."""
    turns: list[_Turn] = []
    open_calls: dict[int, _Turn] = {}

    def note(frame: FrameType, event: str, gave: Any) -> None:
        code = frame.f_code
        turner = _turner(frame) if event == "call" else ""
        if turner and not (alone and _stretches(turner, code)):
            arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            held = [frame.f_locals[name] for name in arguments if name != "self"]
            place = (code.co_filename, code.co_firstlineno)
            open_calls[id(frame)] = _Turn(turner, place, _copied(held))
        elif event == "return" and (turn := open_calls.pop(id(frame), None)) is not None:
            turn.gave = _copied(gave)
            turns.append(turn)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield turns
    finally:
        sys.setprofile(before)


def _copied(held: Any) -> list[Tensor]:
    real = (one for one in tensors_in(held) if one.is_floating_point() and one.ndim > 2)
    return [one.clone() for one in real]


def _turner(frame: FrameType) -> str:
    """The name of the function, or of the class, whose call is one of somebody's rotations; else
    nothing."""
    name, this = frame.f_code.co_name, frame.f_locals.get("self")
    if name in ("forward", "__call__"):
        name = type(this).__name__
        weights = isinstance(this, nn.Module) and any(True for _ in this.parameters())
        if weights or IS_MORE.search(name.lower()):
            return ""
    return name if TURNS.search(name.lower()) and is_users(frame.f_code.co_filename) else ""


def _stretches(name: str, code: CodeType) -> bool:
    """Whether a rotation speaks of what makes vectors longer or shorter."""
    return any(STRETCHES.search(one) for one in (name, *code.co_names, *code.co_varnames))
