"""Importance of heads for a loss: by gradient, and by ablation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from typing import Any

import torch
from torch import Tensor, nn

from .ablate import How, ablate
from .call import AttentionCall
from .effects import HeadEffects, gather
from .head_address import joined_numbers
from .modules import Modules, chosen, why_left_out
from .reference import AblationReference, check_given
from .session import catch

Loss = Callable[[Any, Any], Tensor]
"""`loss(model, batch)`: a loss for each sample, `[B]`, or one number that is their mean."""


def importance(model: nn.Module, loss: Loss, batches: Iterable[Any]) -> HeadEffects:
    """Compute the sensitivity of the loss to each head, in one backward pass for each batch.

    With a head's output o before the output projection, and `⟨o, ∂L/∂o⟩` summed over queries,
    features and the calls of its module in a forward pass, for each sample:

    * `importance` is the mean over samples of `|⟨o, ∂L/∂o⟩|` (Michel et al. 2019, eq. 2): how fast
      the loss moves as the head is turned up or down, either way.
    * `ablation_estimate` is the mean of `−⟨o, ∂L/∂o⟩`: to first order, what the loss gains when
      the head gives 0, which `ablation_scan()` measures.

    Gradients of parameters, `requires_grad` and the model's mode are left as they are; a model
    whose parameters are frozen will do.

    Args:
        model: any model that `watch()` sees.
        loss: `loss(model, batch)`: one loss for each sample of the batch, `[B]`; or a scalar that
            is the mean over samples, which is then taken times B.
        batches: in whatever form `loss` takes. A call whose batch is n times as large as B (an
            image's windows, say) has n rows in a row for each sample.

    Raises:
        ValueError: a loss of another shape, or not finite, or without a gradient (under
            `torch.inference_mode()` there is none); no attention seen; batches that are one batch;
            a scalar loss where calls have batches of different sizes.

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
    said = check_given("importance", model, loss, batches)
    if torch.is_inference_mode_enabled():
        raise ValueError(f"{said}: torch.inference_mode() is on, and there are no gradients in it.")
    parts, numbers = [], dict[str, int]()
    for batch in batches:
        outs: list[tuple[str, Tensor]] = []

        def listen(call: AttentionCall, outs: list[tuple[str, Tensor]] = outs) -> Tensor:
            if not torch.is_grad_enabled():
                how = " (torch.inference_mode)" * torch.is_inference_mode_enabled()
                raise ValueError(f"{said}: the model runs {call.name!r} without gradients{how}.")
            if call.heads < call.all_heads:
                raise ValueError(
                    f"{said}: {call.heads} of the {call.all_heads} heads of {call.name!r} are on "
                    f"this rank; ablation_scan() sees all of them."
                )
            # A tensor of its own: what the model goes on with is made of this one, by every road.
            out = call.out
            out = out.view_as(out) if out.requires_grad else out.detach().requires_grad_()
            if not call.again:
                kept = call.name, out
                call.once_whole(lambda _: outs.append(kept))
            return out

        with torch.enable_grad(), catch(model, listen, function="importance") as net:
            losses = _checked(loss(model, batch), said)
            if not outs:
                raise ValueError(f"{said}: no attention was seen, for {net.names.why_nothing()}.")
            if not losses.requires_grad:
                raise ValueError(f"{said}: the loss has no gradient; it must not be detached.")
            samples = len(losses) if losses.dim() else _batch_of(outs, said)
            total = losses.sum() if losses.dim() else losses * samples
            slopes = torch.autograd.grad(
                total, [out for _, out in outs], allow_unused=True, materialize_grads=True
            )
        numbers = joined_numbers(numbers, net.numbers)
        sums: dict[str, Tensor] = {}
        for (name, out), slope in zip(outs, slopes, strict=True):
            product = torch.einsum("bhtd,bhtd->bh", out.detach().double(), slope.double())
            sums[name] = sums.get(name, 0) + _per_sample(product, samples, name, said)
        figures = {n: {"importance": s.abs(), "ablation_estimate": -s} for n, s in sums.items()}
        parts.append((samples, figures))
    if not parts:
        raise ValueError(f"{said}: there are no batches.")
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
    """Measure the change of the loss when each head is ablated alone: one forward pass per head.

    `ablation` is the mean over samples of the loss without the head less the loss with it; it is
    negative for a head that the loss is better off without.

    Args:
        model: any model that `watch()` sees, in evaluation mode.
        loss: as in `importance()`. Of a scalar, every batch counts as one sample.
        batches: in whatever form `loss` takes.
        how, reference, seed: as in `ablate()`.
        modules: scan these alone: a pattern such as `"model.layers.1?.*"`, the number of a layer
            (2 or `"L2"`), a list of them, or a function that says of a module's qualified name
            whether it is meant.
        report: called after every forward pass with the completed fraction.

    Raises:
        ValueError: a model in training mode, where dropout would drown the differences; a loss of
            another shape, or not finite; no attention seen; and what `ablate()` refuses.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3).eval()
    >>> def loss(model, x):
    ...     return model(x, mask=hw.Causal()).square().mean((1, 2))
    >>> effects = ablation_scan(layer, loss, [torch.randn(4, 7, 24)])
    >>> [list(row) for row in effects.table()][0]
    ['layer', 'head', 'module', 'ablation', 'ablation_se']
    """
    said = check_given("ablation_scan", model, loss, batches)
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(f"{said}: {training[0]} is in training mode; call model.eval() first.")
    wanted = chosen(modules)
    given, parts = batches if isinstance(batches, Sized) else list(batches), []
    unwanted: dict[str, None] = {}
    numbers: dict[str, int] = {}
    why = "there are no batches"
    for number, batch in enumerate(given):
        heads: dict[str, int] = {}

        def listen(call: AttentionCall, heads: dict[str, int] = heads) -> None:
            name, number = call.name, call.all_heads
            if wanted(name, call.layer):
                call.once_whole(lambda _: heads.update({name: number}))
            else:
                unwanted[name] = None

        with catch(model, listen, function="ablation_scan") as net:
            base = _checked(loss(model, batch), said)
        why, numbers = net.names.why_nothing(), joined_numbers(numbers, net.numbers)
        gained: dict[str, list[Tensor]] = {name: [] for name in heads}
        every = [(name, head) for name, count in heads.items() for head in range(count)]
        for done, (name, head) in enumerate(every, start=1):
            with ablate(model, {name: [head]}, how, reference=reference, seed=seed):
                without = _checked(loss(model, batch), said)
            gained[name].append((without.double() - base.double()).reshape(-1))
            if report is not None:
                report((number + done / len(every)) / len(given))
        figures = {name: {"ablation": torch.stack(heads, 1)} for name, heads in gained.items()}
        parts.append((base.numel(), figures))
    if not any(figures for _, figures in parts):
        raise ValueError(
            f"{said}: no attention was seen, for "
            f"{why_left_out(modules, unwanted) if unwanted else why}."
        )
    return gather(parts, numbers)


def _checked(losses: Tensor, said: str) -> Tensor:
    """Return the value of `loss`, if it is valid."""
    if not isinstance(losses, Tensor) or losses.dim() > 1 or not losses.is_floating_point():
        gave = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"{said}: loss(model, batch) gave {gave}; it must give a floating-point tensor: a loss "
            f"for each sample, [B], or their mean, []."
        )
    if not losses.isfinite().all():
        raise ValueError(f"{said}: loss(model, batch) gave {losses.tolist()}, which is not finite.")
    return losses


def _batch_of(outs: list[tuple[str, Tensor]], said: str) -> int:
    """The samples of a batch, where the loss is one number."""
    sizes = {name: len(out) for name, out in outs}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"{said}: the loss is one number and calls have batches of different sizes ({sizes}), "
            f"so that samples cannot be told apart; give a loss for each sample, [B]."
        )
    return len(outs[0][1])


def _per_sample(product: Tensor, samples: int, name: str, said: str) -> Tensor:
    """`[n · B, H]` of a call's rows, n in a row for each sample, to `[B, H]`."""
    if samples == 0 or len(product) % samples:
        raise ValueError(
            f"{said}: the loss has {samples} samples, and {name!r} was called with a batch of "
            f"{len(product)}; it must be as many, or a multiple."
        )
    return product.unflatten(0, (samples, -1)).sum(1)
