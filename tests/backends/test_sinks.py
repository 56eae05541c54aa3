"""Learned sinks: one more outcome in every row's softmax, on each backend, in each statistic."""

import math

import pytest
import torch
from torch import Tensor

import fresh
import headwise as hw
from headwise.backends import tiles
from headwise.core.reference import attention
from headwise.stats.statistic import Statistic
from support import (
    BACKENDS,
    MASKS_WITH_POSITIONS,
    B,
    D,
    G,
    H,
    S,
    T,
    assert_as_good,
    of_halves,
    qkv,
    truth,
)

FORMS = ["sdpa", "tiles", "blocked", "eager"]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "tiles":
        return request.param
    monkeypatch.setattr(tiles, "ROWS_AT_A_TIME", 3)
    monkeypatch.setattr(tiles, "BIAS_AT_A_TIME", 40)
    return "sdpa"


def everything(ids: Tensor) -> list[Statistic]:
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Sink(),
        hw.Mass(hw.First(2)),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.Window(3), name="near"),
        hw.Distance(spread=True, absolute=True),
        hw.Map(4),
        hw.TopKeys(3),
        hw.Received(),
        hw.OffsetHistogram(5, ahead=True),
        hw.Similarity(),
    ]


def test_one_row_by_hand() -> None:
    # Two keys with scores log 1 and log 3, a sink with log 4: probabilities 1/8, 3/8, 4/8.
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([1.0, 3.0], dtype=torch.float64).log().view(1, 1, 2, 1)
    v = torch.tensor([16.0, 32.0], dtype=torch.float64).view(1, 1, 2, 1)
    sinks = torch.tensor([4.0], dtype=torch.float64).log()
    statistics = [
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Sink(),
        hw.Mass(hw.Self()),
        hw.Distance(spread=True, absolute=True),
    ]
    seen = hw.observe(q, k, v, *statistics, hw.Received(), mask=hw.Causal(), scale=1.0, sinks=sinks)
    found = {name: seen[name].flatten().tolist() for name in seen.names}
    assert seen.out.flatten().tolist() == pytest.approx([2 + 12])
    assert seen.lse.exp().flatten().tolist() == pytest.approx([8])
    assert found["sink"] == pytest.approx([0.5])
    assert found["self"] == pytest.approx([3 / 8])
    entropy = -(math.log(1 / 8) / 8 + 3 * math.log(3 / 8) / 8 + math.log(1 / 2) / 2)
    assert found["entropy"] == pytest.approx([entropy])
    assert found["entropy_share"] == pytest.approx([entropy / math.log(3)])
    assert found["max_logit"] == pytest.approx([math.log(3)])
    assert found["distance"] == pytest.approx([1 / 8])  # key 0 is one token back
    assert found["distance_spread"] == pytest.approx([math.sqrt(3) / 4])  # of 1/4 and 3/4
    assert found["received"] == pytest.approx([1 / 8, 3 / 8])
    assert seen.weights().flatten().tolist() == pytest.approx([1 / 8, 3 / 8])


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_output_and_lse_are_as_good_as_the_definitions(
    backend: str, name: str, dtype: torch.dtype
) -> None:
    sinks = 2 * torch.randn(H)
    for t, s, g in [(T, S, G), (S, S, 1), (1, S, H), (S, T, G)]:
        if t > s and "documents" in name:
            continue
        q, k, v = qkv(t, s, g, dv=D + 2, dtype=dtype)
        mask = MASKS_WITH_POSITIONS[name](t, s)
        exact = truth(q, k, v, mask=mask, sinks=sinks)
        plain = attention(q, k, v, mask=mask, sinks=sinks)
        assert plain.sink is not None
        alive = plain.allowed.any(-1)
        torch.testing.assert_close(plain.weights.sum(-1) + plain.sink, alive.to(plain.sink.dtype))
        seen = hw.observe(q, k, v, mask=mask, sinks=sinks, backend=backend)
        assert torch.equal(seen.out, hw.attend(q, k, v, mask=mask, sinks=sinks, backend=backend))
        assert_as_good(seen.out, plain.out, exact.out, dtype)
        own = of_halves(backend, dtype)
        assert_as_good(seen.lse, plain.lse, exact.lse, seen.lse.dtype, own=own)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_statistics_equal_their_definitions(name: str, softcap: float | None) -> None:
    ids = torch.randint(0, 3, (B, S))
    for size, shift in ((1.0, 0.0), (1.0, 30.0), (100.0, -30.0)):
        q, k, v = (x.double() for x in qkv())
        q, sinks = q * size, torch.randn(H, dtype=torch.float64) * size + shift
        mask = MASKS_WITH_POSITIONS[name](T, S)
        full = attention(q, k, v, mask=mask, softcap=softcap, sinks=sinks)
        statistics = everything(ids)
        # All in one pass over the scores, and each by the way of its own.
        alone = [[statistic] for statistic in statistics]
        for some in [statistics, *alone, [hw.Distance()], [hw.Entropy(), hw.Distance()]]:
            seen = hw.observe(q, k, v, *some, mask=mask, softcap=softcap, sinks=sinks)
            for statistic in some:
                for key, want in statistic.define(full).items():
                    if key == "top_keys":
                        continue
                    near = {"rtol": 1e-9, "atol": 1e-10, "equal_nan": True}
                    torch.testing.assert_close(seen[key], want, **near, msg=key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_statistics_are_as_good_as_their_definitions(backend: str, dtype: torch.dtype) -> None:
    sinks = 2 * torch.randn(H)
    q, k, v = qkv(t=S, dtype=dtype)
    exact = truth(q, k, v, mask=hw.Causal(), sinks=sinks)
    plain = attention(q, k, v, mask=hw.Causal(), sinks=sinks)
    for statistic in [hw.Entropy(), hw.Sink(), hw.Mass(hw.First()), hw.Distance(), hw.Map(3)]:
        seen = hw.observe(q, k, v, statistic, mask=hw.Causal(), sinks=sinks, backend=backend)
        for key, want in statistic.define(exact).items():
            scale = S if key == "distance" else 1
            plainly = statistic.define(plain)[key]
            figures = (x / scale for x in (seen[key], plainly, want))
            assert_as_good(*figures, torch.float32, factor=8, own=of_halves(backend, dtype))


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_gradients_reach_q_k_v_and_the_sinks(backend: str, name: str) -> None:
    mask, ids = MASKS_WITH_POSITIONS[name](T, S), torch.randint(0, 3, (B, S))
    parts = [x.double().requires_grad_() for x in qkv(dv=D + 1)]
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)
    full = attention(*parts, mask=mask, sinks=sinks)
    assert full.sink is not None
    alive = full.allowed.any(-1)
    statistics = everything(ids)[3:7] + [hw.Distance()]
    lse = full.lse.masked_fill(~alive, 0.0)
    log_p = (full.logits - lse[..., None]).masked_fill(~full.allowed, 0.0)
    own = full.sink * (sinks[:, None] - lse)
    wanted = {"out": full.out, "lse": lse, "entropy": -(full.weights * log_p).sum(-1) - own}
    for statistic in statistics:
        wanted |= statistic.define(full)
    for rows in (None, [0, 3, 4]):
        seen = hw.observe(
            *(*parts, hw.Entropy(), *statistics),
            mask=mask,
            sinks=sinks,
            backend=backend,
            queries=rows,
        )
        found = {name: seen[name] for name in seen.names}
        found |= {"out": seen.out, "lse": seen.lse.masked_fill(~alive, 0.0)}
        for key, want in wanted.items():
            got = found[key]
            if rows is not None and key not in ("out", "lse"):
                want = want[:, :, rows]
            weight = torch.randn(want.shape, dtype=torch.float64)
            leaves = (*parts, sinks)
            first, second = (
                torch.autograd.grad(
                    (x * weight).sum(), leaves, retain_graph=True, materialize_grads=True
                )
                if x.requires_grad
                else [torch.zeros_like(leaf) for leaf in leaves]
                for x in (got, want)
            )
            for one, two in zip(first, second, strict=True):
                torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9, msg=f"{key} {rows}")


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_gradcheck(backend: str, softcap: float | None) -> None:
    shapes = (1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)
    q, k, v = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    if softcap is not None and backend == "sdpa":
        backend = "auto"

    def figures(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
        seen = hw.observe(
            q,
            k,
            v,
            hw.Entropy(),
            hw.Distance(),
            hw.Sink(),
            mask=hw.Causal() & hw.Window(3),
            softcap=softcap,
            sinks=sinks,
            backend=backend,
        )
        return seen.out, seen.lse, seen["entropy"], seen["distance"], seen["sink"]

    assert torch.autograd.gradcheck(figures, (q, k, v, sinks))


@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_sinks_alone_may_require_a_gradient(backend: str) -> None:
    q, k, v = qkv()
    sinks = torch.zeros(H, requires_grad=True)
    for mask in (None, hw.Window(2)):
        out = hw.attend(q, k, v, mask=mask, sinks=sinks, backend=backend)
        (got,) = torch.autograd.grad(out.square().sum(), sinks)
        want = attention(q, k, v, mask=mask, sinks=sinks).out.square().sum()
        torch.testing.assert_close(got, torch.autograd.grad(want, sinks)[0])
    # In low precision the parameter keeps its own dtype, and so does its gradient.
    low = [x.bfloat16() for x in (q, k, v)]
    out = hw.attend(*low, sinks=sinks, backend=backend)
    assert out.dtype == torch.bfloat16
    (got,) = torch.autograd.grad(out.float().square().sum(), sinks)
    assert got.dtype == torch.float32


@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_a_sink_revives_no_dead_row(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(t=S, s=T))  # the first queries see nothing
    sinks = torch.full((H,), 5.0, requires_grad=True)
    dead = slice(0, S - T)
    for more in ([], [hw.TopKeys(1)]):
        statistics = [hw.Entropy(), hw.Sink(), hw.Distance(), hw.Mass(hw.First()), *more]
        seen = hw.observe(
            q, k, v, *statistics, mask=hw.Causal(), sinks=sinks, backend=backend, output=True
        )
        assert not seen.out[:, :, dead].any()
        assert (seen.lse[:, :, dead] == -math.inf).all()
        for name in ("entropy", "entropy_share", "sink", "distance", "first"):
            assert not seen[name][:, :, dead].any()
            assert seen[name][:, :, S - T + 1 :].any()
        loss = sum(seen[name].sum() for name in ("entropy", "sink", "distance", "first"))
        loss = loss + seen.out.sum()
        for grad in torch.autograd.grad(loss, (q, k, v, sinks)):
            assert torch.isfinite(grad).all()
    assert seen.table()[0]["sink"] == pytest.approx(seen["sink"][:, 0, S - T :].mean().item())


@pytest.mark.parametrize("backend", FORMS, indirect=True)
def test_a_sink_far_below_is_none_and_one_far_above_takes_all(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    statistics = [hw.Entropy(), hw.Sink(), hw.Distance(), hw.MaxLogit(), hw.Mass(hw.First())]
    plain = hw.observe(q, k, v, *statistics, mask=hw.Causal(), backend=backend)
    assert not plain["sink"].any()
    for low in (-1e4, -math.inf):
        sinks = torch.full((H,), low, requires_grad=True)
        seen = hw.observe(q, k, v, *statistics, mask=hw.Causal(), sinks=sinks, backend=backend)
        torch.testing.assert_close(seen.out, plain.out)
        for name in ("entropy", "distance", "first", "max_logit"):
            torch.testing.assert_close(seen[name], plain[name])
        loss = sum(seen[name].sum() for name in ("entropy", "sink", "distance", "first"))
        for grad in torch.autograd.grad(loss + seen.out.sum(), (q, k, v, sinks)):
            assert torch.isfinite(grad).all()
    sinks = torch.full((H,), 1e4, requires_grad=True)
    seen = hw.observe(q, k, v, *statistics, mask=hw.Causal(), sinks=sinks, backend=backend)
    assert not seen.out.any()
    assert torch.equal(seen["sink"], torch.ones_like(seen["sink"]))
    assert not seen["entropy"].any()
    torch.testing.assert_close(seen["max_logit"], plain["max_logit"])
    loss = sum(seen[name].sum() for name in ("entropy", "sink", "distance", "first"))
    for grad in torch.autograd.grad(loss + seen.out.sum(), (q, k, v, sinks)):
        assert torch.isfinite(grad).all()


def test_the_largest_score_is_found_below_a_sink() -> None:
    q, k, v = qkv(t=200, s=200)
    for shift in (-20.0, 0.0, 5.0, 20.0):
        sinks = torch.randn(H) + shift
        seen = hw.observe(q, k, v, hw.MaxLogit(), mask=hw.Causal(), sinks=sinks, backend="sdpa")
        want = attention(q, k, v, mask=hw.Causal()).logits.amax((-1, -2))
        torch.testing.assert_close(seen["max_logit"], want)


@pytest.mark.parametrize("sink", [-5.0, 3.0, 20.0])
def test_a_peaked_row_may_hold_the_largest_score_though_others_weigh_more(sink: float) -> None:
    # Twenty rows of four equal scores come first by their LSE; a row below them has the maximum.
    scores = torch.full((24, 8), -50.0)
    scores[:20, :4] = 4.0
    scores[22, 5] = 4.5
    q, k = torch.zeros(1, 1, 24, 4), torch.zeros(1, 1, 8, 4)
    keywords = {"mask": hw.Bias(scores), "sinks": torch.tensor([sink]), "backend": "sdpa"}
    assert hw.observe(q, k, k, hw.MaxLogit(), **keywords)["max_logit"].item() == 4.5


def test_sampled_queries_and_calls_without_output() -> None:
    q, k, v = (x.double() for x in qkv())
    sinks = torch.randn(H, dtype=torch.float64)
    statistics = [hw.LSE(), hw.Entropy(), hw.Sink(), hw.Distance(), hw.Mass(hw.Previous())]
    whole = hw.observe(q, k, v, *statistics, mask=hw.Causal(), sinks=sinks)
    for output in (True, False):
        some = hw.observe(
            q,
            k,
            v,
            *statistics,
            mask=hw.Causal(),
            sinks=sinks,
            queries=[1, 4, 5],
            output=output,
        )
        for name in some.names:
            torch.testing.assert_close(some[name], whole[name][:, :, [1, 4, 5]])


@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "sdpa"])
def test_dropout_leaves_the_sink_alone(backend: str) -> None:
    q, k, _ = qkv()
    v = torch.ones(B, G, S, D)
    sinks = torch.full((H,), 2.0)
    left = attention(q, k, v, sinks=sinks).weights.sum(-1)
    torch.manual_seed(3)
    mean = sum(hw.attend(q, k, v, dropout=0.4, sinks=sinks, backend=backend) for _ in range(400))
    # As without a sink: the variance of one draw is below 0.4/0.6.
    assert ((mean / 400)[..., 0] - left).abs().mean() < 3 * math.sqrt(0.4 / 0.6 / 400)


# ── the layer ───────────────────────────────────────────────────────────────────────────────────


def layer_with_sinks() -> hw.MultiHeadAttention:
    layer = hw.MultiHeadAttention(24, 6, num_kv_heads=3, sinks=True, rope=hw.RoPE(4))
    assert layer.sinks is not None
    assert layer.sinks.shape == (6,)
    assert not layer.sinks.any()
    with torch.no_grad():
        layer.sinks.normal_()
    return layer


def test_a_layer_learns_its_sinks_and_keeps_them() -> None:
    layer, x = layer_with_sinks(), torch.randn(2, T, 24)
    assert "sinks=True" in layer.extra_repr()
    assert layer.sinks is not None
    layer(x, mask=hw.Causal()).square().sum().backward()
    assert layer.sinks.grad is not None
    assert layer.sinks.grad.abs().min() > 0
    other = hw.MultiHeadAttention(24, 6, num_kv_heads=3, sinks=True, rope=hw.RoPE(4))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x, mask=hw.Causal()), layer(x, mask=hw.Causal()))
    layer.reset_parameters()
    assert not layer.sinks.any()
    without = hw.MultiHeadAttention(24, 6, num_kv_heads=3, rope=hw.RoPE(4))
    assert without.sinks is None
    assert "sinks" not in without.state_dict()
    assert not torch.allclose(without(x, mask=hw.Causal()), other(x, mask=hw.Causal()))


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_continues_a_layer_with_sinks(window: int | None) -> None:
    layer, x = layer_with_sinks(), torch.randn(2, T, 24)
    mask = hw.Causal() if window is None else hw.Window(window)
    cache = hw.KVCache(window=window)
    with torch.no_grad():
        parts = [layer(x[:, :4], mask=mask, cache=cache)]
        parts += [layer(x[:, t : t + 1], mask=mask, cache=cache) for t in range(4, T)]
        torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, mask=mask))


def test_watching_sees_the_sinks_and_changes_nothing() -> None:
    layer, x = layer_with_sinks(), torch.randn(2, T, 24)
    plain = layer(x, mask=hw.Causal())
    with hw.watch(layer, hw.Entropy(), hw.Sink(), hw.Received()) as seen:
        assert torch.equal(layer(x, mask=hw.Causal()), plain)
    assert layer.sinks is not None
    own = seen[""]["sink"]
    assert own.min() > 0
    torch.testing.assert_close(
        seen[""]["received"].sum(-1) + own.sum(-1), torch.full((2, 6), float(T))
    )
    assert seen.table()[2]["sink"] == pytest.approx(own[:, 2].mean().item())


def test_autocast_leaves_the_sinks_wide() -> None:
    layer, x = layer_with_sinks(), torch.randn(2, T, 24)
    exact = layer(x, mask=hw.Causal())
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=hw.Causal())
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    out.float().sum().backward()
    assert layer.sinks is not None
    assert layer.sinks.grad is not None
    assert layer.sinks.grad.dtype == torch.float32


COMPILED = """
import torch, headwise as hw
layer = hw.MultiHeadAttention(24, 3, num_kv_heads=1, sinks=True, dtype=torch.float64)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
x = torch.randn(2, 7, 24, dtype=torch.float64)
for mask in (hw.Causal(), hw.Window(3)):
    torch.testing.assert_close(compiled(x, mask=mask), layer(x, mask=mask))
    got = torch.autograd.grad(compiled(x, mask=mask).square().sum(), layer.parameters())
    want = torch.autograd.grad(layer(x, mask=mask).square().sum(), layer.parameters())
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one, two)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), layer(x))
"""


@pytest.mark.slow
def test_compilation_without_a_graph_break() -> None:
    ran = fresh.run(COMPILED)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("sinks", "says"),
    [
        (torch.zeros(G), "sinks must be one logit.*, got torch.float32"),
        (torch.zeros(1, H), rf"\[1, {H}\]"),
        (torch.zeros(()), r"\[\] on cpu"),
        (torch.zeros(H, dtype=torch.long), "torch.int64"),
        (torch.zeros(H, device="meta"), "on meta"),
        ([0.0] * H, "got a list"),
        (True, "got a bool"),
    ],
    ids=str,
)
def test_bad_sinks_get_one_clear_line(sinks: object, says: str) -> None:
    q, k, v = qkv()
    for function in (hw.attend, hw.observe, hw.explain):
        with pytest.raises(ValueError, match=says) as caught:
            function(q, k, v, sinks=sinks)  # type: ignore[arg-type]
        assert str(caught.value).startswith(f"{function.__name__}(q [2, 6, 7, 5]")
        assert "\n" not in str(caught.value)
