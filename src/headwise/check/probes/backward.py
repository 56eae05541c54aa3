"""Hold the gradients of a `backward` that somebody wrote against what its `forward` does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.introspect import own_backwards
from .probe_context import ProbeContext, failing

INPUTS = 3
"""A function of queries, keys and values has as many; one of a single tensor may have the gradient
of another on purpose, as rounding has."""
STEPS = {torch.float64: (1e-5, 1e-3), torch.float32: (1e-2, 5e-2)}
"""By dtype, how far the inputs are moved, and the share by which gradients must differ to be
wrong."""


def wrong_backward(ctx: ProbeContext) -> Finding | None:
    """A directional derivative by differences, twice, and by the backward."""
    if ctx.x.dtype not in STEPS:
        return None
    step, share = STEPS[ctx.x.dtype]
    draw = torch.Generator().manual_seed(7)
    x = ctx.x.detach().requires_grad_(True)
    with failing(f"x {list(x.shape)} with gradients"):
        out = ctx.exact(x)
        names = [name for name, inputs in own_backwards(out) if inputs >= INPUTS]
        if not names:
            return None
        along = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out)
        moved = torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)
        slope = torch.autograd.grad((out * along).sum(), x)[0]

    def total(way: float) -> Tensor:
        return (ctx.call(x.detach() + way * moved) * along).detach().double().sum()

    told = float((slope.double() * moved.double()).sum())
    once, again = (_difference(total, one) for one in (step, step / 2))
    size = max(abs(once), abs(told))
    if abs(once - again) > 0.2 * share * size or abs(once - told) <= share * size:
        return None
    return found("gradients", "backward", name=names[0], told=told, measured=once)


def _difference(total: Callable[[float], Tensor], step: float) -> float:
    return float(total(step) - total(-step)) / (2 * step)
