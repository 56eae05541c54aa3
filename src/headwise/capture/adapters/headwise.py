"""Capture headwise's own layer, and calls of `attend()` and `observe()` in other modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ...core import observers
from ...core.call import Call
from ..call import AttentionCall, OnePass
from ..known import CHANGED, forget
from ..mask_import import at_the_end
from ..parts import PendingCall
from ..session import SILENCE, CaptureSession, RefcountedPatch


def own_calls(net: CaptureSession) -> AbstractContextManager[None]:
    """Capture the calls of `MultiHeadAttention`, `attend()` and `observe()`."""
    return _CALLS.activate(net)


def _listen() -> Callable[[], None]:
    observers.observers.append(_emit)
    return lambda: observers.observers.remove(_emit)


_CALLS = RefcountedPatch(_listen)


def _emit(request: Call, backend: str, run: Tensor | Callable[[], Tensor]) -> Tensor:
    """Report the call to every session; inner ones receive the output of outer ones."""
    source = observers.HERE.source
    layer = None if source is None else source.layer

    def compute() -> Tensor:
        if isinstance(run, Tensor):
            return run
        with SILENCE:
            return run()

    out: Any = compute
    for net in _CALLS.everyone:
        if layer is None and net.open and not net.in_full:  # unexpected in a known model
            forget(net.names.model)
            net.names.left_out[net.names.current] = CHANGED
            continue
        if not (net.open if layer is None else net.captures(layer)):
            continue
        name = net.names.names.get(id(layer))
        named = net.names.current if name is None else name
        call = AttentionCall(named, "attend", request.q, request.k, request.v, out)
        call.keywords = {name: getattr(request, name) for name in _KEYWORDS}
        call.keywords["first_query"] = request.extent.first_query
        if source is not None and name is not None:
            _of_layer(source, call, request, backend, compute)
            new = net.emit(call, module=layer)
        else:
            call.own_positions = not net.names.crosses and at_the_end(request.mask, request.extent)
            quote, out = f"attend giving {list(call.out.shape)}", call.out
            waiting = PendingCall(call.name, quote, out, out.shape, call.keys)
            new = net.emit(call, waiting)
        out = call.out if new is None else new
    return out if isinstance(out, Tensor) else out()


_KEYWORDS = ("mask", "scale", "softcap", "sinks")


def _of_layer(
    source: observers.Source,
    call: AttentionCall,
    request: Call,
    backend: str,
    compute: Callable[[], Tensor],
) -> None:
    """Add what a `MultiHeadAttention` knows of its call."""
    layer = source.layer
    call.route = "headwise"
    call.keywords |= {"dropout": request.dropout, "backend": backend}
    call.projected_by, call.own_positions = lambda: layer.projection, source.own_positions
    call.first_key, call.first_head = source.first_key, layer.first_head
    call.layer_heads, call.one_pass = layer.all_heads, OnePass(request, backend, compute)
