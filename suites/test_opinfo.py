"""PyTorch's OpInfo samples of `scaled_dot_product_attention`, computed by `attend`.

Values in four dtypes, and in float64 first, second and forward derivatives against finite
differences.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from adapters import backends, reasons, scaled_dot_product_attention
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_methods_invocations import op_db

[OP] = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
SAMPLES = range(25)
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DROPS = "dropout draws other numbers than PyTorch's; its derivatives are tested"


def sample(number: int, dtype: torch.dtype, grad: bool = False) -> tuple[list[Tensor], dict]:
    """A sample's tensors, a float mask among them, and its options."""
    torch.manual_seed(0)
    found = list(OP.sample_inputs("cpu", dtype, requires_grad=grad))[number]
    options = dict(found.kwargs)
    mask = options.pop("attn_mask", None)
    return [found.input, *found.args, *([] if mask is None else [mask])], options


def test_all_of_them_are_here() -> None:
    assert {*DTYPES} == OP.dtypes
    assert all(len(list(OP.sample_inputs("cpu", dtype))) == len(SAMPLES) for dtype in DTYPES)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", SAMPLES)
def test_values(number: int, dtype: torch.dtype, backend: str, count: Callable[..., None]) -> None:
    tensors, options = sample(number, dtype)
    if options["dropout_p"]:
        pytest.skip(DROPS)
    if refused(tensors, options, backend):
        count(refused=1)
        return
    ours = scaled_dot_product_attention(*tensors, **options, backend=backend)
    theirs = OP.op(*tensors, **options)
    if dtype in (torch.float32, torch.float64):
        allowed = {"atol": 5e-5, "rtol": 5e-6} if dtype == torch.float32 else {}  # OpInfo's own
        torch.testing.assert_close(ours, theirs, **allowed)
    else:  # both round: no more than twice PyTorch's error, or a unit in the last place
        exact = OP.op(*(x.double() for x in tensors), **options)
        errors = [(x.double() - exact).abs().max().item() for x in (ours, theirs)]
        assert errors[0] <= max(2 * errors[1], torch.finfo(dtype).eps * exact.abs().max().item())
    count(served=1)


DERIVATIVES: dict[str, Callable[..., bool]] = {
    "first": gradcheck,
    "second": gradgradcheck,
    "forward": lambda *a, **k: gradcheck(*a, check_forward_ad=True, check_backward_ad=False, **k),
}


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("order", DERIVATIVES)
@pytest.mark.parametrize("number", SAMPLES)
def test_derivatives(number: int, order: str, backend: str, count: Callable[..., None]) -> None:
    tensors, options = sample(number, torch.float64, grad=True)

    def function(*tensors: Tensor) -> Tensor:
        torch.manual_seed(3)  # the same weights are dropped each time
        return scaled_dot_product_attention(*tensors, **options, backend=backend)

    if refused(tensors, options, backend):
        count(refused=1)
        return
    if backend == "sdpa" and order == "forward":
        with pytest.raises(ValueError, match="or forward derivatives"):
            DERIVATIVES[order](function, tensors, fast_mode=True)
        count(refused=1)
        return
    assert DERIVATIVES[order](function, tensors, fast_mode=True)
    count(served=1)


def refused(tensors: list[Tensor], options: dict[str, Any], backend: str) -> bool:
    """Whether the backend refuses the call, as `explain` says it does."""
    if not reasons(*tensors, **options, backend=backend):
        return False
    with pytest.raises(ValueError, match="cannot run this call"):
        scaled_dot_product_attention(*tensors, **options, backend=backend)
    return True
