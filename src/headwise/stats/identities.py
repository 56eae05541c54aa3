"""Formulas for statistics of P from the outputs of attention calls: pure functions of tensors.

With learned sinks, P covers keys and sink, but its rows hold only the keys' weights. `of_keys` is
the log-sum-exp over the keys alone, −inf in dead rows; `left` is the total weight of a row's keys,
that is, 1 minus the weight of its sink.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

LARGE = 1e30
"""A bound on the difference of two logits; finite, so that 0 times it is 0."""


def mean_key(k: Float[Tensor, "B G S D"]) -> Float[Tensor, "B G D"]:
    """Return the mean of the finite keys: NaN and infinity must reach only queries that see them.

    0 if no key is finite, or if the mean is so large that subtracting it might overflow.
    """
    mean = k.nanmean(2)
    return mean.where(mean.abs() <= LARGE, 0.0)


def entropy(
    lse: Float[Tensor, "B H n"],
    q: Float[Tensor, "B H n D"],
    keys_seen: Float[Tensor, "B H n D"],
    scale: float,
) -> Float[Tensor, "B H n"]:
    """Return `−Σ_j p_ij log p_ij = lse_i − E[s]`, with `E[s] = scale · q_i·(P K)_i`.

    Scores must be linear in the keys; `lse` and `P K` must refer to the same keys. Subtracting the
    mean of the keys changes no probability and makes both terms of the difference small.
    """
    return lse - torch.einsum("bhtd,bhtd->bht", q, keys_seen) * scale


def with_sink(
    entropy: Float[Tensor, "B H n"], of_keys: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "B H n"]:
    """Return the entropy over keys and sink, from the entropy and the LSE of the keys alone.

    It is `left · H + h(left)`, where h is the entropy of the choice between keys and sink.
    """
    dead = of_keys == -torch.inf
    ahead = of_keys.masked_fill(dead, 0.0) - sinks[:, None]
    ahead = ahead.clamp(-LARGE, LARGE)  # a sink of −inf means no sink, and 0 · inf is NaN
    left, taken = torch.sigmoid(ahead), torch.sigmoid(-ahead)
    choice = left * logsigmoid(ahead) + taken * logsigmoid(-ahead)
    return left * entropy.masked_fill(dead, 0.0) - choice


def lse_with_sink(
    of_keys: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H n"]:
    """Return the log-sum-exp over scores and sink."""
    if sinks is None:
        return of_keys
    dead = of_keys == -torch.inf
    both = torch.logaddexp(of_keys.masked_fill(dead, 0.0), sinks[:, None])
    return both.masked_fill(dead, -torch.inf)


def log_sink(lse: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"]) -> Float[Tensor, "B H n"]:
    """Return the logarithm of the weight on the sink; −inf in dead rows."""
    return (sinks[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf)).clamp(max=0.0)


def left_to_keys(
    of_keys: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"]
) -> Float[Tensor, "B H n"]:
    """Return the total weight on the keys of each row: 1 minus the weight on its sink."""
    return torch.sigmoid(of_keys.masked_fill(of_keys == -torch.inf, 0.0) - sinks[:, None])


def digits(
    positions: Int[Tensor, " m"], of: Int[Tensor, " n"], dtype: torch.dtype
) -> Float[Tensor, "m 2"]:
    """Return positions as base-4096 digits, relative to the middle one of the queries `of`.

    No digit exceeds 2^24 for lengths below 2^36, so each is exact in float32. For a few queries far
    into a text, both digits are small.
    """
    here = positions - (of[len(of) // 2] if len(of) else 0)
    high = torch.div(here, 4096, rounding_mode="trunc")  # 0 on both sides of that query
    return torch.stack([here - 4096 * high, high], dim=-1).to(dtype)


def ahead(seen: Float[Tensor, "B H n 2"], positions: Int[Tensor, " n"]) -> Float[Tensor, "B H n"]:
    """Return `E[j − position of i]`, from the mean `digits` of the keys that each query sees."""
    low, high = (seen - digits(positions, positions, seen.dtype)).unbind(-1)
    return low + 4096 * high
