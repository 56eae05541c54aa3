"""Compiled models: they run as they are written while they are watched, and no graph is made anew.

A compiled function is made for the function modes that are on, so that with the mode that watches
it would be compiled anew, to other last bits. Compiled functions that a model calls, or that call
it, are refused by name: run as written they may be no use (`flex_attention` makes a T×T matrix).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import nn

from ..modules import as_written, called_in_a_graph
from ..net import Net, Replaced
from ..private_torch import compile_with, compiled, compiler, forced_eager, modes, skipped


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


def compiled_functions(net: Net) -> AbstractContextManager[None]:
    """Refuse compiled functions by name when the model calls one; none is without a compiler."""
    return nullcontext() if compiler() is None else _COMPILER.heard_by(net)


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


_COMPILER = Replaced(lambda: compile_with(_refusing))


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
