"""The ways to make a first call: layouts of x, numbers of tokens, and what arguments get that
nobody gave, the likeliest first."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from .call_adapter import Caller, MaskForm, UnusableResult
from .call_faults import (
    AREAS,
    LONGEST,
    OTHER_AXES,
    areas_of,
    known_sizes,
    of_maps,
    sizes_in,
    spoken,
)
from .checked_target import Target
from .errors import failing_line
from .fills import FILLS, OPTIONAL, Fill, left_out
from .layouts import LAYOUTS, MAPS, SINGLE, TIME_FIRST, Layout
from .learnt import learn
from .signatures import keys_read

MASKS = ("mask", "padding", "lengths", "cache")
"""Roles of arguments that are learnt apart."""
EXACT = re.compile(r"\bself\.(seq(uence)?_?(len(gth)?|size)|(num|n)_(tokens|patches))\b")
"""Numbers of a layer's own, of all tokens of a sequence by their names, and not of the most."""
TABLES = 150
"""How many tables are tried on a call."""


@dataclass(frozen=True)
class Way:
    """One way to make the first call; `room` as in `Target`."""

    layout: Layout
    room: int | None = None
    form: MaskForm | None = None
    fills: Mapping[str, Fill] = field(default_factory=dict)
    only: bool = False
    learnt: bool = False

    def set(self, subject: Target) -> None:
        """Let a subject be called so."""
        subject.caller.layout, subject.caller.fills = self.layout, dict(self.fills)
        subject.room, subject.only, subject.open_form = self.room, self.only, self.form


def ways(caller: Caller) -> Iterator[Way]:
    """Ways to make the first call, the likeliest first."""
    usual, every = caller.layout, list(caller.parameters)
    layouts = dict.fromkeys((usual, SINGLE))
    if caller.custom is not None:
        yield from (Way(layout) for layout in layouts)
        yield from (Way(usual, room) for room in (4, 2))
        return
    wanted = [name for name in every if caller.required(name)]
    tables = [name for name in every if name in wanted or caller.roles[name] in OPTIONAL]
    given = [table_options(caller, wanted), table_options(caller, every)]
    forms = (None, *open_forms(caller, wanted))
    for layout, form in product(layouts, forms):
        yield Way(layout, None, form)
    for fills, form in product(given[0], forms):
        yield Way(usual, None, form, fills)
    for room, form in product((4, 2), forms):
        yield Way(usual, room, form)
    for name in caller.named("cache"):
        if keys := keys_read(caller.target, name):  # an empty one
            yield Way(usual, None, None, {name: lambda place, keys=keys: dict.fromkeys(keys)})
    if caller.named("height") or caller.named("grid"):
        yield from (Way(usual, AREAS[0], None, fills, True) for one in given for fills in one[:1])
    if tables != wanted:
        yield from (Way(usual, None, None, fills) for fills in table_options(caller, tables))
    every_form = open_forms(caller, every)
    for layout, form in product((usual, TIME_FIRST), every_form):
        yield Way(layout, None, form)
    for form, fills in chain(product([None], given[1]), product(every_form, given[1][:2])):
        yield Way(usual, None, form, fills)
    for layout, fills in product(LAYOUTS, ({}, *given[0][:2], *given[1][:1])):
        yield Way(layout, None, None, fills)


def learnt_ways(subject: Target, usual: Layout, errors: Sequence[BaseException]) -> Iterator[Way]:
    """Calls with what their arguments are learnt to want."""
    rooms = [(usual, None), (TIME_FIRST, None), *((usual, area) for area in areas_of(subject))]
    for layout, room in dict.fromkeys(rooms):
        Way(layout, room, only=room is not None).set(subject)
        if (fills := learn(subject, spoken(subject.caller, errors[0]))) is not None:
            yield Way(layout, room, None, fills, room is not None, learnt=True)


def lengths_of(subject: Target, layout: Layout, errors: Sequence[BaseException]) -> Iterator[Way]:
    """Calls with as many tokens as the errors speak of, and with no other number; and where x has
    other axes, with the tokens of a square map, of a window's size if there is one."""
    known, areas = known_sizes(subject), areas_of(subject)
    caller = subject.caller
    wanted = [name for name in caller.parameters if caller.required(name)]
    forms, given = open_forms(caller, wanted), table_options(caller, wanted)
    other = bool(errors) and (OTHER_AXES.search(str(errors[0])) is not None or of_maps(subject))
    maps = (layout,) if "H" in layout.axes else MAPS if other else ()
    for sizes in ((), areas or AREAS):
        every = dict.fromkeys((*maps, layout)) if areas else maps
        yield from (Way(axes, size, only=True) for size in sizes for axes in every)
        maps_with = product(sizes[:1], maps, given)  # what else they want
        yield from (Way(axes, size, None, fills, only=True) for size, axes, fills in maps_with)
        said = dict.fromkeys(size for error in errors for size in sizes_in(error))
        exact = any(EXACT.search(failing_line(one)) for one in errors[:1])
        full = subject.context_length  # which shorter inputs may be filled up to
        said |= dict.fromkeys(n for error in errors for n in _tokens_out(error) if n == full)
        plain = known - {full if caller.made_up or exact else None}
        new = [n for n in said if n <= LONGEST and n not in plain][:3]
        yield from (Way(axes, size, only=True) for size in new for axes in (layout, *MAPS))
        yield from (Way(layout, size, form, only=True) for size in new for form in forms)
        known |= set(new)


def _tokens_out(error: BaseException) -> list[int]:
    """How many tokens came out, where the result could not be used."""
    return error.shape[1:2] if isinstance(error, UnusableResult) else []


def table_options(caller: Caller, names: list[str]) -> list[dict[str, Fill]]:
    """What arguments get that nobody gave: the first option of each, then the second, and so on."""
    known = {*caller.inputs, *caller.extra}
    roles = {name: caller.roles[name] for name in names if name not in known}
    roles = {name: role for name, role in roles.items() if role in FILLS and role not in MASKS}
    each = {name: list(FILLS[role](caller.target, caller.head_dim)) for name, role in roles.items()}
    for name, options in each.items():
        if not caller.required(name):
            options.insert(1, left_out)
    most = max(map(len, each.values()), default=0)
    short = max((len(options) for options in each.values() if len(options) < most), default=1)

    def chosen(options: list[Fill], n: int) -> Fill:  # tables of one kind go together
        return options[(n if len(options) == most else n // most) % len(options)]

    return [
        {name: chosen(options, n) for name, options in each.items() if options}
        for n in range(min(most * short, TABLES))
    ]


def open_forms(caller: Caller, among: Sequence[str]) -> list[MaskForm]:
    """Forms of a mask that hides nothing, for calls that insist on one."""
    masks = [n for n in caller.guessed if "mask" in n]
    names = [n for n in [*caller.named("mask"), *caller.named("padding"), *masks] if n in among]
    shapes = ("[T, S]", "[1, 1, T, S]", "[B, T, S]", "[B, S]", "[T, S, 1]")
    return [
        MaskForm(*form)
        for form in product(names, ("may", "added", "ones", "hidden", "later"), shapes)
    ]
