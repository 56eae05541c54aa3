"""`ablate(model, heads)`: heads that give nothing, or nothing about the text, while it lasts."""

from __future__ import annotations

import operator
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from .call import AttentionCall, seed_of_call
from .head_outputs import HeadOutputs, drawn, valid_queries
from .modules import as_written, attending, check_model
from .session import catch

How = Literal["zero", "mean", "resample"]


@contextmanager
def ablate(
    model: nn.Module,
    heads: Mapping[str, Iterable[int] | Tensor],
    how: How = "zero",
    *,
    reference: HeadOutputs | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """Take heads out of a model while this lasts: their outputs before the output projection.

    The other heads' outputs stay bit for bit what they are; what comes after sees what is left.
    Gradients flow through that, and none through the heads that are out: backward belongs inside
    the `with` where activations are checkpointed, as the model runs again then.

    Args:
        model: any model that `watch()` sees.
        heads: which heads of which module: the qualified names that `watch()` gives, or patterns
            such as `"transformer.h.*.attn"`; heads count from 0.
        how: what takes their place. `"zero"`: 0 (Michel et al. 2019, Voita et al. 2019). `"mean"`:
            the head's mean output, which keeps what it gives to every text alike (Wang et al.
            2022): over batch and valid queries of the reference, or of the call itself.
            `"resample"`: what the head gave at the same positions in another text (Chan et al.
            2022): a row of the reference, or another row of the call's batch, drawn for each row.
            All modules draw alike in a forward pass, so that their heads come from one text.
        reference: what `head_outputs()` kept of other texts.
        seed: of the draw; PyTorch's own random numbers are not touched.

    Raises:
        ValueError: heads that are no dict; a module that the model has not, or a head that the
            module has not (then when it is called), with those there are; on exit, a module that
            did not attend meanwhile; a reference that does not fit; a batch of one to resample
            from.

    >>> import headwise as hw
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> with ablate(layer, {"": [0]}):
    ...     out = layer(x)
    >>> _ = layer.out.weight.data[:, :8].zero_()  # what the output projection reads of head 0
    >>> torch.allclose(out, layer(x))
    True
    """
    check_model("ablate", model)
    said = f"ablate({type(model).__name__}, {reprlib.repr(heads)}, how={how!r})"
    if not isinstance(heads, Mapping) or not all(isinstance(name, str) for name in heads):
        raise ValueError(
            f"{said}: heads must be a dict of modules' names and their heads, such as "
            f"{{'layers.2.attn': [0, 3]}}."
        )
    if how not in get_args(How):
        raise ValueError(f"{said}: how must be one of {', '.join(get_args(How))}.")
    if how == "zero" and reference is not None:
        raise ValueError(f"{said}: zeros need no reference; leave it out.")
    if not isinstance(reference, HeadOutputs | None):
        raise ValueError(
            f"{said}: reference must be what head_outputs(…) gives, and "
            f"{type(reference).__name__} is not."
        )
    asked = _asked(model, heads, said)
    calls: Counter[str] = Counter()
    attended: dict[str, None] = {}

    def listen(call: AttentionCall) -> Tensor | None:
        name = call.name
        calls[name] += not call.again
        call.once_whole(lambda _: attended.setdefault(name))
        chosen = {head for pattern in asked if _fits(call.name, pattern) for head in asked[pattern]}
        lacking = sorted(chosen - set(range(call.all_heads)))
        if lacking:
            raise ValueError(
                f"{said}: {call.name!r} has the heads 0 to {call.all_heads - 1}, and no "
                f"{', '.join(map(str, lacking))}."
            )
        here = sorted(head for head in range(call.heads) if call.first_head + head in chosen)
        if not here:
            return None
        out, index = call.out, torch.tensor(here, device=call.out.device)
        if how == "zero":
            return out.index_fill(1, index, 0.0)
        with torch.no_grad():
            if how == "mean":
                put = _mean(call, index, reference)
            else:
                own = seed_of_call(seed, calls[call.name])
                put = _resampled(call, index, reference, own)
        whole = (len(out), len(index), *out.shape[2:])
        return out.index_copy(1, index, put.to(out).expand(whole))

    with catch(model, listen, function="ablate") as net:
        yield
    for name, reason in net.names.left_out.items():
        if any(_fits(name, pattern) for pattern in asked):
            raise ValueError(f"{said}: {name!r} was not ablated as a whole: {reason}.")
    idle = [pattern for pattern in asked if not any(_fits(name, pattern) for name in attended)]
    if idle:
        others = ", ".join(map(repr, attended)) or f"none, for {net.names.why_nothing()}"
        raise ValueError(
            f"{said}: nothing was ablated in {', '.join(map(repr, idle))}, which did not attend; "
            f"those that did: {others}."
        )


def _mean(call: AttentionCall, index: Tensor, reference: HeadOutputs | None) -> Tensor:
    """`[1, h, 1, Dv]`."""
    if reference is None:
        reference = HeadOutputs()
        reference.take(call)
    mean = reference.mean(call.name)
    _check_fit(call, mean.shape)
    return mean[index.to(mean.device)][None, :, None]


def _resampled(
    call: AttentionCall, index: Tensor, reference: HeadOutputs | None, seed: int
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
            f"other row to draw from; give a larger batch, or reference=head_outputs(…, rows=True)."
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


def _asked(
    model: nn.Module, heads: Mapping[str, Iterable[int] | Tensor], said: str
) -> dict[str, tuple[int, ...]]:
    names = [as_written(name) for name, _ in model.named_modules()]
    unknown = [pattern for pattern in heads if not any(_fits(name, pattern) for name in names)]
    if unknown:
        near = get_close_matches(unknown[0], attending(model), n=6, cutoff=0.0)
        told = f"of those that attend, the nearest are: {', '.join(map(repr, near))}"
        if not near:
            near = get_close_matches(unknown[0], [*filter(None, names)], n=6, cutoff=0.0)
            told = (
                f"the nearest that there are: {', '.join(map(repr, near)) or 'none'}; "
                f"hw.watch(model) lists those that attend"
            )
        raise ValueError(
            f"{said}: the model has no module {', '.join(map(repr, unknown))}; {told}."
        )
    return {pattern: _numbers(pattern, given, said) for pattern, given in heads.items()}


def _numbers(pattern: str, given: Iterable[int] | Tensor, said: str) -> tuple[int, ...]:
    try:
        listed = given.tolist() if isinstance(given, Tensor) else list(given)
        numbers = tuple(operator.index(head) for head in listed)
        if any(isinstance(head, bool) for head in listed) or min(numbers, default=0) < 0:
            raise TypeError
    except TypeError:
        raise ValueError(
            f"{said}: the heads of {pattern!r} must be a list of numbers from 0, such as [0, 3]."
        ) from None
    return numbers


def _fits(name: str, pattern: str) -> bool:
    return fnmatchcase(name, as_written(pattern))
