"""What several roads need: functions that modes do not see, composite ones, numbers of heads."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


def twin(function: Any) -> Callable[..., Any]:
    """A function of PyTorch's, which does not ask for function modes itself: run inside one, what
    it calls is seen and it is not."""
    unasked = dict.fromkeys(_ASKING, lambda *_: False)
    found = types.FunctionType(
        function.__code__,
        function.__globals__ | unasked,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@dataclass(frozen=True)
class Composite:
    """What is known of the attention calls inside a function that projects, too.

    heads: how many there are, where batch and heads are one axis.
    own: whether queries and keys come from the same sequence; `None` where that is not known.
    extra: so many keys stand behind the others and are no positions (`bias_k`, zeros).
    projection: weight of the output projection `[O, H · Dv]`.
    """

    heads: int
    own: bool | None
    extra: int
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


_HEADS = ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead")
"""What modules call the number of their heads."""


def leading(shape: torch.Size, running: Sequence[nn.Module]) -> tuple[int, int]:
    """Batch and heads in what stands before the last two axes of scores or outputs.

    Of two or more axes the last is heads, as PyTorch says of its own function; a single one is
    both, where a composite function, the innermost module or an attention module that holds it
    says how many heads there are, and else batch.
    """
    before = shape[:-2]
    if len(before) > 1:
        return before[:-1].numel(), before[-1]
    size = before.numel()
    known = composite()
    heads = known.heads if known else _said([running[-1], *_holders(running)])
    return (size, 1) if heads is None or size % heads else (size // heads, heads)


def heads_first(shape: torch.Size, running: Sequence[nn.Module]) -> bool:
    """Whether scores `[H, B, T, S]` have heads before batch, as far as the modules say."""
    heads = _said(running[-1:-4:-1]) if len(shape) == 4 else None
    return heads is not None and shape[0] == heads != shape[1]


def _said(modules: Sequence[nn.Module]) -> int | None:
    """The number of heads that the first of these modules that has one says."""
    for heads in (getattr(module, name, None) for module in modules for name in _HEADS):
        if isinstance(heads, int) and not isinstance(heads, bool) and heads > 0:
            return heads
    return None


def _holders(running: Sequence[nn.Module]) -> list[nn.Module]:
    """The attention modules around the innermost module, up to two levels; none that has several
    of the kind, each of which may be a head."""
    kind = type(running[-1])
    return [
        module
        for module in running[-2:-4:-1]
        if "att" in type(module).__name__.lower()
        and sum(type(part) is kind for part in module.modules()) == 1
    ]
