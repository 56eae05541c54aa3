"""`attend()` on every backend against the definition in float64."""

import math
import random

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import headwise as hw
from headwise.backends import blocked
from headwise.core.masks import as_mask
from headwise.core.reference import attention
from headwise.core.shapes import Extent
from support import (
    BACKENDS,
    DV,
    IN_DOUBLE,
    MASKS_WITH_POSITIONS,
    SERVED,
    ULPS,
    B,
    D,
    G,
    H,
    S,
    T,
    assert_as_good,
    of_halves,
    qkv,
    score_rounding,
    truth,
)


def of(name: str) -> hw.Mask:
    return as_mask(MASKS_WITH_POSITIONS[name](T, S))


LOW = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED, ids=str)
def test_every_backend_is_as_good_as_the_definition(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    for t, s, g, dv in [(T, S, G, D), (T, T, H, D), (1, S, 1, DV), (S, S, 2, 3)]:
        mask = MASKS_WITH_POSITIONS[name](t, s)
        q, k, v = qkv(t, s, g, dv, dtype)
        exact = truth(q, k, v, mask=mask)
        seen = hw.observe(q, k, v, mask=mask, backend=backend)
        plain = attention(q, k, v, mask=mask)
        assert seen.out.dtype == dtype
        assert seen.lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert_as_good(seen.out, plain.out, exact.out, dtype)
        own = of_halves(backend, dtype)
        assert_as_good(seen.lse, plain.lse, exact.lse, seen.lse.dtype, own=own)


@pytest.mark.parametrize("name", [name for name in MASKS_WITH_POSITIONS if not of(name).biased])
@pytest.mark.parametrize("backend", BACKENDS)
def test_complements(backend: str, name: str) -> None:
    for t, s in [(T, S), (S, S), (1, S)]:
        q, k, v = qkv(t, s)
        inner = as_mask(MASKS_WITH_POSITIONS[name](t, s))
        table = hw.Dense(~inner.dense(B, H, t, s))
        for mask, same in (~inner, table), (~inner & hw.Window(5), table & hw.Window(5)):
            seen = hw.observe(q, k, v, hw.Entropy(), mask=mask, backend=backend)
            exact, plain = truth(q, k, v, mask=same), attention(q, k, v, mask=same)
            assert_as_good(seen.out, plain.out, exact.out, torch.float32)
            assert_as_good(seen.lse, plain.lse, exact.lse, torch.float32)
            assert torch.equal(hw.attend(q, k, v, mask=mask, backend=backend), seen.out)
            mass = hw.observe(q, k, v, hw.Mass(mask), backend=backend)["mass"]
            torch.testing.assert_close(mass, hw.observe(q, k, v, hw.Mass(same))["mass"])


def test_more_queries_than_keys_leave_the_first_ones_without_keys() -> None:
    q, k, v = qkv(t=S, s=T)
    for backend in BACKENDS:
        seen = hw.observe(q, k, v, mask=hw.Causal(), backend=backend)
        assert torch.equal(seen.out[:, :, : S - T], torch.zeros(B, H, S - T, D))
        assert (seen.lse[:, :, : S - T] == -math.inf).all()
        torch.testing.assert_close(
            seen.out[:, :, S - T :],
            hw.attend(q[:, :, S - T :], k, v, mask=hw.Causal(), backend=backend),
        )


@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([None, "causal", "window", "padding", "both", "dense"]),
    st.floats(0.1, 30.0),
    st.randoms(use_true_random=False),
)
# One query and large scores: the definition's own error was small by chance.
@example(1, (4, 2), 1, 25, 6, 5, None, 22.37, random.Random(2445))
def test_drawn_shapes_and_masks(b, heads, t, s, d, dv, kind, size, random) -> None:
    torch.manual_seed(random.randrange(2**31))
    h, g = heads
    q, k, v = torch.randn(b, h, t, d) * size, torch.randn(b, g, s, d), torch.randn(b, g, s, dv)
    lengths = torch.randint(0, s + 1, (b,))
    mask = {
        None: None,
        "causal": hw.Causal(),
        "window": hw.Window(random.randint(1, s + 3)),
        "padding": hw.Padding(lengths),
        "both": hw.Padding(lengths, side="left") & hw.Causal(),
        "dense": hw.Dense(torch.rand(b, h, t, s) > random.random()),
    }[kind]
    exact, plain = truth(q, k, v, mask=mask), attention(q, k, v, mask=mask)
    score = score_rounding(q, k)
    spread = 2 * v.abs().max().item()  # two values lie this far apart at most
    for backend in BACKENDS:
        seen = hw.observe(q, k, v, mask=mask, backend=backend)
        ulps = ULPS.get(backend, 4.0)
        assert_as_good(seen.out, plain.out, exact.out, torch.float32, ulps=ulps, own=score * spread)
        assert_as_good(seen.lse, plain.lse, exact.lse, torch.float32, ulps=ulps, own=score)


@pytest.mark.parametrize("backend", IN_DOUBLE)
@pytest.mark.parametrize("name", ["none", "causal", "padding", "random", "alibi", "nothing"])
def test_gradients(backend: str, name: str) -> None:
    for t, s, g in [(T, S, G), (S, S, 1)]:
        mask = MASKS_WITH_POSITIONS[name](t, s)
        parts = [x.double().requires_grad_() for x in qkv(t, s, g)]
        weight = torch.randn(B, H, t, D, dtype=torch.float64)
        expected = torch.autograd.grad((attention(*parts, mask=mask).out * weight).sum(), parts)
        out = hw.attend(*parts, mask=mask, backend=backend)
        for got, want in zip(
            torch.autograd.grad((out * weight).sum(), parts), expected, strict=True
        ):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_in_low_precision(backend: str, dtype: torch.dtype) -> None:
    inputs = [x.requires_grad_() for x in qkv(dtype=dtype)]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    plain_inputs = [x.detach().clone().requires_grad_() for x in inputs]
    hw.attend(*inputs, mask=hw.Causal(), backend=backend).square().sum().backward()
    attention(*exact_inputs, mask=hw.Causal()).out.square().sum().backward()
    attention(*plain_inputs, mask=hw.Causal()).out.square().sum().backward()
    for got, plain, exact in zip(inputs, plain_inputs, exact_inputs, strict=True):
        assert got.grad is not None
        assert plain.grad is not None
        assert exact.grad is not None
        assert_as_good(got.grad, plain.grad, exact.grad, dtype)


def test_a_bias_gets_its_gradient() -> None:
    q, k, v = qkv()
    bias = torch.randn(H, T, S, requires_grad=True)
    got = torch.autograd.grad(hw.attend(q, k, v, mask=hw.Bias(bias)).square().sum(), bias)[0]
    want = torch.autograd.grad(attention(q, k, v, mask=hw.Bias(bias)).out.square().sum(), bias)[0]
    torch.testing.assert_close(got, want)
    with pytest.raises(ValueError, match="no gradient for a bias"):
        hw.attend(q, k, v, mask=hw.Bias(bias), backend="sdpa")


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sdpa"])
def test_dropout_keeps_the_mean_and_repeats_with_the_seed(backend: str) -> None:
    q, k, _ = qkv()
    v = torch.ones(B, G, S, D, requires_grad=True)
    torch.manual_seed(3)
    first = hw.attend(q, k, v, dropout=0.4, backend=backend)
    torch.manual_seed(3)
    again = hw.attend(q, k, v, dropout=0.4, backend=backend)
    assert torch.equal(first, again)
    assert not torch.equal(first, torch.ones_like(first))
    with torch.no_grad():
        mean = torch.stack([hw.attend(q, k, v, dropout=0.4, backend=backend) for _ in range(400)])
    # The variance of one draw is below 0.4/0.6; 400 draws of 420 numbers.
    assert (mean.mean(0) - 1).abs().mean() < 3 * math.sqrt(0.4 / 0.6 / 400)
    # The backward pass must drop what the forward pass dropped: the output is linear in v.
    (grad,) = torch.autograd.grad(first.sum(), v)
    torch.testing.assert_close((grad * v).sum(), first.sum())


def test_blocks_are_the_definition_whatever_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv(t=S))
    for scores in (1, B * H * S * 3, 1 << 22):
        monkeypatch.setattr(blocked, "SCORES_AT_A_TIME", scores)
        for name, make in MASKS_WITH_POSITIONS.items():
            mask = make(S, S)
            exact = attention(q, k, v, mask=mask, softcap=2.0)
            out = hw.attend(q, k, v, mask=mask, softcap=2.0, backend="blocked")
            torch.testing.assert_close(out, exact.out, rtol=1e-10, atol=1e-12, msg=name)
            got = torch.autograd.grad(out.square().sum(), (q, k, v))
            want = torch.autograd.grad(exact.out.square().sum(), (q, k, v))
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_blocks_skip_keys_that_nobody_sees() -> None:
    sizes = Extent(1, 1, 1, 100_000, 100_000)
    cut = list(blocked.blocks(hw.Window(10), sizes, torch.device("cpu")))
    seen = sum((b.rows.stop - b.rows.start) * (b.keys.stop - b.keys.start) for b in cut)
    assert seen < 1.2 * 100_000 * (blocked.block_rows(sizes, blocked.SCORES_AT_A_TIME) + 10)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_is_not_positive(backend: str, scale: float) -> None:
    q, k, v = qkv(t=S)
    for mask in (None, hw.Causal(), hw.Window(3), hw.Causal() & hw.Window(99)):
        exact = truth(q, k, v, mask=mask, scale=scale)
        plain = attention(q, k, v, mask=mask, scale=scale)
        seen = hw.observe(q, k, v, hw.Entropy(), mask=mask, scale=scale, backend=backend)
        assert_as_good(seen.out, plain.out, exact.out, torch.float32)
        want = hw.Entropy().define(exact)["entropy"]
        torch.testing.assert_close(seen["entropy"].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs(backend: str) -> None:
    rows = torch.randn(B, S, (H + 2 * G) * D)
    heads = rows.unflatten(-1, (-1, D)).transpose(1, 2)
    q, k, v = heads[:, :H], heads[:, H : H + G], heads[:, H + G :]
    want = hw.attend(q.contiguous(), k.contiguous(), v.contiguous(), mask=hw.Causal())
    torch.testing.assert_close(hw.attend(q, k, v, mask=hw.Causal(), backend=backend), want)
    flipped = [x.mT.contiguous().mT for x in (q, k, v)]  # the last axis is not dense
    torch.testing.assert_close(hw.attend(*flipped, mask=hw.Causal(), backend=backend), want)


@pytest.mark.parametrize("backend", ["auto", "blocked", "eager"])
def test_an_empty_batch(backend: str) -> None:
    q = torch.zeros(0, H, T, D)
    statistics = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()), hw.Distance(), hw.Map(3))
    mask = hw.Padding(torch.zeros(0, dtype=torch.long))
    seen = hw.observe(q, q, q, *statistics, mask=mask, backend=backend)
    assert seen.out.shape == q.shape
    assert seen["max_logit"].shape == (0, H)


@pytest.mark.parametrize("t", [0, T])
@pytest.mark.parametrize("s", [0, S])
@pytest.mark.parametrize("backend", ["auto", "blocked", "eager"])
def test_empty_sides(t: int, s: int, backend: str) -> None:
    q, k, v = qkv(t, s)
    seen = hw.observe(q, k, v, hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First()), backend=backend)
    assert seen.out.shape == (B, H, t, D)
    assert not seen.out.isnan().any()
    if not s:
        assert torch.equal(seen.out, torch.zeros(B, H, t, D))
        assert (seen.lse == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [None, hw.Causal(), hw.Window(5)], ids=str)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_nan_stays_in_its_head_and_batch_row(backend: str, mask: hw.Mask, which: int) -> None:
    parts = list(qkv(t=S))
    clean = hw.attend(*parts, mask=mask, backend=backend)
    parts[which] = parts[which].clone()
    parts[which][1, 0, 3] = torch.nan  # batch row 1, (key/value) head 0, position 3
    out = hw.attend(*parts, mask=mask, backend=backend)
    hit = out.isnan().any(-1)
    touched = torch.zeros(B, H, S, dtype=torch.bool)
    touched[1, : 1 if which == 0 else H // G] = True
    assert hit.any()
    assert not (hit & ~touched).any()
    assert torch.equal(out[~touched], clean[~touched])
    if which == 0:  # a query's NaN stays in its own row
        assert hit.nonzero().tolist() == [[1, 0, 3]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_comes_before_the_bias(backend: str) -> None:
    q, k, v = (10 * x for x in qkv())
    bias = 5 * torch.randn(T, S)
    scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(H // G, 1)) * D**-0.5
    weights = (3 * torch.tanh(scores / 3) + bias).softmax(-1)
    want = weights @ v.repeat_interleave(H // G, 1)
    if backend == "sdpa":
        with pytest.raises(ValueError, match="softcap"):
            hw.attend(q, k, v, mask=hw.Bias(bias), softcap=3.0, backend=backend)
        return
    got = hw.attend(q, k, v, mask=hw.Bias(bias), softcap=3.0, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_query_heads_share_key_heads_in_order() -> None:
    q, k, v = qkv()
    out = hw.attend(q, k, v)
    for h in range(H):
        g = h // (H // G)
        alone = hw.attend(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1])
        torch.testing.assert_close(out[:, h : h + 1], alone)


def test_scale_defaults_to_the_head_dimension() -> None:
    q, k, v = qkv()
    assert torch.equal(hw.attend(q, k, v), hw.attend(q, k, v, scale=D**-0.5))
    assert not torch.equal(hw.attend(q, k, v), hw.attend(q, k, v, scale=1.0))


def test_huge_scores_stay_finite() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(t=S))
    for backend in BACKENDS:
        seen = hw.observe(q * 1e4, k, v, hw.Entropy(), mask=hw.Causal(), backend=backend)
        assert torch.isfinite(seen.out).all()
        assert torch.isfinite(seen["entropy"]).all()
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(seen.out.sum(), (q, k, v)))


def test_auto_takes_the_first_that_accepts_and_explain_says_why() -> None:
    q, k, v = qkv()
    assert hw.explain(q, k, v).chosen == BACKENDS[0]
    assert hw.explain(q.double(), k.double(), v.double()).chosen == "sdpa"
    said = hw.explain(q, k, v, dropout=0.5)
    assert said.chosen == ("native" if "native" in BACKENDS else "blocked")
    assert "not support dropout" in str(said)
    assert [c.name for c in said.choices] == ["native", "sdpa", "blocked", "eager"]
    wide = torch.zeros(1, 1, 10_000, 1, dtype=torch.float64)
    assert hw.explain(wide, wide, wide, mask=hw.Window(10)).chosen == "sdpa"
    assert hw.explain(wide, wide, wide, mask=hw.Causal()).chosen == "sdpa"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"q": torch.zeros(B, T, D)}, r"attend\(q \[2, 7, 5\].*q has 3 axes"),
        ({"q": torch.zeros(B, H, T, D + 1)}, "same head_dim"),
        ({"q": torch.zeros(B + 1, H, T, D)}, "batch"),
        ({"q": torch.zeros(B, 7, T, D)}, "7 query heads cannot share 3"),
        ({"v": torch.zeros(B, G, S + 1, D)}, r"same heads \(axis 1\) and length"),
        ({"q": torch.zeros(B, H, T, D, dtype=torch.float64)}, "one dtype"),
        ({"q": torch.zeros(B, H, T, D, dtype=torch.long)}, "floating-point dtype"),
        ({"softcap": -1.0}, "softcap"),
        ({"dropout": 1.0}, "dropout"),
        ({"backend": "fast"}, "'auto', 'native', 'sdpa', 'blocked', 'eager'"),
        ({"mask": torch.ones(T, S, dtype=torch.bool)}, r"headwise.Dense\(mask\)"),
        ({"mask": torch.zeros(T, S)}, r"headwise.Bias\(mask\)"),
        ({"mask": "causal"}, "must be a headwise mask"),
        ({"mask": hw.Dense(torch.ones(T, T, dtype=torch.bool))}, "broadcast"),
        ({"mask": hw.Padding(torch.ones(5, dtype=torch.long))}, "one length per batch row"),
    ],
    ids=str,
)
def test_bad_calls_get_one_clear_line(change: dict, says: str) -> None:
    q, k, v = qkv()
    call = {"q": q, "k": k, "v": v} | change
    with pytest.raises(ValueError, match=says) as caught:
        hw.attend(**call)
    assert "\n" not in str(caught.value)
