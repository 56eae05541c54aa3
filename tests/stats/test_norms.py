"""The largest norms of a head's queries and keys, and largest scores only where they ask for it."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.backends import BACKENDS as ALL_BACKENDS
from headwise.core.reference import attention
from headwise.stats import max_logit
from support import BACKENDS, MASKS_WITH_POSITIONS, B, H, S, T, qkv


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The calls that backends make, for an output or for figures."""
    count: Counter[str] = Counter()

    def spied(name: str, real: Any) -> Any:
        def spy(*args: Any, **keywords: Any) -> Any:
            count[name] += 1
            return real(*args, **keywords)

        return spy

    for backend in ALL_BACKENDS:
        for method in {"run", "statistics", "observe"} & set(dir(backend)):
            kind = type(backend)
            monkeypatch.setattr(kind, method, spied(method, getattr(kind, method)))
    return count


def test_by_hand() -> None:
    q = torch.zeros(1, 4, 2, 2)
    q[0, :, 0, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    q[0, :, 1] = torch.tensor([3.0, 4.0])  # norm 5, but these may attend to nothing
    k = torch.zeros(1, 2, 3, 2)
    k[0, 0, 0], k[0, 1, 0] = torch.tensor([5.0, 12.0]), torch.tensor([8.0, 15.0])
    k[0, :, 2] = 100.0  # nobody sees this key
    mask = hw.Dense(torch.tensor([[True, True, False], [False, False, False]]))
    seen = hw.observe(q, k, k, hw.Norms(), mask=mask)
    assert seen["query_norm"].tolist() == [[1, 2, 3, 4]]
    assert seen["key_norm"].tolist() == [[13, 13, 17, 17]]
    nothing = hw.observe(q, k, k, hw.Norms(), mask=hw.Dense(torch.zeros(2, 3, dtype=torch.bool)))
    assert not nothing["query_norm"].any()
    assert not nothing["key_norm"].any()


@pytest.mark.parametrize("mask", [None, hw.Causal(), hw.Window(2)], ids=str)
def test_of_all_queries_whichever_are_looked_at(mask: hw.Mask | None) -> None:
    q, k, v = qkv()
    whole = hw.observe(q, k, v, hw.Norms(), mask=mask)
    for queries in (2, [0]):
        some = hw.observe(q, k, v, hw.Norms(), mask=mask, queries=queries)
        for name in whole.names:
            assert torch.equal(some[name], whole[name])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_call_is_made_for_them(backend: str, made: Counter[str]) -> None:
    q, k, v = qkv()
    wanted = hw.observe(q, k, v, hw.Norms(), backend=backend)
    made.clear()
    seen = hw.observe(q, k, v, hw.Norms(), backend=backend, output=False)
    assert torch.equal(seen["key_norm"], wanted["key_norm"])
    assert not made
    torch.testing.assert_close(seen.lse, wanted.lse)  # worked out when somebody asks
    assert made.total() == 1
    torch.testing.assert_close(seen.weights(queries=[2]), wanted.weights(queries=[2]))


def test_scores_that_are_no_numbers_are_told_when_they_are_read() -> None:
    q, k, v = (torch.full_like(x, 1e30) for x in qkv())
    seen = hw.observe(q, k, v, hw.Norms(), output=False)
    assert seen["query_norm"].isfinite().all()
    with pytest.raises(ValueError, match="are not finite in"):
        _ = seen.lse


def test_watched_they_add_up_by_the_maximum() -> None:
    layer = hw.MultiHeadAttention(24, num_heads=3)
    one, two = torch.randn(2, T, 24), 3 * torch.randn(2, S, 24)
    single = []
    for x in (one, two):
        with hw.watch(layer, hw.Norms()) as seen:
            layer(x, mask=hw.Causal())
        single.append(seen)
    with hw.watch(layer, hw.Norms(), running=True) as both:
        layer(one, mask=hw.Causal())
        layer(two, mask=hw.Causal())
    for name in ("query_norm", "key_norm"):
        tops = torch.stack([seen[""][name].amax(0) for seen in single]).amax(0)
        assert torch.equal(both[""][name].float(), tops)
        assert [row[name] for row in sum(single).table()] == tops.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_score_is_larger_than_their_product(dtype: torch.dtype) -> None:
    q, k, v = qkv(dtype=dtype)
    q, k = 30 * q, k.exp()
    seen = hw.observe(q, k, v, hw.Norms(), hw.MaxLogit(), mask=hw.Causal(), scale=0.3)
    bound = 0.3 * seen["query_norm"] * seen["key_norm"]
    assert seen["max_logit"].shape == bound.shape == (B, H)
    assert (seen["max_logit"] <= bound * (1 + 1e-5)).all()


LIMIT = 6.0


def some_large() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Head 3 has scores far above the limit, heads 0 and 5 norms that forbid any."""
    q, k, v = qkv()
    q[:, 3] *= 20
    q[:, [0, 5]] *= 0.01
    return q, k, v


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many heads scores were computed, call by call."""
    heads: list[int] = []
    real = max_logit._largest_scores

    def spy(call: Any, engine: Any) -> torch.Tensor:
        heads.append(call.extent.heads)
        return real(call, engine)

    monkeypatch.setattr(max_logit, "_largest_scores", spy)
    return heads


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_above_a_limit_the_largest_score_is_exact(name: str, backend: str) -> None:
    q, k, v = some_large()
    mask = MASKS_WITH_POSITIONS[name](T, S)
    statistic = hw.MaxLogit(above=LIMIT)
    want = statistic.define(attention(q, k, v, mask=mask))["max_logit_above_6"]
    plain = hw.observe(q, k, v, hw.MaxLogit(), mask=mask, backend=backend)["max_logit"]
    assert torch.equal(want > LIMIT, plain > LIMIT)
    for keywords in ({}, {"output": False}, {"queries": 2}, {"sinks": torch.ones(H)}):
        seen = hw.observe(q, k, v, statistic, mask=mask, backend=backend, **keywords)
        got = seen["max_logit_above_6"]
        torch.testing.assert_close(got, want)
        assert torch.equal(got > LIMIT, plain > LIMIT)


def test_no_score_is_computed_where_norms_are_small(
    looked_at: list[int], made: Counter[str]
) -> None:
    q, k, v = some_large()
    keywords: dict[str, Any] = {"backend": "sdpa", "mask": hw.Causal(), "output": False}
    hw.observe(q, k, v, hw.MaxLogit(above=1e4), **keywords)
    assert not looked_at
    assert not made
    hw.observe(q, k, v, hw.MaxLogit(above=50.0), **keywords)
    assert looked_at == [1]
    by_head = hw.Dense(torch.rand(1, H, T, S) > 0.2)
    hw.observe(q, k, v, hw.MaxLogit(above=50.0), **keywords | {"mask": by_head})
    assert looked_at == [1, H]  # other masks for other heads: all heads at once


def test_a_bias_may_lift_scores_over_the_limit(looked_at: list[int]) -> None:
    q, k, v = some_large()
    table = torch.zeros(T, S)
    table[2, 3] = 1e3
    seen = hw.observe(q, k, v, hw.MaxLogit(above=500.0), mask=hw.Bias(table), backend="sdpa")
    assert looked_at == [H]
    assert (seen["max_logit_above_500"] > 900).all()


def test_an_outlier_that_no_drawn_query_shows() -> None:
    q, k, v = (torch.randn(1, 2, 500, 8) for _ in range(3))
    q[:, 1, 77] *= 1e3
    statistics = (hw.MaxLogit(), hw.MaxLogit(above=100.0))
    seen = hw.observe(q, k, v, *statistics, queries=5, seed=1, output=False)
    assert 77 not in seen.queries
    assert (seen["max_logit"] < 100).all()
    assert (seen["max_logit_above_100"] > 100).tolist() == [[False, True]]


@pytest.mark.parametrize("limit", [math.nan, math.inf, "ten", True])
def test_a_limit_is_a_finite_number(limit: Any) -> None:
    with pytest.raises(ValueError, match="finite number"):
        hw.MaxLogit(above=limit)


def test_of_some_queries_they_are_those_of_all_and_are_called_so() -> None:
    q, k, v = torch.randn(3, 2, 3, 50, 5)
    statistics = (hw.Norms(), hw.MaxLogit(above=0.1))
    some = hw.observe(q, k, v, hw.Entropy(), *statistics, mask=hw.Causal(), queries=7)
    every = hw.observe(q, k, v, *statistics, mask=hw.Causal())
    for row, whole in zip(some.table(), every.table(), strict=True):
        assert {name: row[name] for name in whole} == whole
        assert not [name for name in row if name.endswith("_sampled")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_without_scores_is_above_any_limit(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 3, 70, 24)
    q[0, 1, 33, 2] = math.nan
    seen = hw.observe(q, k, v, hw.MaxLogit(above=100.0), mask=hw.Causal(), backend=backend)
    largest = seen["max_logit_above_100"][0]
    assert largest.isnan().tolist() == [False, True, False]
    assert largest[::2].tolist() == [-math.inf, -math.inf]
