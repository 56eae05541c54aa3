"""Capture every attention call of a model, whichever route the call takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .adapters.compiled import (
    AS_WRITTEN,
    COMPILER,
    code_ended,
    compiled_parts,
    refuse_compiled,
    run_as_written,
)
from .adapters.flex import flex_calls
from .adapters.graphs import Listening
from .adapters.headwise import own_calls
from .adapters.mha import functions as composite_functions
from .adapters.sdpa import functions as fused_attention
from .adapters.softmax import functions as steps_by_hand
from .adapters.transformers import attention_functions
from .adapters.varlen import functions as varlen_attention
from .call import Listener
from .known import Known, forget, known, learn, starting, starting_compiled
from .modules import Modules, Names, chosen, names_of
from .private_torch import compiler, unnoticed, without_dispatch
from .session import CaptureSession, Functions, Interceptor, RefcountedPatch


@contextmanager
def catch(
    model: nn.Module,
    listener: Listener,
    begin: Callable[[], None] = lambda: None,
    elsewhere: Callable[[nn.Module], None] | None = None,
    function: str = "watch",
    in_full: bool = True,
    refuse: bool = True,
    modules: Modules = None,
) -> Iterator[CaptureSession]:
    """Call `listener` with the attention calls of `modules` that `model` makes in this thread.

    `begin` is called whenever the outermost module starts, `elsewhere` when the model starts in
    another thread; by default that is an error. Errors name the public `function` that listens.
    Everything is restored on exit, even after an exception. With `in_full`, modules are followed
    while they run; otherwise, only if some attention modules may not report their own calls.
    During capture, parts compiled by `torch.compile` run in eager mode; without `in_full`, if only
    compiled parts compute attention, they run as graphs that report their calls.

    Compiled functions that a model calls are refused; without `refuse`, compiled code runs in eager
    mode from there on.

    Raises:
        ValueError: the model, or a part of it, is compiled by `torch.jit`; `modules` is invalid.
    """
    selected = None if modules is None else chosen(modules)
    about = None if in_full else known(model)
    parts = None if in_full or about else compiled_parts(model)
    names = None if about is None else about.names
    net = CaptureSession(function, model, listener, {}, (), begin, elsewhere, names)
    net.modules, net.selected = modules, selected
    with ExitStack() as stack:
        if not refuse:
            net.run_as_written = lambda: stack.enter_context(AS_WRITTEN)
        if parts:
            _capture_parts(net, parts, stack)
        else:
            _follow_or_capture(net, about, stack, in_full)
        try:
            yield net
        finally:
            net.capture = None
    if net.in_full and not (in_full or parts):
        learn(net)
    elif about is not None and not net.attended <= about.attended:
        forget(model)


def _capture_parts(net: CaptureSession, parts: list[nn.Module], stack: ExitStack) -> None:
    """Capture the calls of compiled parts of a model in their graphs."""
    inner = stack.enter_context(ExitStack())

    def failed() -> None:
        """Follow the model in full from now on."""
        inner.close()
        net.in_full = True
        _follow(net, stack)

    net.in_full = net.names.moves = False
    inner.enter_context(net.names.marked())
    inner.enter_context(COMPILER.activate(net))
    inner.enter_context(Listening(net, failed).on())
    inner.enter_context(starting_compiled(net, parts))


def _follow_or_capture(
    net: CaptureSession, about: Known | None, stack: ExitStack, in_full: bool
) -> None:
    """Follow a model, but capture its calls in graphs while compiled code around it runs."""
    inner = stack.enter_context(ExitStack())

    def follow() -> None:
        if about is None or net.in_full:
            _follow(net, inner)
        else:
            _listen(net, about, inner)

    def capture() -> tuple[Listening, Callable[[], None]]:
        inner.close()
        inner.enter_context(net.names.marked())
        listening = Listening(net, lambda: code_ended())
        inner.enter_context(listening.on())

        def resume() -> None:
            if net.capture is not None:
                inner.close()
                follow()

        return listening, resume

    if not in_full and compiler() is not None:
        net.capture = capture
        stack.enter_context(COMPILER.activate(net))
    follow()


def _listen(net: CaptureSession, about: Known, stack: ExitStack) -> None:
    """Capture the calls that modules of a known model report themselves."""
    inner = stack.enter_context(ExitStack())

    def changed() -> None:
        """Follow the model in full from now on."""
        inner.close()
        forget(net.names.model)
        net.in_full, net.names.names = True, names_of(net.names.model)
        _follow(net, stack)

    inner.enter_context(net.names.marked())
    inner.enter_context(attention_functions(net))
    inner.enter_context(own_calls(net))
    inner.enter_context(starting(net, about, changed))


def _follow(net: CaptureSession, stack: ExitStack) -> None:
    """Follow the modules of a model while they run, and intercept what they compute."""
    model, net.always = net.names.model, ALWAYS
    net.interceptors = ALWAYS | {F.linear: _projection} | fused_attention() | composite_functions()
    net.interceptors |= steps_by_hand() | varlen_attention()
    written = run_as_written(model)
    net.names.moves &= written is not AS_WRITTEN
    stack.enter_context(written)
    refuse_compiled(net.function, model)
    stack.enter_context(net.names.following())
    stack.enter_context(own_calls(net))
    stack.enter_context(attention_functions(net))
    stack.enter_context(flex_calls(net))
    if net.capture is None and compiler() is not None:
        stack.enter_context(COMPILER.activate(net))
    stack.enter_context(UNNOTICED.activate(net))
    if net.names.away:
        net.names.home = None  # the mode is on while the model runs, in whichever thread
    else:
        stack.enter_context(net.functions.on())


def _projection(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a projection: its input shows whose heads were joined."""
    out = function(*args, **kwargs)
    net.projected(args[0] if args else kwargs["input"], out)
    return out


def _backward(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a backward pass with the mode re-enabled, because it is off while an intercepted function
    runs.

    Ablated heads must stay ablated when checkpointing recomputes a layer.
    """
    with net.functions:
        return without_dispatch(function)(*args, **kwargs)


ALWAYS: dict[Any, Interceptor] = dict.fromkeys(
    (torch.autograd.backward, torch.autograd.grad, Tensor.backward), _backward
)
UNNOTICED = RefcountedPatch(lambda: unnoticed(Functions, Names))
