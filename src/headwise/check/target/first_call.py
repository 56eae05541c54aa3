"""Find how a target is called: the layout of x, what arguments get that nobody gave, a mask that
hides nothing, a number of tokens that it insists on.

What is found beyond the usual call is a guess (`Target.guesses`): what breaks under it is no
mistake of the layer's author. Where nothing goes in, somebody has to say how.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product, takewhile

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import ALL_SHAPES, Caller, MaskForm, Result, UnusableResult
from .checked_target import BATCH, TOKENS, Broken, Target, is_users, told
from .fills import FILLS, OPTIONAL, Fill, left_out
from .introspect import numbers_in
from .layouts import LAYOUTS, MAPS, SINGLE, TIME_FIRST, USUAL, Layout, said_layout
from .learnt import learn

MASKS = ("mask", "padding", "lengths", "cache")
"""Roles of arguments that are learnt apart."""
SIZES = ((TOKENS, BATCH), (3, 4), (1, BATCH))
"""Tokens and sequences that a form of a mask is tried with."""
WAYS, SECONDS = 150, 3.0
"""How many tables are tried on a call, and for how long calls are tried."""
LONGEST = 256
"""The most tokens that are tried because an error speaks of them."""
AREAS = (16, 10)
"""Tokens of the windows that a constructor gets here."""


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


def first_call(subject: Target) -> None:
    """Find how it is called: the layout of x, what other arguments get, the width of the output.

    Raises:
        Broken: the call fails, and nothing in it was made up.
        ValueError: it fails, and the call may be at fault.
    """
    caller, errors = subject.caller, list[BaseException]()
    if getattr(caller.target, "batch_first", True) is False:
        caller.layout = TIME_FIRST
    if any(caller.required(name) for name in caller.named("packed")):
        caller.layout = SINGLE
    elif caller.inputs and caller.custom is None and not caller.separate:
        caller.layout = said_layout(caller.target, caller.inputs[0]) or caller.layout
    caller.usual = caller.layout
    until, usual, own = time.process_time() + SECONDS, caller.layout, False
    ways = takewhile(lambda way: not errors or time.process_time() < until, _ways(caller))
    for way in chain(ways, _learnt(subject, usual, errors), _lengths(subject, usual, errors)):
        way.set(subject)
        try:
            result = _tried(subject)
            if way.form is not None and not bool(result.out.isfinite().all()):
                raise UnusableResult("is not finite with a mask that hides nothing")
            if own := way == Way(usual, subject.num_heads) and _is_chance(subject):
                break
            other = way.layout is not usual or way.learnt
            if other and mixes(subject) != (True, False):
                raise UnusableResult("mixes no tokens, or other sequences")
        except Exception as error:
            errors.append(error)
            goes_in = isinstance(error, UnusableResult) and way == Way(usual)
            if goes_in and not _axis_too_many(error):
                break
            continue
        _steady_form(subject)
        subject.out_dim = result.out.shape[-1]
        caller.settled = caller.settled or way.learnt
        if not caller.settled:
            _choose_table(subject)
        turned = {USUAL: TIME_FIRST, TIME_FIRST: USUAL}.get(caller.layout)
        with contextlib.suppress(RuntimeError):  # a script of PyTorch's may run once and no more
            if turned and caller.custom is None and mixes(subject) == (False, True):
                caller.layout = caller.usual = turned
        if way.learnt:
            caller.usual = caller.layout
        subject.notes += _notes(subject)
        return
    error, shape = errors[0], [BATCH, TOKENS, subject.embed_dim]
    Way(usual).set(subject)
    made_up = caller.custom is None and (caller.made_up or _of_guess(subject, error))
    own = own or isinstance(error, NameError) or "modified inplace" in str(error)
    own = own or _is_miscalled(subject, error)
    if (subject.guesses or made_up) and not own:  # own is wrong whatever goes in
        raise how_to_call(subject, error) from error
    if isinstance(error, UnusableResult):
        if "count" in subject.roles or "H" in usual.axes:  # outputs of its own number, perhaps
            raise how_to_call(subject, error) from error
        raise Broken(found("shape", "result", x=shape, error=error, B=BATCH, T=TOKENS)) from error
    raise not_run(f"x {shape}", error) from error


def _tried(subject: Target) -> Result:
    """The first result; without gradients where its kernel has no backward on this machine."""
    try:
        return subject.result(subject.input())
    except NotImplementedError as error:
        if "backward" not in str(error) or subject.module is None:
            raise
    subject.module.requires_grad_(False)
    subject.notes.append("its kernel has no backward here, so gradients were not tried")
    return subject.result(subject.input())


def _is_chance(subject: Target) -> bool:
    """Whether it runs with as many tokens as it has heads, and with fewer it does not: two axes of
    one size were taken for each other, where nothing was made up."""
    if subject.made_up or subject.caller.made_up or subject.caller.custom is not None:
        return False
    for tokens in range(1, subject.num_heads):
        with contextlib.suppress(Exception):
            subject.result(subject.input(tokens=tokens))
            return False
    return True


def _notes(subject: Target) -> Iterator[str]:
    """What is to be said of a call that was found."""
    layout = subject.caller.layout
    if layout is SINGLE:
        yield "it takes one sequence [T, E] at a time, without a batch"
    elif layout is not USUAL:
        yield f"it takes x as {layout}"
    if subject.room is not None:
        most = "it takes" if subject.only else "it takes no more than about"
        yield f"{most} {subject.room} tokens{', and no other number' * subject.only}"


# --- ways to call ---------------------------------------------------------------------------------


def _ways(caller: Caller) -> Iterator[Way]:
    """Ways to make the first call, the likeliest first."""
    usual, every = caller.layout, list(caller.parameters)
    layouts = dict.fromkeys((usual, SINGLE))
    if caller.custom is not None:
        yield from (Way(layout) for layout in layouts)
        yield from (Way(usual, room) for room in (4, 2))
        return
    wanted = [name for name in every if caller.required(name)]
    tables = [name for name in every if name in wanted or caller.roles[name] in OPTIONAL]
    given = [_options(caller, wanted), _options(caller, every)]
    forms = (None, *_open_forms(caller, wanted))
    for layout, form in product(layouts, forms):
        yield Way(layout, None, form)
    for fills, form in product(given[0], forms):
        yield Way(usual, None, form, fills)
    for room, form in product((4, 2), forms):
        yield Way(usual, room, form)
    if caller.named("height") or caller.named("grid"):
        yield from (Way(usual, AREAS[0], None, fills, True) for one in given for fills in one[:1])
    if tables != wanted:
        yield from (Way(usual, None, None, fills) for fills in _options(caller, tables))
    open_forms = _open_forms(caller, every)
    for layout, form in product((usual, TIME_FIRST), open_forms):
        yield Way(layout, None, form)
    for form, fills in chain(product([None], given[1]), product(open_forms, given[1][:2])):
        yield Way(usual, None, form, fills)
    for layout, fills in product(LAYOUTS, ({}, *given[0][:2], *given[1][:1])):
        yield Way(layout, None, None, fills)


def _learnt(subject: Target, usual: Layout, errors: Sequence[BaseException]) -> Iterator[Way]:
    """Calls with what their arguments are learnt to want."""
    for layout in dict.fromkeys((usual, TIME_FIRST)):
        Way(layout).set(subject)
        if (fills := learn(subject, _spoken(subject.caller, errors[0]))) is not None:
            yield Way(layout, None, None, fills, learnt=True)


def _lengths(subject: Target, layout: Layout, errors: Sequence[BaseException]) -> Iterator[Way]:
    """Calls with as many tokens as the errors speak of, and with no other number; and where x has
    other axes, with the tokens of a square map, of a window's size if there is one."""
    known, areas = _known_sizes(subject), _areas(subject)
    other = bool(errors) and _OTHER_AXES.search(str(errors[0])) is not None
    maps = (layout,) if "H" in layout.axes else MAPS if other else ()
    for sizes in ((), areas or AREAS):
        yield from (Way(axes, size, only=True) for size in sizes for axes in maps)
        said = dict.fromkeys(size for error in errors for size in _sizes_in(error))
        new = [size for size in said if size <= LONGEST and size not in known][:3]
        yield from (Way(axes, size, only=True) for size in new for axes in (layout, *MAPS))
        known |= set(new)


def _options(caller: Caller, names: list[str]) -> list[dict[str, Fill]]:
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
        for n in range(min(most * short, WAYS))
    ]


def _open_forms(caller: Caller, among: list[str]) -> list[MaskForm]:
    """Forms of a mask that hides nothing, for calls that insist on one."""
    masks = [n for n in caller.guessed if "mask" in n]
    names = [n for n in [*caller.named("mask"), *caller.named("padding"), *masks] if n in among]
    shapes = ("[T, S]", "[1, 1, T, S]", "[B, T, S]", "[B, S]", "[T, S, 1]")
    return [
        MaskForm(*form)
        for form in product(names, ("may", "added", "ones", "hidden", "later"), shapes)
    ]


def _steady_form(subject: Target) -> None:
    """Of the forms of a mask that hides nothing, the first that goes in with other sizes, too, and
    with each sequence alone gives the same: axes may be taken for each other."""
    form = subject.open_form
    if form is None or subject.room is not None:
        return
    others = (MaskForm(form.argument, form.kind, shape) for shape in ALL_SHAPES)
    first: MaskForm | None = None
    for one in (form, *others):
        subject.open_form = one
        with contextlib.suppress(Exception):
            for tokens, batch in SIZES:
                subject.result(subject.input(tokens, batch))
            first = first or one
            x = subject.input()
            if torch.allclose(subject(x)[:1].nan_to_num(), subject(x[:1]).nan_to_num(), atol=1e-4):
                return
    subject.open_form = first or form


def _choose_table(subject: Target) -> None:
    """Of rotary tables that go in, the first for which only the distance of tokens counts."""
    caller = subject.caller
    tables = [n for n in caller.parameters if caller.roles[n] in OPTIONAL and n not in caller.extra]
    caller.settled = True
    if not tables:
        return
    first = caller.fills
    for fills in ({}, *_options(caller, tables)):
        caller.fills = {**first, **fills}
        try:
            x = subject.input()
            here = subject(x)
            there = replace(subject, caller=caller.shifted())(x)
        except Exception:  # of another shape than it wants
            continue
        if torch.allclose(here, there, atol=1e-4, rtol=1e-3):
            caller.proven = frozenset(tables)
            return
    caller.fills = first


def mixes(subject: Target) -> tuple[bool, bool]:
    """Whether an output depends on other tokens of its sequence, and on other sequences; with
    random weights, so that what starts at zero hides nothing."""
    subject = subject.randomised()
    x = subject.input()
    tokens, rows = x.clone(), x.clone()
    tokens[-1, :-1], rows[:-1] = x[-1, :-1].flip(-1), x[:-1].flip(-1)
    outputs = list[Tensor]()
    for given in (x, tokens, rows):
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # a dropout that is at work draws the same
            outputs.append(subject(given)[-1, -1].nan_to_num())
    one, *others = outputs
    least = 1e-6 * one.abs().max()
    return bool((others[0] - one).abs().max() > least), bool((others[1] - one).abs().max() > least)


# --- whose fault it is ----------------------------------------------------------------------------


_OTHER_AXES = re.compile(
    r"values to unpack|expected \d dims|Dimension out of range|[Ee]xpected \d-?D|"
    r"number of dims|must be \d-?D|No query sequence|to have \d+ channels"
)
_OF_SIDES = re.compile(r"multiply up|is invalid for input|divisible|[Kk]ernel size|too small")
"""What is said where a map's sides do not suit."""
_SIZES = re.compile(r"must match the size of tensor \w \((\d+)\)|size of tensor a \((\d+)\)")


def _axis_too_many(error: BaseException) -> bool:
    """Whether a result has an axis of 1 that x lacks: x, then, may lack one too."""
    return re.search(r"shape \[\d+, (\d+, 1|1, \d+), \d+\]", str(error)) is not None


def _sizes_in(error: BaseException) -> list[int]:
    """The sizes of two tensors that an error says do not fit each other."""
    return [int(n) for pair in _SIZES.findall(str(error)) for n in pair if n]


def _known_sizes(subject: Target) -> set[int]:
    """The sizes that its tensors may have by right, whatever number of tokens it insists on."""
    known = [BATCH, TOKENS, subject.embed_dim, subject.num_heads, subject.head_dim, 1, 0]
    wide = {a * b * c for a in known for b in (1, 2, 3) for c in known if a and c}
    return wide - {TOKENS**2, *_areas(subject)}


def _areas(subject: Target) -> list[int]:
    """How many tokens the windows and maps have that it speaks of."""
    pattern = "window|map_size|height|grid|resolution|image_size|block_size"
    sides = () if subject.module is None else numbers_in(subject.module, pattern)
    squares = [int(side) ** 2 for side in sides if 1 < side * side <= LONGEST]
    return [*dict.fromkeys([*squares, *AREAS * ("window" in subject.roles)])]


def _of_guess(subject: Target, error: BaseException) -> bool:
    """Whether an error speaks of what was guessed: the axes of x, a size that is none of ours, an
    argument that was left out; or comes from a library, of whose layer x alone is no call; or the
    layer itself refuses."""
    if isinstance(error, UnusableResult):
        return False
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames or _OTHER_AXES.search(str(error)) or refuses(error):
        return True
    if "H" in subject.caller.layout.axes and _OF_SIDES.search(str(error)):
        return True
    sizes = set(_sizes_in(error))
    if TOKENS in sizes and sizes - _known_sizes(subject):
        return True
    return bool(_spoken(subject.caller, error))


def _is_miscalled(subject: Target, error: BaseException) -> bool:
    """Whether a line of the target's own file calls a layer of PyTorch's, or something of the same
    file, with arguments that it does not take or without some that it wants."""
    if "must derive from BaseException" in str(error):  # raised where it should be returned
        return True
    said = re.match(r"(\w+)[\w.]*\(\) (got an unexpected|missing|takes)", str(error))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [frame for frame in frames if is_users(frame.f_code.co_filename)]
    if not isinstance(error, TypeError) or said is None or not users or subject.made_up:
        return False
    file, known = users[-1].f_code.co_filename, users[-1].f_globals
    own = getattr(known.get(said[1]), "__module__", "") == known.get("__name__")
    called = frames[-1].f_code.co_filename in (file, nn.Module.__call__.__code__.co_filename)
    return called and (own or hasattr(nn, said[1]))


def _spoken(caller: Caller, error: BaseException) -> list[str]:
    """The arguments that were left out and that the failing line of somebody's file speaks of."""
    every = traceback.extract_tb(error.__traceback__)
    frames = [f for f in every if is_users(f.filename)] or [
        f for f in every if "/torch/" not in f.filename
    ]
    words = set(re.findall(r"\w+", frames[-1].line or "")) if frames else set[str]()
    left = [n for n in caller.parameters if not caller.required(n) and n not in caller.inputs]
    return [name for name in left if name in words]


def refuses(error: BaseException) -> bool:
    """Whether an error is raised on purpose: by a `raise` or an `assert`, or for a package that is
    not there."""
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line or "" if frames else ""
    if isinstance(getattr(error, "obj", None), nn.Module):  # which raises it for its attributes
        return False
    return isinstance(error, ImportError) or line.startswith(("raise ", "assert "))


def how_to_call(subject: Target, error: BaseException) -> ValueError | Broken:
    """That somebody has to say how it is called; or what is wrong where nothing else would do."""
    if (lacks := not_there(error)) is not None:
        return lacks
    if isinstance(error, ImportError) and error.name:
        return ValueError(
            f"check({subject.name}): its call wants what could not be imported here: "
            f"{told(error)}{install(error)}"
        )
    caller = subject.caller
    given = ", ".join(["x"] * max(1, len(caller.inputs)) + [f"{n}=…" for n in caller.made_up])
    call = f"lambda layer, x: layer({given})"
    if caller.guessed:
        return ValueError(
            f"check({subject.name}): what its call wants for {', '.join(caller.guessed)} cannot be "
            f"worked out; say how to call it: hw.check(…, call={call})"
        )
    return ValueError(
        f"check({subject.name}): I do not know how to call this: show me, with hw.check(…, "
        f'call={call}), or on the command line --call "{call}". A call that I made up fails: '
        f"{told(error)}{install(error)}"
    )


def not_there(error: BaseException | None) -> Broken | None:
    """That a package of the file's own lacks the part that is imported of it."""
    name = (error.name if isinstance(error, ImportError) else None) or ""
    package = name.rpartition(".")[0]
    folders = [*getattr(sys.modules.get(package), "__path__", ())]
    if error is None or not folders or not is_users(folders[0]):
        return None
    words = {"name": name, "package": package, "error": str(error), "line": ""}
    return Broken(found("file-import", "part", **words))


def install(error: BaseException) -> str:
    """What to type where a package is not there; nothing where it is, but not that part of it."""
    missing = ((error.name if isinstance(error, ImportError) else None) or "").split(".")[0]
    there = not missing or missing in sys.modules
    return "" if there else f"; it wants a package: pip install {missing}"


def not_run(what: str, error: BaseException) -> Broken:
    """A first call that fails, with what its error says of the reason."""
    text, way = str(error), "other"
    if "mat1 and mat2" in text or "size mismatch" in text:
        way = "matrices"
    elif ("view" in text and "contiguous" in text) or "view size" in text:
        way = "view"
    elif "must match" in text or "shape" in text or "expected" in text.lower():
        way = "shapes"
    elif isinstance(error, (NameError, AttributeError)):
        way = "name"
    return Broken(found("runs", way, what=what, error=told(error)))
