"""Attention under PyTorch's other ways of running it: `torch.func`, forward derivatives, second
derivatives, and tensors without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradgradcheck
from torch.func import grad, hessian, jvp, vmap

import headwise as hw
from support import BACKENDS, DV, IN_DOUBLE, MASKS_WITH_POSITIONS, B, D, G, H, S, T, qkv

PLAIN = ["auto", "blocked", "eager"]
"""Those that serve every transform."""

FUSED = [name for name in BACKENDS if name not in PLAIN]

every_mask = pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)


def doubles(t: int = T, s: int = S) -> list[Tensor]:
    return [x.double() for x in qkv(t, s, dv=DV)]


def attending(backend: str, mask: hw.Mask | None) -> Callable[..., Tensor]:
    return lambda q, k, v: hw.attend(q, k, v, mask=mask, backend=backend)


def loss(backend: str, mask: hw.Mask | None, k: Tensor, v: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda q: hw.attend(q, k, v, mask=mask, backend=backend).sin().sum()


# ── torch.func ──────────────────────────────────────────────────────────────────────────────────


@every_mask
@pytest.mark.parametrize("backend", PLAIN)
def test_vmap_maps_over_any_of_q_k_and_v(backend: str, name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    attend, calls = attending(backend, mask), [doubles() for _ in range(3)]
    every = [torch.stack(x) for x in zip(*calls, strict=True)]
    torch.testing.assert_close(vmap(attend)(*every), torch.stack([attend(*x) for x in calls]))
    q, k, _ = calls[0]
    got = vmap(attend, in_dims=(None, None, 0))(q, k, every[2])
    torch.testing.assert_close(got, torch.stack([attend(q, k, v) for _, _, v in calls]))


@pytest.mark.parametrize("backend", PLAIN)
def test_vmap_maps_over_what_a_mask_holds(backend: str) -> None:
    q, k, v = doubles()
    lengths = torch.tensor([[3, 5], [S, 0], [1, 2]])
    bias = torch.randn(3, T, S)

    def attend(n: Tensor, bias: Tensor) -> Tensor:
        mask = hw.Causal() & hw.Padding(n) & hw.Bias(bias)
        return hw.attend(q, k, v, mask=mask, backend=backend)

    want = torch.stack([attend(n, x) for n, x in zip(lengths, bias, strict=True)])
    torch.testing.assert_close(vmap(attend)(lengths, bias), want)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
def test_observe_says_that_it_cannot_be_mapped(backend: str) -> None:
    every = [torch.stack([x, x]) for x in doubles()]
    with pytest.raises(ValueError, match=r"observe\(q \[2, 6, 7, 5\].*inside torch.func.vmap"):
        vmap(lambda q, k, v: hw.observe(q, k, v, hw.Entropy(), backend=backend).out)(*every)


@pytest.mark.parametrize("backend", FUSED)
@pytest.mark.parametrize("function", ["attend", "observe"])
def test_fused_kernels_refuse_transforms_and_forward_derivatives(
    function: str, backend: str
) -> None:
    q, k, v = qkv()

    def run(q: Tensor) -> Tensor:
        found = getattr(hw, function)(q, k, v, backend=backend)
        return (found if isinstance(found, Tensor) else found.out).sum()

    says = "not support torch.func or forward derivatives"
    asked: list[Callable[[], object]] = [lambda: grad(run)(q), lambda: jvp(run, (q,), (q,))]
    if function == "attend":
        asked.append(lambda: vmap(run)(q[None]))
    for ask in asked:
        with pytest.raises(ValueError, match=says):
            ask()


@every_mask
@pytest.mark.parametrize("backend", PLAIN)
def test_derivatives_by_functions_are_those_of_autograd(backend: str, name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    q, k, v = doubles()
    towards, function = torch.randn_like(q), loss(backend, mask, k, v)
    x = q.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss("eager", mask, k, v)(x), x, create_graph=True)
    (second,) = torch.autograd.grad((first * towards).sum(), x)
    torch.testing.assert_close(grad(function)(q), first)
    torch.testing.assert_close(jvp(function, (q,), (towards,))[1], (first * towards).sum())
    torch.testing.assert_close(jvp(grad(function), (q,), (towards,))[1], second)
    by_two = grad(lambda x: (grad(function)(x) * towards).sum())(q)
    torch.testing.assert_close(by_two, second)


def test_gradients_of_each_sample_and_a_hessian() -> None:
    q, k, v = (x[:1, :, :3] for x in doubles())
    function = loss("auto", hw.Window(2), k, v)
    samples = torch.stack([q, 2 * q])
    want = torch.stack([grad(function)(x) for x in samples])
    torch.testing.assert_close(vmap(grad(function))(samples), want)
    assert hessian(function)(q).shape == 2 * q.shape


# ── forward derivatives ─────────────────────────────────────────────────────────────────────────

FIGURES = ["out", "lse", "entropy", "first", "distance"]


def figures(backend: str, mask: hw.Mask | None, *parts: Tensor) -> Tensor:
    """A number of everything that has a derivative."""
    asked = (hw.Entropy(), hw.Mass(hw.First()), hw.Distance())
    seen = hw.observe(*parts, *asked, mask=mask, backend=backend)
    lse = seen.lse.masked_fill(seen.lse == -torch.inf, 0.0)
    return sum(x.sin().sum() for x in (seen.out, lse, *(seen[name] for name in FIGURES[2:])))


@pytest.mark.parametrize("name", ["none", "window", "padding", "bias", "nothing"])
@pytest.mark.parametrize("backend", PLAIN)
def test_forward_derivatives_of_output_and_statistics(backend: str, name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    parts = doubles()
    towards = [torch.randn_like(x) for x in parts]
    given = [x.clone().requires_grad_() for x in parts]
    grads = torch.autograd.grad(figures("eager", mask, *given), given)
    want = sum((g * x).sum() for g, x in zip(grads, towards, strict=True))
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(parts, towards, strict=True)]
        got = forward_ad.unpack_dual(figures(backend, mask, *duals)).tangent
    torch.testing.assert_close(got, want)
    by_function = jvp(lambda *x: figures(backend, mask, *x), tuple(parts), tuple(towards))[1]
    torch.testing.assert_close(by_function, want)


# ── second derivatives ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["none", "window", "random per head"])
@pytest.mark.parametrize("backend", ["auto", *IN_DOUBLE])
def test_second_derivatives(backend: str, name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](3, 4)
    parts = [x.double().requires_grad_() for x in qkv(3, 4)]
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    attend = attending(backend, mask)
    assert gradgradcheck(attend, parts, fast_mode=True, check_batched_grad=False)

    def beside_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return hw.attend(q, k, v, mask=mask, sinks=sinks, backend=backend)

    assert gradgradcheck(beside_sinks, (*parts, sinks), fast_mode=True, check_batched_grad=False)


# ── tensors without numbers ─────────────────────────────────────────────────────────────────────


def shapes_of(backend: str, parts: list[Tensor], mask: hw.Mask | None) -> list[torch.Size]:
    out = hw.attend(*parts, mask=mask, backend=backend)
    seen = hw.observe(*parts, hw.Entropy(), hw.Distance(), mask=mask, backend=backend)
    return [x.shape for x in (out, seen.out, seen.lse, seen["entropy"], seen["distance"])]


@every_mask
@pytest.mark.parametrize("backend", PLAIN)
def test_meta_tensors_have_shapes(backend: str, name: str) -> None:
    parts = [x.to("meta").requires_grad_() for x in qkv(dv=DV)]
    per_query = torch.Size([B, H, T])
    mask = MASKS_WITH_POSITIONS[name](T, S)
    want = [*2 * [torch.Size([B, H, T, DV])], *3 * [per_query]]
    assert shapes_of(backend, parts, mask) == want
    hw.attend(*parts, mask=mask, backend=backend).sum().backward()
    assert parts[0].grad is not None
    assert parts[0].grad.is_meta


@every_mask
@pytest.mark.parametrize("backend", IN_DOUBLE)
def test_fake_tensors_have_shapes(backend: str, name: str) -> None:
    with FakeTensorMode():
        parts = [torch.empty(B, heads, n, D) for heads, n in ((H, T), (G, S), (G, S))]
        mask = MASKS_WITH_POSITIONS[name](T, S)
        want = [*2 * [torch.Size([B, H, T, D])], *3 * [torch.Size([B, H, T])]]
        assert shapes_of(backend, parts, mask) == want


def test_a_layer_on_meta_gives_shapes() -> None:
    with torch.device("meta"):
        layer = hw.MultiHeadAttention(24, 4, num_kv_heads=2, sinks=True, rope=hw.RoPE(6))
        x = torch.empty(2, 7, 24)
    assert layer(x, mask=hw.Window(3)).shape == x.shape
    with torch.no_grad():
        cache = hw.KVCache(window=3)
        assert layer(x, mask=hw.Window(3), cache=cache).is_meta


@every_mask
@pytest.mark.parametrize("backend", IN_DOUBLE)
def test_the_default_device_and_dtype_change_nothing(backend: str, name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    parts, asked = qkv(), {"mask": mask, "backend": backend}
    want = hw.observe(*parts, hw.Entropy(), hw.Distance(), **asked)
    settings: list[Any] = [torch.device("meta"), DefaultDtype(torch.bfloat16)]
    for setting in [*settings, DefaultDtype(torch.float64)]:
        with setting:
            got = hw.observe(*parts, hw.Entropy(), hw.Distance(), **asked)
            assert torch.equal(hw.attend(*parts, **asked), want.out)
        assert torch.equal(got.lse, want.lse)
        for figure in got.names:
            assert torch.equal(got[figure], want[figure]), figure


class DefaultDtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
