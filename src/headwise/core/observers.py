"""Observers of the calls that layers and people's own code make: a watch, while it lasts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from .call import Call


class Source(NamedTuple):
    """The layer that makes a call.

    `own_positions` says that its queries and keys are of one sequence; `first_key` is the position
    of the call's first key.
    """

    layer: Any
    own_positions: bool
    first_key: int


Observer = Callable[[Call, str, Callable[[], Tensor] | Tensor], Tensor]
"""A function of a call, its backend, and its output `[B, H, T, Dv]` or what computes it; it returns
what takes the place of the output."""

observers: list[Observer] = []
"""At most one. Calls in code that is being compiled are not observed."""


class _Here(threading.local):
    source: Source | None = None


HERE = _Here()
"""The source of the calls that this thread makes now; none of those in people's own code."""


@contextmanager
def made_by(layer: Any, own_positions: bool, first_key: int) -> Iterator[None]:
    """Let observers know who makes the calls of a `with` block."""
    before, HERE.source = HERE.source, Source(layer, own_positions, first_key)
    try:
        yield
    finally:
        HERE.source = before
