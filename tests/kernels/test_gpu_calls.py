"""Every public call on the GPU's path: none reads the host, but for those that are listed here.

On a simulated GPU (simulated_gpu.py), whose numbers are right; and on fake CUDA tensors, which have
none: there nothing can be read, and all that is called must have a fake implementation.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from headwise.kernels import triton_api
from simulated_gpu import Count, needs_guard, simulated

B, H, T, D = 2, 4, 40, 16

STATISTICS: dict[str, Callable[[], hw.Statistic]] = {
    "LSE": hw.LSE,
    "Entropy": hw.Entropy,
    "MaxLogit": hw.MaxLogit,
    "MaxLogit(above)": lambda: hw.MaxLogit(above=5.0),
    "Distance": hw.Distance,
    "First": lambda: hw.Mass(hw.First()),
    "Previous": lambda: hw.Mass(hw.Previous()),
    "Self": lambda: hw.Mass(hw.Self()),
    "Received": hw.Received,
    "Map": lambda: hw.Map(8),
    "OutputNorm": hw.OutputNorm,
    "Segments": lambda: hw.Segments({"start": (0, 4), "others": [(6, 8), (20, 30)]}),
    "Sink": hw.Sink,
    "Norms": hw.Norms,
    "Similarity": hw.Similarity,
    "TopKeys": hw.TopKeys,
    "OffsetHistogram": hw.OffsetHistogram,
    "Distance(spread)": lambda: hw.Distance(spread=True),
    "Distance(absolute)": lambda: hw.Distance(absolute=True),
    "First(3)": lambda: hw.Mass(hw.First(3)),
    "Mass(Window)": lambda: hw.Mass(hw.Window(8)),
}


def lengths() -> Tensor:
    return torch.tensor([T, T - 12], device="cuda")


MASKS: dict[str, Callable[[], hw.Mask | None]] = {
    "none": lambda: None,
    "causal": hw.Causal,
    "window": lambda: hw.Causal() & hw.Window(9),
    "padding": lambda: hw.Causal() & hw.Padding(lengths()),
    "prefix": lambda: hw.Causal() | hw.Prefix(lengths() - 20),
    "documents": lambda: hw.Causal() & hw.Documents((torch.arange(T) // 15).to("cuda")),
    "dense": lambda: hw.Dense(torch.ones(T, T, dtype=torch.bool, device="cuda")),
    "bias": lambda: hw.Bias(torch.zeros(1, 1, T, T, device="cuda")),
    "alibi": lambda: hw.Causal() & hw.ALiBi(),
}

READS = {
    # whether exp(s − lse) keeps its digits, and which keys queries see, so that blocks are skipped
    "Distance(spread)": 5,
    "TopKeys": 5,
    "OffsetHistogram": 5,
    # the same; or, for a padded call, whether a key may lie ahead
    "Distance(absolute)": 5,
    # the same; and how many keys there are
    "First(3)": 7,
    "Mass(Window)": 7,
}
"""Statistics that no kernel of ours has, and at most how often the host waits in a call of each."""

READS_OF_MASKS = {
    "documents": 3,  # whether the tokens of each document lie together
    "alibi": 4,  # which keys queries see: what is added to scores may hide some
}
"""Masks that are looked into, by some or all statistics."""


def qkv() -> list[Tensor]:
    return [torch.randn(B, H, T, D).to("cuda", torch.bfloat16) for _ in range(3)]


@pytest.fixture
def gpu() -> Iterator[Count]:
    with simulated() as count:
        yield count


@pytest.mark.parametrize("queries", [None, 8])
@pytest.mark.parametrize("name", MASKS)
def test_waits_of_every_statistic(gpu: Count, name: str, queries: int | None) -> None:
    q, k, v = qkv()
    mask = MASKS[name]()
    for title, statistic in STATISTICS.items():
        gpu.clear()
        seen = hw.observe(q, k, v, statistic(), mask=mask, queries=queries)
        for metric in seen.readings.known:
            assert seen[metric].device.type == "cuda", title
        most = READS.get(title, 0) + READS_OF_MASKS.get(name, 0)
        assert len(gpu.waits) <= most, f"{title}: {gpu}"


@pytest.mark.parametrize("name", MASKS)
def test_attend_waits_for_nothing(gpu: Count, name: str) -> None:
    q, k, v = qkv()
    mask = MASKS[name]()
    for options in ({}, {"sinks": torch.zeros(H, device="cuda")}, {"softcap": 30.0}):
        gpu.clear()
        hw.attend(q, k, v, mask=mask, **options)
        assert len(gpu.waits) <= (name == "documents"), str(gpu)
        assert len(gpu.kernels) <= (13 if name in ("documents", "prefix") else 3), str(gpu)


def test_named_queries(gpu: Count) -> None:
    """Output and statistics of named queries: the fused kernel and one of ours."""
    q, k, v = qkv()
    gpu.clear()
    hw.observe(q, k, v, hw.Entropy(), hw.MaxLogit(), mask=hw.Causal(), queries=[3, 30])
    assert Counter(name for name, _ in gpu.kernels)["triton sampled"] == 1
    assert len(gpu.kernels) == 2, str(gpu)
    assert not gpu.waits, str(gpu)


def on_cuda(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("cuda"):
        return build().eval()


class Plain(nn.Module):
    """Attention as it is written in many models: a call of `F.scaled_dot_product_attention`."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        attend = nn.functional.scaled_dot_product_attention
        return attend(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def bert() -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 32}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2)
    return transformers.BertModel(config)


def ids() -> Tensor:
    return torch.zeros(2, 16, dtype=torch.long, device="cuda")


def states() -> Tensor:
    return torch.randn(2, 16, 32).to("cuda")


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], int]] = {
    "BERT": (bert, ids, 0),
    "F.scaled_dot_product_attention": (Plain, states, 0),
    "headwise's layer": (lambda: hw.MultiHeadAttention(32, num_heads=4), states, 0),
}
"""Models, what they take, and how often the host waits in a watched forward beyond their own."""


@pytest.mark.parametrize("queries", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_watching(gpu: Count, name: str, queries: int | None) -> None:
    build, make, most = MODELS[name]
    model, x = on_cuda(build), make()
    with torch.no_grad():
        model(x)
        gpu.clear()
        model(x)
        waits = len(gpu.waits)
        gpu.clear()
        with hw.watch(model, hw.Entropy(), hw.MaxLogit(), queries=queries) as seen:
            model(x)
    assert len(gpu.waits) - waits <= most, str(gpu)
    assert len(seen.table()) > 0


def test_a_monitored_forward(gpu: Count) -> None:
    """Two more layers add no wait; a recorded step is for tests that go backward."""
    model, x = on_cuda(lambda: hw.MultiHeadAttention(32, num_heads=4)).train(), states()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor = hw.Monitor(model, every=1, queries=4)
        with torch.no_grad():
            gpu.clear()
            model(x, mask=hw.Causal())
        monitor.close()
    assert not gpu.waits, str(gpu)


FAKE_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "BERT": (bert, lambda: {"input_ids": ids()}),
    "padded BERT": (bert, lambda: {"input_ids": ids(), "attention_mask": ids() + 1}),
    "F.scaled_dot_product_attention": (Plain, lambda: {"x": states()}),
    "headwise's layer": (
        lambda: hw.MultiHeadAttention(32, num_heads=4),
        lambda: {"x": states(), "mask": hw.Causal() & hw.Padding(ids()[:, 0] + 9)},
    ),
}


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    needs_guard()
    monkeypatch.setattr(triton_api, "why_not", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


@pytest.mark.parametrize("queries", [None, 4])
@pytest.mark.parametrize("name", FAKE_MODELS)
def test_fake_tensors_in_a_watched_model(fake_gpu: None, name: str, queries: int | None) -> None:
    """Nothing is read in two watches, the first of which follows every module."""
    build, make = FAKE_MODELS[name]
    model = on_cuda(build)
    for _ in range(2):
        with torch.no_grad(), hw.watch(model, hw.Entropy(), hw.MaxLogit(), queries=queries) as seen:
            model(**make())
        for module in seen.modules:
            assert seen[module]["entropy"].device.type == "cuda"
        assert len(seen) == (2 if "BERT" in name else 1), seen.left_out


@pytest.mark.parametrize("queries", [None, 4])
@pytest.mark.parametrize("name", FAKE_MODELS)
def test_fake_tensors_in_a_monitored_model(fake_gpu: None, name: str, queries: int | None) -> None:
    build, make = FAKE_MODELS[name]
    model = on_cuda(build).train().requires_grad_(False)
    monitor = hw.Monitor(model, every=1, queries=queries)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**make())
    capture = monitor._capture
    assert capture.forwards == 1
    assert not capture.left_out
    assert len(capture._pending) >= (2 if "BERT" in name else 1)
    monitor.close()


NAMED_ALIKE = ("Distance(spread)", "Distance(absolute)", "First")
FAKE = ["attend", "observe", "observe, sampled", "layer"]


@pytest.mark.parametrize("name", FAKE)
def test_fake_tensors_on_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run where tensors have no numbers, as under a compiler, with every mask."""
    needs_guard()
    monkeypatch.setattr(triton_api, "why_not", lambda *_: "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    some = [make() for title, make in STATISTICS.items() if title not in NAMED_ALIKE]
    calls: dict[str, Callable[[Any], Any]] = {
        "attend": lambda mask: hw.attend(*qkv(), mask=mask),
        "observe": lambda mask: hw.observe(*qkv(), *some, mask=mask)["entropy"],
        "observe, sampled": lambda mask: hw.observe(*qkv(), *some, mask=mask, queries=8).lse,
        "layer": lambda mask: on_cuda(lambda: hw.MultiHeadAttention(D, num_heads=2))(
            torch.randn(B, T, D, device="cuda"), mask=mask
        ),
    }
    for title, make in MASKS.items():
        with FakeTensorMode(allow_non_fake_inputs=True):
            found = calls[name](make())
        assert found.device.type == "cuda", title
