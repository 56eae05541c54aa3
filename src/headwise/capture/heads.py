"""What several roads need: composite functions, projections."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .net import Net, Road


@dataclass(frozen=True)
class Composite:
    """What is known of the attention calls inside a function that projects, too.

    heads: how many there are, where batch and heads are one axis.
    own: whether queries and keys come from the same sequence; `None` where that is not known.
    behind: so many keys stand behind the others and have no position (`bias_k`, zeros).
    projection: weight of the output projection `[O, H · Dv]`.
    """

    heads: int
    own: bool | None
    behind: int
    projection: Tensor | None


class _Inside(threading.local):
    composite: Composite | None = None


_INSIDE = _Inside()


def composite() -> Composite | None:
    """The composite function that is running in this thread, if one is."""
    return _INSIDE.composite


@contextmanager
def inside(of: Composite) -> Iterator[None]:
    """What attends while this lasts does so inside a composite function."""
    before, _INSIDE.composite = _INSIDE.composite, of
    try:
        yield
    finally:
        _INSIDE.composite = before


def keys_behind(module: nn.Module) -> int:
    """Return how many keys without a position stand behind the others.

    The composite function says so; of attention that a module writes out itself, the names that
    `nn.MultiheadAttention` and fairseq give them do.
    """
    within = composite()
    if within is not None:
        return within.behind
    learned = isinstance(getattr(module, "bias_k", None), Tensor)
    return learned + (getattr(module, "add_zero_attn", False) is True)


def projection(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A projection: what it reads tells whose heads were joined."""
    out = function(*args, **kwargs)
    net.projected(args[0] if args else kwargs["input"], out)
    return out


def functions() -> dict[Any, Road]:
    """The functions of this file."""
    return {F.linear: projection}
