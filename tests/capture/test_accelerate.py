"""`accelerate()`: the same numbers from headwise's kernel, an account, all given back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.capture import serve
from headwise.core.call import BoundedCache
from headwise.kernels import ctypes_api as cpu

B, H, T, D = 2, 4, 23, 8
E = H * D

pytestmark = pytest.mark.skipif(bool(cpu.why_not()), reason="no native kernel")


@pytest.fixture(autouse=True)
def never_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the native kernel also on CPUs without vector units."""
    monkeypatch.setattr("headwise.backends.slower", lambda call: False)
    monkeypatch.setattr("headwise.core.call.PREPARED", BoundedCache())  # what was chosen before
    torch.manual_seed(3)


class Attention(nn.Module):
    """Self-attention, called as its keywords say."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.join = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, **keywords: Any) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, **keywords)
        return self.join(out.transpose(1, 2).flatten(2))


LOWER = torch.ones(T, T, dtype=torch.bool).tril()
SMALLEST = torch.finfo(torch.float32).min


def numbers(allowed: Tensor, forbidden: float) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, forbidden)


MASKS: dict[str, dict[str, Any]] = {
    "everything": {},
    "causal": {"is_causal": True},
    "booleans": {"attn_mask": LOWER},
    "rows that see nothing": {"attn_mask": LOWER.tril(-2)},
    "numbers": {"attn_mask": numbers(LOWER, -torch.inf)},
    "nothing in numbers": {"attn_mask": numbers(LOWER.tril(-2), -torch.inf)},
    "nothing by the smallest": {"attn_mask": numbers(LOWER.tril(-2), SMALLEST)},
    "bias": {"attn_mask": torch.linspace(-3, 3, T * T).view(T, T)},
    "of each head": {"attn_mask": torch.linspace(-3, 3, H * T).view(1, H, 1, T)},
    "scale": {"scale": -0.3},
}


@pytest.mark.parametrize("name", MASKS)
def test_numbers_gradients_and_statistics_are_the_same(name: str) -> None:
    model, x = Attention(), torch.randn(B, T, E)
    asked, statistics = MASKS[name], (hw.Entropy(), hw.MaxLogit())
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernel's gradient of rows that see nothing by
        plain = model(x, **asked)  # the smallest number is not that of its output
        plain.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with hw.accelerate(model) as account:
        fast = model(x, **asked)
        fast.square().sum().backward()
    assert (account.served, account.left) == (1, 0), str(account)
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)
    for p, grad in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-4, atol=1e-4)
    with hw.watch(model, *statistics) as truth:
        model(x, **asked)
    with hw.accelerate(model) as outside, hw.watch(model, *statistics) as seen:
        assert torch.equal(model(x, **asked), fast)
    with hw.watch(model, *statistics) as again, hw.accelerate(model) as inside:
        assert torch.equal(model(x, **asked), fast)
    assert outside.served == inside.served == 1
    assert seen.table() == again.table()
    for row, true in zip(seen.table(), truth.table(), strict=True):
        assert row == pytest.approx(true, abs=1e-4)


def test_a_watched_call_takes_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    forward = cpu.forward

    def counted(problem: Any, needs: int) -> Any:
        made.append(problem.v is not None)
        return forward(problem, needs)

    monkeypatch.setattr(cpu, "forward", counted)
    model, x = Attention(), torch.randn(B, T, E)
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
    for module, keywords in (
        (model, {"is_causal": True}),
        (model, {"attn_mask": LOWER}),
        (layer, {}),
    ):
        for first, second in ((hw.accelerate, hw.watch), (hw.watch, hw.accelerate)):
            made.clear()
            statistics = {hw.watch: (hw.Entropy(), hw.MaxLogit()), hw.accelerate: ()}
            outer, inner = (how(module, *statistics[how]) for how in (first, second))
            with torch.no_grad(), outer, inner:
                module(x, **keywords)
            assert made == [True]
    made.clear()
    outer, inner = (hw.watch(model, hw.Entropy()) for _ in range(2))
    with torch.no_grad(), outer, hw.accelerate(model), inner:  # which has the output already
        model(x)
    assert made == [True, False]


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "two axes": ((T, D), (13, D), {}),
    "three": ((5, T, D), (5, 13, D), {"attn_mask": torch.rand(5, T, 13) > 0.3}),
    "five": ((2, 3, 5, T, D), (2, 3, 5, 13, D), {"attn_mask": torch.rand(3, 1, T, 13) > 0.3}),
    "shared keys": ((2, 3, T, D), (1, 1, 13, D), {}),
    "groups": ((2, 6, T, D), (2, 3, 13, D), {"enable_gqa": True}),
    "groups of three axes": ((6, T, D), (3, 13, D), {"enable_gqa": True}),
    "more queries, causal": ((2, 3, T, D), (2, 3, 13, D), {"is_causal": True}),
    "fewer queries, causal": ((2, 3, 5, D), (2, 3, 13, D), {"is_causal": True}),
}


class Plain(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **keywords)


@pytest.mark.parametrize("name", SHAPES)
def test_all_axes_that_pytorch_takes(name: str) -> None:
    of_queries, of_keys, keywords = SHAPES[name]
    q, k, v = torch.randn(of_queries), torch.randn(of_keys), torch.randn(*of_keys[:-1], 5)
    model = Plain()
    plain = model(q, k, v, **keywords)
    with hw.accelerate(model) as account:
        fast = model(q, k, v, **keywords)
    assert account.served == 1, str(account)
    assert fast.stride() == fast.contiguous().stride()  # as the queries are
    torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-6)


def test_what_is_left_goes_on_as_before_and_the_account_says_why() -> None:
    model = Plain()
    q = torch.randn(1, 2, 5, 8)
    bias = torch.randn(5, 5, requires_grad=True)
    cases: list[tuple[Tensor, dict[str, Any], str]] = [
        (q.double(), {}, "torch.float64"),
        (q, {"attn_mask": bias}, "gradient for a bias"),
        (torch.full_like(q, 1e30), {}, ""),  # scores beyond float32: served, and made anew
        (q.to("meta"), {}, "on meta"),
        (q.as_subclass(type("Mine", (Tensor,), {})), {}, "Mine"),
    ]
    for x, keywords, reason in cases:
        torch.manual_seed(0)
        plain = model(x, x, x, **keywords)
        with hw.accelerate(model) as account:
            torch.manual_seed(0)
            same = model(x, x, x, **keywords)
        if not x.is_meta:
            torch.testing.assert_close(same, plain, rtol=0, atol=0, equal_nan=True)
        [row] = account.table()
        assert reason in row["reason"], row
        assert (row["backend"] is None) == bool(reason), row
    with hw.accelerate(model) as account, pytest.raises(RuntimeError):
        model(q, q, q, attn_mask=bias, is_causal=True)  # PyTorch's own error
    assert "is_causal" in str(account)
    with hw.accelerate(model) as account, pytest.raises(RuntimeError):
        model(q, q[..., :3], q)
    assert "head_dim" in str(account)
    with hw.accelerate(model) as account:
        gradient = torch.func.grad(lambda x: model(x, x, x).sum())(q)
    assert gradient.isfinite().all()
    assert "torch.func" in str(account)
    with (
        hw.accelerate(model) as account,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        model(q, q, q)
    assert "switched" in str(account)


def test_dropout_is_served_and_drops_what_attend_drops() -> None:
    model, q, v = Plain(), torch.zeros(2, 3, 21, D, requires_grad=True), torch.eye(21)
    v = v.expand(2, 3, 21, 21)
    torch.manual_seed(1)
    with hw.accelerate(model) as account:
        out = model(q, q, v, dropout_p=0.25, is_causal=True)
    assert account.served == 1, str(account)
    torch.manual_seed(1)
    assert torch.equal(out, hw.attend(q, q, v, mask=hw.Causal(), dropout=0.25))
    allowed = torch.ones(21, 21, dtype=torch.bool).tril()
    assert 0.2 < float((out[..., allowed] == 0).float().mean()) < 0.3
    torch.manual_seed(1)
    with hw.accelerate(model) as account, hw.watch(model, hw.Entropy()) as seen:
        same = model(q, q, v, dropout_p=0.25, is_causal=True)
    assert torch.equal(same, out)
    [figures] = [seen[name]["entropy"] for name in seen]
    torch.testing.assert_close(figures[0, 0], torch.arange(1.0, 22).log())
    with hw.accelerate(model) as account:  # which is no dropout for headwise
        nothing = model(q, q, v, dropout_p=1.0)
    assert account.left == 1
    assert not nothing.any()


def test_layers_with_dropout_train_on_the_kernel() -> None:
    layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.2, batch_first=True).train()
    x = torch.randn(2, 9, 24)
    with hw.accelerate(layer) as account:
        first, other = layer(x), layer(x)
    assert account.served == 2, str(account)
    assert not torch.equal(first, other)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_what_was_measured_slower_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.backends.slower", lambda call: True)
    model, q = Plain(), torch.randn(1, 3, 29, 8)
    with hw.accelerate(model) as account:
        assert torch.equal(model(q, q, q), F.scaled_dot_product_attention(q, q, q))
    assert "measured faster" in str(account)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_fused_layers_of_evaluation(norm_first: bool, padded: bool) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, 0.0, norm_first=norm_first, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, pad = torch.randn(B, T, E), torch.zeros(B, T, dtype=torch.bool)
    pad[1, -5:] = True
    keywords = {"src_key_padding_mask": pad} if padded else {}
    with torch.no_grad():
        plain = model(x, **keywords)
        with hw.watch(model, hw.Entropy()) as truth:
            model(x, **keywords)
        with hw.accelerate(model) as account:
            fast = model(x, **keywords)
        with hw.watch(model, hw.Entropy()) as seen, hw.accelerate(model):
            assert torch.equal(model(x, **keywords), fast)
    assert {row["function"] for row in account.table()} == {"transformer_encoder_layer"}
    assert (account.served, account.left) == (2, 0)
    torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for row, true in zip(seen.table(), truth.table(), strict=True):
        assert row == pytest.approx(true, abs=1e-4)


def test_multihead_attention() -> None:
    layer, x = nn.MultiheadAttention(E, H, batch_first=True), torch.randn(B, T, E)
    other = torch.randn(B, 9, E)
    for training in (True, False):
        layer.train(training)
        for given in ((x, x, x), (x, other, other)):
            with torch.set_grad_enabled(training), hw.accelerate(layer) as account:
                fast = layer(*given, need_weights=False)[0]
            torch.testing.assert_close(
                fast, layer(*given, need_weights=False)[0], rtol=1e-5, atol=1e-6
            )
            assert account.served == 1
            with torch.set_grad_enabled(training), hw.accelerate(layer) as account:
                out, weights = layer(*given)
                again, same = layer(*given, need_weights=True)
            assert torch.equal(out, again)
            assert torch.equal(weights, same)
            assert (account.served, account.left) == (0, 2)
            assert "need_weights" in str(account)


def test_keys_without_a_position_stand_where_a_watch_has_them() -> None:
    layer = nn.MultiheadAttention(E, H, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    x, statistics = torch.randn(B, T, E), (hw.Mass(hw.First()), hw.Entropy())
    with hw.watch(layer, *statistics) as truth:
        layer(x, x, x, need_weights=False)
    with hw.accelerate(layer) as account, hw.watch(layer, *statistics) as seen:
        layer(x, x, x, need_weights=False)
    assert account.served == 1
    for row, true in zip(seen.table(), truth.table(), strict=True):
        assert row == pytest.approx(true, abs=1e-5)


def test_autocast_casts_as_pytorch_does() -> None:
    model, x = Attention(), torch.randn(B, T, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = Plain()(x[:, None], x[:, None], x[:, None], attn_mask=numbers(LOWER, -1e9))
        with hw.accelerate(model) as account:
            assert model(x, is_causal=True).dtype == torch.bfloat16
        other = Plain()
        with hw.accelerate(other):
            fast = other(x[:, None], x[:, None], x[:, None], attn_mask=numbers(LOWER, -1e9))
    assert account.served == 1
    assert fast.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(fast, plain, rtol=2e-2, atol=2e-2)


def test_activations_that_are_computed_again() -> None:
    model, x = Attention(), torch.randn(B, T, E, requires_grad=True)

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False, is_causal=True)

    (wanted,) = torch.autograd.grad(model(x, is_causal=True).sum(), x)
    whole = Again()
    with hw.accelerate(whole) as account:
        (found,) = torch.autograd.grad(whole(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert account.served == 2


def test_everything_is_given_back_also_after_exceptions_and_out_of_order() -> None:
    model, x = Attention(), torch.randn(B, T, E)
    plain, asks = model(x), torch.overrides.has_torch_function
    with pytest.raises(RuntimeError, match="mine"), hw.accelerate(model):
        raise RuntimeError("mine")
    with pytest.raises(RuntimeError), hw.accelerate(model):
        model(x[..., :3])
    one, two = hw.accelerate(model), hw.accelerate(model)
    outer, inner = one.__enter__(), two.__enter__()
    model(x)
    one.__exit__(None, None, None)
    model(x)
    two.__exit__(None, None, None)
    assert (outer.served, inner.served) == (1, 2)
    assert torch.overrides.has_torch_function is asks
    assert not serve.SERVED.everyone
    assert torch.equal(model(x), plain)
    assert not torch.overrides._get_current_function_mode_stack()


def test_threads_have_their_own() -> None:
    models, x = [Attention(), Attention()], torch.randn(B, T, E)
    accounts: list[Any] = [None, None]
    together = threading.Barrier(2)

    def work(number: int) -> None:
        with hw.accelerate(models[number]) as accounts[number]:
            together.wait(10)
            for model in models:
                model(x)
            together.wait(10)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for account in accounts:
        assert account.served == 1
        assert "another thread" in str(account)


def test_other_models_are_left_alone_and_ablation_still_works() -> None:
    model, other, x = Attention(), Attention(), torch.randn(B, T, E)
    with hw.accelerate(model) as account:
        other(x)
    assert "no call" in str(account)
    with hw.ablate(model, {"": [1]}):
        wanted = model(x)
    with hw.ablate(model, {"": [1]}), hw.accelerate(model) as account:
        inside = model(x)
    with hw.accelerate(model), hw.ablate(model, {"": [1]}):
        outside = model(x)
    assert account.served == 1
    assert torch.equal(inside, outside)
    torch.testing.assert_close(inside, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: 3, "is not an nn.Module"),
        (lambda: torch.compile(Attention()), r"accelerate\(.*compiled code cannot be accelerated"),
    ],
)
def test_what_is_no_model_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said), hw.accelerate(make()):
        pass


def test_headwises_own_layers_are_told_of() -> None:
    model = hw.MultiHeadAttention(E, H)
    with hw.accelerate(model) as account:
        model(torch.randn(B, T, E))
    assert "1 layers are headwise's own" in str(account)
