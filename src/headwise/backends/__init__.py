"""The ways to compute a call, in the order in which `"auto"` tries them."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Backend, Call
from .blocked import Blocked
from .eager import Eager
from .sdpa import Sdpa

BACKENDS: tuple[Backend, ...] = (Sdpa(), Blocked(), Eager())

__all__ = ["BACKENDS", "Backend", "Call", "Choice", "choose", "consider"]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it would not serve a call (empty if it would)."""

    name: str
    reasons: tuple[str, ...]


def consider(call: Call) -> list[Choice]:
    """Every backend in order, with its reasons for refusing."""
    return [Choice(b.name, tuple(b.refuse(call))) for b in BACKENDS]


def choose(call: Call, name: str = "auto") -> Backend:
    """The backend of that name, or for `"auto"` the first that accepts the call.

    Raises:
        ValueError: an unknown name, or a backend chosen by name that refuses the call.
    """
    if name == "auto":
        for backend in BACKENDS:
            if not backend.refuse(call):
                return backend
    for backend in BACKENDS:
        if backend.name == name:
            if reasons := backend.refuse(call):
                raise ValueError(
                    f"backend={name!r} cannot serve this call: {'; '.join(reasons)}. "
                    f"It never falls back; choose another, or backend='auto'."
                )
            return backend
    known = ", ".join(repr(b.name) for b in BACKENDS)
    raise ValueError(f"backend={name!r} is not known; there are 'auto', {known}.")
