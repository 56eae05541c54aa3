"""Sizes of roundings, and what ranges of scores do to a softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

U = 2.0**-24
"""Half a unit in the last place of float32."""

UNITS = {"float32": U, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""The same of each dtype."""

LEAST = 2.0**-149
"""The smallest number of float32."""

MOST = torch.finfo(torch.float32).max
"""Its largest."""

FLUSHED = 2.0**-126
"""What `vdpbf16ps` takes for 0, and gives as 0, lies below this."""

VANISHING = 125.5 * math.log(2)
"""Weights so far below the largest (in nats) may be 0 in the kernel, which drops them at 2⁻¹²⁶."""


def lowest_bit(x: Tensor) -> Tensor:
    """The largest power of two that divides all numbers of each row; infinity for zeros."""
    mantissa, exponent = torch.frexp(x)
    whole = (mantissa * 2.0**53).long()
    found = torch.ldexp((whole & -whole).double(), exponent - 53)
    return torch.where(x == 0, torch.inf, found).amin(-1)


def between(s: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest softmax of each entry where every score may be in `s ± delta`."""
    there = s > -torch.inf
    low, high = (torch.where(there, s + d, -torch.inf) for d in (-delta, delta))

    def end(own: Tensor, others: Tensor) -> Tensor:
        top = others.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0.0, top)
        mine, each = (own - top).exp().clamp(max=1e300), (others - top).exp()
        # Sums of what is before and behind: a sum of all, less the own, has no digits for the rest.
        before = pad(each.cumsum(-1)[..., :-1], (1, 0))
        rest = before + pad(each.flip(-1).cumsum(-1)[..., :-1], (1, 0)).flip(-1)
        found = mine / (mine + rest)
        return torch.where(found.isnan(), 0.0, found)

    upper = torch.where(there, end(high, low), 0.0)
    return torch.minimum(end(low, high), upper), upper


def apart(exact: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far a number between `low` and `high` may be from the exact one."""
    return torch.maximum(high - exact, exact - low).clamp(min=0)


def entropy_apart(p: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How far −x·log x may be from its value at p, for x from low to high."""
    h = torch.special.entr
    ends = torch.stack([h(low), h(high)])
    top = math.exp(-1)  # where it is largest, and as large
    largest = torch.where((low < top) & (top < high), top, ends.amax(0))
    return apart(h(p), ends.amin(0), largest)


def factor_apart(log_p: Tensor, error: Tensor) -> Tensor:
    """How far p may be off whose logarithm is off by so much, but which is 1 at most.

    From the logarithm, for a p that is 0 in float64 is not 0 for every error of its score.
    """
    p, high = log_p.exp(), (log_p + error).clamp(max=8 * U).exp()
    return torch.maximum(high - p, p * -torch.expm1(-error))
