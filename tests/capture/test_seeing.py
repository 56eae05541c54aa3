"""Sampled queries, weights on demand, gradients of statistics, and what memory they take."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor

import fresh
import headwise as hw
from headwise.backends import tiles
from headwise.core.reference import attention
from support import MASKS_WITH_POSITIONS, B, D, S, T, qkv

FORMS = ["sdpa", "tiles", "blocked", "eager"]


def per_query(ids: Tensor) -> list[hw.Statistic]:
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.Mass(hw.First(2)),
        hw.Mass(hw.Previous()),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.Induction(ids)),
        hw.Mass(hw.Window(2), name="near"),
        hw.Distance(),
    ]


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_sampled_queries_read_what_they_read_among_all(name: str) -> None:
    mask, ids = MASKS_WITH_POSITIONS[name](T, S), torch.randint(0, 3, (B, S))
    q, k, v = (x.double() for x in qkv())
    statistics = [*per_query(ids), hw.Distance(spread=True), hw.TopKeys(2)][:-2]
    whole = hw.observe(q, k, v, *statistics, hw.TopKeys(2), hw.Map(T), mask=mask)
    for output, rows in itertools.product((True, False), ([1, 4, 5], torch.tensor([6, -7]))):
        seen = hw.observe(
            q, k, v, *statistics, hw.TopKeys(2), mask=mask, queries=rows, output=output
        )
        where = sorted(int(row) % T for row in rows)
        assert seen.queries.tolist() == where
        for key in (*(n for s in statistics for n in s.names), "top_weights"):
            torch.testing.assert_close(seen[key], whole[key][:, :, where], rtol=1e-9, atol=1e-11)
        if output:
            assert torch.equal(seen.out, whole.out)
            assert torch.equal(seen.lse, whole.lse)
        else:
            with pytest.raises(ValueError, match="output=False"):
                seen.out  # noqa: B018
        assert "entropy_se" not in seen.table()[0]  # these were chosen, not drawn


def test_a_drawn_sample_is_stratified_seeded_and_says_how_far_off_it_may_be() -> None:
    q, k, v = (torch.randn(1, 4, 512, 8) for _ in range(3))
    keywords = {"mask": hw.Causal(), "backend": "sdpa"}
    whole = hw.observe(q, k, v, hw.Entropy(), **keywords)
    exact = torch.tensor([row["entropy"] for row in whole.table()])
    off = []
    for seed in range(40):
        seen = hw.observe(q, k, v, hw.Entropy(), queries=32, seed=seed, **keywords)
        assert seen.queries[:4].tolist() == [0, 1, 2, 3]
        assert seen.queries[-2:].tolist() == [510, 511]
        means = torch.tensor([row["entropy"] for row in seen.table()])
        errors = torch.tensor([row["entropy_se"] for row in seen.table()])
        off.append((means - exact) / errors)
    again = hw.observe(q, k, v, hw.Entropy(), queries=32, seed=39, **keywords)
    assert torch.equal(again.queries, seen.queries)
    first = hw.observe(q, k, v, hw.Entropy(), queries=32, seed=0, **keywords)
    assert not torch.equal(first.queries, seen.queries)
    z = torch.stack(off)
    # 40 draws, in each of which all heads look at the same queries: unbiased to 3 / √40, and off
    # by about what they say.
    assert abs(float(z.mean())) < 0.47
    assert 0.6 < float(z.square().mean().sqrt()) < 1.1
    assert hw.observe(q, k, v, queries=512, **keywords).queries.tolist() == list(range(512))


@pytest.mark.parametrize("output", [True, False])
@pytest.mark.parametrize(("t", "s"), [(0, S), (T, 0), (0, 0)])
def test_calls_without_queries_or_keys_read_nothing(t: int, s: int, output: bool) -> None:
    q, k, v = qkv(t, s)
    statistics = [hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First()), hw.Map(3)]
    statistics += [hw.Distance(spread=True), hw.TopKeys(2), hw.Received(), hw.OffsetHistogram(3)]
    for statistic in [*statistics, hw.Similarity(), hw.Mass(hw.Window(2))]:
        for queries in (None, 4):
            seen = hw.observe(q, k, v, statistic, output=output, queries=queries)
            for name in seen.names:
                assert seen[name].isnan().all() == (name == "similarity" or not seen[name].numel())
            for row in seen.table():
                figures = {n: x for n, x in row.items() if n != "head" and x != -math.inf}
                assert not any(figures.values()), figures
    if not t:
        with pytest.raises(ValueError, match="the call has no queries"):
            hw.observe(q, k, v, queries=[0])


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("queries", "says"),
    [
        (0, "at least one"),
        (-3, "at least one"),
        ([], "whole number of queries, or a list"),
        ([1.5], "whole number"),
        ([0, T], "from 0 to 6"),
        ([2, 2], "twice"),
        ([2, 2 - T], "twice"),
        (True, "whole number"),
        (2.0, "whole number"),
    ],
    ids=str,
)
def test_bad_samples_are_refused(queries: object, says: str) -> None:
    q, k, v = qkv()
    with pytest.raises(ValueError, match=says):
        hw.observe(q, k, v, hw.Entropy(), queries=queries)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_weights_on_demand(name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    q, k, v = (x.double() for x in qkv())
    want = attention(q, k, v, mask=mask).weights
    seen = hw.observe(q, k, v, mask=mask)
    torch.testing.assert_close(seen.weights(), want)
    got = seen.weights(heads=[5, 0], queries=slice(2, 5), keys=[-1, 3])
    torch.testing.assert_close(got, want[:, [5, 0]][:, :, 2:5][..., [-1, 3]])
    with pytest.raises(ValueError, match="there are 11 keys"):
        seen.weights(keys=[11])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_gradients_of_statistics(name: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "tiles":
        monkeypatch.setattr(tiles, "ROWS_AT_A_TIME", 3)
        monkeypatch.setattr(tiles, "BIAS_AT_A_TIME", 40)
    mask, ids = MASKS_WITH_POSITIONS[name](T, S), torch.randint(0, 3, (B, S))
    q, k, v = (x.double().requires_grad_() for x in qkv(dv=D + 1))
    statistics = per_query(ids)
    full = attention(q, k, v, mask=mask)
    backend = "sdpa" if form == "tiles" else form
    for rows in (None, [0, 3, 4]):
        seen = hw.observe(q, k, v, *statistics, mask=mask, backend=backend, queries=rows)
        for statistic in statistics:
            key = statistic.names[0]
            if key == "entropy":
                log_p = (full.logits - full.lse[..., None]).masked_fill(~full.allowed, 0)
                want = -(full.weights * log_p).sum(-1)
            else:
                want = statistic.define(full)[key]
            got, want = seen[key], want if rows is None else want[:, :, rows]
            finite = torch.isfinite(want)
            weight = torch.randn(want.shape, dtype=torch.float64)
            parts = [
                torch.autograd.grad(
                    (torch.where(finite, x, 0) * weight).sum(),
                    (q, k),
                    retain_graph=True,
                    allow_unused=True,
                )
                if x.requires_grad
                else (None, None)
                for x in (got, want)
            ]
            for one, two, like in zip(*parts, (q, k), strict=True):
                one, two = (torch.zeros_like(like) if x is None else x for x in (one, two))
                torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-9, msg=f"{key} {rows}")


@pytest.mark.slow
def test_softcap_has_gradients_too_and_gradcheck_agrees() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv(t=4, s=5))

    def figures(softcap: float | None, *parts: Tensor) -> tuple[Tensor, ...]:
        seen = hw.observe(
            *(*parts, v, hw.Entropy(), hw.Distance(), hw.Mass(hw.First())),
            mask=hw.Causal(),
            softcap=softcap,
        )
        return seen["entropy"], seen["distance"], seen["first"], seen.lse

    for softcap in (None, 2.0):
        assert torch.autograd.gradcheck(partial(figures, softcap), (q, k))


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_second_derivative(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    entropy = hw.observe(q, k, v, hw.Entropy(), backend=backend)["entropy"]
    (first,) = torch.autograd.grad(entropy.sum(), q, create_graph=True)
    (found,) = torch.autograd.grad(first.square().sum(), k)
    p = torch.softmax(
        q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5, -1
    )
    (first,) = torch.autograd.grad(torch.special.entr(p).sum(), q, create_graph=True)
    (want,) = torch.autograd.grad(first.square().sum(), k)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


def test_no_gradient_is_nan_where_there_is_nothing_to_differentiate() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(t=S, s=T))  # the first queries see nothing
    statistics = [hw.Entropy(), hw.Distance(), hw.Mass(hw.First()), hw.Mass(hw.Window(2))]
    for backend in ("sdpa", "blocked", "eager"):
        seen = hw.observe(q * 1e4, k, v, *statistics, mask=hw.Causal(), backend=backend)
        loss = sum(seen[name].sum() for name in ("entropy", "distance", "first", "mass"))
        for grad in torch.autograd.grad(loss, (q, k)):
            assert torch.isfinite(grad).all()


def test_output_norm_and_contribution() -> None:
    layer = hw.MultiHeadAttention(24, 4)
    x = torch.randn(2, 7, 24)
    with hw.watch(layer, hw.OutputNorm()) as seen:
        layer(x, mask=hw.Causal())
    q, k, v = layer._project(x, None)
    full = attention(q, k, v, mask=hw.Causal())
    want = hw.OutputNorm(layer.out.weight).define(full)
    torch.testing.assert_close(seen[""]["output_norm"], want["output_norm"])
    torch.testing.assert_close(seen[""]["contribution"], want["contribution"])
    with pytest.raises(ValueError, match="output=True"):
        hw.observe(q, k, v, hw.OutputNorm(), output=False)
    with pytest.raises(ValueError, match=r"need \[O, 24\]"):
        hw.observe(q, k, v, hw.OutputNorm(torch.ones(3, 5)))


def test_received_from_the_last_queries_alone() -> None:
    q, k, v = (x.double() for x in qkv(t=S))
    for last in (1, 4, 99):
        statistic = hw.Received(last=last)
        seen = hw.observe(q, k, v, statistic, mask=hw.Causal())
        want = statistic.define(attention(q, k, v, mask=hw.Causal()))["received"]
        torch.testing.assert_close(seen["received"], want)


def test_top_keys_are_those_of_the_matrix() -> None:
    q, k, v = (x.double() for x in qkv())
    seen = hw.observe(q, k, v, hw.TopKeys(4), mask=hw.Window(3))
    want = hw.TopKeys(4).define(attention(q, k, v, mask=hw.Window(3)))
    assert torch.equal(seen["top_keys"], want["top_keys"])
    assert int(seen["top_keys"][0, 0, 0, -1]) == -1


MEMORY = """
import torch, headwise as hw
from pathlib import Path
def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(x.split()[1]) for x in lines if x.startswith(field))
def run(t):
    q, k, v = torch.randn(3, 1, 2, t, 16)
    ids = torch.randint(0, 50, (t,))
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    seen = hw.observe(q, k, v, hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First()),
        hw.Mass(hw.Induction(ids)), hw.Mass(hw.Window(64)), hw.Distance(spread=True), hw.Map(16),
        hw.TopKeys(4), hw.Received(), hw.OffsetHistogram(), hw.Similarity(16), hw.OutputNorm(),
        mask=hw.Causal())
    [seen[name] for name in seen.names]  # what is not read is not worked out
    return resident("VmHWM") - before
run(256)
print(run(16384))
"""


def test_the_full_set_needs_no_matrix() -> None:
    done = fresh.run(MEMORY)
    assert not done.returncode, done.stderr
    assert int(done.stdout) < 700 * 2**20  # one matrix of two heads would be 2 GiB


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "eager"])
def test_autocast_takes_no_digits_from_statistics(backend: str) -> None:
    q, k, v = qkv(t=S)
    statistics = [hw.Entropy(), hw.Distance(), hw.Mass(hw.Previous()), hw.MaxLogit()]
    for more in ([], [hw.TopKeys(2)]):
        plain = hw.observe(q, k, v, *statistics, *more, mask=hw.Causal(), backend=backend)
        with torch.autocast("cpu", torch.bfloat16):
            seen = hw.observe(q, k, v, *statistics, *more, mask=hw.Causal(), backend=backend)
            assert torch.equal(seen.out, hw.attend(q, k, v, mask=hw.Causal(), backend=backend))
            assert torch.equal(seen.weights(), plain.weights())
        for name in plain.names:
            assert torch.equal(seen[name], plain[name]), name
        assert torch.equal(seen.out, plain.out)


def test_one_number_is_a_list_of_one() -> None:
    q, k, v = qkv()
    seen = hw.observe(q, k, v)
    assert torch.equal(seen.weights(heads=2, keys=3), seen.weights(heads=[2], keys=[3]))


@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_the_order_of_statistics_is_free(order: tuple[int, ...], queries: int | None) -> None:
    q, k, v = (x.double() for x in qkv())
    chosen = [hw.LSE(), hw.Entropy(), hw.Distance()]
    want = hw.observe(q, k, v, hw.TopKeys(1), *chosen, mask=hw.Causal(), queries=queries)
    statistics = [chosen[number] for number in order]
    seen = hw.observe(q, k, v, *statistics, mask=hw.Causal(), queries=queries, output=False)
    for name in ("lse", "entropy", "distance"):
        torch.testing.assert_close(seen[name], want[name], rtol=1e-10, atol=1e-10)
