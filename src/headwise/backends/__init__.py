"""The backends of a call, in the order in which `"auto"` tries them."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.call import Call, check_scores
from .base import Backend, RowStatistics
from .blocked import Blocked, Eager
from .native import Native, slower
from .sdpa import Sdpa

BACKENDS: tuple[Backend, ...] = (Native(), Sdpa(), Blocked(), Eager())

_BY_NAME = {backend.name: backend for backend in (*BACKENDS, Native(own_output=True))}

__all__ = [
    "BACKENDS",
    "Backend",
    "Call",
    "Choice",
    "Native",
    "RowStatistics",
    "check_name",
    "check_scores",
    "choose",
    "consider",
]


@dataclass(frozen=True)
class Choice:
    """A backend, and the reasons why it cannot run a call (empty if it can)."""

    name: str
    reasons: tuple[str, ...]


def consider(call: Call) -> list[Choice]:
    """Return every backend in order, with the reasons why it cannot run the call."""
    return [Choice(b.name, tuple(b.refuse(call))) for b in BACKENDS]


def choose(call: Call, name: str = "auto", needs_grad: bool | None = None) -> Backend:
    """Return the backend of that name or, for `"auto"`, the first that can run the call.

    Raises:
        ValueError: the name is unknown, or the named backend cannot run the call.
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
    if name == "auto":
        for backend in BACKENDS:
            # On CPUs no backend after the native one has a fused kernel with dropout.
            left_out = backend.name == "native" and not call.dropout and slower(call)
            if not backend.refuse(call) and not left_out:
                return backend
    backend = _BY_NAME[name]
    if reasons := backend.refuse(call):
        raise ValueError(
            f"backend={name!r} cannot run this call: {'; '.join(reasons)}. "
            f"A named backend never falls back; choose another, or backend='auto'."
        )
    return backend


def check_name(name: str) -> None:
    """Raise ValueError for an unknown backend."""
    names = ("auto", *_BY_NAME)
    if name not in names:
        raise ValueError(f"backend must be one of {', '.join(map(repr, names))}, got {name!r}.")
