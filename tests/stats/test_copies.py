"""What `observe()` returns can be copied, pickled and saved, with all its numbers."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch

import headwise as hw
from support import BACKENDS, H, S, T, qkv

IDS = torch.arange(S) % 4
ASKED = [
    *(hw.Entropy(), hw.MaxLogit(), hw.MaxLogit(above=0.5), hw.Norms(), hw.Received(), hw.Map(3)),
    *(hw.Mass(hw.First()), hw.Mass(hw.Window(3)), hw.Mass(hw.Induction(IDS)), hw.TopKeys(2)),
    *(hw.Distance(spread=True), hw.Similarity(4), hw.OutputNorm(torch.randn(3, 78))),
]


def saved(seen: hw.stats.Seen) -> hw.stats.Seen:
    file = io.BytesIO()
    torch.save(seen, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def case(name: str, backend: str) -> dict[str, Any]:
    learned = backend not in ("native", "sdpa")  # which give a bias no gradient
    return {
        "causal": {"mask": hw.Causal()},
        "documents": {"mask": hw.Documents(IDS) & hw.Causal()},
        "sinks": {"sinks": torch.zeros(H)},
        "bias": {"mask": hw.Causal() & hw.Bias(torch.zeros(T, S, requires_grad=learned) * 2)},
        "sampled": {"mask": hw.Causal(), "queries": 4},
        "named, no output": {"queries": [1, 3], "output": False},
    }[name]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), saved])
@pytest.mark.parametrize("gradients", [None, True, False])
@pytest.mark.parametrize(
    "name", ["causal", "documents", "sinks", "bias", "sampled", "named, no output"]
)
@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_a_copy_has_the_numbers_and_no_graph(
    backend: str, name: str, gradients: bool | None, copied: Any
) -> None:
    keywords = case(name, backend)
    parts = [x.requires_grad_() * 1 if gradients is not None else x for x in qkv(dv=13)]
    asked = [s for s in ASKED if keywords.get("output", True) or not isinstance(s, hw.OutputNorm)]
    options = {**keywords, "backend": backend, "gradients": gradients is not False}
    seen = hw.observe(*parts, *asked, **options)
    twin = copied(seen)
    assert twin.names == seen.names
    pairs = [(twin[figure], seen[figure]) for figure in seen.names]
    pairs += [(twin.lse, seen.lse), (twin.weights(), seen.weights()), (twin.rows, seen.rows)]
    pairs += [(twin.queries, seen.queries)]
    if seen.output is not None:
        pairs += [(twin.out, seen.out)]
    for got, want in pairs:
        assert torch.equal(got, want)
        assert not got.requires_grad
    assert twin.table() == seen.table()


def test_a_copied_statistic_in_a_loss_says_that_it_has_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    twin = copy.deepcopy(hw.observe(q, k, v, hw.Entropy()))
    with pytest.raises(RuntimeError, match="without a graph"):
        twin["entropy"].sum().backward()


def test_a_copy_keeps_its_numbers_when_the_call_s_tensors_change() -> None:
    q, k, v = qkv()
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    twin, want = copy.deepcopy(seen), seen.weights()
    k.zero_()
    assert torch.equal(twin.weights(), want)


@pytest.mark.parametrize("queries", [None, 5])
def test_a_reading_is_copied_with_its_sums(queries: int | None) -> None:
    seen = hw.observe(*qkv(), hw.Entropy(), mask=hw.Causal(), queries=queries)
    reading = seen.reading("entropy")
    for twin in (copy.deepcopy(reading), pickle.loads(pickle.dumps(reading))):
        assert torch.equal(twin.values, reading.values)
        assert torch.equal(twin.moments.mean, reading.moments.mean)
