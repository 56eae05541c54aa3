"""`flex_attention`, called as it is or compiled.

It is no function that modes see, and who calls it has mostly imported it by name, or has compiled
it. So while models are watched its code is another's: one that runs the old code, compiled where
the caller compiled it, and tells of the call. Nothing else of it changes, and it gets its own
code back.
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
from ..net import SILENCE, Functions, Net, Replaced
from ..parts import Waiting
from ..private_torch import (
    modes,
    pop_mode,
    push_mode,
    replace_all,
    set_eval_frame,
    twin,
    uncompiled,
)
from .sdpa import mask_of
from .softmax import call_of_scores

_MODULE = "torch.nn.attention.flex_attention"


def flex_calls(net: Net) -> AbstractContextManager[None]:
    """Capture calls of `flex_attention`; nothing if its module is not loaded."""
    return _FLEX.heard_by(net) if _MODULE in sys.modules else nullcontext()


_OLD = types.SimpleNamespace()
"""`run` and `create`: `flex_attention` and `create_block_mask` with their own code."""


def _replace() -> Callable[[], None]:
    """Give the functions other code; gives what undoes it."""
    module = sys.modules[_MODULE]
    _OLD.run, _OLD.create = twin(module.flex_attention), twin(module.create_block_mask)
    functions = (module.flex_attention, _CODE), (module.create_block_mask, _MASKS)
    return replace_all(*((function, "__code__", code) for function, code in functions))


_FLEX = Replaced(_replace)


# With the parameters of the function whose code it becomes, since the defaults stay that one's. It
# runs among the names of PyTorch's module, and so looks for its own here.
_CODE = (
    lambda query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux: (  # noqa: E501
        __import__("headwise.capture.adapters.flex", fromlist=["heard"]).heard(**locals())
    )
).__code__
_CODE = uncompiled(_CODE)
_MASKS = (
    lambda *args, **kwargs: __import__(
        "headwise.capture.adapters.flex", fromlist=["created"]
    ).created(*args, **kwargs)
).__code__
_MASKS = uncompiled(_MASKS)


def heard(**kwargs: Any) -> Any:
    """Run the old code of `flex_attention` and capture the call."""
    return _alone(_OLD.run, _tell, (), kwargs)


def created(*args: Any, **kwargs: Any) -> Any:
    """Run the old code of `create_block_mask`: nothing in it attends."""
    return _alone(_OLD.create, lambda mask, **_: mask, args, kwargs)


def _alone(
    function: Callable[..., Any],
    then: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run old code without the modes that watch, and give what follows of its result.

    The compiler that the caller has set to work is set on the old code and on nothing else.
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


for _own in (heard, created, _alone):
    _own.__code__ = uncompiled(_own.__code__)


def _restore(taken: list[Any]) -> None:
    """Put modes back, of which the innermost comes first."""
    while taken:
        push_mode(taken.pop())


def _without_modes() -> list[Any]:
    """Take the modes that watch off the stack: compiled code is made for a stack of modes."""
    taken = []
    while (stack := modes()) and isinstance(stack[-1], Functions):
        taken.append(pop_mode())
    return taken


def _tell(
    result: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float | None,
    **_: Any,
) -> Any:
    """Report the call to every watch; inner ones get the output that outer ones made."""
    out = made = result if isinstance(result, Tensor) else result[0]
    k, v = (x.expand(len(query), -1, -1, -1) for x in (key, value))
    for net in _FLEX.nets:
        with SILENCE:
            call = _call(net, query, k, v, out, score_mod, block_mask, scale)
        said = f"flex_attention giving {list(out.shape)}"
        waiting = Waiting(call.name, said, out, out.shape, call.keys)
        new = net.tell(call, waiting)
        out = out if new is None else new
    if out is made:
        return result
    return out if isinstance(result, Tensor) else (out, *result[1:])


def _call(
    net: Net,
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


def allowed_by(net: Net, block_mask: Any, extent: Extent) -> Tensor:
    """A block mask as booleans `[B or 1, H or 1, T, S]`."""
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
    what = ("flex", block_mask.mask_mod, extent, plain)
    return net.masks.of(blocks, what, find, tensors)


def captured(function: Callable[..., Any]) -> list[Any] | None:
    """Tensors and plain values that a function reads beside its arguments, those of the functions
    that it calls included; `None` where it reads something else, which may change unseen.

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
            except ValueError:  # a cell that is empty yet
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
    """The scores `[B, H, T, S]` that enter the softmax, all pairs at once."""
    dtype = statistics_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = q.to(dtype) @ keys.mT * scale
    at = [
        torch.arange(size, device=q.device).view([-1] + [1] * (3 - axis))
        for axis, size in enumerate(scores.shape)
    ]
    return score_mod(scores, *at).expand(scores.shape)
