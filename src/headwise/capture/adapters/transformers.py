"""transformers' attention: eager, sdpa, flash, flex, and whatever else is registered with it.

Models of transformers ask `AttentionInterface` for the function that attends. While a model is
watched, what the interface hands out is wrapped; nothing is registered, so the model keeps its
implementation, and with it the masks that `AttentionMaskInterface` makes for this implementation.

What heads did is read from the arguments that the function gets (q, the keys and values of each
group, mask and options), not from what it calls inside: `sdpa` repeats keys for each query head and
packs the heads of a single query into another axis, a flash kernel shows nothing, and sinks are
sliced off a softmax. Where a function turns out to compute something else than its arguments say,
PyTorch's functions inside it are heard instead, and if there are none, it is refused by name.

What a mask cannot tell: which queries of a decoder are padding where it attends to an encoder; they
count there. Where a cache has dropped keys, the first key is the first that is left. `generate()`
compiles models for static caches on some devices: ask it for `disable_compile=True`.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..call import HeadsCall
from ..known import forget
from ..modules import Forward
from ..net import Net, Replaced, silence
from .transformers_arguments import Function, Given, Meaning

_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "o", "dense")
"""What attention modules call the projection of the heads' outputs."""


def attention_functions(net: Net) -> AbstractContextManager[None]:
    """Hear of the calls that go through transformers' interface; nothing where it is not loaded."""
    loaded = hasattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface")
    return _INTERFACE.heard_by(net) if loaded else nullcontext()


class _Kept(threading.local):
    """The keys that a cache gave last in this thread, and the position of the first of them."""

    keys: Tensor | None = None
    first = 0


_KEPT = _Kept()
_FOUND: dict[tuple[object, ...], list[str]] = {}
"""Which meanings the arguments of a function may have."""


def _wrap() -> Callable[[], None]:
    """Let the interface hand out functions that are heard; gives what undoes it."""
    interface: Any = sys.modules["transformers.modeling_utils"].AttentionInterface
    cache: Any = sys.modules["transformers.cache_utils"].Cache
    item, update = interface.__getitem__, cache.update
    get: Any = getattr(interface, "get_interface", None)  # not before transformers 5

    def get_interface(self: Any, implementation: str, default: Function) -> Function:
        return _heard(get(self, implementation, default))

    def getitem(self: Any, implementation: str) -> Function:
        return _heard(item(self, implementation))

    def updated(self: Any, keys: Tensor, values: Tensor, layer_idx: int, *a: Any, **b: Any) -> Any:
        kept = update(self, keys, values, layer_idx, *a, **b)
        if _INTERFACE.everyone and self.is_sliding[layer_idx]:
            dropped = int(self.get_seq_length(layer_idx)) - kept[0].shape[2]
            _KEPT.keys, _KEPT.first = kept[0], max(dropped, 0)
        return kept

    changes = [(interface, "__getitem__", getitem), (cache, "update", updated)]
    if get is not None:
        changes.append((interface, "get_interface", get_interface))
    before = [(owner, name, vars(owner).get(name)) for owner, name, _ in changes]
    for owner, name, new in changes:
        setattr(owner, name, new)

    def restore() -> None:
        for owner, name, old in before:
            delattr(owner, name) if old is None else setattr(owner, name, old)
        _FOUND.clear()

    return restore


_INTERFACE = Replaced(_wrap)


def _heard(function: Function) -> Function:
    known = isinstance(function, partial) and function.func is _attend
    return function if known else partial(_attend, function)


def _attend(
    function: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Make a call of the interface and tell of it."""
    nets = tuple(net for net in _INTERFACE.everyone if net.hears(module))
    run = partial(function, module, query, key, value, attention_mask, *rest)
    # A paged cache holds the keys itself; other shapes are nobody's habit.
    if not nets or rest or query.dim() != 4 or options.get("cache") is not None:
        _follow_in_full(nets, module)
        return run(**options)
    net = nets[-1]
    tensors = (query, key, value, attention_mask)
    kept, _KEPT.keys = _KEPT.keys, None
    behind = _behind(kept, key)
    given = Given(net, _FOUND, function, module, *tensors, options, behind)
    with silence():  # silence is for all nets of a thread
        meaning = given.meaning()
        if meaning is not None:
            first = _KEPT.first if key is kept or behind else 0
            return _tell(nets, given, meaning, partial(run, **options), first)
    _follow_in_full(nets, module)
    if not net.in_full:
        return run(**options)
    told = len(net.noticed)
    result = run(**options)
    if len(net.noticed) == told:
        raise ValueError(
            f"{net.said}: {given.named} of {net.names.current!r} gives something else than "
            f"softmax(scale · q·k + mask) · v of its arguments, and nothing that attends was heard "
            f"inside it; choose another attn_implementation."
        )
    return result


def _follow_in_full(nets: tuple[Net, ...], module: nn.Module) -> None:
    """Leave out a call that only the functions inside it tell of, where no net hears these."""
    for net in nets:
        if not net.in_full:
            forget(net.names.model)
            reason = "it attends in another way than before; watch the model once more"
            net.names.left_out[net.names.names[id(module)]] = reason


def _behind(kept: Tensor | None, key: Tensor) -> int:
    """Return how many keys a model has put behind those that its cache gave."""
    if kept is None or key is kept or key.dtype != kept.dtype or key.shape[2] <= kept.shape[2]:
        return 0
    behind = key.shape[2] - kept.shape[2]
    return behind if torch.equal(key[:, :, :-behind], kept) else 0


def _tell(
    nets: tuple[Net, ...],
    given: Given,
    meaning: Meaning,
    run: Callable[[], tuple[Any, ...]],
    first: int,
) -> tuple[Any, ...]:
    """Tell every net, those inside of what those outside have made of the output."""
    served = given.served()
    result: Any = None if served is not None else run()
    made: Any = served.out if served is not None else given.heads_of(result)
    # Under autocast the function has cast them all to the dtype of its output.
    dtype = made.dtype if served is None else served.call.q.dtype
    q, k, v = (x.to(dtype) for x in (given.q, meaning.k, meaning.v))
    out = made
    for net in nets:
        name = net.names.name_of(given.module)
        call = HeadsCall(
            net.names.current if name is None else name,
            given.named,
            q,
            k,
            v,
            out,
            keywords=meaning.keywords,
            projection=_projection(given.module, q.shape[1] * v.shape[3]),
            own_positions=False,  # the mask has seen to that
            first_key=first,
            behind=meaning.behind,
        )
        if served is not None and not isinstance(out, Tensor):
            call = served.told(call)
        among = None if net.in_full else Forward(given.module)
        new = net.tell(call, among=among, by_interface=True)
        out = call.out if new is None else new
    if result is None:
        return out.transpose(1, 2).contiguous(), None
    if out is made:
        return result
    return out.transpose(1, 2).reshape(result[0].shape).contiguous(), *result[1:]


def _projection(module: nn.Module, width: int) -> Tensor | None:
    """The weight `[O, H · Dv]` by which the module projects its heads' outputs, if it has one."""
    for name in _PROJECTIONS:
        layer = getattr(module, name, None)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        weight = weight.T if type(layer).__name__ == "Conv1D" else weight
        if weight.shape[1] == width:
            return weight
    return None
