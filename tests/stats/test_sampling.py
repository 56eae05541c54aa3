"""Drawn queries: which ones, how much each counts, and errors that hold for every head.

The figures of every query are worked out once; the means of drawn ones and their errors are then
held against those of all, over 200 seeds. `benchmarks/sampling.py` does the same end to end.
"""

from __future__ import annotations

import itertools
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.capture.captured import Watched
from headwise.models import gpt
from headwise.models.corpus import encode, manual_passage
from headwise.stats.record import Reading
from headwise.stats.sampling import draw, standard_error, stretches
from headwise.stats.tables import summarise
from support import BACKENDS, MASKS_WITH_POSITIONS, B, H, S, T, qkv

CPU = torch.device("cpu")
SEEDS, QUERIES, LENGTH = 200, 64, 128
KERNEL_GIVES = {"native"}
"""Backends whose own pass has figures of every query."""


# ── which queries, and how much each counts ────────────────────────────────────────────────────


@pytest.mark.parametrize("of", [8, 17, 65, 100, 257, 4099])
@pytest.mark.parametrize("queries", [1, 2, 7, 8, 15, 16, 32, 64, 256])
def test_stretches_hold_every_query_once(queries: int, of: int) -> None:
    if queries >= of:
        assert draw(queries, of, 0, CPU) is None
        return
    edges = stretches(queries, of)
    wide = edges.diff()
    first, last = queries // 8, min(2, queries // 16)
    assert (edges[0], edges[-1], len(wide)) == (0, of, queries)
    assert set(wide[:first].tolist() + wide[queries - last :].tolist()) <= {1}
    inner = wide[first : queries - last]
    assert inner.min() >= 1
    assert (inner.diff() >= -1).all()  # they grow, but for the rounding of an edge
    # No stretch is much longer than if all were equal, nor than where it begins.
    assert inner.max() <= 1.5 * (of - first - last) / len(inner) + 1
    if queries >= 32:
        assert (wide <= 2 + 1.2 * edges[:-1]).all()
    drawn = [draw(queries, of, seed, CPU) for seed in range(30)]
    for sample in drawn:
        assert sample is not None
        assert sample.weights is not None
        assert sample.weights.tolist() == wide.tolist()
        assert bool((edges[:-1] <= sample.rows).all() & (sample.rows < edges[1:]).all())
    same = [draw(queries, of, 3, CPU), draw(queries, of, 3, CPU)]
    assert torch.equal(*(sample.rows for sample in same if sample is not None))
    kinds = {tuple(sample.rows.tolist()) for sample in drawn if sample is not None}
    assert len(kinds) > 1


def test_standard_error_by_hand() -> None:
    values = torch.tensor([[[1.0, 2.0, 4.0, 3.0]]])
    rows, weights = torch.ones(1, 1, 4, dtype=torch.bool), torch.full((4,), 2.0).double()
    # Residuals −1.5 −0.5 1.5 0.5. At the ends ½ 1² and ½ 1²; between (1 − 2 + ...)²: second
    # differences 2 − 1 = 1 and −1 − 2 = −3, squared over 6: ⅙ and 1.5. Their sum is 2⅔; times
    # 2 (2 − ½) = 3 and over 8 queries. 2 degrees of freedom widen 1 + 1.25 + 1.4375 + 1.2575.
    want = 4.945 * math.sqrt(8 / 3 * 3) / 8
    assert standard_error(values, rows, weights).tolist() == pytest.approx([want])
    assert standard_error(values, rows, torch.ones(4).double()).tolist() == [0.0]
    # Stretches count by their own lengths: of the last two alone, ⅙ + 1.5 + ½ less ⅙.
    uneven = torch.tensor([1.0, 1.0, 3.0, 3.0]).double()
    residual = values.double()[0, 0] - (values.double()[0, 0] * uneven).sum() / 8
    threes = residual.diff(n=2).square()[1] / 6 + residual.diff().square()[2] / 2
    want = 10.06 + 5.75 + 2.5 + 1  # of a single degree of freedom
    want = want * math.sqrt(float(threes) * 3 * 2.5) / 8
    assert standard_error(values, rows, uneven).tolist() == pytest.approx([want])
    # A row that does not count weighs nothing, whatever it holds.
    rows[..., 3] = False
    found = standard_error(values, rows, weights)
    values[..., 3] = math.inf
    assert torch.equal(standard_error(values, rows, weights), found)
    assert standard_error(values[..., :1], rows[..., :1], weights[:1]).isnan().all()


def test_one_drawn_query_has_no_standard_error() -> None:
    q = torch.randn(1, 2, 40, 8)
    seen = hw.observe(q, q, q, hw.Entropy(), queries=1, backend="sdpa")
    running = hw.Running()
    running.add(seen)
    for table in (seen.table(), running.table()):
        assert set(table[0]) == {"head", "entropy", "entropy_share"}


# ── errors that hold ───────────────────────────────────────────────────────────────────────────


def builtin(kind: str) -> tuple[nn.Module, Tensor]:
    """The built-in model, headwise's own or that of transformers, and a passage of its text."""
    own, tokenizer = gpt.load(gpt.builtin())
    ids = torch.tensor(encode(tokenizer, manual_passage(), "the passage")[:LENGTH])[None]
    if kind == "own":
        return own.eval(), ids
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2LMHeadModel.from_pretrained(gpt.builtin()).eval(), ids


def masses(ids: Tensor) -> list[hw.Statistic]:
    patterns = hw.First(), hw.Previous(), hw.Self(), hw.SameToken(ids), hw.Induction(ids), hw.At(-2)
    return [*map(hw.Mass, patterns), hw.Mass(hw.Window(5), name="near")]


def watched(
    model: nn.Module, ids: Tensor, *statistics: hw.Statistic, **keywords: object
) -> Watched:
    with torch.no_grad(), hw.watch(model, *statistics, **keywords) as seen:  # type: ignore[arg-type]
        model(ids)
    return seen


def long_heads() -> Iterator[tuple[str, Reading]]:
    """Heads of 1,024 queries: even ones, sinks and previous tokens of growing strength, noise."""
    q, k = torch.randn(2, 1, 20, 1024, 8, generator=torch.Generator().manual_seed(1))
    q[:, :4] *= torch.arange(4)[:, None, None] / 4
    to_sink = torch.eye(8)[0]
    q[:, 4:12] += torch.arange(3, 11)[:, None, None] * to_sink
    k[:, 4:12] -= to_sink / 2
    k[:, 4:12, 0] += 3.5 * to_sink
    k[:, 12:16, :-1] = torch.arange(3, 7)[:, None, None] / 2 * q[:, 12:16, 1:]
    seen = hw.observe(q, k, k, hw.Entropy(), hw.Distance(), mask=hw.Causal())
    for name in ("entropy", "entropy_share", "distance"):
        yield name, seen.reading(name)


def noise() -> Iterator[tuple[str, Reading]]:
    """Heads of 2,000 random queries: what they look at nearby falls with their position."""
    q, k = torch.randn(2, 1, 6, 2000, 8, generator=torch.Generator().manual_seed(2))
    seen = hw.observe(q, k, k, hw.Entropy(), hw.Mass(hw.Window(64), name="near"), mask=hw.Causal())
    for name in ("entropy", "near"):
        yield name, seen.reading(name)


def of_builtin() -> Iterator[tuple[str, Reading]]:
    seen = watched(*builtin("own"), hw.Entropy(), hw.Distance())
    for name in ("entropy", "entropy_share", "distance"):
        calls = [seen[module].calls[0][name] for module in seen]
        rows = [call.rows.expand(call.values.shape) for call in calls if call.rows is not None]
        yield name, Reading(torch.cat([call.values for call in calls], 1), torch.cat(rows, 1))


def drawn(whole: Reading, queries: int, seed: int) -> tuple[Tensor, Tensor]:
    """The mean of each head from drawn queries, and its standard error."""
    assert whole.rows is not None
    sample = draw(queries, whole.values.shape[2], seed, CPU)
    assert sample is not None
    rows = whole.rows.expand(whole.values.shape)[:, :, sample.rows]
    figure = summarise(
        [Reading(whole.values[:, :, sample.rows], rows).of_some(None, sample.weights)]
    )
    assert figure is not None
    assert figure.error is not None
    return figure.mean, figure.error


@pytest.mark.parametrize("heads", [of_builtin, long_heads, noise])
def test_errors_hold_for_every_head(heads: Callable[[], Iterator[tuple[str, Reading]]]) -> None:
    """Of 200 draws 99 % lie within three errors, 97 % of the worst head; none is twice too wide."""
    for name, whole in heads():
        exact = summarise([whole])
        assert exact is not None
        found = [drawn(whole, QUERIES, seed) for seed in range(SEEDS)]
        off = torch.stack([mean - exact.mean for mean, _ in found])
        errors = torch.stack([error for _, error in found])
        within = (off.abs() <= 3 * errors + 1e-9).double()
        seen = off.square().mean(0).sqrt()
        assert within.mean() >= 0.99, name
        assert within.mean(0).min() >= 0.97, name
        varied = seen > 1e-9
        assert (errors.mean(0)[varied] <= 2 * seen[varied]).all(), name
        # Unbiased: the mean of 200 is off by 4 of its own errors nowhere, but for rounding.
        assert (off.mean(0).abs() <= 4 * seen / math.sqrt(SEEDS) + 1e-9).all(), name


# ── figures of all queries, where they are at hand ─────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["own", "transformers"])
@pytest.mark.parametrize("running", [False, True])
def test_masses_of_drawn_queries_are_exact_in_a_watched_model(kind: str, running: bool) -> None:
    model, ids = builtin(kind)
    whole = watched(model, ids, *masses(ids), running=running)
    some = watched(model, ids, *masses(ids), running=running, queries=16)
    for want, row in zip(whole.table(), some.table(), strict=True):
        assert not any(name.endswith("_se") for name in row)
        assert row.pop("queries") == 16
        assert want.pop("queries") == LENGTH
        assert row == pytest.approx(want, abs=2e-6)


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_masses_of_drawn_queries_are_exact_under_every_mask(name: str) -> None:
    mask, ids = MASKS_WITH_POSITIONS[name](T, S), torch.randint(0, 3, (B, S))
    sinks = torch.randn(H)
    others = {
        "sinks": {"sinks": sinks},
        "large logits": {"scale": 3e7},
        "softcap": {"softcap": 3.0},
    }
    for output, (other, keywords) in itertools.product((True, False), others.items()):
        q, k, v = qkv()
        if other == "softcap":
            q, k, v = q.double(), k.double(), v.double()
        whole, some = (
            hw.observe(q, k, v, *masses(ids), mask=mask, output=output, queries=n, **keywords)
            for n in (None, 3)
        )
        for row, want in zip(some.table(), whole.table(), strict=True):
            assert row == pytest.approx(want, abs=2e-6), other


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [4, 64])
def test_masses_of_windows_are_exact_beside_the_output(size: int, backend: str) -> None:
    """Whose errors were too small: few early queries hold most of them."""
    q, k = torch.randn(2, 1, 2, 600, 8, generator=torch.Generator().manual_seed(5))
    mass, keywords = hw.Mass(hw.Window(size)), {"mask": hw.Causal(), "backend": backend}
    whole = hw.observe(q, k, k, mass, **keywords).table()
    for seed in range(3):
        some = hw.observe(q, k, k, mass, queries=32, seed=seed, **keywords)
        assert some["mass"].shape == (1, 2, 32)
        for row, want in zip(some.table(), whole, strict=True):
            assert row == pytest.approx(want, abs=2e-6)
    # So are they not where they would cost more than the queries that are looked at.
    wide = hw.Mass(hw.Window(300))
    assert "mass_se" in hw.observe(q, k, k, wide, queries=32, **keywords).table()[0]


def planted() -> tuple[Tensor, Tensor]:
    """Two heads; of the second, query 211 looks at key 5, with the largest score by far."""
    q, k = torch.randn(2, 1, 2, 600, 8, generator=torch.Generator().manual_seed(4))
    q[:, 1, 211] = 40 * k[:, 1, 5] / k[:, 1, 5].norm()
    return q, k


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", [True, False])
def test_a_mass_that_one_query_holds_is_not_missed(backend: str, output: bool) -> None:
    q, k = planted()
    at_five = hw.Mass(hw.At(5 - 211))
    keywords = {"mask": hw.Causal(), "backend": backend, "output": output}
    whole = hw.observe(q, k, k, at_five, **keywords)
    for seed in (1, 2, 3):
        seen = hw.observe(q, k, k, at_five, queries=64, seed=seed, **keywords)
        assert 211 not in seen.queries
        assert seen.table()[1] == pytest.approx(whole.table()[1], abs=1e-6)
        assert seen["back_206"].shape == (1, 2, 64)
    if output:  # beside the output the log-sum-exp of all is at hand, however many they are
        seen = hw.observe(q, k, k, at_five, queries=8, **keywords)
        assert seen.table()[1] == pytest.approx(whole.table()[1], abs=1e-6)
    else:  # else there is an estimate that says so
        seen = hw.observe(q, k, k, at_five, queries=8, **keywords)
        assert seen.reading("back_206").sampled
        assert "back_206_se" in seen.table()[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_figures_of_the_kernels_own_pass_are_those_of_all_queries(backend: str) -> None:
    q, k = planted()
    statistics = [hw.Entropy(), hw.Distance(), hw.LSE(), hw.MaxLogit()]
    whole = hw.observe(q, k, k, *statistics, mask=hw.Causal(), backend=backend)
    some = hw.observe(q, k, k, *statistics, mask=hw.Causal(), backend=backend, queries=16, seed=1)
    names = ["lse"]
    if backend in KERNEL_GIVES:
        names += ["entropy", "entropy_share", "distance", "max_logit"]
        assert torch.equal(some["max_logit"], whole["max_logit"])
    for row, want in zip(some.table(), whole.table(), strict=True):
        for name in names:
            assert row[name] == pytest.approx(want[name], abs=1e-5)
        assert {name for name in row if name.endswith("_se")} == (
            set() if backend in KERNEL_GIVES else {"entropy_se", "entropy_share_se", "distance_se"}
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_figures_of_all_queries_draw_no_random_numbers(backend: str) -> None:
    q, k = planted()
    dropout = 0.0 if backend == "sdpa" else 0.5
    torch.manual_seed(3)
    hw.observe(
        q, k, k, hw.Mass(hw.First()), queries=64, output=False, dropout=dropout, backend=backend
    )
    after = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(4))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("output", [True, False])
def test_masses_of_all_queries_leave_gradients_alone(backend: str, output: bool) -> None:
    q, k = planted()
    grads = []
    for queries in (draw(64, 600, 0, CPU).rows, 64):  # type: ignore[union-attr]
        x = q.clone().requires_grad_()
        seen = hw.observe(
            x, k, k, hw.Mass(hw.Previous()), queries=queries, backend=backend, output=output
        )
        assert seen["previous"].requires_grad
        seen["previous"].square().sum().backward()
        assert seen.table()[0]["previous"] != 0
        grads.append(x.grad)
    assert torch.equal(*grads)


# ── over calls ─────────────────────────────────────────────────────────────────────────────────


def test_calls_weigh_by_their_queries_and_exact_ones_add_no_error() -> None:
    running, readings, total, count = hw.Running(), [], torch.zeros(2), 0
    for length, queries in ((40, 64), (300, 16), (100, 16)):
        q = torch.randn(3, 2, length, 8, dtype=torch.float64)
        whole = hw.observe(q, q, q, hw.Entropy(), mask=hw.Causal())
        seen = hw.observe(q, q, q, hw.Entropy(), mask=hw.Causal(), queries=queries)
        running.add(seen)
        readings.append(seen.reading("entropy"))
        total = total + whole["entropy"].sum((0, 2))
        count += 3 * length
    figure = summarise(readings)
    assert figure is not None
    assert figure.error is not None
    assert running.count("entropy").tolist() == [count] * 2
    off = figure.mean - total / count
    assert (off.abs() < 3 * figure.error).all()
    shares = torch.tensor([300.0, 100.0]).double()[:, None] / (count / 3)
    errors = torch.stack([reading.error for reading in readings[1:]])  # type: ignore[arg-type]
    torch.testing.assert_close(figure.error, (shares * errors).square().sum(0).sqrt())
    row = running.table()[1]
    assert row["entropy"] == pytest.approx(float(figure.mean[1]), rel=1e-12)
    assert row["entropy_se"] == pytest.approx(float(figure.error[1]), rel=1e-12)


@pytest.mark.parametrize("running", [False, True])
def test_every_call_of_a_watched_module_has_a_draw_of_its_own(running: bool) -> None:
    layer, x = hw.MultiHeadAttention(24, 3, backend="sdpa").double(), torch.randn(1, 200, 24)
    layer.qkv.weight.data *= 8  # entropies that differ much from position to position

    def many(calls: int, **keywords: object) -> Watched:
        with torch.no_grad(), hw.watch(layer, hw.Entropy(), **keywords) as seen:  # type: ignore[arg-type]
            for _ in range(calls):
                layer(x.double(), mask=hw.Causal())
        return seen

    whole = many(1).table()
    for truth, row in zip(whole, many(100, queries=8, running=running).table(), strict=True):
        assert abs(row["entropy"] - truth["entropy"]) < 3 * row["entropy_se"] < 0.3
    if not running:
        calls = many(2, queries=8, seed=3)[""].calls
        assert not torch.equal(*(call["entropy"].values for call in calls))
        alone = many(1, queries=8, seed=3)[""].calls[0]
        assert torch.equal(calls[0]["entropy"].values, alone["entropy"].values)
        calls = many(2, queries=8, gradients=True)[""].calls  # what is computed again is the same
        assert torch.equal(*(call["entropy"].values for call in calls))


def test_the_same_draw_twice_is_told_where_figures_are_added_up(tmp_path: Path) -> None:
    layer, x = hw.MultiHeadAttention(24, 3), torch.randn(2, 40, 24)

    def watched(**keywords: Any) -> Watched:
        with torch.no_grad(), hw.watch(layer, hw.Entropy(), **keywords) as seen:
            layer(x, mask=hw.Causal())
        return seen

    for one, other in (
        (watched(queries=8), watched(queries=8)),
        (watched(queries=8, running=True), watched(queries=8, running=True)),
    ):
        one.save(tmp_path / "one.safetensors")
        for first in (
            one,
            hw.capture.Watched.load(tmp_path / "one.safetensors"),
            pickle.loads(pickle.dumps(one)),
        ):
            with pytest.warns(UserWarning, match="both sampled queries with the same seed"):
                _ = first + other
        with pytest.warns(UserWarning, match="both sampled queries with the same seed"):
            _ = sum([one, watched(queries=8, seed=1, running=one[""].running is not None), other])
    q, running = torch.randn(1, 2, 40, 8), hw.Running()
    for seed in (0, 1, 2):
        running.add(hw.observe(q, q, q, hw.Entropy(), queries=8, seed=seed))
    with pytest.warns(UserWarning, match="drawn by the same seed"):
        running.add(hw.observe(q, q, q, hw.Entropy(), queries=8, seed=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        running.add(hw.observe(q, q, q, hw.Entropy(), queries=8, seed=3))
        for one, other in (
            (watched(), watched()),
            (watched(queries=8), watched(queries=8, seed=1)),
            (watched(queries=64), watched(queries=64)),  # all of them
            (watched(queries=[3, 5]), watched(queries=[3, 5])),  # named, and no estimate of a mean
        ):
            _ = one + other
        for _ in range(2):
            running.add(hw.observe(q, q, q, hw.Entropy(), queries=64))
            running.add(hw.observe(q, q, q, hw.Entropy(), queries=[3, 5]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_spread_and_largest_over_calls_are_those_of_all_where_these_are_at_hand(
    backend: str,
) -> None:
    q, k = planted()
    running, whole = hw.Running(), hw.Running()
    for queries, kept in ((16, running), (None, whole)):
        kept.add(
            hw.observe(
                q, k, k, hw.Mass(hw.At(-206)), mask=hw.Causal(), queries=queries, backend=backend
            )
        )
    for figure in ("count", "deviation", "maximum"):
        torch.testing.assert_close(
            *(getattr(kept, figure)("back_206") for kept in (running, whole))
        )


# ── what is per key or head ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_over_drawn_queries_count_each_as_many_as_it_stands_for(backend: str) -> None:
    q, k, v = torch.randn(3, 2, 3, 70, 8)
    keywords = {"mask": hw.Causal(), "backend": backend}
    p = hw.observe(q, k, v, **keywords).weights().double()
    statistics = [hw.Received(), hw.Received(last=30), hw.Map(2), hw.OffsetHistogram(3)]
    for statistic in statistics:
        (name,) = statistic.names
        seen = hw.observe(q, k, v, statistic, queries=16, seed=2, **keywords)
        sample = draw(16, 70, 2, CPU)
        assert sample is not None
        assert sample.weights is not None
        rows, weights = sample.rows, sample.weights
        if statistic == statistics[1]:
            weights = weights * (rows >= 40)
        each = p[:, :, rows] * weights[:, None]
        if name == "received":
            want = each.sum(2)
        elif name == "map":
            half = torch.stack([each[:, :, rows < 35].sum(2), each[:, :, rows >= 35].sum(2)], 2)
            counts = torch.stack([weights[rows < 35].sum(), weights[rows >= 35].sum()])
            want = half.unflatten(-1, (2, 35)).sum(-1) / counts[:, None]
        else:
            away = rows[:, None] - torch.arange(70)
            bins = [each * (away == 0), each * (away == 1), each * (away > 1)]
            want = torch.stack([part.sum((2, 3)) for part in bins], -1) / weights.sum()
        torch.testing.assert_close(seen[name].double(), want, rtol=1e-5, atol=1e-6)


# ── the largest logit ──────────────────────────────────────────────────────────────────────────


OTHERS = [name for name in BACKENDS if name not in KERNEL_GIVES]


@pytest.mark.parametrize("backend", OTHERS)
def test_the_largest_logit_of_some_queries_is_named_so(backend: str) -> None:
    q, k = planted()
    keywords = {"mask": hw.Causal(), "backend": backend}
    whole = hw.observe(q, k, k, hw.MaxLogit(), **keywords)
    true = whole.table()[1]["max_logit"]
    assert not whole.reading("max_logit").sampled
    for queries in (16, [0, 5, 599]):
        seen = hw.observe(q, k, k, hw.MaxLogit(), queries=queries, seed=2, **keywords)
        assert 211 not in seen.queries
        assert seen.reading("max_logit").sampled
        row = seen.table()[1]
        assert set(row) == {"head", "max_logit_sampled"}
        assert row["max_logit_sampled"] < true / 3
        assert seen["max_logit"][0, 1] == pytest.approx(row["max_logit_sampled"])
    both, one = hw.Running(), hw.Running()
    both.add(whole)
    assert set(both.table()[1]) == {"head", "max_logit"}
    one.add(seen)
    for kept in (one, both + one, hw.Running.of_state((both + one).state())):
        assert kept.sampled("max_logit")
        assert "max_logit_sampled" in kept.table()[1]
    assert not both.sampled("max_logit")


@pytest.mark.skipif("native" not in BACKENDS, reason="no kernel whose pass has the maximum")
def test_the_kernels_own_largest_logit_is_that_of_all_queries() -> None:
    q, k = planted()
    want = hw.observe(q, k, k, hw.MaxLogit(), mask=hw.Causal())["max_logit"]
    seen = hw.observe(q, k, k, hw.MaxLogit(), mask=hw.Causal(), queries=16, backend="native")
    assert torch.equal(seen["max_logit"], want)
    assert seen.table()[1]["max_logit"] == pytest.approx(float(want[0, 1]))
    named = hw.observe(q, k, k, hw.MaxLogit(), mask=hw.Causal(), queries=[3, 9], backend="native")
    assert "max_logit_sampled" in named.table()[1]  # no one asked for the others


@pytest.mark.parametrize("running", [False, True])
def test_a_watched_model_names_it_so_in_tables_and_files(running: bool, tmp_path: Path) -> None:
    model, ids = builtin("transformers")
    statistics = [hw.MaxLogit(), hw.Entropy(), hw.Received()]
    whole = watched(model, ids, *statistics, running=running)
    some = watched(model, ids, *statistics, running=running, queries=16)
    file = tmp_path / "seen.safetensors"
    some.save(file)
    again = hw.capture.Watched.load(file)
    for seen in (some, again, some + whole, whole + some):
        module = seen[seen.modules[0]]
        assert module.sampled("max_logit")
        assert not module.sampled("entropy")
        row = seen.table()[0]
        assert "max_logit_sampled" in row
        assert "max_logit" not in row
    assert again.table() == some.table()
    assert not whole[whole.modules[0]].sampled("max_logit")
    assert "max_logit" in whole.table()[0]
    with pytest.raises(KeyError, match="'first' was not observed"):
        some[some.modules[0]].sampled("first")


def test_sums_over_all_queries_survive_a_file(tmp_path: Path) -> None:
    model, ids = builtin("own")
    seen = watched(model, ids, *masses(ids), hw.Entropy(), queries=16)
    file = tmp_path / "seen.safetensors"
    seen.save(file)
    again = hw.capture.Watched.load(file)
    assert again.table() == seen.table()
    assert (again + again).table()[5]["first"] == pytest.approx(seen.table()[5]["first"])
