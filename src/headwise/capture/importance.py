"""Importance of heads for a loss: by gradient, and by ablation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from .ablate import How, ablate
from .call import AttentionCall
from .catch import catch
from .effects import HeadEffects, gather
from .head_address import joined_numbers
from .modules import Modules
from .reference import AblationReference, check_given

Loss = Callable[[Any, Any], Tensor]
"""`loss(model, batch)`: a loss for each sample, `[B]`, or their mean as a scalar."""


def importance(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> HeadEffects:
    """Compute the sensitivity of the loss to each head, in one backward pass for each batch.

    Let o be a head's output before the output projection, and `⟨o, ∂L/∂o⟩` be summed over queries,
    features and the calls of its module in a forward pass, for each sample:

    * `importance` is the mean over samples of `|⟨o, ∂L/∂o⟩|` (Michel et al. 2019, eq. 2): how fast
      the loss changes as the head's output is scaled.
    * `ablation_estimate` is the mean of `−⟨o, ∂L/∂o⟩`: a first-order estimate of the increase of
      the loss if the head's output is 0, which `ablation_scan()` measures.

    Gradients of parameters, `requires_grad` and the mode of the model do not change. The parameters
    may be frozen.

    Args:
        model: any model that `watch()` supports.
        loss: `loss(model, batch)`: one loss for each sample of the batch, `[B]`; or a scalar that
            is the mean over samples, which is then multiplied by B.
        batches: in any form that `loss` accepts. A call with a batch n times as large as B (such as
            the windows of an image) must have n consecutive rows for each sample.

    Raises:
        ValueError: the loss has another shape, is not finite or has no gradient (as under
            `torch.inference_mode()`); no attention was captured; `batches` is a single batch; the
            loss is a scalar but calls have batches of different sizes.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> def loss(model, x):
    ...     return model(x, mask=hw.Causal()).square().mean((1, 2))  # for each sample
    >>> effects = importance(layer, loss, [torch.randn(4, 7, 24) for _ in range(2)])
    >>> effects[""]["importance"].shape
    torch.Size([8, 3])
    >>> list(effects.table()[0])
    ['layer', 'head', 'module', 'importance', 'importance_se', 'ablation_estimate', ...]
    """
    quote = check_given("importance", model, loss, batches)
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{quote}: torch.inference_mode() is on, so no gradients are recorded.")
    parts, numbers = [], dict[str, int]()
    for batch in batches:
        outs: list[tuple[str, Tensor]] = []

        def listen(call: AttentionCall, outs: list[tuple[str, Tensor]] = outs) -> Tensor:
            if not torch.is_grad_enabled():
                how = " (torch.inference_mode)" * torch.is_inference_mode_enabled()
                raise ValueError(f"{quote}: the model runs {call.name!r} without gradients{how}.")
            if call.heads < call.all_heads:
                raise ValueError(
                    f"{quote}: {call.heads} of the {call.all_heads} heads of {call.name!r} are on "
                    f"this rank; ablation_scan() sees all of them."
                )
            # A new tensor from which all further results of the model are computed.
            out = call.out
            out = out.view_as(out) if out.requires_grad else out.detach().requires_grad_()
            if not call.again:
                kept = call.name, out
                call.on_complete(lambda _: outs.append(kept))
            return out

        with torch.enable_grad(), catch(model, listen, function="importance") as net:
            losses = _checked(loss(model, batch), quote)
            net.check_seen(outs, quote)
            if not losses.requires_grad:
                raise ValueError(f"{quote}: the loss has no gradient; it must not be detached.")
            samples = len(losses) if losses.dim() else _batch_of(outs, quote)
            total = losses.sum() if losses.dim() else losses * samples
            slopes = torch.autograd.grad(
                total, [out for _, out in outs], allow_unused=True, materialize_grads=True
            )
        numbers = joined_numbers(numbers, net.numbers)
        sums: dict[str, Tensor] = {}
        for (name, out), slope in zip(outs, slopes, strict=True):
            product = torch.einsum("bhtd,bhtd->bh", out.detach().double(), slope.double())
            sums[name] = sums.get(name, 0) + _per_sample(product, samples, name, quote)
        figures = {n: {"importance": s.abs(), "ablation_estimate": -s} for n, s in sums.items()}
        parts.append((samples, figures))
    if not parts:
        raise ValueError(f"{quote}: there are no batches.")
    return gather(parts, numbers)


@torch.no_grad()
def ablation_scan(
    model: nn.Module,
    loss: Loss,
    batches: Iterable[Any],
    how: How = "zero",
    *,
    reference: AblationReference | None = None,
    seed: int = 0,
    modules: Modules = None,
    report: Callable[[float], None] | None = None,
) -> HeadEffects:
    """Measure the change of the loss when each head is ablated: one forward pass per head.

    `ablation` is the mean over samples of the loss without the head minus the loss with it. It is
    negative if the loss is lower without the head.

    Args:
        model: any model that `watch()` supports, in evaluation mode.
        loss: as in `importance()`. If it is a scalar, every batch counts as one sample.
        batches: in any form that `loss` accepts.
        how, reference, seed: as in `ablate()`.
        modules: the modules to scan: a pattern such as `"model.layers.1?.*"`, the index of a layer
            (2 or `"L2"`), a list of these, or a function that returns True for the qualified names
            to include. Default: all.
        report: called after every forward pass with the completed fraction.

    Raises:
        ValueError: the model is in training mode, where dropout would hide the differences; the
            loss has another shape or is not finite; no attention was captured; or as for
            `ablate()`.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3).eval()
    >>> def loss(model, x):
    ...     return model(x, mask=hw.Causal()).square().mean((1, 2))
    >>> effects = ablation_scan(layer, loss, [torch.randn(4, 7, 24)])
    >>> [list(row) for row in effects.table()][0]
    ['layer', 'head', 'module', 'ablation', 'ablation_se']
    """
    quote = check_given("ablation_scan", model, loss, batches)
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(f"{quote}: {training[0]} is in training mode; call model.eval() first.")
    given, parts = batches if isinstance(batches, Sized) else list(batches), []
    numbers: dict[str, int] = {}
    why = "there are no batches"
    for number, batch in enumerate(given):
        heads: dict[str, int] = {}

        def listen(call: AttentionCall, heads: dict[str, int] = heads) -> None:
            name, number = call.name, call.all_heads
            call.on_complete(lambda _: heads.update({name: number}))

        with catch(model, listen, function="ablation_scan", modules=modules) as net:
            base = _checked(loss(model, batch), quote)
        why, numbers = net.why_nothing(), joined_numbers(numbers, net.numbers)
        gained: dict[str, list[Tensor]] = {name: [] for name in heads}
        every = [(name, head) for name, count in heads.items() for head in range(count)]
        for done, (name, head) in enumerate(every, start=1):
            with ablate(model, {name: [head]}, how, reference=reference, seed=seed):
                without = _checked(loss(model, batch), quote)
            gained[name].append((without.double() - base.double()).reshape(-1))
            if report is not None:
                report((number + done / len(every)) / len(given))
        figures = {name: {"ablation": torch.stack(heads, 1)} for name, heads in gained.items()}
        parts.append((base.numel(), figures))
    if not any(figures for _, figures in parts):
        raise ValueError(f"{quote}: no attention was seen, for {why}.")
    return gather(parts, numbers)


def _checked(losses: Tensor, quote: str) -> Tensor:
    """Return the value of `loss`, if it is valid."""
    if not isinstance(losses, Tensor) or losses.dim() > 1 or not losses.is_floating_point():
        gave = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{quote}: loss(model, batch) gave {gave}; it must give a floating-point tensor: a "
            f"loss for each sample, [B], or their mean, []."
        )
    if not losses.isfinite().all():
        raise ValueError(
            f"{quote}: loss(model, batch) gave {losses.tolist()}, which is not finite."
        )
    return losses


def _batch_of(outs: list[tuple[str, Tensor]], quote: str) -> int:
    """Return the number of samples of a batch, if the loss is a scalar."""
    sizes = {name: len(out) for name, out in outs}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{quote}: the loss is one number and calls have batches of different sizes ({sizes}), "
            f"so that samples cannot be distinguished; give a loss for each sample, [B]."
        )
    return len(outs[0][1])


def _per_sample(product: Tensor, samples: int, name: str, quote: str) -> Tensor:
    """Sum `[n · B, H]`, with n consecutive rows for each sample, to `[B, H]`."""
    if samples == 0 or len(product) % samples:
        raise ValueError(
            f"{quote}: the loss has {samples} samples, and {name!r} was called with a batch of "
            f"{len(product)}; it must be as many, or a multiple."
        )
    return product.unflatten(0, (samples, -1)).sum(1)
