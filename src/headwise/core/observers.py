"""Observers of the calls that layers and user code make, such as an active watch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from .call import Call


class Source(NamedTuple):
    """The layer that makes a call.

    `own_positions` is True if its queries and keys belong to one sequence; `first_key` is the
    position of the call's first key.
    """

    layer: Any
    own_positions: bool
    first_key: int


Observer = Callable[[Call, str, Callable[[], Tensor] | Tensor], Tensor]
"""A function of a call, its backend, and its output `[B, H, T, Dv]` or a function that computes it.
It returns the tensor that replaces the output."""

observers: list[Observer] = []
"""At most one observer. Calls in code that is being compiled are not observed."""


class _Here(threading.local):
    source: Source | None = None


HERE = _Here()
"""The source of the calls that this thread makes now; `None` in user code."""


@contextmanager
def made_by(layer: Any, own_positions: bool, first_key: int) -> Iterator[None]:
    """Set the source of the calls in a `with` block, for observers."""
    before, HERE.source = HERE.source, Source(layer, own_positions, first_key)
    try:
        yield
    finally:
        HERE.source = before
