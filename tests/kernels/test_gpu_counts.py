"""How many kernels the GPU's path launches, and how often the host waits for them.

Counted on a simulated GPU (simulated_gpu.py), so they are the same on every machine; what they cost
in time is for benchmarks on a real one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import headwise as hw
from headwise.backends import native_masks
from headwise.backends.native import Native
from headwise.core.call import Call
from headwise.kernels.interface import STATISTICS
from simulated_gpu import Count, simulated

SIX = (
    hw.Entropy(),
    hw.MaxLogit(),
    hw.Distance(),
    *(hw.Mass(pattern) for pattern in (hw.First(), hw.Previous(), hw.Self())),
)
METRICS = ("entropy", "max_logit", "distance", "first", "previous", "self")
ALL = (*METRICS, "entropy_share")
B, H, T, D = 2, 4, 96, 64


@pytest.fixture
def gpu() -> Iterator[Count]:
    with simulated() as count:
        yield count


def qkv(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(B, H, T, D).to("cuda", dtype) for _ in range(3)]


def lengths() -> Tensor:
    return torch.tensor([T, T - 20], device="cuda")


def padded() -> hw.Mask:
    return hw.Causal() & hw.Padding(lengths())


def test_the_numbers_are_those_of_the_cpu(gpu: Count) -> None:
    for mask in (hw.Causal(), padded(), hw.Window(9)):
        here = qkv(torch.float32)
        seen = hw.observe(*here, *SIX, mask=mask)
        there = [x.cpu() for x in here]
        on_cpu = mask if mask.free else hw.Causal() & hw.Padding(lengths().cpu())
        want = hw.observe(*there, *SIX, mask=on_cpu, backend="eager")
        torch.testing.assert_close(seen.out.cpu(), want.out, rtol=1e-4, atol=1e-5)
        for name in ("lse", *ALL):
            got = seen.lse if name == "lse" else seen[name]
            right = want.lse if name == "lse" else want[name]
            torch.testing.assert_close(got.cpu(), right, rtol=1e-4, atol=1e-4, msg=name)


def test_attend_is_one_kernel(gpu: Count) -> None:
    q, k, v = qkv()
    padding = padded()
    for mask in (None, hw.Causal(), hw.Window(9), padding):
        gpu.clear()
        hw.attend(q, k, v, mask=mask)
        assert len(gpu.kernels) == 1, f"{mask}: {gpu}"
        assert not gpu.waits, f"{mask}: {gpu}"


@pytest.mark.parametrize("queries", [None, 16])
def test_what_is_observed_and_not_read(gpu: Count, queries: int | None) -> None:
    """The output, and one launch for all statistics, of all queries or of sampled ones."""
    q, k, v = qkv()
    for _ in range(2):
        gpu.clear()
        hw.observe(q, k, v, *SIX, mask=hw.Causal(), queries=queries)
    assert len(gpu.kernels) == 2, str(gpu)
    name = "triton forward, LSE known" if queries is None else "triton sampled"
    assert name in dict(gpu.kernels), "the fused kernel gives it"
    assert not gpu.waits, str(gpu)


@pytest.mark.parametrize("name", ["none", "causal", "padded"])
def test_one_launch_with_the_native_backend_by_name(gpu: Count, name: str) -> None:
    """Output and statistics come from the same kernel, with the numbers of the definition."""
    q, k, v = qkv()
    mask = {"none": None, "causal": hw.Causal(), "padded": padded()}[name]
    for _ in range(2):
        gpu.clear()
        out = hw.attend(q, k, v, mask=mask, backend="native")
        assert [kernel for kernel, _ in gpu.kernels] == ["triton forward"], str(gpu)
        gpu.clear()
        seen = hw.observe(q, k, v, hw.LSE(), *SIX, mask=mask, backend="native")
        kept = ["clone"] if name == "padded" else []  # of the lengths, which may change in place
        assert [kernel for kernel, _ in gpu.kernels] == ["triton forward", *kept], str(gpu)
        assert not gpu.waits, str(gpu)
    assert torch.equal(out.cpu(), seen.out.cpu())
    on_cpu = hw.Causal() & hw.Padding(lengths().cpu()) if name == "padded" else mask
    there = [x.cpu().float() for x in (q, k, v)]
    want = hw.observe(*there, *SIX, mask=on_cpu, backend="eager")
    for metric in METRICS:
        torch.testing.assert_close(seen[metric].cpu(), want[metric], rtol=1e-3, atol=1e-3)


def test_sampled_queries_have_the_numbers_of_the_cpu(gpu: Count) -> None:
    """At the same queries; largest scores and masses are of all of them, and so are exact."""
    here = qkv(torch.float32)
    seen = hw.observe(*here, *SIX, mask=hw.Causal(), queries=16)
    there = [x.cpu() for x in here]
    want = hw.observe(*there, *SIX, mask=hw.Causal(), queries=16, backend="eager")
    assert torch.equal(seen.queries.cpu(), want.queries)
    for name in ("entropy", "distance", "first", "previous", "self"):
        torch.testing.assert_close(seen[name].cpu(), want[name], rtol=1e-4, atol=1e-5, msg=name)
    every = hw.observe(*there, *SIX, mask=hw.Causal(), backend="eager")
    for name in ("max_logit", "first", "previous", "self"):
        exact = seen.readings[name].every
        assert (exact is None) == (name == "max_logit"), name  # which is that of all as it stands
        values = seen[name] if exact is None else exact().values
        torch.testing.assert_close(values.cpu(), every[name], rtol=1e-4, atol=1e-5, msg=name)
    for name in ("entropy", "distance"):
        assert seen.readings[name].every is None, name
        assert seen.readings[name].error is not None, name


@pytest.mark.parametrize("name", ["causal", "padded"])
def test_the_kernels_own_part(gpu: Count, name: str) -> None:
    """All figures in one launch, into one tensor; a mask of lengths takes nothing beside it."""
    mask = hw.Causal() if name == "causal" else padded()
    call = Call.of(*qkv(), mask=mask)
    figures = [figure for figure in STATISTICS if figure != "lse"]
    gpu.clear()
    given = Native().observe(call, figures)
    assert len(gpu.kernels) == (2 if name == "causal" else 1), str(gpu)
    assert not gpu.waits, str(gpu)
    assert len({getattr(given, figure)._base.inner.data_ptr() for figure in figures}) == 1
    gpu.clear()
    assert given.lse is not None
    Native().received(call, given.lse)
    assert len(gpu.kernels) <= 2, "the kernel itself looks where the log-sum-exp is too large"
    assert not gpu.waits, str(gpu)


MASKS = {
    "window": (lambda: hw.Window(9), 1),
    "padding": (padded, 1),
    "padding on the left": (lambda: hw.Causal() & hw.Padding(lengths(), "left"), 2),
    "alibi": (lambda: hw.Causal() & hw.ALiBi(), 1),
    "dense": (lambda: hw.Causal() & hw.Dense((lengths() > 0)[:, None, None, None]), 1),
    "bias": (lambda: hw.Bias(torch.zeros(T, T, device="cuda")), 1),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_cost_no_kernels_of_their_own(
    gpu: Count, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, most = MASKS[name]
    mask, (q, k, v) = make(), qkv()
    monkeypatch.setattr(native_masks, "TABLE_LIMIT", B * H * T * T)  # sizes of tables are looked at
    for _ in range(2):  # what a mask without tensors comes to is made in the first call
        call = Call.of(q, k, v, mask=mask)
        gpu.clear()
        assert not Native().refuse(call)
        Native().observe(call, ["entropy", "self"])
    assert len(gpu.kernels) <= most, str(gpu)
    assert not gpu.waits, str(gpu)


@pytest.mark.parametrize(
    ("name", "queries", "metrics", "most"),
    [
        ("causal", None, METRICS, 6),
        ("causal", None, ALL, 9),
        ("padded", None, METRICS, 16),
        ("padded", None, ALL, 23),
        ("causal", 16, METRICS, 12),
        ("causal", 16, ALL, 19),
    ],
)
def test_six_statistics_read(
    gpu: Count, name: str, queries: int | None, metrics: tuple[str, ...], most: int
) -> None:
    mask = hw.Causal() if name == "causal" else padded()
    q, k, v = qkv()
    for _ in range(2):  # the first call of a kind works out what others find
        gpu.clear()
        seen = hw.observe(q, k, v, *SIX, mask=mask, queries=queries)
        for metric in metrics:
            seen[metric]
    assert not gpu.waits, str(gpu)
    assert len(gpu.kernels) <= most, str(gpu)


def gpt2(layers: int) -> nn.Module:
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": layers, "n_positions": 64, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def llama(layers: int) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.LlamaForCausalLM(config)


def bert(layers: int) -> nn.Module:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "vocab_size": 32}
    return transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=layers))


MODELS = {"gpt2": gpt2, "llama": llama, "bert": bert}


def watched(
    gpu: Count, name: str, layers: int, padding: bool, **options: Any
) -> tuple[hw.capture.Watched, int, int]:
    """Watch a forward pass; with the kernels and waits beyond those of the model itself."""
    with torch.device("cuda"):
        model, ids = MODELS[name](layers).eval(), torch.zeros(2, 24, dtype=torch.long)
    own = {"use_cache": False}
    if padding:
        own["attention_mask"] = (torch.arange(24) >= torch.tensor([[0], [5]])).long().to("cuda")
    with torch.no_grad():
        for _ in range(2):
            gpu.clear()
            model(ids, **own)
            kernels, waits = len(gpu.kernels), len(gpu.waits)
            gpu.clear()
            with hw.watch(model, *SIX, **options) as seen:
                model(ids, **own)
    return seen, len(gpu.kernels) - kernels, len(gpu.waits) - waits


@pytest.mark.parametrize("queries", [None, 8])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_watched_layer(gpu: Count, name: str, padding: bool, queries: int | None) -> None:
    """One launch for each layer, and no wait before a table is read."""
    _, two, _ = watched(gpu, name, 2, padding, queries=queries)
    _, three, waits = watched(gpu, name, 3, padding, queries=queries)
    assert not waits, str(gpu)
    assert three - two == 1, str(gpu)


@pytest.mark.parametrize("name", MODELS)
def test_an_accelerated_layer(gpu: Count, name: str) -> None:
    """Where headwise's kernel replaces PyTorch's, statistics cost no launch of their own."""
    with torch.device("cuda"):
        model, ids = MODELS[name](2).eval(), torch.zeros(2, 24, dtype=torch.long)
    counted: dict[str, Counter[str]] = {}
    with torch.no_grad(), hw.accelerate(model) as account:
        for _ in range(2):
            gpu.clear()
            model(ids, use_cache=False)
            counted["plain"] = Counter(kernel for kernel, _ in gpu.kernels)
            gpu.clear()
            with hw.watch(model, *SIX) as seen:
                model(ids, use_cache=False)
            counted["watched"] = Counter(kernel for kernel, _ in gpu.kernels)
    assert counted["plain"]["triton forward"] == 2, str(account)
    assert counted["watched"] == counted["plain"], str(gpu)
    assert not account.left, str(account)
    assert len(seen.table()) > 0


class Masked(nn.Module):
    """Attention of one layer, by a mask that is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("side", ["left", "right", "holes", "of heads", "of keys"])
@pytest.mark.parametrize("kind", ["booleans", "-inf", "-10000", "bias"])
def test_mask_tensors_mean_the_same_as_on_the_cpu(
    gpu: Count, kind: str, side: str, padding: bool
) -> None:
    """Also which queries are padding; and nothing in them is read."""
    q, k, v = (torch.randn(2, 4, 24, 8) for _ in range(3))
    at = torch.arange(24)
    real = {"left": at >= 5, "right": at < 19}.get(side, (at != 3) & (at < 20))
    rows = torch.stack([torch.ones(24, dtype=torch.bool), real])[:, None, None]
    allowed = rows if side == "of keys" else rows & (at <= at[:, None])
    if side == "of heads":
        allowed = allowed & (at > at[:, None] - torch.tensor([3, 9, 24, 24])[:, None, None])
    mask = allowed
    if kind != "booleans":
        mask = torch.where(allowed, 0.0, {"-inf": -torch.inf, "bias": -1e9}.get(kind, -1e4))
        mask = mask + 0.1 * at * (kind == "bias")
    found = []
    for device in ("cpu", "cuda"):
        model, given = Masked(), [x.to(device) for x in (q, k, v, mask)]
        gpu.clear()
        with torch.no_grad(), hw.watch(model, *SIX, hw.LSE(), padding=padding) as seen:
            model(*given)
        assert not gpu.waits, str(gpu)
        found.append(seen.table())
    for here, there in zip(*found, strict=True):
        assert here.pop("module") == there.pop("module")
        assert here == pytest.approx(there, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("layers", [2, 3])
def test_a_table_of_all_layers(gpu: Count, layers: int) -> None:
    """One copy to the host for each kind of metric, however many layers there are."""
    seen, _, _ = watched(gpu, "gpt2", layers, False)
    gpu.clear()
    seen.table()
    assert len(gpu.waits) <= len(SIX), str(gpu)


@pytest.mark.parametrize("padding", [False, True])
def test_a_recorded_step_of_a_monitor(gpu: Count, padding: bool) -> None:
    """One copy to the host, and what layers gave is reduced for all of them at once."""
    own: dict[str, Any] = {"use_cache": False}
    if padding:
        own["attention_mask"] = (torch.arange(24) >= torch.tensor([[0], [5]])).long().to("cuda")
    step = []
    for layers in (2, 3):
        with torch.device("cuda"):
            model, ids = llama(layers), torch.zeros(2, 24, dtype=torch.long)
        model.requires_grad_(False)  # the simulated GPU has no backward pass
        gpu.clear()
        model(ids, **own)
        kernels, waits = len(gpu.kernels), len(gpu.waits)
        monitor = hw.Monitor(model, every=1, queries=8)
        for _ in range(2):
            gpu.clear()
            model(ids, **own)
            launches = Counter(name for name, _ in gpu.kernels)
            assert launches["triton sampled"] == layers, str(gpu)
            assert launches.total() - kernels <= 6 * layers + 20 * padding, str(gpu)
            assert len(gpu.waits) == waits, str(gpu)
            gpu.clear()
            monitor.step()
            step.append(len(gpu.kernels))
            assert len(gpu.waits) == 1, str(gpu)
        monitor.close()
        assert len(monitor.latest) == 8
        assert monitor.latest["entropy"].values.shape == (4 * layers,)
    assert step[1] == step[3], "as many kernels for three layers as for two"


@pytest.mark.parametrize(
    ("mode", "masked"),
    [(torch.no_grad, False), (torch.no_grad, True), (torch.inference_mode, False)],
)
def test_the_log_sum_exp_is_that_of_the_models_kernel(gpu: Count, mode: Any, masked: bool) -> None:
    """The output is PyTorch's own, bit for bit, and our kernel knows its log-sum-exp."""
    q, k, v = qkv()
    model = Masked() if masked else Causal()
    mask = torch.ones(T, T, dtype=torch.bool).tril().to("cuda")
    given = (q, k, v, mask) if masked else (q, k, v)
    with mode():
        plain = model(*given)
        for options in ({}, {"queries": 8}):
            gpu.clear()
            with hw.watch(model, *SIX, **options) as seen:
                out = model(*given)
            assert torch.equal(out.cpu(), plain.cpu())
            launches = Counter(name for name, _ in gpu.kernels if name.startswith("triton"))
            known = "triton sampled" if options else "triton forward, LSE known"
            assert launches == Counter({known: 1}), str(gpu)
            assert seen.modules == ("",)


class Causal(nn.Module):
    """Attention of one layer."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
