"""Find how a target is called: the layout of x, what arguments get that nobody gave, a mask that
hides nothing, a number of tokens that it insists on.

What is found beyond the usual call is a guess (`Target.guesses`): what breaks under it is no
mistake of the layer's author. Where nothing goes in, somebody has to say how.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, takewhile
from typing import NoReturn

import torch
from torch import Tensor, nn

from .call_adapter import ALL_SHAPES, MaskForm, Result, UnusableResult
from .call_faults import axis_too_many, fails_after_softmax, of_guess, own_areas, pools
from .checked_target import BATCH, TOKENS, Target
from .copies import copied
from .errors import Broken, failing_line
from .fills import OPTIONAL, SURE, Fill
from .layouts import SINGLE, TIME_FIRST, USUAL, batch_axis, said_layout
from .refusals import leaves_heads_apart, not_run, refuse
from .token_ids import OF_IDS, put_alike, put_in
from .vectors import gives_vectors, takes_vectors, weighs_one
from .ways import Way, learnt_ways, lengths_of, table_options, ways

SIZES = ((TOKENS, BATCH), (3, 4), (1, BATCH))
"""Tokens and sequences that a form of a mask is tried with."""
SECONDS = 3.0
"""For how long calls are tried."""


WANTED = (
    re.compile(r"\(\d+x(?P<came>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<came>\d+) channels"),
    re.compile(r"shape=\[(?P<wanted>\d+)\].* size ?\[.*, (?P<came>\d+)\]"),
)
"""How errors speak of as many features as came, and as many as are wanted."""


TWO = re.compile(r"too many values to unpack \(expected 2\)")
"""What Python says of `batch, tokens = x.shape`, where x has three axes."""
UNPACKS = re.compile(r"(?:too many|not enough) values to unpack \(expected \d")
"""What it says of any other number of axes."""
OF_SHAPES = re.compile(r"\.(shape|size\(\))")
"""Code that reads the shape of a tensor."""


def first_call(subject: Target, widened: bool = False) -> None:
    """Find how it is called: the layout of x, what other arguments get, the width of the output.

    Args:
        widened: whether the width of x was taken from what its layers want.

    Raises:
        Broken: the call fails, and nothing in it was made up.
        ValueError: it fails, and the call may be at fault.
    """
    search = _Search(subject)
    if not (search.finds() or _otherwise(search, widened) or search.finds_vectors()):
        search.refuse()


class _Search:
    """The ways of a call that are tried one after the other, and the errors of those that fail.

    Attributes:
        usual: the layout that the target itself says.
        errors: of the ways, in their order.
        own: whether the first of them is the layer's own fault.
    """

    def __init__(self, subject: Target) -> None:
        self.subject, self.errors, self.own = subject, list[BaseException](), False
        self._windowed = list[tuple[BaseException, int]]()
        self._crossed: Way | None = None  # the first that mixes sequences, and no tokens
        self._unpacked = dict[int, list[bool]]()  # by the number of x's axes, of which E is last
        caller = subject.caller
        inputs = caller.inputs if caller.custom is None else []
        self._batch = batch_axis(caller.target, inputs[0]) if inputs else None
        self._told = told = getattr(caller.target, "batch_first", None)
        if told is True and self._batch == 1:
            self._batch = None  # what is written is of the default
        if self._batch == 1 or told is False:
            caller.layout = TIME_FIRST
        if any(caller.required(name) for name in caller.named("packed")):
            caller.layout = SINGLE
        elif inputs and all(takes_vectors(caller.target, n) for n in (*inputs, *caller.made_up)):
            caller.layout, subject.vectors = SINGLE, True
        elif inputs and self._batch != 1 and not caller.separate:
            caller.layout = said_layout(caller.target, caller.inputs[0]) or caller.layout
        self.usual = caller.usual = caller.layout

    def finds(self) -> bool:
        """Whether one of the ways goes in, which the subject is then called in."""
        until, errors, subject = time.thread_time() + SECONDS, self.errors, self.subject
        first = takewhile(
            lambda way: not errors or time.thread_time() < until, ways(subject.caller)
        )
        more = (one(subject, self.usual, errors) for one in (learnt_ways, lengths_of))
        for way in chain(first, *more):
            way.set(subject)
            try:
                result = self._result(way)
            except Exception as error:
                self._note(way, error)
                goes_in = isinstance(error, UnusableResult) and way == Way(self.usual)
                if goes_in and not axis_too_many(error):
                    break
                continue
            if result is None:
                break
            self._settle(way, result)
            return True
        if self._crossed is not None:
            self._crossed.set(subject)
            self._settle(self._crossed, _tried(subject))
            return True
        Way(self.usual).set(subject)
        return False

    def finds_vectors(self) -> bool:
        """Whether it takes one vector of each sample, and weighs a single key for each."""
        subject, caller = self.subject, self.subject.caller
        given = table_options(caller, caller.made_up) if caller.custom is None else ()
        for way in (Way(SINGLE, fills=fills) for fills in given):
            way.set(subject)
            with contextlib.suppress(Exception):  # whatever somebody's code raises
                result = _tried(subject)
                if weighs_one(subject):
                    subject.vectors = True
                    self._settle(way, result)
                    return True
        return False

    def _result(self, way: Way) -> Result | None:
        """What a call in such a way gives; None where it runs by chance alone.

        Raises:
            Exception: it fails, or what comes out tells that it is not meant so.
        """
        subject, result = self.subject, _tried(self.subject)
        if way.form is not None and not bool(result.out.isfinite().all()):
            raise UnusableResult("is not finite with a mask that hides nothing")
        few = way.room in (subject.num_heads, subject.num_kv_heads or subject.num_heads)
        few = few and replace(way, form=None) == Way(self.usual, way.room)
        if few and _is_chance(subject):
            self.own = True
            replace(way, room=None).set(subject)
            if (fault := _fault(subject)) is not None:
                self.errors.insert(0, fault)
            return None
        if few and way.room == 2:  # with fewer, one token, it says nothing
            raise UnusableResult("runs with as many tokens as heads")
        if subject.vectors and not gives_vectors(subject):
            raise UnusableResult("takes more than vectors")
        if _gives_weights(subject, result):
            raise UnusableResult("gives one number for each token, weights perhaps, and no output")
        other = way.layout is not self.usual or way.learnt
        mixed = mixes(subject) if other else (True, False)
        astray = mixed != (True, False)
        if mixed == (False, True) and way.layout.axes == "BET":  # no other axis is the sequences'
            self._crossed = self._crossed or way
        if astray or (subject.caller.pooled and not mixes(subject)[0]):
            raise UnusableResult("mixes no tokens, or other sequences")
        return result

    def _note(self, way: Way, error: Exception) -> None:
        self.errors.append(error)
        if way.layout.axes.endswith("E"):
            said = UNPACKS.search(str(error)) is not None and _is_of_shape(error)
            self._unpacked.setdefault(len(way.layout.axes), []).append(said)
        if way == Way(self.usual, way.room, only=True) and _fills_window(self.subject, error):
            self._windowed.append((error, self.subject.most_tokens))

    def _settle(self, way: Way, result: Result) -> None:
        """Learn the rest of a call that goes in."""
        subject, caller = self.subject, self.subject.caller
        steady_form(subject)
        subject.out_dim = result.out.shape[-1]
        subject.told = subject.only and subject.room in own_areas(subject)
        caller.settled = caller.settled or way.learnt
        if not caller.settled:
            _choose_table(subject)
        turned = {USUAL: TIME_FIRST, TIME_FIRST: USUAL}.get(caller.layout)
        free = self._batch is None and caller.custom is None and self._told is not True
        once = (RuntimeError, UnusableResult)  # of what may run once and no more
        with contextlib.suppress(*once):
            if turned and free and mixes(subject) == (False, True):
                caller.layout = caller.usual = turned
        if way.learnt or way == self._crossed:
            caller.usual = caller.layout
        subject.notes += _notes(subject)

    def refuse(self) -> NoReturn:
        """Raise what is to be said where no way goes in."""
        subject, errors = self.subject, self.errors
        Way(self.usual).set(subject)
        made_up = subject.made_up or subject.caller.made_up
        for error, tokens in self._windowed if not made_up else ():
            raise not_run(f"x {[BATCH, tokens, subject.embed_dim]}", error) from error
        no_axes = all(all(self._unpacked.get(n, [False])) for n in (2, 3, 4))
        cut = no_axes or _cut_short(errors)
        sure = _is_sure(subject) and (cut or fails_after_softmax(subject, errors[0]))
        apart = (one for one in errors if leaves_heads_apart(subject, one))
        refuse(subject, next(apart, errors[0]), self.own or sure)


def _otherwise(search: _Search, widened: bool) -> bool:
    """Whether another call goes in: one whose output is one for all tokens, one that takes x for
    its other sequence, one with an x as wide as its layers want."""
    subject, errors = search.subject, search.errors
    caller = subject.caller
    results = (one for one in errors if isinstance(one, UnusableResult))
    if not caller.pooled and pools(caller, next(results, None)):
        caller.pooled = True
        if _goes_in(subject, widened):
            return True
        caller.pooled = False
    if OF_IDS.search(str(errors[0])) and _goes_in_as_ids(subject):
        return True
    if not caller.turned and caller.pair:
        subject.caller = replace(caller, turned=True)
        if _goes_in(subject, widened):
            return True
        subject.caller = caller
    if not widened and (width := _other_width(subject, errors)):
        own_width, subject.embed_dim = subject.embed_dim, width
        if _goes_in(subject, True):
            return True
        subject.embed_dim = own_width
    return False


def put_ids(subject: Target, names: frozenset[str]) -> bool:
    """Let arguments of these names get ids of tokens, for which x goes in behind their embeddings;
    whether any take them."""
    module = copied(subject.module)
    if module is None:
        return False
    caller, x = subject.caller, subject.caller.usual.into(subject.input())
    subject.caller = replace(caller, target=module, ids=names)
    wide = put_in(module, x, lambda: subject.result(subject.input()))
    if not wide:
        subject.caller = caller
        return False
    subject.embed_dim = wide
    if subject.uncalled is not None:
        uncalled: nn.Module = copied(subject.uncalled)
        put_alike(uncalled, module)
        subject.uncalled = uncalled
    subject.notes.append(f"it takes ids of tokens: x goes in behind its embedding, [B, T, {wide}]")
    return True


def _goes_in_as_ids(subject: Target) -> bool:
    """Whether it takes ids of tokens."""
    first, caller = replace(subject, notes=[*subject.notes]), subject.caller
    others = [name for name in caller.made_up if caller.roles[name] == "context"]
    single = len(caller.inputs) == 1 and not caller.function and not caller.ids
    kinds = dict.fromkeys((frozenset(caller.inputs), frozenset([*caller.inputs, *others])))
    for names in kinds if single else ():
        Way(caller.usual).set(subject)
        if put_ids(subject, names) and _goes_in(subject, True):
            return True
        subject.caller, subject.embed_dim = caller, first.embed_dim
        subject.uncalled, subject.notes = first.uncalled, [*first.notes]
    return False


def _goes_in(subject: Target, widened: bool) -> bool:
    try:
        first_call(subject, widened)
    except (Broken, ValueError):
        return False
    return True


def _fills_window(subject: Target, error: BaseException) -> bool:
    """Whether a call with as many tokens as its window has fails, and the error speaks of no such
    number."""
    tokens = subject.most_tokens
    near = {tokens - 1, tokens, tokens + 1, 2 * tokens}
    said = {int(number) for number in re.findall(r"\d+", str(error))}
    window = subject.roles.get("window")
    fills = isinstance(window, tuple) and math.prod(window) == tokens
    return fills and not near & said and not of_guess(subject, error)


def _cut_short(errors: Sequence[BaseException]) -> bool:
    """Whether it takes the shape of x for two numbers, and one sequence without a batch will not do
    either."""
    single = errors[1] if len(errors) > 1 else None  # the second way to call is that
    return TWO.search(str(errors[0])) is not None and isinstance(single, RuntimeError)


def _is_of_shape(error: BaseException) -> bool:
    """Whether the line that failed takes the shape of something apart."""
    return OF_SHAPES.search(failing_line(error)) is not None


def _is_sure(subject: Target) -> bool:
    """Whether its width is known, and nothing was made up for it."""
    return "width" in subject.roles and not subject.made_up and not subject.caller.made_up


def _other_width(subject: Target, errors: Sequence[BaseException]) -> int | None:
    """The width of x that its layers speak of, where nobody said it and none fits."""
    told = "width" in subject.roles or not subject.roles or subject.caller.custom is not None
    for error in errors if not told else ():
        for said in (pattern.search(str(error)) for pattern in WANTED):
            came, wanted = map(int, said.group("came", "wanted")) if said else (1, 0)
            width, rest = divmod(subject.embed_dim * wanted, came)
            if not rest and came % subject.embed_dim == 0 and width > subject.embed_dim:
                return width
    return None


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


def _gives_weights(subject: Target, result: Result) -> bool:
    """Whether what comes out is as wide as there are tokens, however many these are."""
    tokens = subject.input().shape[1]
    if result.out.shape[-1] != tokens or tokens == subject.embed_dim or subject.only:
        return False
    with contextlib.suppress(Exception):  # it may take no other number
        return subject(subject.input(tokens=tokens - 2)).shape[-1] == tokens - 2
    return False


def _fault(subject: Target) -> Exception | None:
    """The error of the call that is set; None where it runs."""
    try:
        _tried(subject)
    except Exception as error:
        return error
    return None


def _is_chance(subject: Target) -> bool:
    """Whether it runs with as many tokens as it has heads, and with fewer it does not: two axes of
    one size were taken for each other, where nothing was made up."""
    caller = subject.caller
    sure = all(caller.roles[name] in SURE for name in caller.made_up)
    if subject.made_up or not sure or caller.custom is not None:
        return False
    with contextlib.suppress(Exception):  # a single token goes in anywhere
        subject.result(subject.input(tokens=subject.most_tokens - 1))
        return False
    return True


def _notes(subject: Target) -> Iterator[str]:
    """What is to be said of a call that was found."""
    layout = subject.caller.layout
    if subject.vectors:
        yield "it takes one vector of each sample, [B, E]"
    elif layout is SINGLE:
        yield "it takes one sequence [T, E] at a time, without a batch"
    elif layout is not USUAL:
        yield f"it takes x as {layout}"
    if subject.caller.pooled:
        yield f"it gives one output for all tokens, [B, {subject.out_dim}]"
    if subject.room is not None:
        most = "it takes" if subject.only else "it takes no more than about"
        yield f"{most} {subject.room} tokens{', and no other number' * subject.only}"


def steady_form(subject: Target) -> None:
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
    first, mixed = caller.fills, list[dict[str, Fill]]()
    for fills in ({}, *table_options(caller, tables)):
        caller.fills = {**first, **fills}
        try:
            x = subject.input()
            here = subject(x)
            there = replace(subject, caller=caller.shifted())(x)
        except Exception:  # of another shape than it wants
            continue
        if not torch.allclose(here, there, atol=1e-4, rtol=1e-3):
            continue
        others = torch.cat((x[:-1].flip(-1), x[-1:]))
        if torch.allclose(subject(others)[-1], here[-1], atol=1e-4, rtol=1e-3):
            caller.proven = frozenset(tables)
            return
        mixed.append(caller.fills)  # with an axis too many, perhaps
    caller.fills = mixed[0] if mixed else first
    caller.proven = frozenset(tables if mixed else ())


def mixes(subject: Target) -> tuple[bool, bool]:
    """Whether an output depends on other tokens of its sequence, and on other sequences; with
    random weights, so that what starts at zero hides nothing, and with small numbers, too, where
    large ones leave all the weight on one token."""
    subject = subject.randomised()
    seen = _mixes(subject, subject.input())
    return seen if any(seen) else _mixes(subject, 0.1 * subject.input())


def _mixes(subject: Target, x: Tensor) -> tuple[bool, bool]:
    """The same on x."""
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
