"""`ablate(model, heads)`: replace the outputs of heads by zeros, means or other texts' outputs."""

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
"""Addresses of heads, or a dict from layers to the numbers of their heads."""


@contextmanager
def ablate(
    model: nn.Module,
    heads: Heads,
    how: How = "zero",
    *,
    reference: AblationReference | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Ablate heads in a `with` block: replace their outputs before the output projection.

    The outputs of the other heads stay bit-identical; later layers see the changed hidden states.
    Gradients do not flow through ablated heads. With activation checkpointing, call `backward()`
    inside the `with` block too, because the model is then recomputed.

    Args:
        model: any model that `watch()` supports.
        heads: the heads, as addresses: `"L2H9"`, `(2, 9)`, `("transformer.h.2.attn", 9)` or
            `"transformer.h.2.attn:9"`, one or several; or a dict of layers and the numbers of their
            heads. Layers are numbers as in tables, qualified names of modules, or patterns such as
            `"transformer.h.*.attn"`. Numbers start at 0.
        how: the replacement. `"zero"`: 0 (Michel et al. 2019, Voita et al. 2019). `"mean"`: the
            head's mean output over batch and valid queries of the reference, or else of the call,
            which keeps what is common to all texts (Wang et al. 2022). `"resample"`: the head's
            output at the same positions in another text (Chan et al. 2022): a row of the reference,
            or another row of the batch, sampled for each row. All modules sample the same texts in
            a forward pass.
        reference: the result of `ablation_reference()` for other texts.
        seed: the seed of the samples; PyTorch's global generator is not used.

    Raises:
        ValueError: an invalid address; a module or head that does not exist (for heads, when the
            module is called); on exit, a module that did not attend; a reference that does not fit;
            resampling from a batch of one.

    >>> import headwise as hw
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> with ablate(layer, ["L0H0"]):
    ...     out = layer(x)
    >>> _ = layer.out.weight.data[:, :8].zero_()  # what the output projection reads from head 0
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
            f"{quote}: reference must be the result of ablation_reference(…), got "
            f"{type(reference).__name__}."
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
    """Return the mean outputs of some heads, `[1, h, 1, Dv]`."""
    if reference is None:
        reference = AblationReference()
        reference.take(call)
    mean = reference.mean(call.name)
    _check_fit(call, mean.shape)
    return mean[index.to(mean.device)][None, :, None]


def _resampled(
    call: AttentionCall, index: Tensor, reference: AblationReference | None, seed: int
) -> Tensor:
    """Return the resampled outputs of some heads, `[B, h, T, Dv]`."""
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
    """Raise ValueError if `shape`, `[H, Dv]` of the reference, differs from the call's."""
    here = call.out.shape[1::2]
    if shape != here:
        raise ValueError(
            f"ablate(…): {call.name!r} has {here[0]} heads of width {here[1]}, and the reference "
            f"{shape[0]} of width {shape[1]}; take the reference from the same model."
        )


def heads_by_layer(model: nn.Module, heads: Heads, quote: str) -> dict[Layer, tuple[int, ...]]:
    """Return the numbers of the given heads by layer; raise ValueError for unknown names."""
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
