"""Capture `flex_attention`, eager or compiled.

Function modes do not intercept it, and callers usually import it by name or compile it. While
models are watched, its code object is therefore replaced with one that runs the original code,
compiled if the caller compiled it, and reports the call. The original code is restored afterwards.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor

from ...core.shapes import Extent, statistics_dtype
from ..call import AttentionCall
from ..parts import PendingCall
from ..private_torch import (
    modes,
    pop_mode,
    push_mode,
    replace_all,
    set_eval_frame,
    twin,
    uncompiled,
)
from ..session import SILENCE, CaptureSession, Functions, RefcountedPatch
from .sdpa import mask_of
from .softmax import call_of_scores

_MODULE = "torch.nn.attention.flex_attention"


def flex_calls(net: CaptureSession) -> AbstractContextManager[None]:
    """Capture calls of `flex_attention`; do nothing if its module is not loaded."""
    return _FLEX.activate(net) if _MODULE in sys.modules else nullcontext()


_OLD = types.SimpleNamespace()
"""`run` and `create` are `flex_attention` and `create_block_mask` with their original code."""


def _replace() -> Callable[[], None]:
    """Replace the code of the functions; return a function that restores it."""
    module = sys.modules[_MODULE]
    _OLD.run, _OLD.create = twin(module.flex_attention), twin(module.create_block_mask)
    functions = (module.flex_attention, _CODE), (module.create_block_mask, _MASKS)
    return replace_all(*((function, "__code__", code) for function, code in functions))


_FLEX = RefcountedPatch(_replace)


# It has the parameters of the function whose code it replaces, because that keeps its defaults.
# It runs with the globals of PyTorch's module, so it has to import this module's functions.
_CODE = (
    lambda query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux: (  # noqa: E501
        __import__(
            "headwise.capture.adapters.flex", fromlist=["attend_and_report"]
        ).attend_and_report(**locals())
    )
).__code__
_CODE = uncompiled(_CODE)
_MASKS = (
    lambda *args, **kwargs: __import__(
        "headwise.capture.adapters.flex", fromlist=["created"]
    ).created(*args, **kwargs)
).__code__
_MASKS = uncompiled(_MASKS)


def attend_and_report(**kwargs: Any) -> Any:
    """Run the original code of `flex_attention` and capture the call."""
    return _alone(_OLD.run, _emit, (), kwargs)


def created(*args: Any, **kwargs: Any) -> Any:
    """Run the original code of `create_block_mask`, which contains no attention."""
    return _alone(_OLD.create, lambda mask, **_: mask, args, kwargs)


def _alone(
    function: Callable[..., Any],
    then: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run the original code with the capturing modes removed, and return the processed result.

    If the caller compiles, only the original code is compiled.
    """
    compiler = set_eval_frame(None)
    watching = _without_modes()
    try:
        set_eval_frame(compiler)
        result = function(*args, **kwargs)
        set_eval_frame(None)
        _restore(watching)
        return then(result, **kwargs)
    finally:
        set_eval_frame(None)
        _restore(watching)
        set_eval_frame(compiler)


for _own in (attend_and_report, created, _alone):
    _own.__code__ = uncompiled(_own.__code__)


def _restore(taken: list[Any]) -> None:
    """Restore modes, given innermost first."""
    while taken:
        push_mode(taken.pop())


def _without_modes() -> list[Any]:
    """Remove capturing modes from the stack, because compiled code depends on the stack."""
    taken = []
    while (stack := modes()) and isinstance(stack[-1], Functions):
        taken.append(pop_mode())
    return taken


def _emit(
    result: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    **_: Any,
) -> Any:
    """Report the call to every session; inner ones receive the output of outer ones."""
    out = original = result if isinstance(result, Tensor) else result[0]
    k, v = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    for net in _FLEX.nets:
        with SILENCE:
            call = _call(net, query, k, v, out, score_mod, block_mask, scale)
        quote = f"flex_attention giving {list(out.shape)}"
        waiting = PendingCall(call.name, quote, out, out.shape, call.keys)
        new = net.emit(call, waiting)
        out = out if new is None else new
    if out is original:
        return result
    return out if isinstance(result, Tensor) else (out, *result[1:])


def _call(
    net: CaptureSession,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
) -> AttentionCall:
    extent = Extent(len(q), q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    allowed = None if block_mask is None else allowed_by(net, block_mask, extent)
    if score_mod is not None:
        scores = _scores(q, k, score_mod, q.shape[-1] ** -0.5 if scale is None else scale)
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        return call_of_scores(net, "flex_attention", scores, out, vectors=(q, k))
    mask, keys, behind = mask_of(net, allowed, extent, q.device)
    k, v, sight = k[:, :, :keys], v[:, :, :keys], {"mask": mask, "scale": scale}
    return AttentionCall(net.names.current, "flex_attention", q, k, v, out, sight, behind=behind)


def allowed_by(net: CaptureSession, block_mask: Any, extent: Extent) -> Tensor:
    """Return a block mask as booleans `[B or 1, H or 1, T, S]`."""
    batch, heads = block_mask.shape[:2]
    blocks = block_mask.kv_num_blocks

    def find() -> Tensor:
        of = sys.modules[_MODULE].create_mask
        sizes = (batch, heads, extent.queries, extent.keys)
        return of(block_mask.mask_mod, *sizes, device=str(blocks.device))

    read = captured(block_mask.mask_mod)
    if read is None:
        return find()
    tensors = [x for x in read if isinstance(x, Tensor)]
    plain = tuple(x for x in read if not isinstance(x, Tensor))
    key = ("flex", block_mask.mask_mod, extent, plain)
    return net.masks.of(blocks, key, find, tensors)


def captured(function: Callable[..., Any]) -> list[Any] | None:
    """Return the tensors and plain values that a function reads besides its arguments, including
    those of functions that it calls; `None` if it reads other objects, which may change unnoticed.

    >>> size = 3
    >>> captured(lambda i: i < size)
    [3]
    """
    found, todo, known = [], [function], set()
    while todo:
        one = todo.pop()
        if id(one) in known:
            continue
        known.add(id(one))
        if isinstance(one, types.FunctionType):
            try:
                read = getclosurevars(one)
            except ValueError:  # a cell that is still empty
                return None
            todo += [*read.nonlocals.values(), *read.globals.values()]
        elif isinstance(one, tuple | list):
            todo += one
        elif isinstance(one, Tensor | int | float | str | torch.dtype | torch.device | None):
            found.append(one)
        elif not isinstance(one, types.ModuleType | types.BuiltinFunctionType | type):
            return None
    return found


def _scores(q: Tensor, k: Tensor, score_mod: Any, scale: float) -> Tensor:
    """Return the scores `[B, H, T, S]` that enter the softmax, for all pairs at once."""
    dtype = statistics_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.to(dtype) @ keys.mT * scale
    at = [
        torch.arange(size, device=q.device).view([-1] + [1] * (3 - axis))
        for axis, size in enumerate(scores.shape)
    ]
    return score_mod(scores, *at).expand(scores.shape)
