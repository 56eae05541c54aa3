"""Capture compiled models in instrumented graphs, or run them in eager mode.

If all attention of a model is compiled, graphs with an operator after each attention call are used
while the model is watched (`graphs`). Compiled parts run in eager mode if a graph attends in
an unsupported way, if parts attend outside graphs, or if the listener replaces outputs.

If a model is not captured in graphs, compiled functions that it calls, or that call it, are refused
by name, because running them in eager mode may be impractical (`flex_attention` builds a T×T
matrix).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import CodeType, FrameType
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from ..modules import Names, as_written, attending, called_in_a_graph
from ..private_torch import (
    backend_of,
    compile_with,
    compiled,
    compiler,
    compiling_with,
    forced_eager,
    modes,
    more_graphs,
    not_compiled,
    skipped,
)
from ..session import CaptureSession, RefcountedPatch
from .graph_sites import CannotCapture, instrument
from .graphs import LISTENING, Listening, Site, uncompiled_module


class _AsWritten:
    """Make compiled code run eagerly while any watch is active."""

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
    """Return a context that runs a model in eager mode if any of it is compiled."""
    if compiler() is None:
        return nullcontext()
    some = any("torch.compile" in compiled(module) for module in model.modules())
    return AS_WRITTEN if some else nullcontext()


_EAGER = "run it eagerly under torch.compiler.set_stance('force_eager')"
_FIX = {
    "compiled by torch.compile": f"{_EAGER}, or take and call the module inside, _orig_mod",
    "compiled in place by torch.compile": _EAGER,
    "compiled by torch.jit": "use the module that it was compiled from",
}


def _cannot(function: str) -> str:
    """Return the reason why compiled code is refused."""
    return f"compiled code cannot be {'accelerated' if function == 'accelerate' else 'watched'}"


def refuse_compiled(function: str, model: nn.Module) -> None:
    """Raise ValueError if the model or a part of it is compiled, and would run compiled."""
    eager = forced_eager()
    for name, module in model.named_modules():
        how = compiled(module)
        if how and not (eager and "jit" not in how):
            where = repr(as_written(name)) if as_written(name) else "the model"
            raise ValueError(
                f"{function}({type(model).__name__}): {where} is {how}, and {_cannot(function)}; "
                f"{_FIX[how]}."
            )


# ── captured in graphs ──────────────────────────────────────────────────────────────────────────

_WRITTEN: WeakSet[nn.Module] = WeakSet()
"""Models with a graph whose attention is captured only in eager mode."""


def compiled_parts(model: nn.Module) -> list[nn.Module] | None:
    """Return the outermost compiled parts of a model whose graphs contain all its attention.

    `None` if nothing or not all attention is compiled, if compiled code runs in eager mode, or if
    only parts are compiled and no module is named attention.
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
    whole = any(not as_written(name) for name, _ in parts)
    outside = any(name in attend and id(module) not in inside for name, module in names)
    if not parts or outside or not (whole or attend):
        return None
    return [part for _, part in parts]


class _Backend:
    """A compiler backend that instruments graphs of models, then passes them to another backend."""

    def __init__(self, backend: Any, models: Sequence[nn.Module]) -> None:
        self.backend, self.models = backend, [weakref.ref(model) for model in models]
        self.root: nn.Module | None = None
        self.sites: list[Site] = []  # for as long as graphs of this backend are kept
        self.declared: Callable[[str], Any] = lambda name: None
        vars(self).update({x: getattr(backend, x) for x in _NAMES if hasattr(backend, x)})
        self.callback = compiling_with(self)

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        models = [model for ref in self.models if (model := ref()) is not None]
        sites, attends = instrument(graph, models, self.root, self.declared)
        self.sites += sites
        _AROUND.graphs += 1
        _AROUND.attending += attends
        return self.backend(graph, inputs, **options)

    def serves(self, backend: Any, models: Sequence[nn.Module]) -> bool:
        """Return True if it instruments graphs of these models for this backend."""
        same = [ref() for ref in self.models] == list(models)
        return same and self.backend == backend  # each module.compile() has one of its own


_NAMES = ("__name__", "compiler_name")
"""Attributes of a backend that the compiler reads; a property would itself be compiled."""

_BACKENDS: list[_Backend] = []
"""Kept alive here, because the compiler keeps graphs but no references to their backends."""


def _backend_for(models: Sequence[nn.Module], backend: Any) -> _Backend:
    _BACKENDS[:] = [one for one in _BACKENDS if all(ref() is not None for ref in one.models)]
    found = next((one for one in _BACKENDS if one.serves(backend, models)), None)
    if found is None:
        _BACKENDS.append(found := _Backend(backend, models))
    return found


def _capturing(callback: Any, listening: Sequence[Listening], caller: FrameType) -> Any:
    """Return a compiler callback that makes instrumented graphs for these listeners."""
    nets = [one.net for one in listening]
    models = list({id(one.model): one.model for one in listening}.values())
    ours = _backend_for(models, backend_of(callback))

    def capture(frame: Any, *args: Any, **kwargs: Any) -> Any:
        if forced_eager() or not all(one in LISTENING for one in listening):
            return not_compiled()
        root = frame.f_locals.get(next(iter(frame.f_code.co_varnames), None))  # usually self
        if not isinstance(root, nn.Module):
            running = [net.names.stack[-1].module for net in nets if net.names.inside]
            root = uncompiled_module(running[-1]) if running else None
        ours.root, ours.declared = root, nets[-1].heads
        try:
            with more_graphs():
                return ours.callback(frame, *args, **kwargs)
        except Exception as error:
            if not isinstance(getattr(error, "inner_exception", None), CannotCapture):
                raise
            _WRITTEN.update(models)
            for one in listening:
                one.failed()
            if root is not None:
                _enter_late([net.names for net in nets if not net.names.inside], root, caller)
            return not_compiled()
        finally:
            ours.root = None

    capture._torchdynamo_orig_backend = ours.callback  # type: ignore[attr-defined]
    return capture


def _enter_late(unseen: Sequence[Names], root: nn.Module, caller: FrameType) -> None:
    """Enter a module whose start was not captured, until compiled code has ended."""

    def ended() -> None:
        for names in unseen:
            names.leave(root)

    for names in unseen:
        names.enter(root)
    if unseen:
        _AROUND.ends.append((caller, ended))


# ── captured or refused ────────────────────────────────────────────────────────────────────────


def _for_nets(callback: Any, caller: FrameType) -> Any:
    """Return a compiler callback for the sessions of this thread; None to run in eager mode."""
    listening = [one for one in LISTENING if one.net.names.here]
    nets = [net for net in COMPILER.everyone if net.names.here]
    others = [net for net in nets if all(one.net is not net for one in listening)]
    if any(net.capture is None for net in others):
        return _refusing(callback)
    if inside := [net for net in others if net.names.inside]:
        as_written = [run for net in inside if (run := net.run_as_written) is not None]
        if len(as_written) < len(inside):
            return _refusing(callback)
        for run in as_written:
            run()
        return None
    _refuse_nested([*others, *(one.net for one in listening)])
    if any(uncompiled_module(net.names.model) in _WRITTEN for net in others):
        return None
    if not (running := [one for one in listening if one.net.names.inside]):
        if callback in _UNRELATED:
            return _refusing(callback) if others else callback
        pairs = [capture() for net in others if (capture := net.capture) is not None]
        listening += [one for one, _ in pairs]
        _at_the_end(callback, caller, [resume for _, resume in pairs])
    return _capturing(callback, running or listening, caller) if listening else callback


def _refuse_nested(nets: Sequence[CaptureSession]) -> None:
    """Raise ValueError if a model that runs compiled is watched together with a part of it."""
    models = [uncompiled_module(net.names.model) for net in nets]
    for net, model in zip(nets, models, strict=True):
        parts = {id(module) for module in model.modules()} if len(set(models)) > 1 else ()
        if any(other is not model and id(other) in parts for other in models):
            raise ValueError(
                f"{net.quote}: the model runs compiled, and a part of it is watched, too; watch "
                f"the model alone, with modules=… for its part, or leave it uncompiled."
            )


def _at_the_end(callback: Any, caller: FrameType, resume: Sequence[Callable[[], None]]) -> None:
    """Resume following when compiled code has ended; record callbacks whose code never attends."""
    graphs, attending = _AROUND.graphs, _AROUND.attending

    def ended() -> None:
        for one in resume:
            one()
        if _AROUND.graphs > graphs and _AROUND.attending == attending:
            _UNRELATED.add(callback)

    if resume or not _AROUND.ends:
        _AROUND.ends.append((caller, ended))


_UNRELATED: WeakSet[Any] = WeakSet()
"""Callbacks of compiled functions that do not attend, such as losses and optimizers."""


class _Around(threading.local):
    """The running compiled code, innermost last: the calling frame and a function to call at the
    end; and the numbers of graphs compiled with the operator so far, and of those that attend."""

    graphs = attending = 0

    def __init__(self) -> None:
        self.ends: list[tuple[FrameType, Callable[[], None]]] = []


_AROUND = _Around()


def code_ended(caller: FrameType | None = None) -> None:
    """Note that the compiled code called by a frame has ended; without a frame, that all of it
    has, because the rest runs in eager mode."""
    ends = _AROUND.ends
    while ends and (caller is None or any(frame is caller for frame, _ in ends)):
        _, ended = ends.pop()
        ended()


def _refusing(callback: Any) -> Any:
    """Return a compiler callback that raises an error if the calling model is watched."""

    def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
        net = None if skipped(frame.f_code) else _watching()
        if net is not None:
            raise _refused(net, frame.f_code)
        try:
            return callback(frame, *args, **kwargs)
        except Exception as error:  # from a graph that must not break
            net = next(_out_here(), None)
            if net is None or called_in_a_graph.__name__ not in str(error):
                raise
            raise _refused(net, frame.f_code) from None

    return refuse


COMPILER = RefcountedPatch(lambda: compile_with(_for_nets, code_ended))
"""Intercepts compiled code: it is refused if the model calls it, otherwise captured."""


def _refused(net: CaptureSession, code: CodeType) -> ValueError:
    """Return the error for a compiled function that the model calls, or that calls the model."""
    names, function = net.names, f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"
    what = f"the model is called by {function}"
    if names.inside:
        what = f"{repr(names.current) if names.current else 'the model'} calls {function}"
    return ValueError(
        f"{net.quote}: {what}, compiled by torch.compile, and {_cannot(net.function)}; {_EAGER}."
    )


def _out_here() -> Iterator[CaptureSession]:
    """Return the sessions of this thread, innermost first."""
    stack = modes()
    return (net for net in reversed(COMPILER.everyone) if net.functions in stack)


def _watching() -> CaptureSession | None:
    """Return the innermost session that watches a model running in this thread."""
    return next((x for x in _out_here() if x.function != "accelerate" and x.names.inside), None)
