"""Attention that a model writes out itself: a softmax of scores, and a product with the values.

A softmax over the last axis is remembered, through dropout and changes of dtype or shape, until
something with a vector for each key is multiplied with it: then it was attention, and only then it
is told of. The scores are at hand, so that the call is one whose whole score is a bias.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._axes import Extent, statistics_dtype
from ..masks import Mask
from .calls import HeadsCall
from .foreign import FORBIDDEN, as_bias, at_the_end, without_padding
from .net import Net, Road
from .roads import composite, leading


@dataclass(frozen=True, eq=False)
class _Softmax:
    """The scores of a softmax, the shapes that its probabilities have had, and who ran then."""

    scores: Tensor
    shapes: tuple[torch.Size, ...]
    running: tuple[nn.Module, ...]


def softmax(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A softmax, which may be a step of attention."""
    p = function(*args, **kwargs)
    scores = args[0] if args else kwargs["input"]
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if scores.dim() > 2 and axis in (-1, scores.dim() - 1) and not scores.is_nested:
        net.softmaxes[p] = _Softmax(scores, (scores.shape,), tuple(net.names.stack))
    return p


def passing(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What probabilities may pass through and still be those of the same keys."""
    result = function(*args, **kwargs)
    if net.softmaxes and args and isinstance(args[0], Tensor):
        found = net.softmaxes.get(args[0])
        if found is not None and result.shape[-2:] == found.scores.shape[-2:]:
            if result.numel() != found.scores.numel():  # spread over something else
                return result
            net.softmaxes[result] = replace(found, shapes=(*found.shapes, result.shape))
    return result


def product(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`matmul`, `@` and `bmm`: probabilities `[…, T, S]` times values `[…, S, D]`."""
    out = function(*args, **kwargs)
    if not net.softmaxes or len(args) < 2:
        return out
    p, v = args[:2]
    found = net.softmaxes.get(p)
    if found is None or v.dim() < 3 or p.shape[:-1] != out.shape[:-1]:
        return out
    grouped = p.dim() == v.dim() == 5 and v.shape[2] == 1
    new = _tell(net, found, p.shape, out, grouped)
    return out if new is None else new.reshape(out.shape)


def einsum(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`torch.einsum` of the two, in any order of axes."""
    out = function(*args, **kwargs)
    operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if not net.softmaxes or len(operands) != 2 or not isinstance(args[0], str):
        return out
    places = [n for n, x in enumerate(operands) if x in net.softmaxes]
    if not places:
        return out
    p, v = operands[places[0]], operands[1 - places[0]]
    order = _order(args[0], [x.dim() for x in operands], places[0])
    if order is None or v.dim() < 3:
        return out
    sorted_ = out.permute(order)
    grouped = p.dim() == 5 and v.dim() == 4
    new = _tell(net, net.softmaxes[p], p.shape, sorted_, grouped)
    if new is None:
        return out
    return new.reshape(sorted_.shape).permute([order.index(axis) for axis in range(out.dim())])


def _order(equation: str, axes: list[int], place: int) -> list[int] | None:
    """The axes of an einsum's result, ordered as those of the probabilities with the value's own
    for the key's; `None` where it is no product of probabilities with a vector for each key."""
    terms, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow:
        return None
    spelled = terms.split(",")
    missing = [n - len(term.replace("...", "")) for n, term in zip(axes, spelled, strict=True)]
    letters = "ABCDEFGHIJ"[: max(missing)]  # what stands for `...`, the same at the end in all
    if set(letters) & set(equation):
        return None
    spelled = [
        term.replace("...", letters[len(letters) - n :])
        for term, n in zip(spelled, missing, strict=True)
    ]
    result = result.replace("...", letters)
    p, v = spelled[place], spelled[1 - place]
    own = [letter for letter in result if letter not in p]
    if p[-1] in result or p[-1] not in v or len(own) != 1 or own[0] not in v:
        return None
    wanted = p[:-1] + own[0]
    return [result.index(c) for c in wanted] if sorted(wanted) == sorted(result) else None


def _tell(
    net: Net, found: _Softmax, shape: torch.Size, out: Tensor, grouped: bool
) -> Tensor | None:
    """Tell of attention with these probabilities; `out` has their order of axes.

    Those that are `grouped`, `[B, G, H // G, T, S]`, share the values of a group.
    """
    for p in [p for p, other in net.softmaxes.items() if other.scores is found.scores]:
        del net.softmaxes[p]  # autograd may keep p, and should not keep the scores with it
    batch, heads = (shape[0], shape[1] * shape[2]) if grouped else _sizes(net, found, shape)
    scores = found.scores.reshape(batch, heads, *shape[-2:])
    made = out.reshape(batch, heads, *out.shape[-2:])
    call = call_of_scores(net, "softmax", scores, made)
    call.name = net.names.common(found.running)  # softmax and product may have modules of their own
    return net.tell(call)


def call_of_scores(net: Net, road: str, scores: Tensor, made: Tensor) -> HeadsCall:
    """A call of which only the scores `[B, H, T, S]` are known, −∞ or nearly where forbidden."""
    within = composite()
    if within is not None and within.extra:  # keys without a position go before all others
        scores = scores.roll(within.extra, -1)
    batch, heads, queries, keys = scores.shape
    extent = Extent(batch, heads, heads, queries, keys)
    scores = scores.to(statistics_dtype(scores.dtype))
    mask: Mask = as_bias(scores, FORBIDDEN)
    own = within.own if within is not None else (False if net.names.crosses else None)
    if at_the_end(mask, extent) if own is None else own:
        mask = without_padding(mask, extent, scores.device)
    q, k, v = (
        scores.new_zeros(1).expand(batch, heads, length, width)
        for length, width in ((queries, 8), (keys, 8), (keys, made.shape[-1]))
    )
    return HeadsCall(
        *(net.names.current, road, q, k, v, made),
        keywords={"mask": mask},
        projection=None if within is None else within.projection,
        own_positions=False,  # the mask has seen to that
    )


def _sizes(net: Net, found: _Softmax, shape: torch.Size) -> tuple[int, int]:
    """Batch and heads: from the last shape that tells them apart."""
    for known in (shape, *reversed(found.shapes)):
        if len(known) > 3 and known.numel() == shape.numel():
            return leading(known, net.names.module)
    return leading(shape, net.names.module)


def _named(*names: str) -> list[Any]:
    """Every function of PyTorch of these names."""
    owners = (torch, torch.Tensor, F, torch.special)
    return [getattr(owner, name) for name in names for owner in owners if hasattr(owner, name)]


def functions() -> dict[Any, Road]:
    """The functions of this file."""
    return {
        **dict.fromkeys(
            _named(
                *("dropout", "dropout_", "feature_dropout", "alpha_dropout"),
                *("to", "type", "type_as", "float", "half", "bfloat16", "double"),
                *("view", "reshape", "contiguous", "clone", "flatten", "unflatten", "unsqueeze"),
                *("squeeze", "nan_to_num", "masked_fill", "mul", "__mul__"),
            ),
            passing,
        ),
        **dict.fromkeys(_named("softmax"), softmax),
        **dict.fromkeys(_named("matmul", "__matmul__", "bmm"), product),
        torch.einsum: einsum,
        torch.functional.einsum: einsum,
    }
