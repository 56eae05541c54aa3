"""The CUDA kernels behind the sdpa backend, against the definition in float64."""

import pytest
import torch

import headwise as hw
from headwise.core.reference import attention
from support import MASKS_WITH_POSITIONS, B, H, assert_as_good, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize(("t", "s", "g"), [(37, 37, H), (37, 41, 3), (1, 41, 2)])
def test_forward_and_backward(name: str, dtype: torch.dtype, t: int, s: int, g: int) -> None:
    mask = MASKS_WITH_POSITIONS[name](t, s)
    q, k, v = torch.randn(B, H, t, 64), torch.randn(B, g, s, 64), torch.randn(B, g, s, 64)
    here = [x.to("cuda", dtype).requires_grad_() for x in (q, k, v)]
    exact_in = [x.detach().double().cpu().requires_grad_() for x in here]
    plain_in = [x.detach().clone().requires_grad_() for x in here]
    seen = hw.observe(*here, hw.Entropy(), hw.Mass(hw.First()), mask=mask, backend="sdpa")
    exact, plain = truth(*exact_in, mask=mask), attention(*plain_in, mask=mask)
    assert_as_good(seen.out.cpu(), plain.out.cpu(), exact.out, dtype)
    assert_as_good(seen.lse.cpu(), plain.lse.cpu(), exact.lse, torch.float32)
    assert torch.equal(seen.out, hw.attend(*here, mask=mask, backend="sdpa"))
    want = hw.Entropy().define(exact)["entropy"]
    torch.testing.assert_close(seen["entropy"].cpu().double(), want, rtol=1e-4, atol=1e-4)
    for result in (seen.out, plain.out, exact.out):
        result.square().sum().backward()
    for got, beside, right in zip(here, plain_in, exact_in, strict=True):
        assert got.grad is not None
        assert beside.grad is not None
        assert right.grad is not None
        assert_as_good(got.grad.cpu(), beside.grad.cpu(), right.grad, dtype)
