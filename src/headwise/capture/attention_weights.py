"""`attention_of()`: the attention weights of selected heads as a matrix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._text import and_more
from ..core.numbers import as_int, whole_numbers
from ..core.reference import Definition
from ..stats.entries import entries
from ..stats.lse import LOG_SUM_EXP
from ..stats.plan import Need
from ..stats.record import Reading, Record
from ..stats.statistic import Statistic
from .call import AttentionCall, ObserveOptions
from .catch import catch
from .head_address import HeadAddress, Layer, as_written, is_head, parse_head, parse_layer
from .modules import call_model, check_inputs, check_model, names_of

MOST_BYTES = 2**30
"""The largest size of all requested attention weights."""


def attention_of(
    model: nn.Module,
    inputs: Any,
    layer: Layer | HeadAddress,
    head: int | Sequence[int] | Tensor | None = None,
    *,
    nth: int | None = None,
) -> Float[Tensor, "B *h T S"]:
    """Run a model and return the exact attention weights of one of its layers.

    Each entry is `exp(s_ij − lse_i)` of the model's own queries and keys, for any kernel. The model
    and its mode do not change; in training, weights are those before dropout. For long texts, use
    `Map(n)` or `TopKeys(k)` with `watch()`, which never build this matrix.

    Args:
        model: any module that `watch()` supports.
        inputs: the inputs of the model: a dict of keywords (the output of a tokenizer), a tuple or
            list of arguments, or a single argument.
        layer: the module that attends, by the number of the layer (1 or `"L1"`, as in tables) or
            by its qualified name; or one head, such as `"L1H0"`, `(1, 0)` or `"layers.1.attn:0"`.
        head: the number of a head, from 0, or several. Default: all heads, or that of the address.
        nth: the index of one call of a module that is called more than once. Default: all calls.

    Returns:
        Weights in float32 (float64 for a model in float64), without a graph: `[B, T, S]` for one
        head, `[B, h, T, S]` for several. Rows sum to 1 minus the weight of a learned sink; queries
        without a visible key, such as padding, have a row of zeros. If a module is called more than
        once, calls of equal shape are concatenated along the batch.

    Raises:
        ValueError: the layer did not attend (the message lists those that did) or was left out; the
            head does not exist; the weights exceed a gigabyte; calls have different shapes.

    >>> import headwise as hw
    >>> from headwise.models import builtin, load
    >>> model, tokenizer = load(builtin())
    >>> ids = torch.tensor([tokenizer.encode("The with statement wraps the block").ids])
    >>> weights = hw.attention_of(model, ids, "L1H0")
    >>> weights.shape, bool(weights.sum(-1).allclose(torch.ones(1, ids.shape[1])))
    (torch.Size([1, 11, 11]), True)

    Source: Vaswani et al. 2017, §3.2.1.
    """
    arguments = f"…, layer={layer!r}, head={head!r}"
    quote = check_model("attention_of", model).replace("…", arguments)
    if nth is not None and as_int(nth) is None:
        raise ValueError(f"{quote}: nth={nth!r} must be the number of a call, from 0.")
    wanted, head = _parse(model, layer, head, quote)
    check_inputs(quote, inputs)
    found: dict[int, Tensor] = {}
    met: dict[str, None] = {}
    calls = itertools.count()

    def listen(call: AttentionCall) -> None:
        if call.again:
            return
        met[call.name] = None
        if wanted not in (call.layer, call.name):
            return
        number = next(calls)
        if nth is not None and nth != number:
            return
        if call.heads < call.all_heads:
            raise ValueError(
                f"{quote}: {call.heads} of its {call.all_heads} heads are on this rank."
            )
        chosen = _heads(head, call, quote)
        size = call.batch * len(chosen) * call.queries * call.keys * 4
        if size > MOST_BYTES:
            raise ValueError(
                f"{quote}: {len(chosen)} heads × {call.queries} queries × {call.keys} keys are "
                f"{size / 2**30:.1f} GiB; use fewer heads or a shorter text, or watch with Map(n) "
                f"or TopKeys(k)."
            )
        weights = call.observe([_Weights(tuple(chosen))], ObserveOptions())["weights"].values
        call.on_complete(lambda _: found.update({number: weights}))

    with catch(model, listen, function="attention_of") as net, torch.no_grad():
        call_model(model, inputs)
    if not found:
        if wanted in net.names.left_out:
            raise ValueError(f"{quote}: {wanted!r} is left out: {net.names.left_out[str(wanted)]}.")
        if count := next(calls):
            raise ValueError(f"{quote}: it is called {count} times, so there is no call {nth}.")
        known = f"those that attend: {and_more([repr(one) for one in met], 12)}"
        if not met:
            known = f"no attention was seen: {net.names.why_nothing()}"
        raise ValueError(f"{quote}: no such layer; {known}.")
    if len({one.shape[1:] for one in found.values()}) > 1:
        shapes = [f"nth={number} gives {list(one.shape)}" for number, one in found.items()]
        raise ValueError(
            f"{quote}: {wanted!r} is called with different lengths; give one of its calls: "
            f"{and_more(shapes, 12)}; or watch and take seen[{wanted!r}].calls."
        )
    every = list(found.values())
    weights = every[0] if len(every) == 1 else torch.cat(every)
    return weights if as_int(head) is None else weights[:, 0]


def _parse(model: nn.Module, layer: Any, head: Any, quote: str) -> tuple[Layer, Any]:
    """Return the layer and its head or heads from the arguments."""
    try:
        if isinstance(layer, str) and any(as_written(layer) == n for n in names_of(model).values()):
            return as_written(layer), head
        if isinstance(layer, tuple | list) or (isinstance(layer, str) and is_head(layer)):
            layer, own = parse_head(layer)
            if head is not None and head != own:
                raise ValueError("the address already names a head; leave out head")
            return layer, own
        return parse_layer(layer), head
    except ValueError as error:
        raise ValueError(f"{quote}: {error}.") from None


@dataclass(frozen=True)
class _Weights(Statistic):
    """The attention weights of some heads, `[B, h, T, S]`, as a statistic."""

    heads: tuple[int, ...]
    names = ("weights",)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return {"weights": LOG_SUM_EXP}

    def metric(self, record: Record) -> dict[str, Reading]:
        return {"weights": Reading(entries(record, self.heads))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"weights": full.weights[:, list(self.heads)]}


def _heads(head: int | Sequence[int] | Tensor | None, call: AttentionCall, quote: str) -> list[int]:
    """Return the numbers of the requested heads."""
    if head is None:
        return list(range(call.heads))
    one = as_int(head)
    chosen = whole_numbers(head) if one is None else [one]
    if not chosen or not all(0 <= number < call.heads for number in chosen):
        raise ValueError(f"{quote}: {call.name!r} has the heads 0 to {call.heads - 1}.")
    return chosen
