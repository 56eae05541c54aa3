"""Dropout as a function of seed and indices: known answers, shares, and blocks of any kind."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.dropout import STEPS, drop, dropped_of, dropped_weights, philox

# From Random123's own `kat_vectors`: rounds, counter and key, answer.
KNOWN = [
    (7, "00000000 " * 6, "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff " * 6, "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (
        7,
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
        "4dfccaba 190a87f0 c47362ba b6b5242a",
    ),
    (10, "00000000 " * 6, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff " * 6, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        10,
        "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


@pytest.mark.parametrize(("rounds", "given", "answer"), KNOWN)
def test_philox_gives_the_known_answers(rounds: int, given: str, answer: str) -> None:
    words = [torch.tensor([int(word, 16)]) for word in given.split()]
    found = philox(tuple(words[:4]), tuple(words[4:]), rounds)  # type: ignore[arg-type]
    assert [f"{int(word):08x}" for word in found] == answer.split()


def whole(dropped: int, seed: int, b: int, h: int, t: int, s: int) -> Tensor:
    i, j = torch.arange(t)[:, None], torch.arange(s)[None]
    return dropped_weights(b, h, dropped, torch.tensor(seed), i, j)


def test_a_weight_is_of_the_half_that_the_layout_says() -> None:
    seed, dropped = 0x123456789ABCDEF, 20000
    found = whole(dropped, seed, 2, 3, 5, 11)
    key = torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)
    for b, h, i, j in [(0, 0, 0, 0), (1, 2, 4, 10), (0, 1, 3, 7), (1, 0, 2, 5), (1, 1, 1, 8)]:
        counter = tuple(torch.tensor(x) for x in (j // 4, i // 2, h, b))
        word = int(philox(counter, key)[2 * (j // 2 % 2) + 1 - i % 2])  # type: ignore[arg-type]
        half = word >> 16 if j % 2 else word & 0xFFFF
        signed = half - 65536 if half >= 32768 else half
        assert bool(found[b, h, i, j]) == (signed < dropped - 32768)


def test_blocks_drop_what_the_whole_drops() -> None:
    every = whole(30000, 5, 2, 3, 13, 21)
    seed = torch.tensor(5)
    for rows in (slice(0, 1), slice(1, 2), slice(1, 13), slice(4, 9), slice(7, 10)):
        for keys in (slice(0, 21), slice(1, 2), slice(2, 21), slice(3, 9), slice(7, 8)):
            i, j = torch.arange(13)[rows, None], torch.arange(21)[None, keys]
            some = dropped_weights(2, 3, 30000, seed, i, j)
            assert torch.equal(some, every[:, :, rows, keys])


def chance(n: int, rate: float, found: Tensor) -> Tensor:
    """The two-sided p-values of exact binomial tests: of n, so many came with this probability."""
    k = torch.arange(n + 1, dtype=torch.float64)
    ways = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    each = (ways + k * math.log(rate) + (n - k) * math.log1p(-rate)).exp()
    below, above = each.cumsum(0), each.flip(0).cumsum(0).flip(0)
    return (2 * torch.minimum(below, above)[found]).clamp(max=1)


def test_the_test_of_shares_finds_a_wrong_share() -> None:
    assert float(chance(10, 0.5, torch.tensor(10))) == pytest.approx(2 / 2**10)
    assert float(chance(65536, 0.1, torch.tensor(6554))) > 0.9
    assert float(chance(65536, 0.1, torch.tensor(6900))) < 1e-4


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_kept_shares_pass_an_exact_binomial_test(rate: float) -> None:
    """Of heads, rows and columns; of pairs side by side in each direction; of two seeds."""
    dropped = dropped_of(rate)
    share = dropped / STEPS
    one, two = (whole(dropped, seed, 2, 6, 128, 160) for seed in (2026, 2027))
    values = [
        chance(128 * 160, share, one.sum((2, 3))).flatten(),
        chance(160, share, one.sum(3)).flatten(),
        chance(128, share, one.sum(2)).flatten(),
        chance(one.numel(), share**2, (one & two).sum()[None]),
    ]
    for axis in range(4):
        for step in (1, 2, 4, 8):
            if one.shape[axis] % (2 * step) == 0:
                first, second = one.unflatten(axis, (-1, 2, step)).unbind(axis + 1)
                both = (first & second).sum()[None]
                values.append(chance(first.numel(), share**2, both))
    found = torch.cat(values)
    assert float(found.min()) > 0.01 / len(found)


def test_rates_are_rounded_and_made_up_for() -> None:
    i, j = torch.arange(64)[:, None], torch.arange(64)[None]
    ones, seed = torch.ones(1, 1, 64, 64, dtype=torch.float64), torch.tensor(1)
    assert drop(ones, 1e-6, seed, i, j) is ones
    kept = drop(ones, 0.1, seed, i, j)
    assert set(kept.unique().tolist()) == {0.0, 65536 / (65536 - 6554)}
    assert set(drop(ones, 1 - 1e-9, seed, i, j).unique().tolist()) <= {0.0, 65536.0}
    q = torch.zeros(1, 1, 2, 8)
    with pytest.raises(ValueError, match="dropout must be at least 0 and below 1"):
        hw.attend(q, q, q, dropout=1.0)


def test_the_definition_draws_its_seed_or_takes_one() -> None:
    from headwise.core.reference import attention

    q, v = torch.zeros(1, 2, 8, 8), torch.eye(8).expand(1, 2, 8, 8)
    torch.manual_seed(3)
    drawn = attention(q, q, v, dropout=0.5).out
    torch.manual_seed(3)
    assert torch.equal(drawn, attention(q, q, v, dropout=0.5).out)
    assert not torch.equal(drawn, attention(q, q, v, dropout=0.5).out)
    given = attention(q, q, v, dropout=0.5, seed=torch.tensor(9)).out
    assert torch.equal(given == 0, whole(32768, 9, 1, 2, 8, 8))
