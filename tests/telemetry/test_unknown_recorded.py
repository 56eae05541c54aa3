"""Unknown is not zero, in trainings: what is not known is recorded nowhere, NaN raise alarms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.report.codec import unpack
from headwise.report.page import timeline as page
from headwise.report.timeline import read_timeline
from headwise.telemetry.trackers import logged
from roads import MODELS, Attends, B, E, H, T, Torch, by_matmul, by_sdpa, made, poisoned

NORMS = ("query_norm", "key_norm")


def train(model: nn.Module, steps: int = 4, **settings: Any) -> hw.Monitor:
    """A monitor, closed, after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    with hw.Monitor(model, optimizer, every=1, **settings) as monitor:
        for _ in range(steps):
            model(torch.randn(B, T, E)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return monitor


def mixed() -> nn.Module:
    """Two layers: of the first only the scores can be seen."""
    torch.manual_seed(0)
    return nn.Sequential(Attends(by_matmul), Attends(by_sdpa))


@pytest.mark.filterwarnings("ignore:headwise")
@pytest.mark.parametrize("queries", [4, None])
@pytest.mark.parametrize("name", MODELS)
def test_weights_that_are_nan_raise_an_alarm(name: str, queries: int | None) -> None:
    monitor = train(poisoned(made(name)), queries=queries)
    first = [alarm for alarm in monitor.alarms if alarm.step == 1]
    assert {(alarm.rule, alarm.head) for alarm in first} == {
        ("max_logit > 100", 0),
        ("not a finite number", 0),
    }
    assert not any(np.isfinite(alarm.value) for alarm in first)


def test_a_layer_whose_weights_are_sound_raises_none() -> None:
    for name in MODELS:
        assert train(made(name), steps=2).alarms == []


def test_norms_that_are_not_visible_are_recorded_of_no_layer() -> None:
    monitor = train(made("matmul"), rules=[hw.telemetry.Rule("query_norm", above=1e-6)])
    assert not monitor.latest.keys() & set(NORMS)
    assert set(monitor.unavailable[""]) == set(NORMS)
    assert monitor.alarms == []


def test_what_is_not_known_of_one_layer_is_missing_beside_others(tmp_path: Path) -> None:
    told: list[dict[str, float]] = []
    path = tmp_path / "monitor.sqlite"
    rules = [hw.telemetry.Rule("query_norm", below=1e-3), hw.telemetry.Rule("key_norm", above=1e3)]
    monitor = train(
        mixed(),
        history=path,
        rules=rules,
        trackers=[lambda scalars, step: told.append(scalars)],
        probe=torch.randn(B, T, E),
    )
    assert monitor.alarms == []  # a norm that is not known is neither small nor large
    reason = monitor.unavailable["0"]["query_norm"]
    assert "only the scores of this attention are visible" in reason
    hidden = {start + name for name in NORMS for start in ("", "probe/")}
    assert monitor.unavailable.keys() == {"0"}
    assert monitor.unavailable["0"].keys() == hidden
    history = hw.History(path)
    assert history.unavailable == monitor.unavailable
    for name in hidden:
        for values in (monitor.latest[name].values, history[name].values[-1]):
            assert np.isnan(values).tolist() == [True] * H + [False] * H
            assert (values[H:] > 0).all()
        assert f"headwise/{name}/0" not in told[-1]
        assert told[-1][f"headwise/{name}/1"] > 0
        assert len(logged(monitor.latest, monitor.layers)[1][f"headwise/{name}"]) == H
    columns = history.columns()
    of_first = columns["module"] == "0"
    assert np.isnan(columns["query_norm"][of_first]).all()
    assert not np.isnan(columns["query_norm"][~of_first]).any()


def test_a_timeline_draws_it_as_missing_and_says_why(tmp_path: Path) -> None:
    train(mixed(), history=tmp_path / "monitor.sqlite")
    run = read_timeline(tmp_path)
    assert np.isnan(run.tracks["query_norm"].values[:, :H]).all()
    assert run.document()["unavailable"]["0"].keys() == set(NORMS)
    drawn = page._run(run, page.Coding(4, True, 1))
    assert np.isnan(unpack(drawn["values"]["query_norm"])[:H]).all()
    said = dict(drawn["made"])["Not recorded"]
    assert "query_norm of 0:" in said
    assert "key_norm of 0:" in said


def test_a_history_says_why_it_has_no_such_metric(tmp_path: Path) -> None:
    train(made("matmul"), history=tmp_path / "heads.sqlite")
    history = hw.History(tmp_path / "heads.sqlite")
    with pytest.raises(KeyError, match="only the scores of this attention are visible"):
        history["query_norm"]
    with pytest.raises(KeyError, match="'distance' was not recorded; there are"):
        history["distance"]


@pytest.mark.filterwarnings("ignore:headwise")
def test_a_norm_that_one_micro_batch_hides_is_not_recorded() -> None:
    model = Torch(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for order in ((False, True), (True, False)):
        with hw.Monitor(model, optimizer, every=1) as monitor:
            for model.need_weights in order:
                model(torch.randn(B, T, E)).square().mean().backward()
            optimizer.step()
        assert not monitor.latest.keys() & set(NORMS)
        assert monitor.latest["entropy"].queries == 2 * B * T


@pytest.mark.filterwarnings("ignore:headwise")
def test_scores_that_overflow_raise_an_alarm() -> None:
    for name in ("sdpa", "matmul", "nn.MultiheadAttention, weights"):
        model = made(name)
        for parameter in model.parameters():
            parameter.data *= 1e20
        rules = {alarm.rule for alarm in train(model, steps=1).alarms}
        assert rules == {"max_logit > 100", "not a finite number"}
