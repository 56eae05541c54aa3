"""What else to build a layer with where the first arguments fail, and whose fault it is where all
do."""

from __future__ import annotations

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from types import ModuleType
from typing import Any

from torch import nn

from .call_faults import refuses, set_by
from .construct import Unsaid, as_typed, name_of
from .errors import Broken, is_users, told
from .names import building_role
from .refusals import install, not_there
from .signatures import signature, source_of
from .sizes import BuildSizes
from .unknowns import STEADY

TRIES, SECONDS = 4, 8.0
"""How many values are tried for arguments whose names tell nothing; after how long no other sizes
are."""
SIZES = {"width", "heads", "kv_heads", "head_dim", "context", "dropout", "out_width", "bias"}
"""Roles of arguments that are what their names say."""
MOST_NAMED = 4
"""How many arguments are asked for, where none has to be given."""
ENOUGH = 3
"""How many other sizes must fail alike."""
TOO_FEW = re.compile(r"__init__\(\) missing \d+ required")
"""What Python says where a class is built with too few arguments."""
GROUPS = re.compile(r"num_channels \((\d+)\) must be divisible by num_groups \((\d+)\)")
"""What PyTorch says of channels that do not divide into the groups of a norm."""
NO_CHANNELS = re.compile(r"to be at least 1 at dimension 0, but got weight of size \[0,")
"""What it says of a convolution that gives no channels."""
THREE = re.compile(r"not enough values to unpack \(expected 3, got 2\)")
"""What Python says of the height and the width of a map where three sides are wanted."""
UNMADE = re.compile(r"before Module.__init__\(\) call|__init__' of 'super' object needs")
"""What is said where a constructor forgot that of its base class, or how to call it."""


def other_sizes(
    factory: Callable[..., Any],
    own: BuildSizes,
    first: Exception,
    given: bool,
    widths: Sequence[int | None],
) -> Iterator[BuildSizes]:
    """Other sizes to build it with: some insist on such numbers, or on those of their own
    configuration; and what no name tells is tried, where nothing else is left.

    Args:
        own: what was asked for.
        first: what the first try raised.
        given: whether somebody said a size or how it is called, which nothing else replaces.
        widths: of the input as it was built, where it was.
    """
    if not given:
        if (fitting := _as_wanted(own, first)) is not None:
            yield fitting
        yield from _own_width(own, widths)
        yield from _flags_spoken(factory, own, first)
        if "rotat" in str(first):
            yield replace(own, embed_dim=192)  # heads of 64, of which a fixed part is turned
    if not given and not isinstance(first, Unsaid):
        for heads, groups in ((3, 3), (4, None), (8, None), (6, 3), (None, None)):
            yield replace(own, num_heads=heads, num_kv_heads=groups, plain=heads is None)
        yield replace(own, embed_dim=64)
        yield replace(own, embed_dim=64, num_heads=8, num_kv_heads=2)
    fault = first.__cause__
    if not given and fault and (_is_unset(fault) or _is_of_arguments(fault, _builds(first))):
        yield replace(own, every=True)
    if isinstance(first, Unsaid) or not given:
        yield from (replace(own, tried=n) for n in range(TRIES))


def fitted(tries: Iterable[BuildSizes], others: Sequence[Exception]) -> Iterator[BuildSizes]:
    """Sizes to try, each followed by the same as its error says that they must be.

    Args:
        others: what came of those that were tried, the newest last.
    """
    for sizes in tries:
        yield sizes
        if (fitting := _as_wanted(sizes, others[-1])) is not None:
            yield fitting


def blamed(
    first: Exception,
    others: Sequence[Exception],
    factory: Callable[..., Any],
    given: bool,
    told_all: bool,
) -> Exception:
    """What to raise where no sizes will do: the first failure where it is the layer's own, else a
    question for its arguments.

    Args:
        others: what came of other sizes.
        given: whether somebody said anything of it.
        told_all: whether that was every argument that its constructor must get.
    """
    sure = (one for one in others if isinstance(one, Broken) and one.finding.ground == "any")
    if not isinstance(first, Broken) and (found := next(sure, None)) is not None:
        return found  # which no guess excuses
    fault = first.__cause__
    missing = isinstance(fault, ImportError)  # a package that is not there
    own = not _is_unset(fault)
    if fault and _builds(first):
        own = _is_its_own(fault, signature(factory)) or _is_steady(fault, others, factory)
    if fault is None or own or (given and not missing and (told_all or not _builds(first))):
        return first
    if (lacks := not_there(fault)) is not None:
        return lacks
    parameters = signature(factory)
    names = [p.name for p in parameters if p.default is p.empty and p.kind <= 1]
    names = names or [p.name for p in parameters if p.kind in (1, 3)][:MOST_NAMED]
    return ValueError(
        f"check({name_of(factory)}): I do not know how to build this: give its arguments, "
        f"{as_typed(factory, names)}, or a layer that is built. With what I made up it fails: "
        f"{told(fault)}{install(fault)}"
    )


def _builds(first: Exception) -> bool:
    return isinstance(first, Broken) and first.finding.rule == "builds"


def _own_width(own: BuildSizes, widths: Sequence[int | None]) -> Iterator[BuildSizes]:
    """The width of the input that was built first, whatever was asked for: a number of its file,
    perhaps, which the heads must share."""
    for width in widths:
        if width is not None and width != own.settle(False).embed_dim:
            yield replace(own, embed_dim=width)


def _as_wanted(sizes: BuildSizes, fault: Exception) -> BuildSizes | None:
    """The sizes as an error says that they must be: a width that has as many groups of channels as
    a norm wants, an output that is wider than what is put beside it, the sides of a volume."""
    text, width = str(fault.__cause__), sizes.settle(False).embed_dim or 1
    if said := GROUPS.search(text):
        channels, groups = map(int, said.groups())
        return replace(sizes, embed_dim=width * groups // math.gcd(channels, groups))
    if NO_CHANNELS.search(text) and "out_width" not in sizes.changes:
        return replace(sizes, changes={**sizes.changes, "out_width": 2 * width})
    if THREE.search(text) and "sides" not in sizes.changes:
        return replace(sizes, changes={**sizes.changes, "sides": (2, 4, 4)})
    return None


def _flags_spoken(
    factory: Callable[..., Any], own: BuildSizes, first: Exception
) -> Iterator[BuildSizes]:
    """Flags the other way of which a constructor speaks where it refuses what it was given."""
    fault = first.__cause__
    if fault is None or not refuses(fault):
        return
    line = traceback.extract_tb(fault.__traceback__)[-1].line or ""
    for parameter in signature(factory):
        if isinstance(parameter.default, bool) and re.search(rf"\b{parameter.name}\b", line):
            changes = {parameter.name: not parameter.default}
            yield from (replace(own, changes=changes, tried=tried) for tried in (None, 1))


def _is_unset(fault: BaseException | None) -> bool:
    """Whether a module lacks an attribute, which other arguments may set."""
    return isinstance(getattr(fault, "obj", None), nn.Module) and not (fault and set_by(fault))


def _is_of_arguments(fault: BaseException, builds: bool) -> bool:
    """Whether a constructor, or what it built, may have failed because an argument was left out."""
    of_none = isinstance(fault, TypeError) and "NoneType" in str(fault)
    return of_none or (builds and (isinstance(fault, TypeError) or refuses(fault)))


def _is_steady(
    fault: BaseException, others: Sequence[Exception], factory: Callable[..., Any]
) -> bool:
    """Whether a line of somebody's file fails alike for all sizes, where names tell what each
    argument is."""
    parameters = signature(factory)
    known = (building_role(one.name) for one in parameters if one.default is one.empty)
    unset = {one.name for one in parameters if one.default is None}
    line = traceback.extract_tb(fault.__traceback__)[-1].line or ""
    if not isinstance(fault, STEADY) or refuses(fault) or not {*known} <= SIZES:
        return False
    if unset & {*re.findall(r"\w+", line)}:
        return False  # it may want a value for that
    places = {_place(one.__cause__) for one in others if _builds(one)}
    return len(others) >= ENOUGH and places == {_place(fault)} and is_users(_place(fault)[1])


def _place(fault: BaseException | None) -> tuple[type, str, int | None]:
    """Of what kind an error is, and where it was raised."""
    frames = traceback.extract_tb(fault.__traceback__) if fault else ()
    return (type(fault), frames[-1].filename, frames[-1].lineno) if frames else (type(fault), "", 0)


def _is_its_own(fault: BaseException, parameters: Sequence[inspect.Parameter]) -> bool:
    """Whether a name is not there, or taken, or a line of somebody's file builds something of it
    with too few arguments or does not hand on its own: whatever a constructor gets."""
    given = {parameter.name for parameter in parameters}
    owner = getattr(fault, "obj", None)
    line = traceback.extract_tb(fault.__traceback__)[-1]
    if is_users(line.filename) and "*" not in (line.line or "") and TOO_FEW.search(str(fault)):
        return True
    of_key = isinstance(fault, KeyError) and (
        bool(given & {*map(str, fault.args)}) or "already exists" in str(fault)
    )
    spoken = {one.name for one in parameters if one.default is one.empty or one.default is None}
    of_none = "'NoneType' object has no attribute" in str(fault)
    if of_none and is_users(line.filename) and not spoken & {*re.findall(r"\w+", line.line or "")}:
        return True  # of something that its own defaults leave out
    if "as child module" in str(fault):
        return True  # a name that holds a module already
    if _lacks_a_field(fault):
        return True
    module = "'module' object is not callable" in str(fault) and is_users(line.filename)
    if of_key or module or UNMADE.search(str(fault)) or isinstance(fault, NameError):
        return True
    return isinstance(owner, nn.Module | ModuleType | type)


def _lacks_a_field(fault: BaseException) -> bool:
    """Whether a configuration of the file's own class of data lacks what is read of it, and nothing
    in the file puts it there."""
    owner, name = getattr(fault, "obj", None), getattr(fault, "name", None)
    kind = type(owner)
    home = sys.modules.get(kind.__module__)
    if not isinstance(fault, AttributeError) or not name or not is_dataclass(kind):
        return False
    put = re.search(rf"(?<!self)\.{name}\s*=(?!=)|setattr\(", source_of(home))
    return is_users(getattr(home, "__file__", None) or "") and put is None
