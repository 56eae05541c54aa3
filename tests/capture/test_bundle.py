"""Small calls that are alike are observed as one, with the numbers that each has by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.capture import bundle
from headwise.capture.bundle import BundledCall, Bundles, together
from headwise.capture.call import AttentionCall, ObserveOptions
from headwise.kernels import ctypes_api
from headwise.stats.output_norm import OutputLength
from headwise.stats.statistic import Statistic, Statistics
from headwise.telemetry import DEFAULT_STATISTICS
from hugging_cases import CASES

EACH = (hw.Entropy(), hw.MaxLogit(), hw.Norms(), hw.Distance(), hw.LSE(), hw.Mass(hw.Previous()))
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, "equal_nan": True}


@pytest.fixture(autouse=True)
def none_observed() -> None:
    """Forget the forms of calls that other tests have observed."""
    bundle._OBSERVED.clear()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of heads in the passes of the kernel that give no output."""
    heads: list[int] = []
    run = ctypes_api.forward

    def spy(problem: Any, needs: int) -> Any:
        if problem.v is None:
            heads.append(problem.q.shape[1])
        return run(problem, needs)

    monkeypatch.setattr(ctypes_api, "forward", spy)
    return heads


def watched(
    model: torch.nn.Module, inputs: dict[str, Tensor], *each: Statistic
) -> hw.capture.Watched:
    with torch.no_grad(), hw.watch(model, *each) as seen:
        model(**inputs)
        model(**inputs)
    return seen


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_layers_are_read_in_one_pass_with_the_same_numbers(
    name: str, passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = CASES[name].model(), CASES[name].inputs(False)
    watched(model, inputs, *EACH)
    passes.clear()
    seen = watched(model, inputs, *EACH)
    (heads,) = {seen[layer].heads for layer in seen}
    assert passes == [2 * len(seen) * heads]
    with monkeypatch.context() as patch:
        patch.setattr(bundle, "LARGEST", 0)
        apart = watched(model, inputs, *EACH)
    assert passes[1:] == [heads] * 2 * len(seen)
    assert seen.table() == apart.table()
    assert seen.table(texts=True) == apart.table(texts=True)
    assert seen.unavailable == apart.unavailable
    for layer in seen:
        assert seen[layer].statistics == apart[layer].statistics
        for metric in seen[layer].statistics:
            torch.testing.assert_close(seen[layer][metric], apart[layer][metric], **EXACT)
            rows = [x[layer].calls[1][metric].rows for x in (seen, apart)]
            torch.testing.assert_close(*(torch.zeros(0) if x is None else x for x in rows))


def test_nothing_of_a_model_outlasts_the_watch() -> None:
    model, inputs = CASES["gpt2"].model(), CASES["gpt2"].inputs(False)
    watched(model, inputs)
    seen = watched(model, inputs)
    (one,) = {
        part.bundle for layer in seen for part in seen[layer].calls if isinstance(part, BundledCall)
    }
    assert not one._tensors
    assert not hasattr(one.readings.record.view, "asked")
    twin = copy.deepcopy(seen)
    assert twin.table() == seen.table()
    assert twin.table(texts=True) == seen.table(texts=True)


def test_what_is_read_while_the_model_is_watched_stays() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    whole = watched(model, inputs)
    with torch.no_grad(), hw.watch(model) as seen:
        model(**inputs)
        first = seen.table()
        model(**inputs)
    assert seen.table() == whole.table()
    assert [row["entropy"] for row in first] == [row["entropy"] for row in whole.table()]


def call_of(seed: int, heads: int = 4, **changes: Any) -> AttentionCall:
    torch.manual_seed(seed)
    q, k, v = (torch.randn(2, h, 6, 8) for h in (heads, 2, 2))
    keywords = {"mask": hw.Causal(), "scale": None, "softcap": None, "sinks": None} | changes
    return AttentionCall(f"layer {seed}", "sdpa", q, k, v, torch.randn_like(q), keywords)


def test_copies_are_read_where_a_model_changes_its_keys_afterwards() -> None:
    statistics, bundles = Statistics.of(DEFAULT_STATISTICS), Bundles()
    wanted = [dict(call_of(seed).observe(statistics, ObserveOptions())) for seed in range(5)]
    found = []
    for seed in range(5):
        call = call_of(seed)
        found.append(bundles.observe(call, statistics, ObserveOptions()))
        for x in (call.q, call.k, call.out):
            x.fill_(torch.nan)
    assert [isinstance(one, BundledCall) for one in found] == [False, *[True] * 4]
    for one, want in zip(found, wanted, strict=True):
        assert list(one) == list(want)
        for name, reading in want.items():
            torch.testing.assert_close(one[name].values, reading.values, **EXACT)
    pairs = [[one] for one in found]
    assert [places for places, _ in together(pairs)] == [[0], [1, 2, 3, 4]]
    assert [places for places, _ in together(pairs[:0:-1])] == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    "odd",
    [
        {"sinks": torch.zeros(4)},
        {"mask": hw.Padding(torch.tensor([6, 3]))},
        {"mask": hw.Causal() & hw.Bias(torch.zeros(6, 6))},
        {"first_query": 0},
        {"backend": "sdpa"},
    ],
    ids=lambda odd: next(iter(odd)),
)
def test_other_calls_are_read_at_once(odd: dict[str, Any]) -> None:
    statistics, bundles = Statistics.of(EACH), Bundles()
    for seed in range(3):
        found = bundles.observe(call_of(seed, **odd), statistics, ObserveOptions())
        assert not isinstance(found, BundledCall)


def test_calls_of_other_sizes_and_options_are_apart() -> None:
    statistics, bundles = Statistics.of(EACH), Bundles()
    for looking in (ObserveOptions(), ObserveOptions(queries=2), ObserveOptions(gradients=True)):
        for seed in range(2):
            bundles.observe(call_of(seed), statistics, looking)
    four, two = (
        [bundles.observe(call_of(seed, heads), statistics, ObserveOptions()) for seed in range(3)]
        for heads in (4, 2)
    )
    assert all(isinstance(one, BundledCall) for one in (*four, *two[1:]))
    assert len({one.bundle for one in (*four, *two) if isinstance(one, BundledCall)}) == 2
    sampled = bundles.observe(call_of(0), statistics, ObserveOptions(queries=2))
    assert not isinstance(sampled, BundledCall)
    assert sampled["entropy"].values.shape == (2, 4, 2)


def test_many_calls_are_read_before_they_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "TOGETHER", 2000)
    statistics, bundles = Statistics.of((hw.Entropy(),)), Bundles()
    found = [bundles.observe(call_of(seed), statistics, ObserveOptions()) for seed in range(12)]
    parts = [one for one in found if isinstance(one, BundledCall)]
    assert len({one.bundle for one in parts}) > 1
    want = [
        call_of(seed).observe(statistics, ObserveOptions())["entropy"].values for seed in range(12)
    ]
    for one, values in zip(found, want, strict=True):
        torch.testing.assert_close(one["entropy"].values, values, **EXACT)


def test_outputs_are_read_with_the_calls() -> None:
    (need,) = {need for one in DEFAULT_STATISTICS for need in one.needs.values() if need.output}
    assert isinstance(need, OutputLength)
    statistics, bundles = Statistics.of(DEFAULT_STATISTICS), Bundles()
    for seed in range(3):
        call = call_of(seed)
        found = bundles.observe(call, statistics, ObserveOptions())
        torch.testing.assert_close(found["output_norm"].values, call.out.norm(dim=-1))
