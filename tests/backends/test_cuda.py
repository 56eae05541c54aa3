"""What runs on CUDA, against the definition in float64: our Triton kernels and PyTorch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.reference import attention
from support import MASKS_WITH_POSITIONS, B, H, assert_as_good, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(37, 37, H), (37, 41, 3), (1, 41, 2), (150, 260, 2)]

CASES = [(*shape, dtype) for shape in SHAPES for dtype in DTYPES[:2]]
CASES.append((*SHAPES[0], torch.float16))

FACTOR = {torch.float32: 16.0, torch.bfloat16: 4.0, torch.float16: 4.0}
"""How many times the error of the plain definition is allowed.

Products of float32 are made in three passes of TF32 by the kernels, PyTorch's and ours: 8 to 10
times as far off as one pass of float32 was seen.
"""


def qkv(t: int, s: int, g: int, dtype: torch.dtype, dim: int = 64) -> list[Tensor]:
    q, k, v = torch.randn(B, H, t, dim), torch.randn(B, g, s, dim), torch.randn(B, g, s, dim)
    return [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]


def statistics() -> list[hw.Statistic]:
    """All that one pass has, and two passes over the columns."""
    masses = [hw.Mass(pattern) for pattern in (hw.First(), hw.Previous(), hw.Self())]
    pass_ = [hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Distance(), *masses]
    return [*pass_, hw.Received(), hw.Map(4)]


@pytest.mark.parametrize("backend", ["native", "sdpa"])
@pytest.mark.parametrize(("t", "s", "g", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_forward_and_backward(
    name: str, t: int, s: int, g: int, dtype: torch.dtype, backend: str
) -> None:
    mask = MASKS_WITH_POSITIONS[name](t, s)
    here = qkv(t, s, g, dtype)
    exact_in = [x.detach().double().cpu().requires_grad_() for x in here]
    plain_in = [x.detach().clone().requires_grad_() for x in here]
    seen = hw.observe(*here, *statistics(), mask=mask, backend=backend)
    exact, plain = truth(*exact_in, mask=mask), attention(*plain_in, mask=mask)
    assert_as_good(seen.out.cpu(), plain.out.cpu(), exact.out, dtype, FACTOR[dtype])
    assert_as_good(seen.lse.cpu(), plain.lse.cpu(), exact.lse, torch.float32, 16.0)
    assert torch.equal(seen.out, hw.attend(*here, mask=mask, backend=backend))
    assert_figures(seen, exact)
    for result in (seen.out, plain.out, exact.out):
        result.square().sum().backward()
    assert_gradients(here, plain_in, exact_in, dtype)


def assert_figures(seen: hw.stats.Seen, exact: object) -> None:
    for statistic in statistics():
        for name, want in statistic.define(exact).items():  # type: ignore[arg-type]
            got = seen[name].cpu().double()
            assert not got.isnan().any(), name
            torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4, msg=name)


def assert_gradients(
    here: list[Tensor], plain_in: list[Tensor], exact_in: list[Tensor], dtype: torch.dtype
) -> None:
    for got, beside, right in zip(here, plain_in, exact_in, strict=True):
        assert got.grad is not None
        assert beside.grad is not None
        assert right.grad is not None
        assert_as_good(got.grad.cpu(), beside.grad.cpu(), right.grad, dtype, FACTOR[dtype])


@pytest.mark.parametrize("name", ["none", "causal", "window", "left padding", "alibi", "random"])
@pytest.mark.parametrize(("softcap", "sunk"), [(None, False), (5.0, False), (None, True)])
def test_a_loss_on_figures(name: str, softcap: float | None, sunk: bool) -> None:
    t, s, g = 70, 90, 3
    mask = MASKS_WITH_POSITIONS[name](t, s)
    here = qkv(t, s, g, torch.float32, dim=32)
    sinks = torch.randn(H)
    gradients = []
    for device, dtype in (("cuda", torch.float32), ("cpu", torch.float64)):
        q, k, v = (x.detach().to(device, dtype).requires_grad_() for x in here)
        own = sinks.to(device, dtype).requires_grad_() if sunk else None
        masses = [hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Mass(hw.Self())]
        call = {"mask": mask, "softcap": softcap, "sinks": own}
        backend = "native" if device == "cuda" else "eager"
        seen = hw.observe(
            q, k, v, hw.LSE(), hw.Entropy(), hw.Distance(), *masses, backend=backend, **call
        )
        loss = seen.out.square().sum()
        for n, name_ in enumerate(("lse", "entropy", "distance", "first", "previous", "self")):
            loss = loss + (n + 1) * seen[name_].masked_fill(seen.lse.isneginf(), 0.0).sin().sum()
        loss.backward()
        gradients.append([x.grad for x in (q, k, v, own) if x is not None])
    for got, want in zip(*gradients, strict=True):
        assert got is not None
        size = want.abs().max().item()
        torch.testing.assert_close(got.cpu().double(), want, rtol=1e-3, atol=1e-4 * size)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80, 128, 192, 256])
def test_widths_of_heads(dim: int, dtype: torch.dtype) -> None:
    here = qkv(70, 70, 3, dtype, dim)
    exact_in = [x.detach().double().cpu().requires_grad_() for x in here]
    plain_in = [x.detach().clone().requires_grad_() for x in here]
    mask = hw.Window(20)
    backend = "auto" if dtype == torch.float32 else "native"  # which refuses the widest of these
    seen = hw.observe(*here, *statistics(), mask=mask, backend=backend)
    exact, plain = truth(*exact_in, mask=mask), attention(*plain_in, mask=mask)
    assert_as_good(seen.out.cpu(), plain.out.cpu(), exact.out, dtype, FACTOR[dtype])
    assert_figures(seen, exact)
    for result in (seen.out, plain.out, exact.out):
        result.square().sum().backward()
    assert_gradients(here, plain_in, exact_in, dtype)


@pytest.mark.parametrize("output", [True, False])
def test_some_of_the_queries(output: bool) -> None:
    q, k, v = (x.detach() for x in qkv(300, 300, 3, torch.bfloat16))
    rows = torch.tensor([0, 3, 77, 150, 299], device="cuda")
    some = hw.observe(
        q, k, v, *statistics(), mask=hw.Causal(), queries=rows, output=output, backend="native"
    )
    exact = truth(q.cpu(), k.cpu(), v.cpu(), mask=hw.Causal())
    want = hw.Entropy().define(exact)["entropy"][:, :, rows.cpu()]
    torch.testing.assert_close(some["entropy"].cpu().double(), want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("mask", [None, hw.Causal(), hw.Window(9)], ids=str)
def test_compiled_whole(mask: hw.Mask | None) -> None:
    q, k, v = (x.detach() for x in qkv(64, 64, 3, torch.bfloat16))

    def figures(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen = hw.observe(q, k, v, hw.Entropy(), mask=mask)
        return seen.out, seen["entropy"]

    compiled: Callable[..., tuple[Tensor, Tensor]] = torch.compile(figures, fullgraph=True)
    for got, want in zip(compiled(q, k, v), figures(q, k, v), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


def test_a_call_of_one_row_and_of_many_heads() -> None:
    q = torch.randn(3, 70, 1, 32, device="cuda")
    k, v = torch.randn(2, 3, 35, 5, 32, device="cuda")
    seen = hw.observe(q, k, v, *statistics(), mask=hw.Causal(), backend="native")
    assert_figures(seen, truth(q.cpu(), k.cpu(), v.cpu(), mask=hw.Causal()))
