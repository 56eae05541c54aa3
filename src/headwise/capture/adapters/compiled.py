"""Compiled models: their calls are captured in graphs of their own, or they run as written.

Where all that attends in a model is compiled, graphs with an operator beside each attention call
are used while the model is watched (`graphs`). Where a graph attends in another way, where parts
attend outside of graphs, and for whoever replaces outputs, compiled parts run as they are written.

Compiled functions that a model calls, or that call it, are refused by name where the model is not
captured in graphs: run as written they may be no use (`flex_attention` makes a T×T matrix).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from ..modules import as_written, attending, called_in_a_graph
from ..net import Net, Replaced
from ..private_torch import (
    backend_of,
    compile_with,
    compiled,
    compiler,
    compiling_with,
    forced_eager,
    modes,
    not_compiled,
    skipped,
)
from .graph_sites import CannotCapture, instrument
from .graphs import LISTENING, Listening, Site, uncompiled_module


class _AsWritten:
    """Has compiled code run as it is written while anybody watches, in whatever order they end."""

    def __init__(self) -> None:
        self._lock, self._open = threading.Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *raised: object) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                self._stance.__exit__(None, None, None)


AS_WRITTEN = _AsWritten()


def run_as_written(model: nn.Module) -> AbstractContextManager[None]:
    """Let a model of which `torch.compile` has compiled a part run as it is written."""
    if compiler() is None:
        return nullcontext()
    some = any("torch.compile" in compiled(module) for module in model.modules())
    return AS_WRITTEN if some else nullcontext()


_EAGER = "run it under torch.compiler.set_stance('force_eager'), as it is written"
_CURE = {
    "compiled by torch.compile": f"{_EAGER}, or take and call the module inside, _orig_mod",
    "compiled in place by torch.compile": _EAGER,
    "compiled by torch.jit": "take the module that it was made from",
}


def _cannot(function: str) -> str:
    """What compiled code cannot be."""
    return f"compiled code cannot be {'accelerated' if function == 'accelerate' else 'watched'}"


def refuse_compiled(function: str, model: nn.Module) -> None:
    """Raise ValueError if the model or a part of it is compiled, and would run so."""
    eager = forced_eager()
    for name, module in model.named_modules():
        how = compiled(module)
        if how and not (eager and "jit" not in how):
            where = repr(as_written(name)) if as_written(name) else "the model"
            raise ValueError(
                f"{function}({type(model).__name__}): {where} is {how}, and {_cannot(function)}; "
                f"{_CURE[how]}."
            )


# ── captured in graphs ──────────────────────────────────────────────────────────────────────────

_WRITTEN: WeakSet[nn.Module] = WeakSet()
"""Models of which a graph attends in a way that only running it as written shows."""


def compiled_parts(model: nn.Module) -> list[nn.Module] | None:
    """Return the outermost compiled parts of a model whose graphs can show all that attends.

    None where some of it is not compiled, or nothing is, or compiled code does not run compiled.
    """
    if compiler() is None or forced_eager() or uncompiled_module(model) in _WRITTEN:
        return None
    parts: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        if any(name == outer or name.startswith(f"{outer}.") or not outer for outer, _ in parts):
            continue
        how = compiled(module)
        if "jit" in how:
            return None
        if how:
            parts.append((name, module))
    inside = {id(module) for _, part in parts for module in part.modules()}
    attend = set(attending(model))
    names = ((as_written(name), module) for name, module in model.named_modules())
    if not parts or any(name in attend and id(module) not in inside for name, module in names):
        return None
    return [part for _, part in parts]


class _Backend:
    """Makes graphs of a model by another backend, with the operator beside each attention call."""

    def __init__(self, backend: Any, model: nn.Module) -> None:
        self.backend, self.model = backend, weakref.ref(model)
        self.root: nn.Module | None = None
        self.sites: list[Site] = []  # for as long as graphs of this backend are kept
        self.told: Callable[[str], Any] = lambda name: None
        vars(self).update({x: getattr(backend, x) for x in _NAMES if hasattr(backend, x)})
        self.callback = compiling_with(self)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        model = self.model()
        if model is not None:
            self.sites += instrument(graph, model, self.root, self.told)
        return self.backend(graph, inputs, **options)


_NAMES = ("__name__", "compiler_name")
"""What the compiler asks of a backend; in Python it would compile what answers."""

_BACKENDS: WeakKeyDictionary[nn.Module, list[_Backend]] = WeakKeyDictionary()
"""By model, for each backend that it is compiled with."""


def _backend_for(model: nn.Module, backend: Any) -> _Backend:
    made = _BACKENDS.setdefault(model, [])
    for one in made:
        if one.backend is backend or (
            type(one.backend) is type(backend) and one.backend == backend
        ):
            return one
    made.append(_Backend(backend, model))
    return made[-1]


def _capturing(found: Any, listening: Listening, caller: FrameType) -> Any:
    """Return a callback that makes graphs for somebody who listens."""
    model, ours = listening.model, _backend_for(listening.model, backend_of(found))

    def capture(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if forced_eager() or listening not in LISTENING:
            return not_compiled()
        names = listening.net.names
        root = frame.f_locals.get(next(iter(frame.f_code.co_varnames), None))  # mostly self
        if not isinstance(root, nn.Module) or id(root) not in names.names:
            root = uncompiled_module(names.stack[-1].module) if names.inside else None
        ours.root, ours.told = root, listening.net.heads
        try:
            return ours.callback(frame, *args, **kwargs)
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", None), CannotCapture):
                raise
            _WRITTEN.add(model)
            listening.failed()
            if root is not None and not names.inside:  # it has started unseen
                names.enter(root)
                _AROUND.caller, _AROUND.ended = caller, lambda: names.leave(root)
            return not_compiled()
        finally:
            ours.root = None

    capture._torchdynamo_orig_backend = ours.callback  # type: ignore[attr-defined]
    return capture


# ── refused ─────────────────────────────────────────────────────────────────────────────────────


def compiled_functions(net: Net) -> AbstractContextManager[None]:
    """Let the net know of compiled code: refused where the model calls it, else captured."""
    return nullcontext() if compiler() is None else _COMPILER.heard_by(net)


def _for_nets(found: Any, caller: FrameType) -> Any:
    """Return a callback of the compiler for those who watch in this thread."""
    listening = next((one for one in reversed(LISTENING) if one.net.names.here), None)
    if listening is not None:
        return _capturing(found, listening, caller)
    nets = [net for net in _COMPILER.everyone if net.names.here]
    if len(nets) != 1 or nets[0].capture is None:
        return _refusing(found)
    if nets[0].names.inside:
        if nets[0].run_as_written is None:
            return _refusing(found)
        nets[0].run_as_written()
        return None
    if uncompiled_module(nets[0].names.model) in _WRITTEN:
        return None
    if found in _UNRELATED:
        return _refusing(found)
    listening, resume = nets[0].capture()
    calls = listening.net.names.calls

    def ended() -> None:
        resume()
        if listening.net.names.calls == calls:
            _UNRELATED.add(found)

    _AROUND.caller, _AROUND.ended = caller, ended
    return _capturing(found, listening, caller)


_UNRELATED: WeakSet[Any] = WeakSet()
"""Callbacks of compiled functions in which no watched model attends: losses, optimizers."""


class _Around(threading.local):
    """What to do when the compiled code that `caller` runs has ended."""

    caller: FrameType | None = None
    ended: Callable[[], None] | None = None


_AROUND = _Around()


def code_ended(caller: FrameType | None = None) -> None:
    """Note that compiled code has ended, or runs as it is written from now on."""
    if _AROUND.ended is not None and caller in (None, _AROUND.caller):
        ended, _AROUND.ended, _AROUND.caller = _AROUND.ended, None, None
        ended()


def _refusing(found: Any) -> Any:
    """Return the callback of PyTorch's compiler that asks who watches."""

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        net = None if skipped(frame.f_code) else _watching()
        if net is not None:
            raise _refused(net, frame.f_code)
        try:
            return found(frame, *args, **kwargs)
        except Exception as error:  # of a graph that must not end
            net = next(_out_here(), None)
            if net is None or called_in_a_graph.__name__ not in str(error):
                raise
            raise _refused(net, frame.f_code) from None

    return refuse


_COMPILER = Replaced(lambda: compile_with(_for_nets, code_ended))


def _refused(net: Net, code: CodeType) -> ValueError:
    """The error for a function that is compiled: the model calls it, or it calls the model."""
    names, function = net.names, f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"
    what = f"the model is called by {function}"
    if names.inside:
        what = f"{repr(names.current) if names.current else 'the model'} calls {function}"
    return ValueError(
        f"{net.said}: {what}, compiled by torch.compile, and {_cannot(net.function)}; {_EAGER}."
    )


def _out_here() -> Iterator[Net]:
    """The nets of this thread, innermost first."""
    stack = modes()
    return (net for net in reversed(_COMPILER.everyone) if net.functions in stack)


def _watching() -> Net | None:
    """The innermost net that watches a model which is running here."""
    return next((x for x in _out_here() if x.function != "accelerate" and x.names.inside), None)
