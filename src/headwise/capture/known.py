"""Models whose attention modules report their calls themselves, captured without hooks.

transformers' attention interface passes the module, and headwise's own layers report themselves.
The first watch of a model follows it in full, with hooks on all modules and a function mode. If all
its attention was reported by modules themselves, later watches use only these reports and cost
almost nothing. When an outermost module starts, the model is compared with its recorded form; if
it has changed, it is followed in full from there on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..layers.attention import MultiHeadAttention
from .modules import attending
from .session import CaptureSession


class _ModuleRecord(NamedTuple):
    """The recorded form of a module: its class, its submodules by id and class, and its hooks."""

    module: weakref.ref[nn.Module]
    form: tuple[object, ...]


class Known(NamedTuple):
    """The recorded form of a model: its compared modules, their attention implementations, the
    qualified names of all modules, and the modules that attended, by the id of the outermost one.

    Modules are compared if they have submodules, attend, or are outermost. `modules` holds them
    while the model is in use.
    """

    parts: tuple[_ModuleRecord, ...]
    implementations: list[object]
    names: dict[int, str]
    attended: set[tuple[int, frozenset[str]]]
    modules: list[nn.Module]


CHANGED = "it now attends in a different way; watch the model again"
"""The reason why a call that is new for a known model is left out."""

_LIBRARIES = ("headwise.", "torch.", "transformers.")
"""Packages whose modules attend in the same way in every forward."""

_KNOWN: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()


def known(model: nn.Module) -> Known | None:
    """Return the recorded form of a model; `None` if it must be followed in full.

    A model is no longer known if a submodule was replaced, compiled, or given another `forward` or
    other hooks, or if its attention implementation has changed.
    """
    found = _KNOWN.get(model)
    if found is None:
        return None
    modules = []
    for ref, form in found.parts:
        module = ref()
        if module is None or _form(module) != form:
            return None
        modules.append(module)
    same = _implementations(modules) == found.implementations
    return found._replace(modules=modules) if same else None


def learn(net: CaptureSession) -> None:
    """Record the model of a session if its modules reported all attention themselves."""
    model, names = net.names.model, net.names.names
    if not net.complete or not all(net.complete.values()) or net.names.left_out:
        return
    modules, outermost = list(model.modules()), {module for module, _ in net.attended}
    own = any(isinstance(module, MultiHeadAttention) for module in modules)
    if own and not all(type(module).__module__.startswith(_LIBRARIES) for module in modules):
        return  # a user's own forward around such layers may sometimes attend in other ways
    seen = [
        m for m in modules if m._modules or names.get(id(m)) in net.complete or id(m) in outermost
    ]
    same = set(names) == set(map(id, modules)) and all(_form(module) for module in modules)
    if same and set(attending(model)) <= set(net.complete):
        parts = tuple(_ModuleRecord(weakref.ref(module), _form(module)) for module in seen)
        _KNOWN[model] = Known(parts, _implementations(seen), names, net.attended, [])


def forget(model: nn.Module) -> None:
    """Remove a model, so that the next watch follows it in full."""
    _KNOWN.pop(model, None)


def _form(module: nn.Module) -> tuple[object, ...]:
    """Return the parts of a module that must not change; () if its `forward` is not that of its
    class, because it may do anything."""
    own = vars(module)
    if "forward" in own or own.get("_compiled_call_impl") is not None or "_c" in own:
        return ()
    parts = own["_modules"].values()
    hooks = (*own["_forward_hooks"], *own["_forward_pre_hooks"])
    return type(module), hooks, *map(id, parts), *map(type, parts)


def _implementations(modules: list[nn.Module]) -> list[object]:
    """Return the attention implementations in the configurations of modules."""
    configs = {id(config): config for module in modules if (config := vars(module).get("config"))}
    return [getattr(one, "_attn_implementation", None) for one in configs.values()]


# ── when modules start ──────────────────────────────────────────────────────────────────────────


class _Started:
    """Report to each watch when modules of a class start and end.

    Meanwhile, the class's `__call__` is replaced: a module's own hooks would be copied with it,
    and global hooks would slow down every module.
    """

    def __init__(self, kind: type[nn.Module]) -> None:
        self.kind, self.own, before = kind, vars(kind).get("__call__"), kind.__call__
        self.followers: dict[int, tuple[_Compiled | _Following, ...]] = {}
        followers = self.followers

        @wraps(before)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found, output = followers.get(id(module)), None
            if found is None:
                return before(module, *args, **kwargs)
            for one in found:
                one.enter(module)
            try:
                output = before(module, *args, **kwargs)
                return output
            finally:
                for one in reversed(found):
                    one.leave(module, output)

        kind.__call__ = call

    def restore(self) -> None:
        if self.own is None:
            del self.kind.__call__
        else:
            self.kind.__call__ = self.own


class _Compiled(NamedTuple):
    """A session of a model with compiled parts: only which modules run is recorded."""

    net: CaptureSession

    def enter(self, module: nn.Module) -> None:
        self.net.names.enter(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        self.net.names.leave(module, output=output)


class _Following(NamedTuple):
    """A watch, the known facts about its model, and the function to call if they change."""

    net: CaptureSession
    about: Known
    changed: Callable[[], None]

    def enter(self, module: nn.Module) -> None:
        if self.net.in_full:
            return
        if not self.net.names.stack and known(self.net.names.model) is None:
            self.changed()
        else:
            self.net.names.enter(module)

    def leave(self, module: nn.Module, output: Any) -> None:
        if not self.net.in_full:
            self.net.names.leave(module, output=output)
            if not self.net.attended <= self.about.attended:  # other modules attended
                forget(self.net.names.model)


_LOCK = threading.Lock()
_STARTED: dict[type[nn.Module], _Started] = {}


@contextmanager
def starting(net: CaptureSession, about: Known, changed: Callable[[], None]) -> Iterator[None]:
    """Notify a session when its model's outermost modules start and end.

    `changed` is called when one starts and the model no longer matches its recorded form.
    """
    outermost = {id(net.names.model), *(module for module, _ in about.attended)}
    modules = [one for one in about.modules if id(one) in outermost]
    with _started(modules, _Following(net, about, changed)):
        yield


@contextmanager
def starting_compiled(net: CaptureSession, parts: Sequence[nn.Module]) -> Iterator[None]:
    """Notify a session when its model and the model's compiled parts start and end."""
    modules = {id(one): one for one in (net.names.model, *parts)}
    with _started(list(modules.values()), _Compiled(net)):
        yield


@contextmanager
def _started(modules: Sequence[nn.Module], following: _Compiled | _Following) -> Iterator[None]:
    """Notify `following` when modules start and end, while the context is active."""
    with _LOCK:
        for module in modules:
            kind = type(module)
            started = _STARTED.get(kind) or _STARTED.setdefault(kind, _Started(kind))
            started.followers[id(module)] = (*started.followers.get(id(module), ()), following)
    try:
        yield
    finally:
        with _LOCK:
            for module in modules:
                started = next(one for one in _STARTED.values() if id(module) in one.followers)
                left = tuple(x for x in started.followers.pop(id(module)) if x is not following)
                if left:
                    started.followers[id(module)] = left
                if not started.followers:
                    _STARTED.pop(started.kind).restore()
