"""Rotary positions that a layer puts in only where its constructor is told to: by the length and
the base of their table, or by a module of its file that makes them."""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..findings.verdict import Finding
from ..target.checked_target import Target
from ..target.construct import build
from ..target.errors import Broken
from ..target.introspect import SPEAKS_OF_ROPE, names_in
from ..target.names import building_role
from ..target.signatures import signature
from ..target.sizes import CONTEXT, USUAL, BuildSizes
from .arguments import rotary
from .mask_effects import MISFIT
from .paths import is_own
from .probe_context import Failed, ProbeContext

ROTARY = re.compile("rope|rotary")
"""Names of what turns queries and keys."""
_EMB = r"(_(embs?|embeddings?|pos|positions?|enc|encodings?))*$"
SWITCHES = re.compile(rf"^((use|with|enable|has|add|apply|is)_(.*_)?)?(rope|rotary){_EMB}")
"""Names of what makes rotary positions, and of flags that switch them on."""
TABLE = {"context": CONTEXT, "base": USUAL["base"]}
"""What a table of rotary positions is made of, by role."""


def rotating(subject: Target) -> Iterator[dict[str, Any]]:
    """Arguments of its constructor that are None or False, with what makes it turn queries and
    keys."""
    kind = type(subject.module)
    given = {one.name: one.default for one in signature(kind)} | subject.arguments
    for name, value in given.items():
        if value is False and SWITCHES.search(name.lower()):
            yield {name: True}
    unset = [one for one in signature(kind) if one.default is None]
    roles = {building_role(one.name, needed=True): one.name for one in unset}
    if {*TABLE} <= {*roles}:
        yield {roles[role]: value for role, value in TABLE.items()}
    home = vars(sys.modules.get(kind.__module__, sys))
    for one in unset:
        if not ROTARY.search(one.name.lower()):
            continue
        for name in re.findall(r"\w+", _said(one.annotation)):
            made = home.get(name)
            if inspect.isclass(made) and issubclass(made, nn.Module) and name != "Module":
                sizes = BuildSizes(subject.head_dim, 1, head_dim=subject.head_dim)
                try:
                    rope = build(made, (), {}, sizes)[0]
                except Exception:  # somebody's class, built on a guess
                    continue
                yield {one.name: rope}


def _said(annotation: Any) -> str:
    """An annotation in words, `RoPE | None`."""
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def misturned(subject: Target, other: Target | Broken) -> Finding | None:
    """What is wrong with the rotations of a layer that was told to make them.

    Args:
        other: the layer, or why it could not be called.
    """
    from ..diagnosis import run as diagnose

    if isinstance(other, Broken):
        error = other.__cause__
        misfit = isinstance(error, RuntimeError) and MISFIT.search(str(error)) and is_own(error)
        return other.finding if misfit else None
    names = () if other.module is None else names_in(other.module)
    if not any(SPEAKS_OF_ROPE.search(name.lower()) for name in names):
        return None
    found = [one for one in diagnose(other) if one.rule != "definition"]
    with contextlib.suppress(Failed):  # whether the call or the option is at fault cannot be told
        one = rotary(ProbeContext(other))
        found += [] if one is None else [one]
    return next((one for one in found if one.severity == "error"), None)
