"""Calls that are recorded for other numbers, by `torch.jit.trace`, `make_fx` and `torch.export`;
statistics of tensors without numbers."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from support import BACKENDS, MASKS_WITH_POSITIONS, B, H, S, T, pairwise, qkv

IDS = torch.arange(2 * S).view(2, S) * 7 % 5
WEIGHT = torch.linspace(-1, 1, 8 * 30).view(8, 30)
ALL = [
    *(hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.MaxLogit(above=0.5), hw.Norms(), hw.Sink()),
    *(hw.Received(), hw.Map(3), hw.OffsetHistogram(4, ahead=True), hw.Similarity(4)),
    *(hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Mass(hw.Self()), hw.Mass(hw.At(1))),
    *(hw.Mass(hw.First(3), name="three"), hw.Mass(hw.Window(3)), hw.Mass(hw.SameToken(IDS))),
    *(hw.Mass(hw.Induction(IDS)), hw.Distance(spread=True, absolute=True), hw.TopKeys(3)),
    *(hw.OutputNorm(WEIGHT), hw.Segments({"few": (0, 2), "others": [(2, 3), (4, 9)]})),
]


def test_every_statistic_is_among_those() -> None:
    known = {x for name in hw.__all__ if hasattr(x := getattr(hw, name), "define")}
    assert {type(statistic) for statistic in ALL} == known - {hw.Statistic}


def everything(backend: str, mask: hw.Mask | None, *parts: Tensor) -> dict[str, Tensor]:
    """The output of a call and all that is known of it."""
    seen = hw.observe(*parts, *ALL, mask=mask, backend=backend)
    found = {"attend": hw.attend(*parts, mask=mask, backend=backend)}
    return found | {"out": seen.out, "lse": seen.lse} | {name: seen[name] for name in seen.names}


@pytest.fixture
def quiet() -> Iterator[None]:
    """No warnings of a trace about what it takes for constant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def by_jit(run: Callable[..., object], parts: tuple[Tensor, ...]) -> Callable[..., object]:
    return torch.jit.trace(run, parts, check_trace=not torch.is_grad_enabled(), strict=False)


def by_make_fx(run: Callable[..., object], parts: tuple[Tensor, ...]) -> Callable[..., object]:
    return make_fx(run)(*parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name", "how"),
    pairwise(
        BACKENDS,
        ["causal", "windowed documents"],
        [(by_jit, False), (by_jit, True), (by_make_fx, False)],
    ),
)
@pytest.mark.usefixtures("quiet", "unchecked")
def test_a_trace_computes_with_the_numbers_that_it_is_given(
    backend: str, name: str, how: tuple[Callable[..., Callable[..., object]], bool]
) -> None:
    trace, gradients = how
    mask = MASKS_WITH_POSITIONS[name](T, S)

    def run(*parts: Tensor) -> dict[str, Tensor]:
        return everything(backend, mask, *parts)

    first, second = qkv(), [x + torch.randn_like(x) for x in qkv()]
    with torch.set_grad_enabled(gradients):
        graph = trace(run, tuple(x.requires_grad_(gradients) for x in first))
        got, want = graph(*second), run(*second)
    assert isinstance(got, dict)
    for figure, x in want.items():
        torch.testing.assert_close(got[figure], x, rtol=1e-4, atol=1e-5, msg=figure)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.usefixtures("quiet", "unchecked")
def test_a_traced_layer_is_saved_and_trains(backend: str) -> None:
    layer = hw.MultiHeadAttention(24, 4, num_kv_heads=2, rope=hw.RoPE(6), backend=backend)
    run = CausalLayer(layer)
    x, y = torch.randn(2, 1, 9, 24)
    file = io.BytesIO()
    torch.jit.save(by_jit(run, (x,)), file)
    file.seek(0)
    graph = torch.jit.load(file)
    torch.testing.assert_close(graph(y), run(y))
    inputs = [y.clone().requires_grad_() for _ in range(2)]
    graph(inputs[0]).square().sum().backward()
    run(inputs[1]).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


class CausalLayer(nn.Module):
    def __init__(self, layer: hw.MultiHeadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=hw.Causal())


class Observed(nn.Module):
    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
        asked = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()))
        seen = hw.observe(q, k, v, *asked, mask=hw.Causal(), backend=self.backend)
        return {"out": seen.out, "lse": seen.lse} | {name: seen[name] for name in seen.names}


@pytest.mark.parametrize(
    ("backend", "gradients"), [("auto", False), ("auto", True), ("sdpa", True)]
)
@pytest.mark.usefixtures("quiet", "unchecked")
def test_an_exported_call_is_saved(backend: str, gradients: bool) -> None:
    first, second = qkv(), [x + torch.randn_like(x) for x in qkv()]
    first = [x.requires_grad_(gradients) for x in first]
    file = io.BytesIO()
    with torch.set_grad_enabled(gradients):
        torch.export.save(torch.export.export(Observed(backend), tuple(first)), file)
    file.seek(0)
    got = torch.export.load(file).module()(*second)
    for figure, x in Observed(backend)(*second).items():
        torch.testing.assert_close(got[figure], x, rtol=1e-4, atol=1e-5, msg=figure)


# ── tensors without numbers ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("backend", "fake"), [("auto", False), ("auto", True), ("sdpa", True)])
@pytest.mark.parametrize("name", ["none", "causal", "padding", "bias", "nothing", "documents"])
def test_every_statistic_of_tensors_without_numbers_has_its_shape_and_dtype(
    name: str, backend: str, fake: bool
) -> None:
    want = everything("eager", MASKS_WITH_POSITIONS[name](T, S), *qkv())
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    mask = MASKS_WITH_POSITIONS[name](T, S)
    with mode:
        parts = [torch.empty_like(x) if fake else x.to("meta") for x in qkv()]
        got = everything(backend, mask, *parts)
    for figure, x in want.items():
        assert (got[figure].shape, got[figure].dtype) == (x.shape, x.dtype), figure


@pytest.mark.parametrize("fake", [False, True])
def test_some_queries_of_tensors_without_numbers(fake: bool) -> None:
    for queries, number in ((3, 3), ([1, -1], 2)):
        with FakeTensorMode() if fake else nullcontext():
            parts = [torch.empty(x.shape, device="cpu" if fake else "meta") for x in qkv()]
            for output in (True, False):
                asked = (hw.Entropy(), hw.Mass(hw.Window(3)), hw.Mass(hw.First(2)))
                seen = hw.observe(*parts, *asked, queries=queries, output=output)
                assert {seen[name].shape for name in seen.names} == {(B, H, number)}


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name in ("native", "sdpa")])
def test_functional_tensors_have_their_numbers(backend: str) -> None:
    parts = qkv()
    asked = hw.Entropy(), hw.Received()
    want = hw.observe(*parts, *asked, backend=backend)  # which makes the kind of call known
    wrapped = [torch._to_functional_tensor(x) for x in parts]
    seen = hw.observe(*wrapped, *asked, backend=backend)
    pairs = [(seen.out, want.out), *((seen[name], want[name]) for name in seen.names)]
    for got, x in pairs:
        torch._sync(got)
        torch.testing.assert_close(torch._from_functional_tensor(got), x)


def test_the_way_to_a_statistic_is_told_without_numbers() -> None:
    parts = [x.to("meta") for x in qkv()]
    told = hw.explain(*parts, hw.Mass(hw.First(2)), hw.Entropy(), hw.MaxLogit())
    assert set(told.statistics) == {"first", "entropy", "entropy_share", "max_logit"}
    assert "numbers cannot be read" in told.statistics["first"]


def test_queries_are_drawn_alike_on_any_device_by_default() -> None:
    parts = qkv()
    want = hw.observe(*parts, hw.Entropy(), queries=4, backend="blocked")
    with torch.device("meta"):
        seen = hw.observe(*parts, hw.Entropy(), queries=4, backend="blocked")
    assert torch.equal(seen.queries, want.queries)
    assert torch.equal(seen["entropy"], want["entropy"])


def numbers(low: int) -> Tensor:
    return torch.arange(B * T).view(B, T) % 3 // (3 - low)


MASKS: list[Callable[[int], hw.Mask]] = [  # of one kind each, with other numbers
    lambda low: hw.Causal() & hw.Window(3),
    lambda low: hw.Causal() & hw.Padding(torch.tensor([T, T - low])),
    lambda low: hw.Padding(torch.tensor([T - low, T]), side="left") | hw.Prefix(2),
    lambda low: hw.Documents(numbers(low)),
    lambda low: hw.Dense(~torch.eye(T, dtype=torch.bool).roll(low, 1)) & ~hw.Window(1),
    lambda low: hw.ALiBi() & hw.Bias(torch.arange(T * T).view(T, T) / (9.0 + low)),
]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("saved", [False, True])
def test_layers_are_exported_with_a_mask(mask: Callable[[int], hw.Mask], saved: bool) -> None:
    layer, x = hw.MultiHeadAttention(24, num_heads=3).eval(), torch.randn(B, T, 24)
    program = torch.export.export(layer, (x,), {"mask": mask(1)})
    if saved:
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        program = torch.export.load(file)
    for low in (1, 2):
        given = mask(low)
        got = program.module()(x, mask=given)
        torch.testing.assert_close(got, layer(x, mask=given), atol=1e-6, rtol=1e-5)


def test_people_s_own_masks_are_exported() -> None:
    class Every(hw.Mask):
        """No dataclass: it has no parts."""

        def allowed(self, i: Tensor, j: Tensor, extent: object) -> Tensor:
            return (i - j) % 2 == 0

    layer, x = hw.MultiHeadAttention(24, num_heads=3).eval(), torch.randn(B, T, 24)
    mask = Every()
    program = torch.export.export(layer, (x,), {"mask": mask})
    got = program.module()(x, mask=mask)
    torch.testing.assert_close(got, layer(x, mask=mask), atol=1e-6, rtol=1e-5)
