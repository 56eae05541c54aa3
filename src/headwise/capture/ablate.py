"""`ablate(model, heads)`: heads that give nothing, or nothing about the text, while it lasts."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..core.numbers import as_int
from .call import AttentionCall, seed_of_call
from .edit import Edit, EditedCall, Replace, check_names, edited
from .head_address import HeadAddress, Layer, parse_head, parse_layer
from .modules import check_model
from .reference import AblationReference, drawn, valid_queries

How = Literal["zero", "mean", "resample"]

Heads = HeadAddress | Iterable[HeadAddress] | Mapping[Any, Iterable[int] | Tensor]
"""Addresses of heads, or the numbers of heads by layers."""


@contextmanager
def ablate(
    model: nn.Module,
    heads: Heads,
    how: How = "zero",
    *,
    reference: AblationReference | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Take heads out of a model while this lasts: their outputs before the output projection.

    The other heads' outputs stay bit for bit what they are; what comes after sees what is left.
    Gradients flow through that, and none through the heads that are out: backward belongs inside
    the `with` where activations are checkpointed, as the model runs again then.

    Args:
        model: any model that `watch()` sees.
        heads: which heads, as addresses: `"L2H9"`, `(2, 9)`, `("transformer.h.2.attn", 9)` or
            `"transformer.h.2.attn:9"`, one or several; or a dict of layers and the numbers of their
            heads. Layers are numbers as in tables, qualified names of modules, or patterns such as
            `"transformer.h.*.attn"`; all count from 0.
        how: what takes their place. `"zero"`: 0 (Michel et al. 2019, Voita et al. 2019). `"mean"`:
            the head's mean output, which keeps what it gives to every text alike (Wang et al.
            2022): over batch and valid queries of the reference, or of the call itself.
            `"resample"`: what the head gave at the same positions in another text (Chan et al.
            2022): a row of the reference, or another row of the call's batch, drawn for each row.
            All modules draw alike in a forward pass, so that their heads come from one text.
        reference: what `ablation_reference()` kept of other texts.
        seed: of the draw; PyTorch's own random numbers are not touched.

    Raises:
        ValueError: heads that are no addresses; a module that the model has not, or a head that the
            module has not (then when it is called), with those there are; on exit, a module that
            did not attend meanwhile; a reference that does not fit; a batch of one to resample
            from.

    >>> import headwise as hw
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> with ablate(layer, ["L0H0"]):
    ...     out = layer(x)
    >>> _ = layer.out.weight.data[:, :8].zero_()  # what the output projection reads of head 0
    >>> torch.allclose(out, layer(x))
    True
    """
    check_model("ablate", model)
    quote = f"ablate({type(model).__name__}, {reprlib.repr(heads)}, how={how!r})"
    if how not in get_args(How):
        raise ValueError(f"{quote}: how must be one of {', '.join(get_args(How))}.")
    if how == "zero" and reference is not None:
        raise ValueError(f"{quote}: zeros need no reference; leave it out.")
    if not isinstance(reference, AblationReference | None):
        raise ValueError(
            f"{quote}: reference must be what ablation_reference(…) gives, and "
            f"{type(reference).__name__} is not."
        )
    requested = heads_by_layer(model, heads, quote)
    without = (Replace(0.0) if how == "zero" else _Ablation(how, reference, seed),)
    plan = [(layer, head, without) for layer, numbers in requested.items() for head in numbers]
    plan += [(layer, None, ()) for layer, numbers in requested.items() if not numbers]
    with edited(model, plan, quote, "ablate"):
        yield


@dataclass(frozen=True, eq=False)
class _Ablation(Edit):
    """The replacement for heads that are ablated by mean or by resampling."""

    how: How
    reference: AblationReference | None
    seed: int

    @torch.no_grad()
    def change(self, x: Tensor, place: EditedCall) -> Tensor:
        if self.how == "mean":
            return _mean(place.call, place.index, self.reference)
        own = seed_of_call(self.seed, place.number)
        return _resampled(place.call, place.index, self.reference, own)


def _mean(call: AttentionCall, index: Tensor, reference: AblationReference | None) -> Tensor:
    """`[1, h, 1, Dv]`."""
    if reference is None:
        reference = AblationReference()
        reference.take(call)
    mean = reference.mean(call.name)
    _check_fit(call, mean.shape)
    return mean[index.to(mean.device)][None, :, None]


def _resampled(
    call: AttentionCall, index: Tensor, reference: AblationReference | None, seed: int
) -> Tensor:
    """`[B, h, T, Dv]`."""
    out = call.out.detach()
    if reference is not None:
        outs, valid = reference.rows(call.name, out.shape[2])
        _check_fit(call, outs.shape[1::2])
        return drawn(out.shape, outs, valid, index.to(outs.device), seed, own=False)
    if len(out) < 2:
        raise ValueError(
            f"ablate(…, how='resample'): {call.name!r} is called with a batch of one, which has no "
            f"other row to draw from; give a larger batch, or "
            f"reference=ablation_reference(…, rows=True)."
        )
    return drawn(out.shape, out, valid_queries(call), index, seed, own=True)


def _check_fit(call: AttentionCall, shape: torch.Size) -> None:
    """`shape` is `[H, Dv]` of the reference."""
    here = call.out.shape[1::2]
    if shape != here:
        raise ValueError(
            f"ablate(…): {call.name!r} has {here[0]} heads of width {here[1]}, and the reference "
            f"{shape[0]} of width {shape[1]}; take the reference from the same model."
        )


def heads_by_layer(model: nn.Module, heads: Heads, quote: str) -> dict[Layer, tuple[int, ...]]:
    """Return the numbers of the heads of each layer that is given, all names checked."""
    try:
        given = _by_layer(heads)
    except ValueError as error:
        raise ValueError(f"{quote}: {error}.") from None
    check_names(model, given, quote)
    return given


def _by_layer(heads: Heads) -> dict[Layer, tuple[int, ...]]:
    found: dict[Layer, tuple[int, ...]] = {}
    if isinstance(heads, Mapping):
        for name, numbers in heads.items():
            layer = parse_layer(name)
            found[layer] = (*found.get(layer, ()), *_numbers(name, numbers))
        return found
    single = isinstance(heads, tuple) and len(heads) == 2 and as_int(heads[1]) is not None
    if single or isinstance(heads, str) or not isinstance(heads, Iterable):
        heads = [heads]  # type: ignore[list-item]
    for address in heads:
        layer, head = parse_head(address)
        found[layer] = (*found.get(layer, ()), head)
    return found


def _numbers(layer: object, given: Iterable[int] | Tensor) -> tuple[int, ...]:
    try:
        listed = given.tolist() if isinstance(given, Tensor) else list(given)
        numbers = tuple(operator.index(head) for head in listed)
        if any(isinstance(head, bool) for head in listed) or min(numbers, default=0) < 0:
            raise TypeError
    except TypeError:
        raise ValueError(
            f"the heads of {layer!r} must be a list of numbers from 0, such as [0, 3]"
        ) from None
    return numbers
