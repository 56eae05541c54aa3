"""Every statistic without the matrix against its definition on the matrix."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

import headwise as hw
from headwise.backends import blocked
from headwise.core.reference import attention
from headwise.stats import mass as masses
from headwise.stats import max_logit
from headwise.stats.patterns import At
from headwise.stats.record import Record
from headwise.stats.statistic import Statistic
from support import (
    BACKENDS,
    MASKS_WITH_POSITIONS,
    SERVED,
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

SIZED = ("distance", "distance_spread", "distance_absolute", "received")
"""Figures whose scale is the number of keys."""


def everything(ids: torch.Tensor) -> list[Statistic]:
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Mass(hw.First(2)),
        hw.Mass(hw.Previous(2)),
        hw.Mass(hw.First(), name="first key"),
        hw.Mass(hw.Previous(), name="one back"),
        hw.Mass(hw.Self()),
        *(hw.Mass(At(offset)) for offset in (-2, 1, 3)),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.FirstOfDocument(ids), name="first of document"),
        hw.Mass(hw.FirstOfDocument(ids, 2), name="two of document"),
        hw.Mass(hw.Induction(ids)),
        hw.Mass(hw.Window(3), name="near"),
        hw.Distance(spread=True, absolute=True),
        hw.Map(4),
        hw.TopKeys(3),
        hw.Received(),
        hw.OffsetHistogram(5, ahead=True),
        hw.Similarity(),
        hw.Norms(),
        hw.Segments({"two": (1, 3), "same": ids == 1, "none": (90, 95)}),
    ]


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize(("backend", "dtype"), SERVED, ids=str)
def test_equal_to_the_definition(backend: str, name: str, dtype: torch.dtype) -> None:
    for t, s, g in [(T, S, G), (S, S, H), (1, S, 1)]:
        mask = MASKS_WITH_POSITIONS[name](t, s)
        statistics = everything(torch.randint(0, 3, (B, s)))
        q, k, v = qkv(t, s, g, dtype=dtype)
        seen = hw.observe(q, k, v, *statistics, mask=mask, backend=backend)
        exact, plain = truth(q, k, v, mask=mask), attention(q, k, v, mask=mask)
        for statistic in statistics:
            wanted, plainly = statistic.define(exact), statistic.define(plain)
            assert set(wanted) == set(statistic.names)
            for key, want in wanted.items():
                if key == "top_keys":  # a tie may be broken otherwise; the weights must agree
                    continue
                got, plain_one = seen[key], plainly[key]
                assert got.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
                # q, k and v are exact in float32, so the statistics of bf16 are as good as those
                # of float32. Distances are differences of positions: their scale is S.
                scale = s if key in SIZED else 1
                figures = [x / scale for x in (got, plain_one, want)]
                if key == "similarity":  # NaN of heads that see nothing
                    assert torch.equal(got.isnan(), want.isnan())
                    figures = [x.nan_to_num() for x in figures]
                assert_as_good(*figures, got.dtype, factor=8, own=of_halves(backend, dtype))


@given(
    st.integers(1, 30),
    st.integers(0, 10),
    st.sampled_from([0.0, 1.0, 1e2, 1e4]),
    st.sampled_from([None, hw.Causal(), hw.Window(1), hw.Window(50)]),
    st.sampled_from([1, 3, 300]),
    st.integers(0, 2**31),
)
def test_drawn_cases(
    t: int, more: int, size: float, mask: hw.Mask, symbols: int, seed: int
) -> None:
    torch.manual_seed(seed)
    s = t + more
    ids = torch.randint(0, symbols, (B, s))
    q, k, v = (x.double() for x in qkv(t, s))
    q = q * size
    exact = attention(q, k, v, mask=mask)
    statistics = everything(ids)
    seen = hw.observe(q, k, v, *statistics, mask=mask)
    for statistic in statistics:
        for key, want in statistic.define(exact).items():
            if key == "top_keys":
                continue
            # float64's rounding of scores of this size
            atol = 1e-10 * max(1.0, size)
            torch.testing.assert_close(seen[key], want, rtol=1e-9, atol=atol, msg=key)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_bias_and_softcap_take_the_exact_road(softcap: float | None) -> None:
    q, k, v = (3 * x.double() for x in qkv(t=S))
    mask = hw.ALiBi() & hw.Causal()
    statistics = everything(torch.randint(0, 3, (B, S)))
    exact = attention(q, k, v, mask=mask, softcap=softcap)
    seen = hw.observe(q, k, v, *statistics, mask=mask, softcap=softcap)
    for statistic in statistics:
        for key, want in statistic.define(exact).items():
            if key != "top_keys":
                torch.testing.assert_close(seen[key], want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("backend", "dtype"), SERVED, ids=str)
def test_observing_leaves_outputs_bit_identical(backend: str, dtype: torch.dtype) -> None:
    for name, make in MASKS_WITH_POSITIONS.items():
        mask = make(T, S)
        q, k, v = qkv(dtype=dtype)
        plain = hw.attend(q, k, v, mask=mask, backend=backend)
        seen = hw.observe(
            q, k, v, *everything(torch.randint(0, 3, (B, S))), mask=mask, backend=backend
        )
        assert torch.equal(plain, seen.out), name


def test_observing_leaves_gradients_and_dropout_bit_identical() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(t=S))
    for dropout in (0.0, 0.3):
        torch.manual_seed(5)
        plain = hw.attend(q, k, v, mask=hw.Causal(), dropout=dropout)
        want = torch.autograd.grad(plain.square().sum(), (q, k, v))
        torch.manual_seed(5)
        seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), dropout=dropout)
        got = torch.autograd.grad(seen.out.square().sum(), (q, k, v))
        assert torch.equal(plain, seen.out)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
        assert seen["entropy"].requires_grad
        plain_seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), gradients=False)
        assert not plain_seen["entropy"].requires_grad
        assert plain_seen.out.requires_grad


def test_a_large_common_part_of_the_keys_costs_the_entropy_no_digits() -> None:
    # Probabilities do not depend on it; a difference of large numbers would.
    q, k, v = qkv(t=S)
    moved = k + 1000.0
    want = hw.Entropy().define(truth(q, moved, v))["entropy"]
    got = hw.observe(q, moved, v, hw.Entropy(), backend="sdpa")["entropy"]
    # The scores are near 1000·|q|·√D; a difference of two of them would be wrong by 1e-3.
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-5)


def test_statistics_describe_the_weights_before_dropout() -> None:
    q, k, v = qkv(t=S)
    plain = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    dropped = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), dropout=0.5)
    torch.testing.assert_close(plain["entropy"], dropped["entropy"])


def test_rows_without_keys_read_nothing_and_count_nowhere() -> None:
    q, k, v = qkv(t=S, s=T)  # the first S − T queries may attend to nothing
    seen = hw.observe(q, k, v, hw.Entropy(), hw.Mass(hw.Self()), hw.Distance(), mask=hw.Causal())
    dead = slice(0, S - T)
    for name in ("entropy", "entropy_share", "self", "distance"):
        assert torch.equal(seen[name][:, :, dead], torch.zeros(B, H, S - T))
    assert (seen.lse[:, :, dead] == -math.inf).all()
    row = seen.table()[0]
    assert row["entropy"] == pytest.approx(seen["entropy"][:, 0, S - T :].mean().item())
    assert row["self_coverage"] == 1.0
    # a single key has no entropy, and no share of a bound of zero
    assert row["entropy_share"] == pytest.approx(
        seen["entropy_share"][:, 0, S - T + 1 :].mean().item()
    )


def test_max_logit_of_heads_that_see_nothing() -> None:
    q, k, v = qkv()
    blind = torch.zeros(1, H, 1, 1, dtype=torch.bool)
    blind[:, 1] = True
    seen = hw.observe(q, k, v, hw.MaxLogit(), mask=hw.Dense(blind))
    assert torch.isfinite(seen["max_logit"][:, 1]).all()
    assert (seen["max_logit"][:, 0] == -math.inf).all()


def test_uniform_heads_by_hand() -> None:
    q = torch.zeros(1, 2, 4, D)
    ids = torch.tensor([5, 6, 5, 6])
    seen = hw.observe(
        q,
        q,
        q,
        hw.Entropy(),
        hw.Distance(),
        hw.Mass(hw.First()),
        hw.Mass(hw.Previous()),
        *(hw.Mass(At(offset)) for offset in (-2, 1, 3)),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.Induction(ids)),
        mask=hw.Causal(),
    )
    head = {name: seen[name][0, 0].tolist() for name in seen.names}
    assert head["entropy"] == pytest.approx([0, math.log(2), math.log(3), math.log(4)])
    assert head["entropy_share"] == pytest.approx([0, 1, 1, 1])
    assert head["distance"] == pytest.approx([0, 0.5, 1, 1.5])
    assert head["first"] == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert head["previous"] == pytest.approx([0, 1 / 2, 1 / 3, 1 / 4])
    assert head["same_token"] == pytest.approx([0, 0, 1 / 3, 1 / 4])
    # the follower: position 2 (token 5) may look at 1, which followed the first 5; position 3
    # (token 6) at 2, which followed the first 6
    assert head["induction"] == pytest.approx([0, 0, 1 / 3, 1 / 4])
    row = seen.table()[0]
    assert row["induction"] == pytest.approx((1 / 3 + 1 / 4) / 2)
    assert row["induction_coverage"] == 0.5
    assert row["first_coverage"] == 1.0
    assert row["previous_coverage"] == 0.75


def test_patterns_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (x.double() for x in qkv(t=S))
    exact = attention(q, k, v)
    ids = torch.randint(0, 2, (B, S))
    for scores, crowded in itertools.product((1, 50, 10_000), (0.0, 2.0)):
        for module in (max_logit, masses):
            monkeypatch.setattr(module, "SCORES_AT_A_TIME", scores)
        monkeypatch.setattr(max_logit, "SCORES_IN_CACHE", scores)
        monkeypatch.setattr(masses, "CROWDED", crowded)  # whole rows always, or never
        for statistic in everything(ids):
            seen = hw.observe(q, k, v, statistic)
            for key, want in statistic.define(exact).items():
                torch.testing.assert_close(seen[key], want, rtol=1e-10, atol=1e-10)


def test_a_map_with_a_block_per_token_is_the_matrix() -> None:
    q, k, v = qkv(t=S)
    seen = hw.observe(q, k, v, hw.Map(S), mask=hw.Causal())
    torch.testing.assert_close(seen["map"], attention(q, k, v, mask=hw.Causal()).weights)
    wide = hw.observe(q, k, v, hw.Map(S + 5), mask=hw.Causal())["map"]
    torch.testing.assert_close(wide[..., :S, :S], seen["map"])
    assert not wide[..., S:].any()


def test_extra_memory_is_linear_in_t(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (max_logit, masses, blocked):
        monkeypatch.setattr(module, "SCORES_AT_A_TIME", 1 << 14)

    # The largest tensor that observing makes, as T doubles.
    def largest(t: int) -> int:
        sizes: list[int] = []

        class Spy(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                result = func(*args, **(kwargs or {}))
                if isinstance(result, torch.Tensor):
                    sizes.append(result.untyped_storage().nbytes())
                return result

        q = torch.randn(1, 2, t, 16)
        ids = torch.arange(t) % 97
        with Spy():
            hw.observe(q, q, q, *everything(ids), mask=hw.Causal())
        return max(sizes)

    assert largest(4096) <= 2.2 * largest(2048)


@pytest.mark.usefixtures("unchecked")
def test_faults_are_named() -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=r"did you mean Entropy\(\)"):
        hw.observe(q, k, v, hw.Entropy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'entropy' is given twice"):
        hw.observe(q, k, v, hw.Entropy(), hw.Entropy())
    with pytest.raises(ValueError, match="one token per key"):
        hw.observe(q, k, v, hw.Mass(hw.Induction(torch.zeros(T, dtype=torch.long))))
    with pytest.raises(KeyError, match="there are: lse, entropy, entropy_share"):
        hw.observe(q, k, v, hw.Entropy())["max"]
    with pytest.raises(ValueError, match=r"First\(0\)"):
        hw.First(0)
    with pytest.raises(ValueError, match=r"Previous\(0\)"):
        hw.Previous(0)
    with pytest.raises(ValueError, match=r"Map\(0\)"):
        hw.Map(0)


def test_counts_and_groups_do_not_depend_on_the_backend() -> None:
    q, k, v = qkv(g=G)
    tables = [
        hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), backend=b).table() for b in BACKENDS
    ]
    for row in zip(*tables, strict=True):
        for key, value in row[0].items():
            assert all(other[key] == pytest.approx(value, rel=1e-5) for other in row)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", ["q", "k", "mask", "sinks"])
def test_weights_are_never_read_of_what_has_changed_since(backend: str, what: str) -> None:
    q, k, v = torch.randn(2, 6, 70, 8), torch.randn(2, 3, 70, 8), torch.randn(2, 3, 70, 8)
    mask, sinks = torch.rand(2, 1, 70, 70) > 0.3, torch.randn(6)
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Dense(mask), sinks=sinks, backend=backend)
    entropy, weights = seen["entropy"].clone(), seen.weights(heads=[1, 5], keys=[0, 7])
    {"q": q, "k": k, "mask": mask, "sinks": sinks}[what].zero_()
    torch.testing.assert_close(seen["entropy"], entropy)
    with pytest.raises(ValueError, match="changed in place"):
        seen.weights(heads=[1, 5], keys=[0, 7])
    v.zero_()
    assert weights.shape == (2, 2, 70, 2)


def test_weights_are_read_while_a_cache_goes_on_behind_its_keys() -> None:
    cache, q = hw.KVCache(max_length=9), torch.randn(2, 3, 4, 5)
    with torch.inference_mode():
        k, v = cache.append(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5))
        seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
        weights = seen.weights()
        cache.append(torch.randn(2, 3, 1, 5), torch.randn(2, 3, 1, 5))
        assert torch.equal(seen.weights(), weights)
        k.zero_()
        with pytest.raises(ValueError, match="changed in place"):
            seen.weights()


def test_patterns_are_masks() -> None:
    q, k, v = (x.double() for x in qkv(t=S))
    ids = torch.randint(0, 3, (S,))
    early = torch.stack([ids[: j + 1].eq(ids[j]).sum() <= 2 for j in range(S)])  # in its document
    pairs = [
        (hw.First(2), hw.Prefix(2)),
        (hw.Self(), At(0)),
        (hw.Previous(3), At(-3)),
        (hw.First(2) & hw.Window(4), hw.Prefix(2) & hw.Window(4)),
        (hw.FirstOfDocument(ids, 2), hw.Dense(ids[:, None].eq(ids) & early)),
        (hw.SameToken(ids), hw.Dense(ids[:, None].eq(ids) & ~torch.eye(S, dtype=torch.bool))),
    ]
    for one, other in pairs:
        masses = [hw.Mass(keys, name="mass") for keys in (one, other)]
        seen = [hw.observe(q, k, v, mass, mask=hw.Causal()) for mass in masses]
        torch.testing.assert_close(seen[0]["mass"], seen[1]["mass"], rtol=1e-12, atol=1e-12)
        rows = [one.reading("mass").rows.expand(B, H, S) for one in seen]
        assert torch.equal(*rows)
        outs = [hw.attend(q, k, v, mask=mask, backend="blocked") for mask in (one, other)]
        torch.testing.assert_close(*outs)


def test_a_subclass_that_makes_its_own_metric_is_heard() -> None:
    class Twice(hw.Entropy):
        def metric(self, record: Record) -> dict[str, hw.stats.Reading]:
            made = super().metric(record)
            return {name: hw.stats.Reading(one.values * 2, one.rows) for name, one in made.items()}

    q, k, v = qkv()
    once = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    twice = hw.observe(q, k, v, Twice(), mask=hw.Causal())
    assert torch.equal(twice["entropy"], 2 * once["entropy"])
    assert twice.table()[0]["entropy"] == pytest.approx(2 * once.table()[0]["entropy"])


def test_sampled_entropy_is_traced_with_symbolic_sizes() -> None:
    def entropy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), queries=4, output=False)
        return seen["entropy"]

    q, k, v = qkv()
    graph = make_fx(entropy, tracing_mode="symbolic")(q, k, v)
    torch.testing.assert_close(graph(q, k, v), entropy(q, k, v))
