"""headwise's own layer, and `attend()` and `observe()` as people call them in their own modules."""

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
from ..net import SILENCE, Net, Replaced
from ..parts import Waiting


def own_calls(net: Net) -> AbstractContextManager[None]:
    """Capture the calls of `MultiHeadAttention`, `attend()` and `observe()`."""
    return _CALLS.heard_by(net)


def _listen() -> Callable[[], None]:
    observers.observers.append(_tell)
    return lambda: observers.observers.remove(_tell)


_CALLS = Replaced(_listen)


def _tell(asked: Call, backend: str, run: Tensor | Callable[[], Tensor]) -> Tensor:
    """Report the call to every watch; inner ones get the output that outer ones made."""
    source = observers.HERE.source
    layer = None if source is None else source.layer

    def made() -> Tensor:
        if isinstance(run, Tensor):
            return run
        with SILENCE:
            return run()

    out: Any = made
    for net in _CALLS.everyone:
        if layer is None and net.open and not net.in_full:  # the model was known to have no such
            forget(net.names.model)
            net.names.left_out[net.names.current] = CHANGED
            continue
        if not (net.open if layer is None else net.hears(layer)):
            continue
        name = net.names.names.get(id(layer))
        named = net.names.current if name is None else name
        call = AttentionCall(named, "attend", asked.q, asked.k, asked.v, out)
        call.keywords = {name: getattr(asked, name) for name in _KEYWORDS}
        call.keywords["first_query"] = asked.extent.first_query
        if source is not None and name is not None:
            _of_layer(source, call, asked, backend, made)
            new = net.tell(call, module=layer)
        else:
            call.own_positions = not net.names.crosses and at_the_end(asked.mask, asked.extent)
            said, out = f"attend giving {list(call.out.shape)}", call.out
            waiting = Waiting(call.name, said, out, out.shape, call.keys)
            new = net.tell(call, waiting)
        out = call.out if new is None else new
    return out if isinstance(out, Tensor) else out()


_KEYWORDS = ("mask", "scale", "softcap", "sinks")


def _of_layer(
    source: observers.Source,
    call: AttentionCall,
    asked: Call,
    backend: str,
    made: Callable[[], Tensor],
) -> None:
    """Add what a `MultiHeadAttention` knows of its call."""
    layer = source.layer
    call.road = "headwise"
    call.keywords |= {"dropout": asked.dropout, "backend": backend}
    call.projected_by, call.own_positions = lambda: layer.projection, source.own_positions
    call.first_key, call.first_head = source.first_key, layer.first_head
    call.layer_heads, call.one_pass = layer.all_heads, OnePass(asked, backend, made)
