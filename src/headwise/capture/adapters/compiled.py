"""Compiled models: while somebody watches, they run as they are written, and no graph is made anew.

A compiled function is made for the function modes that are on, so that with the mode that watches
it would be compiled anew, to other last bits. What cannot run as it is written is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import CodeType
from typing import Any

import torch
from torch import nn

from ..modules import as_written, called_in_a_graph
from ..net import Net
from ..patches import Replaced
from ..private_torch import compiler, forced_eager, modes, replace


class _AsWritten:
    """Has compiled code run as it is written, while anybody watches, in whatever order."""

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


_AS_WRITTEN = _AsWritten()


def run_as_written() -> AbstractContextManager[None]:
    """Let compiled code run as it is written while this lasts; without a compiler there is none."""
    return nullcontext() if compiler() is None else _AS_WRITTEN


_EAGER = "run it under torch.compiler.set_stance('force_eager'), as it is written"
_CURE = {
    "compiled by torch.compile": f"{_EAGER}, or take and call the module inside, _orig_mod",
    "compiled in place": _EAGER,
    "compiled by torch.jit": "take the module that it was made from",
}


def _cannot(function: str) -> str:
    """What compiled code cannot be."""
    return f"compiled code cannot be {'accelerated' if function == 'accelerate' else 'watched'}"


def refuse_compiled(function: str, model: nn.Module) -> None:
    """Raise ValueError if the model or a part of it is compiled, and would run so."""
    eager = forced_eager()
    for name, module in model.named_modules():
        how = _compiled(module)
        if how and not (eager and "jit" not in how):
            where = repr(as_written(name)) if as_written(name) else "the model"
            raise ValueError(
                f"{function}({type(model).__name__}): {where} is {how}, and {_cannot(function)}; "
                f"{_CURE[how]}."
            )


def _compiled(module: nn.Module) -> str:
    """How a module was compiled; empty if it was not."""
    if "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx"):
        return "compiled by torch.compile"
    forward = vars(module).get("forward")
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled in place"
    if hasattr(forward, "_torchdynamo_orig_callable"):
        return "compiled in place"
    return "compiled by torch.jit" if hasattr(module, "_c") and hasattr(module, "graph") else ""


def compiled_functions(net: Net) -> AbstractContextManager[None]:
    """Refuse a graph that calls the model and must not end, by name; none is without a compiler."""
    return nullcontext() if compiler() is None else _COMPILER.heard_by(net)


def _watch_the_compiler() -> Callable[[], None]:
    """Let PyTorch's compiler say whose model its graph may not call; gives what undoes it."""
    before = compiler()._callback_from_stance

    def callback_from_stance(callback: Any) -> Any:
        found = before(callback)
        if not callable(found):  # nothing is compiled now
            return found

        def refuse(frame: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return found(frame, *args, **kwargs)
            except Exception as error:  # of a graph that must not end
                net = next(_out_here(), None)
                if net is None or called_in_a_graph.__name__ not in str(error):
                    raise
                raise _refused(net, frame.f_code) from None

        refuse._torchdynamo_orig_backend = found  # type: ignore[attr-defined]
        return refuse

    return replace(compiler(), "_callback_from_stance", callback_from_stance)


_COMPILER = Replaced(_watch_the_compiler)


def _refused(net: Net, code: CodeType) -> ValueError:
    """The error for a function that is compiled and calls the model."""
    function = f"{code.co_name!r} ({code.co_filename}:{code.co_firstlineno})"
    return ValueError(
        f"{net.said}: the model is called by {function}, compiled by torch.compile, and "
        f"{_cannot(net.function)}; {_EAGER}."
    )


def _out_here() -> Iterator[Net]:
    """The nets of this thread, innermost first."""
    stack = modes()
    return (net for net in reversed(_COMPILER.everyone) if net.functions in stack)
