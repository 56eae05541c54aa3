"""The call that somebody shows, `call(layer, x)`: what it does beside calling, and whose fault it
is where it fails."""

from __future__ import annotations

import contextlib
import dis
import re
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from .call_adapter import ShownCallFails, UnusableResult
from .checked_target import BATCH, TOKENS, Target
from .errors import told

Call = Callable[[Any, Tensor], Any]

IDS = re.compile(r"ids?$|^(idx|index|indices|tokens?)$")
"""Names of ids of tokens."""
MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
"""Functions that make tensors, on the CPU where no device is said."""
DRAWS = {"rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"}
DRAWS |= {"normal", "normal_", "uniform_", "random_", "bernoulli", "bernoulli_", "multinomial"}
"""Functions that draw random numbers."""
SIZES = ((TOKENS, 1), (TOKENS, 3), (5, BATCH), (1, BATCH))
"""Tokens and sequences that a call which is shown is tried with, beside the usual ones."""


def wants_ids(call: Call) -> bool:
    """Whether a call says by the name of its second argument that it wants ids of tokens.

    >>> wants_ids(lambda layer, ids: layer(ids)), wants_ids(lambda layer, x: layer(x))
    (True, False)
    """
    code = getattr(call, "__code__", None)
    return code is not None and code.co_argcount > 1 and bool(IDS.search(code.co_varnames[1]))


def makes_tensors(call: Call | None) -> bool:
    """Whether a call that somebody shows makes tensors and says no device, or has others make them.

    >>> makes_tensors(lambda layer, x: layer(x, torch.arange(x.shape[1])))
    True
    """
    said, own = set(_names(call)), getattr(call, "__globals__", {})
    steps = (one for code in _codes(call) for one in dis.get_instructions(code))
    read = (own.get(one.argval) for one in steps if one.opname == "LOAD_GLOBAL")
    others = any(
        isinstance(one, FunctionType | ModuleType) and not one.__name__.startswith("torch")
        for one in read
    )
    makes = said & MAKERS or others
    return bool(makes) and not said & {"device", "to", "cuda"}


def is_plain(call: Call) -> bool:
    """Whether a call hands on x as it is, and constants, and nothing that it makes.

    >>> is_plain(lambda layer, x: layer(x, mask=None)[0])
    True
    >>> is_plain(lambda layer, x: layer(x.flatten(2))), is_plain(lambda layer, x: layer(x[:, 0]))
    (False, False)
    """
    first = next(_codes(call), None)
    if first is None:  # an object that is called, say
        return False
    steps = [one.opname for one in dis.get_instructions(first)]
    calls = [place for place, name in enumerate(steps) if name.startswith("CALL")]
    before = steps[: calls[-1]] if calls else []
    return not set(_names(call)) and not any(name.startswith("BINARY") for name in before)


def shapes(subject: Target) -> str:
    """What x is, and what a call must give, in words."""
    return (
        f"x is [{BATCH}, {TOKENS}, {subject.embed_dim}]: sequences, tokens, features; the call may "
        "bring it into another form, and must give back the output of each token, "
        f"[{BATCH}, {TOKENS}, …], or one for each sequence, [{BATCH}, …]; ids of tokens are "
        "wanted with lambda layer, ids: …"
    )


def refuse_call(subject: Target, call: Call) -> None:
    """Ask for another call where the one that is shown cannot give the same twice."""
    said = set(_names(call))
    if drawn := sorted(said & DRAWS):
        raise ValueError(
            f"check({subject.name}): the call that you show draws random numbers ({drawn[0]}), so "
            "that it is another one each time; make what goes in of x, or of torch.arange and the "
            "like"
        )
    if "train" in said:
        raise ValueError(
            f"check({subject.name}): the call that you show sets the mode (train); leave that out: "
            "both modes are tried, and outputs are compared in eval mode, where no dropout is drawn"
        )


def refuse_shown(subject: Target, call: Call, error: BaseException) -> None:
    """Ask for another call where what it was given may be at fault; nothing where only the layer
    can be."""
    x = f"x {[BATCH, TOKENS, subject.embed_dim]}"
    if isinstance(error, ShownCallFails):
        raise ValueError(
            f"check({subject.name}): the call that you show fails before it reaches it, or behind "
            f"it, with {x}: {error}"
        ) from error
    if isinstance(error, UnusableResult):
        raise ValueError(
            f"check({subject.name}): the call that you show {_gives(subject, call, error)}. "
            f"{shapes(subject)}, as in lambda layer, x: layer(x)[0].flatten(2)"
        ) from error
    certain = isinstance(error, NameError | AttributeError) or "modified inplace" in str(error)
    plain = is_plain(call) and "width" in subject.roles
    if certain or plain or isinstance(error, ImportError):
        return
    raise ValueError(
        f"check({subject.name}): the call that you show fails in the layer, with {x}: "
        f"{told(error)}. Where its users call it so, the mistake is there; where they do not, show "
        "another call"
    ) from error


def _gives(subject: Target, call: Call, error: UnusableResult) -> str:
    """What comes of a call that gives no output, in words."""
    with contextlib.suppress(Exception):
        x = subject.input()
        results = [call(subject.caller.target, one) for one in (x, x.flip(1) + 1)]
        if all(isinstance(one, Tensor) for one in results) and torch.equal(*results):
            return f"{error}, the same for any x: make what goes in of x"
    weights = error.shape == [BATCH, TOKENS] or error.shape[-1:] == [TOKENS]
    said = ": one number for each token, weights perhaps, which the call has to apply to values"
    return f"{error}{said * weights}"


def fit_sizes(subject: Target, call: Call) -> None:
    """Let a subject be called with as many tokens as its call is shown for, where others do not go
    in.

    Raises:
        ValueError: the call fails by itself for another number of sequences.
    """
    for tokens, batch in SIZES:
        x = subject.input(tokens, batch)
        error = _error(subject, x)
        if error is None:
            continue
        shape = isinstance(error, UnusableResult) and not is_plain(call)  # else the layer's own
        own = isinstance(error, ShownCallFails) or shape
        if tokens != TOKENS and (own or not is_plain(call)):
            subject.room, subject.only, subject.told = TOKENS, True, True
            subject.notes.append(
                f"the call that you show goes with {TOKENS} tokens, and not with {x.shape[1]}: "
                f"{told(error)}"
            )
            return
        if own:
            raise ValueError(
                f"check({subject.name}): the call that you show fails with x {list(x.shape)}: "
                f"{error}; it must do for any number of sequences"
            ) from error


def _error(subject: Target, x: Tensor) -> Exception | None:
    try:
        with torch.no_grad():
            subject.result(x)
    except Exception as error:  # whatever somebody's code raises
        return error
    return None


def _names(call: Call | None) -> Iterator[str]:
    """The names that a call's code speaks of, but for those of its arguments: what it reads, what
    it calls, and a device that it hands on by name."""
    for code in _codes(call):
        yield from (*code.co_names, *code.co_freevars)
        words = (one for one in code.co_consts if isinstance(one, tuple))
        yield from ("device" for one in words if "device" in one)


def _codes(call: Call | None) -> Iterator[CodeType]:
    """A call's own code, and that of the functions within."""
    codes: list[Any] = [getattr(call, "__code__", None)]
    while codes:
        code = codes.pop()
        if isinstance(code, CodeType):
            yield code
            codes += code.co_consts
