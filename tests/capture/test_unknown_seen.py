"""Unknown is not zero: what cannot be known of a call is NaN, in no table, and listed with why."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from roads import HAND, MODELS, Attends, B, D, E, H, T, Torch, causal, made, poisoned

NORMS = {"query_norm", "key_norm"}
STATISTICS = (hw.LSE(), hw.Entropy(), hw.Mass(hw.First()), hw.Distance(), hw.MaxLogit())
STATISTICS += (hw.OutputNorm(), hw.Norms())
OF_WEIGHTS = {"lse", "entropy", "first", "distance"}


def watched(model: nn.Module, *statistics: Any, **keywords: Any) -> hw.capture.Watched:
    torch.manual_seed(1)
    x = torch.randn(B, T, E)
    with torch.no_grad():
        plain = model(x)
        with hw.watch(model, *(statistics or STATISTICS), **keywords) as seen:
            out = model(x)
    torch.testing.assert_close(out, plain, rtol=0.0, atol=0.0, equal_nan=True)
    return seen


# ── norms of queries and keys that are not visible ──────────────────────────────────────────────


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("name", HAND)
def test_norms_of_queries_that_are_not_visible_are_not_0(name: str, running: bool) -> None:
    seen = watched(made(name), running=running)
    (module,) = seen
    for norm in NORMS:
        assert seen[module][norm].isnan().all()
        assert "only the scores of this attention are visible" in seen.unavailable[module][norm]
    for row in seen.table():
        assert not NORMS & row.keys()
        assert row["entropy"] > 0


@pytest.mark.parametrize("name", sorted(MODELS.keys() - HAND.keys()))
def test_norms_of_visible_queries_are_those_of_the_model(name: str) -> None:
    model = made(name)
    heads: dict[str, Tensor] = {}

    def keep(_: nn.Module, given: Any, found: Tensor) -> None:
        heads[str(len(heads))] = found

    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(keep)
    seen = watched(model)
    (module,) = seen
    assert not NORMS & seen.unavailable.get(module, {}).keys()
    assert all(row["query_norm"] > 0.5 and row["key_norm"] > 0.5 for row in seen.table())
    if name.startswith("flex"):  # the norms are those without the scores' own change
        q, k, _ = heads["0"].unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        for norm, x in (("query_norm", q), ("key_norm", k)):
            torch.testing.assert_close(seen[module][norm], x.norm(dim=-1).amax(-1))


def test_what_is_not_known_stays_so_in_files_sums_and_frames(tmp_path: Path) -> None:
    for running in (False, True):
        seen = watched(made("matmul"), running=running)
        seen.save(tmp_path / "seen.safetensors")
        again = hw.capture.Watched.load(tmp_path / "seen.safetensors")
        for one in (again, seen + again):
            assert one.unavailable == seen.unavailable
            assert one[""]["query_norm"].isnan().all()
            assert not any(NORMS & row.keys() for row in one.table())
        pandas = pytest.importorskip("pandas")
        poor = seen.to_pandas()
        assert not NORMS & set(poor.columns)
        visible = watched(made("sdpa"), running=running)
        both = pandas.concat([poor, visible.to_pandas()])
        assert both["query_norm"].isna().tolist() == [True] * H + [False] * H


def test_a_norm_that_one_call_hides_is_not_known_of_both() -> None:
    model, x = Torch(False), torch.randn(B, T, E)
    for running in (False, True):
        with torch.no_grad(), hw.watch(model, hw.Norms(), running=running) as seen:
            for model.need_weights in (False, True):
                model.train()(x)
        assert not any(NORMS & row.keys() for row in seen.table())
        assert seen.unavailable["layer"].keys() == NORMS


def test_a_contribution_without_a_projection_is_listed() -> None:
    q, k, v = torch.randn(3, 1, H, T, D)
    seen = hw.observe(q, k, v, hw.OutputNorm())
    assert seen["contribution"].isnan().all()
    assert "contribution" not in seen.table()[0]
    assert "projection" in seen.unavailable["contribution"]
    known = hw.observe(q, k, v, hw.OutputNorm(), projection=torch.randn(E, E))
    assert known.unavailable == {}


# ── means over nothing ──────────────────────────────────────────────────────────────────────────


def test_a_mean_over_no_query_is_not_0() -> None:
    q, k, v = torch.randn(3, 1, H, 4, D)
    mask = torch.ones(1, H, 4, 4, dtype=torch.bool).tril()
    mask[:, 1] = False  # head 1 attends to nothing
    ids = torch.arange(4)  # no token comes twice
    seen = hw.observe(q, k, v, hw.Entropy(), hw.Mass(hw.Induction(ids)), mask=hw.Dense(mask))
    running = hw.Running()
    running.add(seen)
    for table, reasons in (
        (seen.table(), seen.unavailable),
        (running.table(), running.unavailable),
    ):
        assert "entropy" in table[0]
        assert "entropy" not in table[1]
        assert not any("induction" in row for row in table)
        assert [row["induction_coverage"] for row in table] == [0.0, 0.0]
        assert reasons == {
            "entropy": "head 1: no query counts in its mean",
            "entropy_share": "head 1: no query counts in its mean",
            "induction": "heads 0, 1: no query counts in its mean",
        }
    assert seen["entropy"][0, 1].tolist() == [0.0] * 4  # a row with no allowed key reads 0
    assert running["entropy"].isnan().tolist() == [False, True]


def test_one_head_that_is_not_known_takes_no_standard_error_from_others() -> None:
    q, k, v = torch.randn(3, 2, H, 64, D)
    q[:, 0] = torch.nan
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal(), queries=16, backend="sdpa")
    assert [name in row for row in seen.table() for name in ("entropy", "entropy_se")] == [
        *(False, False),
        *(True, True),
    ]
    running = hw.Running()
    running.add(seen)
    assert [row.get("entropy_se", 0.0) > 0 for row in running.table()] == [False, True]
    texts = hw.Running()
    texts.add(hw.observe(q, k, v, hw.Entropy()))
    assert ["entropy_se" in row for row in texts.table(texts=True)] == [False, True]


def test_heads_that_no_query_shares_are_not_alike() -> None:
    q, k, v = torch.randn(3, 1, H, 4, D)
    mask = torch.ones(1, H, 4, 4, dtype=torch.bool)
    mask[:, 0, :2], mask[:, 1, 2:] = False, False
    seen = hw.observe(q, k, v, hw.Similarity(), mask=hw.Dense(mask))
    running = hw.Running()
    running.add(seen)
    for found in (seen["similarity"][0], running["similarity"]):
        assert found.isnan().tolist() == [[False, True], [True, False]]
    running.add(hw.observe(q, k, v, hw.Similarity()))
    assert not running["similarity"].isnan().any()


def test_an_entropy_floor_knows_of_no_entropy_without_queries() -> None:
    model = Attends(lambda *qkv: hw.attend(*qkv, mask=hw.Padding(torch.tensor([0]))))
    with hw.EntropyFloor(model, floor=1.0) as floor:
        model(torch.randn(1, T, E))
    assert floor.entropies[""].isnan().all()
    assert float(floor.loss.detach()) == 0.0


# ── weights that are NaN ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("keywords", [{}, {"queries": 4}, {"running": True}], ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_nan_read_nan(name: str, training: bool, keywords: Any) -> None:
    seen = watched(poisoned(made(name)).train(training), **keywords)
    (module,) = seen
    dead, alive = seen.table()
    largest = "max_logit" if "max_logit" in alive else "max_logit_sampled"
    for metric in (*OF_WEIGHTS, "entropy_share"):
        assert metric not in dead
        assert "head 0" in seen.unavailable[module][metric]
        assert math.isfinite(alive[metric])
    assert largest not in dead
    assert alive[largest] < 10
    for metric in OF_WEIGHTS:
        values = seen[module][metric]
        of_head = values[0] if "running" in keywords else values[:, 0]
        assert of_head.isnan().all()


@pytest.mark.parametrize("name", MODELS)
def test_the_length_of_an_output_is_that_of_the_models_own(name: str) -> None:
    """PyTorch's kernel for CPUs gives 0 for weights that are NaN; others give NaN."""
    model = poisoned(made(name))
    for training in (True, False):
        model.train(training)
        seen = watched(model)
        (module,) = seen
        with torch.no_grad():
            out = model(torch.randn(B, T, E))
        assert bool(seen[module]["output_norm"][:, 0].isnan().all()) == bool(out.isnan().all())


def test_a_row_without_keys_is_no_row_of_nan() -> None:
    """Scores by hand: query 2 of head 0 is NaN, query 4 of both may attend to nothing."""

    class Scores(nn.Module):
        def forward(self, scores: Tensor, v: Tensor) -> Tensor:
            return scores.softmax(-1) @ v

    scores, v = causal(torch.randn(1, H, T, T)), torch.randn(1, H, T, D)
    scores[0, 0, 2, :3], scores[:, :, 4] = torch.nan, -torch.inf
    model = Scores()
    with hw.watch(model, hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First())) as seen:
        model(scores, v)
    entropy = seen[""]["entropy"][0]
    assert entropy.isnan().nonzero().tolist() == [[0, 2]]
    assert entropy[:, 4].tolist() == [0.0, 0.0]
    assert seen[""]["first"][0].isnan().nonzero().tolist() == [[0, 2]]
    assert seen[""]["max_logit"].isnan().tolist() == [[True, False]]
    assert ["entropy" in row for row in seen.table()] == [False, True]
    wanted = entropy[1, [0, 1, 2, 3, 5, 6]].mean()  # query 4 is in no mean
    assert seen.table()[1]["entropy"] == pytest.approx(float(wanted))


@pytest.mark.parametrize(
    "name", ["sdpa", "sdpa, noise", "matmul", "nn.MultiheadAttention, weights"]
)
def test_scores_that_overflow_stop_no_watched_model(name: str) -> None:
    model = made(name)
    for parameter in model.parameters():
        parameter.data *= 1e20
    seen = watched(model, hw.Entropy(), hw.MaxLogit())
    (module,) = seen
    assert not torch.isfinite(seen[module]["entropy"]).all()
    assert not any("entropy" in row for row in seen.table())


def test_an_accelerated_model_that_is_watched_gives_what_it_gives_alone() -> None:
    model = poisoned(made("sdpa")).eval()
    x = torch.randn(B, T, E)
    with torch.no_grad(), hw.accelerate(model):
        alone = model(x)
        with hw.watch(model, hw.Entropy()):
            both = model(x)
    with torch.no_grad():
        plain = model(x)
    for found in (alone, both):
        torch.testing.assert_close(found, plain, rtol=0.0, atol=0.0, equal_nan=True)


def test_meanings_tried_on_nan_are_tried_again() -> None:
    """What a function of transformers means is found out on a call; NaN tell nothing of it."""
    model = made("transformers, eager")
    healthy = copy.deepcopy(model)
    watched(poisoned(model))
    assert all("query_norm" in row for row in watched(healthy).table())
