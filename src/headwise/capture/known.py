"""Models whose attention goes through transformers' interface alone: watching them takes no hooks.

The first watch of a model follows it in full: hooks on all modules, a function mode that sees what
is computed. If all that attended came through the interface, the next watch hears of it there, and
the model runs as if nobody watched.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from .modules import attending
from .net import Net


class _Known(NamedTuple):
    """The parts of a model as they were, and their qualified names."""

    modules: tuple[weakref.ref[nn.Module], ...]
    names: dict[int, str]


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def known(model: nn.Module) -> dict[int, str] | None:
    """Return the names of a known model's modules; `None` of one that is to be followed in full.

    A model of which a part was exchanged, compiled or given another `forward` is not known.
    """
    found = _KNOWN.get(model)
    if found is None:
        return None
    modules = tuple(model.modules())
    same = len(modules) == len(found.modules) and all(
        ref() is module for ref, module in zip(found.modules, modules, strict=True)
    )
    return found.names if same and all(map(_as_written, modules)) else None


def learn(net: Net) -> None:
    """Remember the model of a watch in which all attention came through the interface."""
    model = net.names.model
    if not net.heard or not all(net.heard.values()) or net.names.left_out:
        return
    modules = tuple(model.modules())
    if set(attending(model)) <= set(net.heard) and all(map(_as_written, modules)):
        _KNOWN[model] = _Known(tuple(map(weakref.ref, modules)), net.names.names)


def forget(model: nn.Module) -> None:
    """Let the next watch follow a model in full."""
    _KNOWN.pop(model, None)


def _as_written(module: nn.Module) -> bool:
    """Return True if a module runs the `forward` of its class."""
    return "forward" not in vars(module) and module._compiled_call_impl is None
