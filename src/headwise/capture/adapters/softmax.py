"""Capture attention written as separate operations: a softmax and a product with the values.

A softmax over the last axis is tracked, through dropout and changes of dtype or shape, until it is
multiplied by a tensor that has a vector for each key. Only then is it reported as attention. The
scores are available, so they are passed to the call as a bias.

PyTorch's version counters miss in-place changes through `.data` or `.numpy()`, and those made in
inference mode. Checksums of the tensors' bits are therefore compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...core.mask_algebra import Mask
from ...core.modes import transformed
from ...core.shapes import Extent, statistics_dtype
from ..call import AttentionCall
from ..head_axis import Leading, composite, keys_behind, leading
from ..mask_import import FORBIDDEN, as_bias, resolve_padding
from ..modules import Forward
from ..parts import PendingCall
from ..private_torch import version
from ..session import CaptureSession, Interceptor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROWS = 64


def checksum(x: Tensor) -> Tensor:
    """Return integer sums of a tensor's bits, `[…, T, S]`: per row, and per column over some rows.

    Views with other leading axes have the same checksum. It is kept instead of a copy because
    scores are large.

    >>> x = torch.rand(2, 3, 4)
    >>> before = checksum(x)
    >>> torch.equal(checksum(x.view(1, 2, 3, 4)), before), torch.equal(checksum(x.mul_(2)), before)
    (True, False)
    """
    bits = x.detach().resolve_neg().view(_INTEGERS[x.element_size()])
    each = 8 // x.element_size()
    sizes = (bits.shape[-1], bits.storage_offset(), *bits.stride()[:-1])
    if bits.stride(-1) == 1 and not any(size % each for size in sizes):
        bits = bits.view(torch.int64)  # sums of whole words are several times faster
    some = bits[..., :: max(1, bits.shape[-2] // _ROWS), :]
    return torch.cat([bits.sum(-1).flatten(), some.sum(-2).flatten()])


@dataclass(frozen=True, eq=False)
class _Held:
    """The content of a tensor at the time it was recorded."""

    version: int
    sums: Tensor | None

    @classmethod
    def by(cls, x: Tensor) -> _Held:
        # Tensors in transforms have no values, and their attention is not supported.
        plain = not transformed()
        return cls(version(x), checksum(x) if plain else None)

    def still(self, x: Tensor) -> bool:
        """Return True if the content of the tensor has not changed."""
        if self.version != version(x):
            return False
        return self.sums is None or torch.equal(self.sums, checksum(x))


@dataclass(frozen=True, eq=False)
class _Softmax:
    """The scores of a softmax, the shapes of its probabilities so far, and the running module.

    `before` and `held` record the contents of scores and probabilities, to detect changes.
    """

    scores: Tensor
    before: _Held
    held: _Held
    shapes: tuple[torch.Size, ...]
    running: tuple[Forward, ...]
    mark: object


def softmax(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a softmax, which may be a step of attention."""
    scores = args[0] if args else kwargs["input"]
    if scores.dim() < 3 or scores.layout is not torch.strided:
        p = function(*args, **kwargs)
        if p.dim() == 2:
            net.by_hand[p] = f"the softmax of {list(p.shape)} has no axes of batch rows and heads"
        return p
    before = _Held.by(scores)
    p = function(*args, **kwargs)
    axis = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    running, mark, shape = tuple(net.names.stack), object(), scores.shape
    if axis not in (-1, scores.dim() - 1):
        net.contexts |= _storage(p)
        quote = f"the softmax of {list(shape)} is over axis {axis}, not the last"
        _may_attend(net, quote, axis is not None and shape.count(shape[axis]) > 1 < shape[axis])
        return p
    if p is not scores:
        net.softmaxes[p] = _Softmax(scores, before, _Held.by(p), (shape,), running, mark)
    running[-1].lost[mark] = shape
    return p


def exp(net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an exponential, which may be a step of a softmax written by hand."""
    e = function(*args, **kwargs)
    net.exps[e] = True
    if e.dim() > 2:
        net.by_hand[e] = f"a softmax of {list(e.shape)} is written out with exp()"
    return e


def divided(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a division, which may be the last step of a softmax written by hand."""
    if net.by_hand and args and isinstance(args[-1], Tensor) and args[-1].dim():
        _note_by_hand(net, args[0])
    return function(*args, **kwargs)


def grouped(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a sum over groups of entries, which may be a step of a softmax over each group."""
    for e in [*args, *kwargs.values()] if net.exps else []:
        if isinstance(e, Tensor) and e in net.exps:
            quote = f"the exp() of {list(e.shape)} is summed by {function.__name__}()"
            _may_attend(net, f"{quote}, as in a softmax over the edges of a graph")
    return function(*args, **kwargs)


def _note_by_hand(net: CaptureSession, p: Any) -> None:
    """Note that these probabilities, if tracked, are used in a way that cannot be tracked."""
    quote = net.by_hand.get(p) if net.by_hand and isinstance(p, Tensor) else None
    if quote is not None:
        _may_attend(net, quote, p.shape[-1] == p.shape[-2] > 1)


def _may_attend(net: CaptureSession, quote: str, likely: bool = True) -> None:
    """Note possible attention in the running module that cannot be tracked."""
    net.names.stack[-1].other[quote] = likely


def reshaping(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a change of axes or dtype after which probabilities still belong to the same keys."""
    record = net.softmaxes.get(args[0]) if args else None
    result = function(*args, **kwargs)
    if record is None:
        return result
    if result.dtype == args[0].dtype and _storage(result) & _storage(args[0]):
        _pass_on(net, record, result, record.held)  # checked only when they are multiplied
    elif record.held.still(args[0]):
        _pass_on(net, record, result)
    return result


def passing(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation after which probabilities still belong to the same keys."""
    record = _known(net, args[0]) if args else None
    result = function(*args, **kwargs)
    if record is not None:
        _pass_on(net, record, result)
    return result


def changing(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation that is tracked if it does not change the probabilities, or scales all those
    of a query equally (a mask of heads)."""
    tracked = [(p, record) for p in args if (record := _known(net, p)) is not None]
    result = function(*args, **kwargs)
    if len(tracked) == 1:
        p, record = tracked[0]
        others = [x for x in args if x is not p]
        if _scales(function, others) or _same(record, p, result):
            _pass_on(net, record, result)
    return result


def _known(net: CaptureSession, p: Any) -> _Softmax | None:
    """Return the record of probabilities, if they have not changed since."""
    record = net.softmaxes.get(p) if net.softmaxes and isinstance(p, Tensor) else None
    return record if record is not None and record.held.still(p) else None


def _pass_on(net: CaptureSession, record: _Softmax, p: Tensor, held: _Held | None = None) -> None:
    """Record the new form of the probabilities, unless they are expanded."""
    alike = p.shape[-2:] == record.scores.shape[-2:] and p.numel() == record.scores.numel()
    if alike and p.is_floating_point():
        shapes = (*record.shapes, p.shape)
        net.softmaxes[p] = replace(record, held=held or _Held.by(p), shapes=shapes)


def _scales(function: Any, others: list[Any]) -> bool:
    """Return True if this multiplies all keys by the same factor."""
    if function not in _PRODUCTS:
        return False
    return not any(isinstance(x, Tensor) and x.dim() and x.shape[-1] != 1 for x in others)


def _same(record: _Softmax, p: Tensor, result: Tensor) -> bool:
    """Return True if all queries with a visible key have kept their probabilities."""
    if result.shape != p.shape or not record.held.still(p):  # changed by `out=`
        return False
    dead = (record.scores.amax(-1) <= FORBIDDEN).reshape(p.shape[:-1])
    return bool(((result == p).all(-1) | dead | p.isnan().any(-1)).all())  # NaN is inconclusive


def product(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `matmul`, `@` or `bmm`, which may multiply probabilities `[…, T, S]` with values."""
    out = function(*args, **kwargs)
    if len(args) < 2 or _is_context(net, args[:2], out):
        return out
    p, v = args[:2]
    _note_by_hand(net, p)
    record, result = _attends(net, p), out
    if record is None and (turned := _turned(net, v)) is not None:  # values first: v @ pᵀ
        p, v, record, result = turned, p.mT, _attends(net, turned), out.mT
    if record is None and v.dim() == 2 and p.dim() > 2:  # a projection by a weight
        net.projected(p, out)
    if record is None or v.dim() < 3 or p.shape[:-1] != result.shape[:-1]:
        return out
    sizes = (1,) * (p.dim() - v.dim()) + tuple(v.shape)
    new = _emit(net, record, p.shape, result, v, [size == 1 for size in sizes[:-2]])
    if new is None:
        return out
    return new if result is out else new.mT


def _turned(net: CaptureSession, x: Tensor) -> Tensor | None:
    """Return the recorded probabilities whose transpose this is, if any."""
    memory = _storage(x) if net.softmaxes and x.dim() > 2 else set()
    for p in list(net.softmaxes) if memory else []:
        same = p.shape == x.mT.shape and p.stride() == x.mT.stride()
        if same and p.storage_offset() == x.storage_offset() and _storage(p) == memory:
            return p
    return None


def _attends(net: CaptureSession, p: Any) -> _Softmax | None:
    """Return the record of probabilities that are still the softmax of their scores."""
    record = _known(net, p)
    return record if record is not None and record.before.still(record.scores) else None


def einsum(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `torch.einsum`, which may multiply probabilities and values in any order of axes."""
    out = function(*args, **kwargs)
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or not isinstance(args[0], str) or _is_context(net, operands, out):
        return out
    for x in operands:
        _note_by_hand(net, x)
    tracked = [
        (n, record) for n, x in enumerate(operands) if (record := _attends(net, x)) is not None
    ]
    if not tracked:
        return out
    place, record = tracked[0]
    p, v = operands[place], operands[1 - place]
    found_order = _order(args[0], [x.dim() for x in operands], place)
    if found_order is TIED:
        net.followed(record.mark)
        shape = record.scores.shape
        quote = f"the softmax of {list(shape)} weighs {TIED}"
        _may_attend(net, quote, shape[-1] == shape[-2] > 1)
    if not isinstance(found_order, tuple) or v.dim() < 3:
        return out
    order, shared, of_values = found_order
    sorted_ = out.permute(order)
    if sorted(axis for axis in of_values if axis >= 0) == list(range(v.dim())):
        v = v.permute([axis for axis in of_values if axis >= 0])
        v = v[tuple(None if axis < 0 else slice(None) for axis in of_values)]
    new = _emit(net, record, p.shape, sorted_, v, shared, queries_first=order[-2] < order[0])
    if new is None:
        return out
    return new.permute([order.index(axis) for axis in range(out.dim())])


def _is_context(net: CaptureSession, factors: Sequence[Tensor], out: Tensor) -> bool:
    """Return True if a factor is a softmax over an axis other than the last, or a product with one.

    Linear attention computes such a context from keys and values. It is identified by its storage,
    which its views share.
    """
    if not net.contexts or not any(_storage(x) & net.contexts for x in factors):
        return False
    net.contexts |= _storage(out)
    return True


def _storage(x: Tensor) -> set[StorageWeakRef]:
    """Return the storage of a tensor as a set; empty for sparse tensors and in `torch.func`."""
    if x.layout is not torch.strided or transformed():
        return set()
    return {StorageWeakRef(x.untyped_storage())}


TIED = "several vectors of each key at once, as rows do that share their weights (tied rows)"
"""The reason reported for row attention in MSA Transformers, whose scores are sums over rows."""


def _order(
    equation: str, axes: list[int], place: int
) -> tuple[list[int], list[bool], list[int]] | str:
    """Return the axes of an einsum's result, in the order of the probabilities with the value's
    axis in place of the key's; the leading axes that share their values; and the axes of the values
    in the same order, −1 for shared ones. Return `TIED` for a product with several vectors per key,
    and an empty string if it is not a product of probabilities and values."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        return ""
    spelled = terms.split(",")
    missing = [n - len(term.replace("...", "")) for n, term in zip(axes, spelled, strict=True)]
    letters = "ABCDEFGHIJ"[: max(missing)]  # the axes of `...`, aligned at the end in all operands
    if set(letters) & set(equation):
        return ""
    spelled = [
        term.replace("...", letters[len(letters) - n :])
        for term, n in zip(spelled, missing, strict=True)
    ]
    result = result.replace("...", letters)
    p, v = spelled[place], spelled[1 - place]
    own = [letter for letter in result if letter not in p]
    if p[-1] in result or p[-1] not in v or not own or not {*own} <= {*v}:
        return ""
    if len(own) > 1:
        return TIED if {*p[:-1]} <= {*result} else ""
    wanted = p[:-1] + own[0]
    if sorted(wanted) != sorted(result):
        return ""
    of_values = [v.find(c) for c in (*p[:-2], p[-1], own[0])]
    return [result.index(c) for c in wanted], [c not in v for c in p[:-2]], of_values


def _emit(
    net: CaptureSession,
    record: _Softmax,
    shape: torch.Size,
    out: Tensor,
    values: Tensor,
    shared: Sequence[bool],
    queries_first: bool = False,
) -> Tensor | None:
    """Report attention with these probabilities; `out` has their order of axes.

    Leading axes that are `shared` use the same `values`, as do the heads of a group.
    `queries_first` means that the product has the query axis before the first leading axis.
    """
    net.refuse_transforms()
    for p in [p for p, other in net.softmaxes.items() if other.scores is record.scores]:
        del net.softmaxes[p]  # autograd may keep p, but should not keep the scores with it
    net.followed(record.mark)
    # Softmax and product may be in different modules.
    running = net.names.common(record.running)
    name = net.names.name(running[-1])
    wide = next((s for s in (shape, *reversed(record.shapes)) if len(s) > 3), shape)
    shared = shared if wide is shape else ()
    outputs = torch.Size((*wide[:-2], *out.shape[-2:]))
    axes = leading(outputs, running, values, shared, net.heads(name))
    quote = f"the softmax of {list(wide)}"
    if axes is None:
        reason = f"{quote}: it is unclear which axis holds heads and which holds blocks"
        net.leave_out(running[-1], reason)
        return None
    heads_out = axes.split(out)
    behind = keys_behind(running[-1].module)
    call = call_of_scores(net, "softmax", axes.split(record.scores), heads_out, behind)
    call.name = name
    call.values = partial(_values, call, values, shape[:-2], axes)
    waiting = None
    if composite() is None:
        place = (name, quote, heads_out, out.shape, call.keys, axes.sure, axes.declared)
        waiting = PendingCall(*place, by_hand=True, queries_first=queries_first)
    new = net.emit(call, waiting, running[-1])
    return None if new is None else axes.join(new, out.shape)


def _values(call: AttentionCall, values: Tensor, lead: torch.Size, axes: Leading) -> Tensor:
    """Return values `[…, S, Dv]` as those of a call, `[B, H, S, Dv]`."""
    if values.dim() > len(lead) + 2 or values.shape[-2] < call.keys:
        raise ValueError(
            f"the values of {call.name!r} are not visible: those of its product are "
            f"{list(values.shape)}, in another order of axes"
        )
    return axes.split(values.expand(*lead, *values.shape[-2:]))[:, :, : call.keys]


def call_of_scores(
    net: CaptureSession,
    route: str,
    scores: Tensor,
    out: Tensor,
    behind: int = 0,
    vectors: tuple[Tensor, Tensor] | None = None,
) -> AttentionCall:
    """Return a call from its scores `[B, H, T, S]`, which are −∞ or very negative if forbidden.

    The mask holds the scores. Queries and keys are unknown, unless `vectors` has them.
    """
    within = composite()
    batch, heads, queries, keys = scores.shape
    extent = Extent(batch, heads, heads, queries, keys)
    scores = scores.to(statistics_dtype(scores.dtype))
    own = within.own if within is not None else (False if net.names.crosses else None)

    def find(sizes: Extent) -> Mask:
        return as_bias(scores[..., : sizes.keys], FORBIDDEN)

    mask, keys, behind = resolve_padding(find, extent, scores.device, own, behind)
    zero = scores.new_zeros(1)
    q, k = vectors or (zero.expand(batch, heads, size, 8) for size in (queries, keys))
    q, k = q.to(scores.dtype), k[:, :, :keys].to(scores.dtype)
    v, weight = zero.expand(*k.shape[:3], out.shape[-1]), within and within.projection
    sight = {"mask": mask, "scale": 0.0 if vectors else None}  # the mask has the scores
    call = AttentionCall(net.names.current, route, q, k, v, out, sight, weight, behind=behind)
    call.hidden = "" if vectors else _HIDDEN
    return call


_HIDDEN = "only the scores of this attention are visible, not its queries and keys"


def _named(*names: str) -> list[Any]:
    """Return all functions of PyTorch with these names."""
    owners = (torch, torch.Tensor, F, torch.special)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


_PRODUCTS = _named("mul", "multiply", "__mul__", "__rmul__")
_STEPS: dict[Interceptor, str] = {
    reshaping: "to type type_as float half bfloat16 double view reshape contiguous clone flatten "
    "unflatten unsqueeze squeeze",
    passing: "dropout dropout_ feature_dropout alpha_dropout nan_to_num",
    changing: "masked_fill where mul multiply __mul__ __rmul__",
    softmax: "softmax",
    exp: "exp exp_ exp2 exp2_",
    divided: "div div_ divide true_divide __truediv__ __idiv__ __itruediv__",
    grouped: "scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ "
    "segment_reduce",
    product: "matmul __matmul__ bmm",
    einsum: "einsum",
}


def functions() -> dict[Any, Interceptor]:
    """Return the intercepted functions of PyTorch, each with its interceptor in this file."""
    interceptors = {one: route for route, names in _STEPS.items() for one in _named(*names.split())}
    return interceptors | {torch.functional.einsum: einsum}
