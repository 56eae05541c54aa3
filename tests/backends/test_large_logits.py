"""Scores of any size: rows are judged by the mask, and every figure is right at any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.reference import attention
from support import BACKENDS, B, D, G, H, S, T, assert_as_good

LOWEST = torch.finfo(torch.float32).min
IDS = torch.arange(S) % 3

STATISTICS = (
    hw.LSE(),
    hw.Entropy(),
    hw.MaxLogit(),
    hw.Sink(),
    hw.Map(3),
    hw.Received(),
    hw.Mass(hw.First()),
    hw.Mass(hw.First(3), name="first 3"),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.SameToken(IDS)),
    hw.Mass(hw.Window(3)),
    hw.Similarity(4),
    hw.TopKeys(3),
    hw.Distance(spread=True, absolute=True),
    hw.OffsetHistogram(4, ahead=True),
    hw.Norms(),
)


def along(scale: float, *values: float) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys along one axis, whose scores are exactly `scale` times one of the values."""
    q, k = torch.zeros(B, H, T, D), torch.zeros(B, G, S, D)
    q[..., 0] = scale
    k[..., 0] = torch.tensor(values)[torch.randint(len(values), (B, G, S))]
    return q, k, torch.randn(B, G, S, D)


def biased(bias: float, *rows: int) -> hw.Bias:
    """Some rows whose bias is the same everywhere."""
    table = torch.randn(T, S)
    table[list(rows)] = bias
    return hw.Bias(table)


def still(*rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v; the queries of some rows are 0."""
    q = torch.randn(B, H, T, D)
    q[:, :, list(rows)] = 0
    return q, torch.randn(B, G, S, D), torch.randn(B, G, S, D)


CASES: dict[str, Any] = {
    "rows of the lowest bias": lambda: (still(), dict(mask=biased(LOWEST, 2, 5))),
    "the same, causal": lambda: (still(), dict(mask=biased(LOWEST, 2, 5) & hw.Causal())),
    "all of the lowest bias": lambda: (still(), dict(mask=hw.Bias(torch.full((T, S), LOWEST)))),
    "rows of −10⁴": lambda: (still(2, 5), dict(mask=biased(-1e4, 2, 5))),
    "rows of −10⁹": lambda: (still(2, 5), dict(mask=biased(-1e9, 2, 5))),
    "rows of 10⁹": lambda: (still(2, 5), dict(mask=biased(1e9, 2, 5))),
    "10⁹": lambda: (along(2.0**15, -(2.0**15), 0, 2.0**15), dict(scale=1.0)),
    "10⁶": lambda: (along(2.0**10, -(2.0**10), 0, 2.0**10), dict(scale=1.0)),
    "10³⁸": lambda: (along(2.0**64, -(2.0**63), 0, 2.0**63), dict(scale=1.0)),
    "−10³⁸ alone": lambda: (along(2.0**64, -(2.0**63)), dict(scale=1.0)),
    "large keys": lambda: (along(2.0**-127, -3e38, 3e38), dict(scale=1.0)),
}


def assert_right(statistic: hw.Statistic, inputs: tuple[Tensor, ...], **keywords: Any) -> None:
    """No figure of a call is farther from the definition in float64 than that in float32."""
    backend, queries = keywords.pop("backend"), keywords.pop("queries", None)
    seen = hw.observe(*inputs, statistic, backend=backend, queries=queries, **keywords)
    plain = statistic.define(attention(*(x.detach() for x in inputs), **keywords))
    if (sinks := keywords.get("sinks")) is not None:
        keywords["sinks"] = sinks.double()
    exact = statistic.define(attention(*(x.detach().double() for x in inputs), **keywords))
    for name in seen.names:
        got, known, truth = seen[name].detach(), plain[name], exact[name]
        if queries is not None:
            known, truth = known[:, :, queries], truth[:, :, queries]
        if name == "top_keys":
            assert torch.equal(got, known), name
        else:
            assert_as_good(got, known, truth.double(), torch.float32, factor=8)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_figures_of_large_scores(name: str, backend: str, gradients: bool) -> None:
    inputs, keywords = CASES[name]()
    inputs = tuple(x.requires_grad_(gradients) for x in inputs)
    for statistic in STATISTICS:
        assert_right(statistic, inputs, backend=backend, **keywords)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sink", [-1e9, 0.0, 2.0**30])
def test_figures_of_large_scores_beside_a_sink(backend: str, sink: float) -> None:
    inputs, keywords = CASES["10⁹"]()
    for statistic in STATISTICS:
        sinks = torch.full((H,), sink)
        assert_right(statistic, inputs, backend=backend, sinks=sinks, **keywords)


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_queries_of_large_scores(backend: str) -> None:
    inputs, keywords = CASES["rows of −10⁹"]()
    for statistic in (hw.Entropy(), hw.Mass(hw.Previous()), hw.TopKeys(3), hw.Mass(hw.Window(3))):
        assert_right(statistic, inputs, backend=backend, queries=[1, 2, 4], **keywords)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_large_scores(backend: str) -> None:
    """A constant added to all scores of a row changes no figure, and so no gradient."""
    q, k, v = still(2, 5)
    bias = torch.randn(T, S)
    bias[2] = bias[5] = 0.0
    found = []
    for lift in (0.0, -1e9):
        table = bias.clone()
        table[2] = table[5] = lift
        ours = [x.clone().requires_grad_() for x in (q, k)]
        mask = hw.Bias(table)
        seen = hw.observe(*ours, v, hw.Entropy(), hw.Mass(hw.First()), mask=mask, backend=backend)
        total = seen["entropy"][:, :, [2, 5]].square().sum() + seen["first"][:, :, [2, 5]].sum()
        found.append(torch.autograd.grad(total, ours))
    for small, large in zip(*found, strict=True):
        torch.testing.assert_close(small, large)


@pytest.mark.parametrize("backend", BACKENDS)
def test_single_weights_of_large_scores(backend: str) -> None:
    (q, k, v), keywords = CASES["rows of −10⁹"]()
    seen = hw.observe(q, k, v, backend=backend, **keywords)
    exact = attention(q, k, v, **keywords).weights
    torch.testing.assert_close(seen.weights(), exact)
    torch.testing.assert_close(
        seen.weights([1], [2], [0, 3]), exact[:, [1]][:, :, [2]][..., [0, 3]]
    )


def test_top_keys_are_the_earlier_among_equals() -> None:
    q = k = torch.zeros(1, 2, 300, 8)
    for k_best in (1, 5, 40):
        seen = hw.observe(q, k, k, hw.TopKeys(k_best), mask=hw.Causal())
        exact = hw.TopKeys(k_best).define(attention(q, k, k, mask=hw.Causal()))
        assert torch.equal(seen["top_keys"], exact["top_keys"])
