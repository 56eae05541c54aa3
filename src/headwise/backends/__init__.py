"""The ways to compute a call, in the order in which `"auto"` tries them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.call import Call, check_scores
from .base import Backend, Figures, OnePass
from .blocked import Blocked
from .eager import Eager
from .native import Native, slower
from .sdpa import Sdpa

BACKENDS: tuple[Backend, ...] = (Native(), Sdpa(), Blocked(), Eager())

__all__ = [
    "BACKENDS",
    "Backend",
    "Call",
    "Choice",
    "Figures",
    "OnePass",
    "check_name",
    "check_scores",
    "choose",
    "consider",
]


@dataclass(frozen=True)
class Choice:
    """A backend, and why it would not serve a call (empty if it would)."""

    name: str
    reasons: tuple[str, ...]


def consider(call: Call) -> list[Choice]:
    """Every backend in order, with its reasons for refusing."""
    return [Choice(b.name, tuple(b.refuse(call))) for b in BACKENDS]


def choose(call: Call, name: str = "auto", needs_grad: bool | None = None) -> Backend:
    """The backend of that name, or for `"auto"` the first that accepts the call.

    Raises:
        ValueError: an unknown name, or a backend chosen by name that refuses the call.
    """
    if call.prepared is None or type(name) is not str:
        return _choose(call, name)
    graph = call.needs_grad if needs_grad is None else needs_grad
    key = name, graph, call.sinks is not None
    chosen = call.prepared.backends.get(key)
    if chosen is None:
        chosen = call.prepared.backends[key] = _choose(call, name)
    return chosen


def _choose(call: Call, name: str) -> Backend:
    check_name(name)
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        reasons = backend.refuse(call)
        # No kernel that comes after the native one on a CPU has dropout.
        anyhow = name != "auto" or backend.name != "native" or call.dropout
        if not reasons and (anyhow or not slower(call)):
            return backend
        if name != "auto":
            raise ValueError(
                f"backend={name!r} cannot serve this call: {'; '.join(reasons)}. "
                f"It never falls back; choose another, or backend='auto'."
            )
    raise AssertionError("the blocked backend refuses nothing")


def check_name(name: str) -> None:
    """Raise ValueError for a backend that there is not."""
    names = ["auto", *(b.name for b in BACKENDS)]
    if name not in names:
        known = ", ".join(map(repr, names))
        raise ValueError(f"backend={name!r} is not known; there are {known}.")
