"""Dropout of attention weights as a function of a seed and of indices, the same on every backend.

A call draws one seed from PyTorch's default generator. Whether a weight is dropped depends only on
seed, batch row, head, query and key, so blocks of any size and backward passes agree without a
stored mask; `kernels/cpp/dropout.hpp` computes the same bits.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

STEPS = 1 << 16
"""Dropout rates are multiples of 1/STEPS."""

ROUNDS = 7
"""Rounds of Philox4x32: the fewest with which it passes BigCrush (Salmon et al. 2011, table 2)."""


def draw_seed(device: torch.device) -> Int[Tensor, ""]:
    """Draw a seed from the device's default generator."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def dropped_of(rate: float) -> int:
    """Round a rate below 1 to a number of weights dropped per `STEPS`, at most `STEPS − 1`.

    >>> dropped_of(0.1), dropped_of(0.5), dropped_of(0.999999), dropped_of(1e-6)
    (6554, 32768, 65535, 0)
    """
    return min(round(rate * STEPS), STEPS - 1)


def drop(
    weights: Tensor,
    rate: float,
    seed: Int[Tensor, ""],
    i: Int[Tensor, "t 1"],
    j: Int[Tensor, "1 s"],
) -> Tensor:
    """Drop weights `[B, H, t, s]` of consecutive queries `i` and keys `j`, and scale up the others.

    >>> i, j = torch.arange(2)[:, None], torch.arange(6)[None]
    >>> drop(torch.ones(1, 1, 2, 6), 0.5, torch.tensor(3), i, j)
    tensor([[[[2., 2., 0., 0., 0., 2.],
              [0., 2., 0., 2., 0., 2.]]]])
    """
    dropped = dropped_of(rate)
    if not dropped or 0 in weights.shape:
        return weights
    which = dropped_weights(weights.shape[0], weights.shape[1], dropped, seed, i, j)
    return weights.masked_fill(which, 0.0) * (STEPS / (STEPS - dropped))


def dropped_weights(
    batch: int,
    heads: int,
    dropped: int,
    seed: Int[Tensor, ""],
    i: Int[Tensor, "t 1"],
    j: Int[Tensor, "1 s"],
) -> Bool[Tensor, "B H t s"]:
    """Return a boolean tensor: True for each dropped weight of consecutive queries and keys.

    One draw of 128 bits covers 2 queries and 4 keys. An even query uses the second and the fourth
    word, an odd one the first and the third. The low half of a word covers the even key, the high
    half the odd one. A weight is dropped if its half, as a signed integer, is below dropped − 2¹⁵.
    """
    # Enough draws to cover the weights for any start index.
    pairs = i[0] // 2 + torch.arange(i.shape[0] // 2 + 1, device=i.device)
    fours = j[0, :1] // 4 + torch.arange((j.shape[1] + 2) // 4 + 1, device=j.device)
    of_batch, of_heads = (torch.arange(n, device=i.device) for n in (batch, heads))
    counter = (fours, pairs[:, None], of_heads[:, None, None], of_batch[:, None, None, None])
    words = philox(counter, (seed & _LOW, seed >> 32 & _LOW))
    even, odd = (torch.stack(of_query, -1) for of_query in (words[1::2], words[::2]))
    drawn = torch.stack([even, odd], 3)  # [B, H, pairs, 2, fours, 2]
    halves = torch.stack([drawn & 0xFFFF, drawn >> 16], -1).flatten(4).flatten(2, 3)
    which = (halves ^ STEPS // 2) < dropped
    return which[:, :, i[:, 0] - 2 * pairs[0]][..., j[0] - 4 * fours[0]]


_LOW = 0xFFFFFFFF
_FACTORS = 0xD2511F53, 0xCD9E8D57
_GROWTH = 0x9E3779B9, 0xBB67AE85


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox4x32 of counters and keys whose 32-bit words are stored as int64.

    >>> zero = torch.tensor(0)
    >>> [f"{int(word):08x}" for word in philox((zero,) * 4, (zero,) * 2)]
    ['5f6fb709', '0d893f64', '4f121f81', '4f730a48']
    """
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(rounds):
        low, high = _FACTORS[0] * x0, _FACTORS[1] * x2  # mod 2⁶⁴, regardless of the sign
        x0, x1 = (high >> 32 & _LOW) ^ x1 ^ k0, high & _LOW
        x2, x3 = (low >> 32 & _LOW) ^ x3 ^ k1, low & _LOW
        k0, k1 = (k0 + _GROWTH[0]) & _LOW, (k1 + _GROWTH[1]) & _LOW
    return x0, x1, x2, x3
