"""Figures of P as formulas on sums that attention gives: pure functions of tensors.

With learned sinks, P is over keys and sink, and its rows hold the keys' part. `of_keys` is the
log-sum-exp among the keys alone, −inf in dead rows; of a row, `left` is what its sink leaves to the
keys.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

LARGE = 1e30
"""Farther apart no two logits are; finite, so that 0 times it is 0."""


def mean_key(k: Float[Tensor, "B G S D"]) -> Float[Tensor, "B G D"]:
    """Take the mean of the keys that are numbers: what is none must reach only who sees it.

    0 where there is none, or one so large that keys less it might be infinite.
    """
    mean = k.nanmean(2)
    return mean.where(mean.abs() <= LARGE, 0.0)


def entropy(
    lse: Float[Tensor, "B H n"],
    q: Float[Tensor, "B H n D"],
    keys_seen: Float[Tensor, "B H n D"],
    scale: float,
) -> Float[Tensor, "B H n"]:
    """`−Σ_j p_ij log p_ij = lse_i − E[s]`, with `E[s] = scale · q_i·(P K)_i`.

    Where scores are linear in the keys, with `lse` and `P K` of the same keys: moved by their mean,
    no probability changes, and both sides of the difference are small.
    """
    return lse - torch.einsum("bhtd,bhtd->bht", q, keys_seen) * scale


def with_sink(
    entropy: Float[Tensor, "B H n"],
    of_keys: Float[Tensor, "B H n"],
    sinks: Float[Tensor, " H"],
) -> Float[Tensor, "B H n"]:
    """The entropy of keys and sink together, from that among the keys alone and their LSE.

    `left · H + h(left)`, with h the entropy of choosing between the two.
    """
    dead = of_keys == -torch.inf
    ahead = of_keys.masked_fill(dead, 0.0) - sinks[:, None]
    ahead = ahead.clamp(-LARGE, LARGE)  # a sink of −inf is none, and 0 · inf is no number
    left, taken = torch.sigmoid(ahead), torch.sigmoid(-ahead)
    choice = left * logsigmoid(ahead) + taken * logsigmoid(-ahead)
    return left * entropy.masked_fill(dead, 0.0) - choice


def lse_with_sink(
    of_keys: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H n"]:
    """The log-sum-exp of scores and sink."""
    if sinks is None:
        return of_keys
    dead = of_keys == -torch.inf
    both = torch.logaddexp(of_keys.masked_fill(dead, 0.0), sinks[:, None])
    return both.masked_fill(dead, -torch.inf)


def log_sink(lse: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"]) -> Float[Tensor, "B H n"]:
    """The logarithm of the mass on the sink; −inf in dead rows."""
    return (sinks[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).clamp(max=0.0)


def left_to_keys(
    of_keys: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "B H n"]:
    """The share of each row that its sink leaves to the keys."""
    return torch.sigmoid(of_keys.masked_fill(of_keys == -torch.inf, 0.0) - sinks[:, None])


def digits(
    positions: Int[Tensor, " m"], of: Int[Tensor, " n"], dtype: torch.dtype
) -> Float[Tensor, "m 2"]:
    """Positions as digits to the base 4096, counted from the middle one of the queries `of`.

    No digit is over 2^24 for any length below 2^36, so each is exact in float32; and of few
    queries, far into a text, both are small.
    """
    here = positions - (of[len(of) // 2] if len(of) else 0)
    high = torch.div(here, 4096, rounding_mode="trunc")  # 0 on both sides of that query
    return torch.stack([here - 4096 * high, high], dim=-1).to(dtype)


def ahead(seen: Float[Tensor, "B H n 2"], positions: Int[Tensor, " n"]) -> Float[Tensor, "B H n"]:
    """`E[j − position of i]`, from the mean `digits` of the keys that each query sees."""
    low, high = (seen - digits(positions, positions, seen.dtype)).unbind(-1)
    return low + 4096 * high
