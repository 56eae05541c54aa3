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
    implementations: tuple[str, ...]


_KNOWN: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()


def known(model: nn.Module) -> dict[int, str] | None:
    """Return the names of a known model's modules; `None` of one that is to be followed in full.

    A model of which a part was exchanged, compiled or given another `forward` is not known, nor one
    that attends by another implementation than before.
    """
    found = _KNOWN.get(model)
    if found is None:
        return None
    modules = tuple(model.modules())
    same = len(modules) == len(found.modules) and all(
        ref() is module for ref, module in zip(found.modules, modules, strict=True)
    )
    same = same and all(map(_as_written, modules))
    return found.names if same and _implementations(modules) == found.implementations else None


def learn(net: Net) -> None:
    """Remember the model of a watch in which all attention came through the interface."""
    model = net.names.model
    if not net.heard or not all(net.heard.values()) or net.names.left_out:
        return
    modules = tuple(model.modules())
    if set(attending(model)) <= set(net.heard) and all(map(_as_written, modules)):
        parts = tuple(map(weakref.ref, modules))
        _KNOWN[model] = _Known(parts, net.names.names, _implementations(modules))


def forget(model: nn.Module) -> None:
    """Let the next watch follow a model in full."""
    _KNOWN.pop(model, None)


def _implementations(modules: tuple[nn.Module, ...]) -> tuple[str, ...]:
    """Return by which implementations the configurations of a model let it attend."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
    return tuple(str(getattr(one, "_attn_implementation", None)) for one in configs.values())


def _as_written(module: nn.Module) -> bool:
    """Return True if a module runs the `forward` of its class."""
    return "forward" not in vars(module) and module._compiled_call_impl is None
