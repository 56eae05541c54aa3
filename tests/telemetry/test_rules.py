"""Rules and alarms: who is named, when, and what then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.telemetry.figures import HeadMetrics
from headwise.telemetry.rules import RecordedStep, alarms_at
from monitored import LAYERS, H, advance, made, monitored

HEADS = {"low": 2, "high": 1}


def maxima(step: int, values: list[float], sampled: bool = False) -> RecordedStep:
    figures = HeadMetrics("maximum", np.array([values]), 1 if sampled else 2, 2)
    return RecordedStep(step, {"max_logit": figures})


def means(step: int, values: list[float], count: float = 1.0) -> RecordedStep:
    rows = np.array([[count] * len(values), values, [0.0] * len(values), [0.0] * len(values)])
    return RecordedStep(step, {"entropy": HeadMetrics("mean", rows, 1, 2)})


def named(rule: hw.telemetry.Rule, records: list[RecordedStep]) -> list[list[tuple[str, int]]]:
    """The heads that are named at each record."""
    found = []
    for end in range(1, len(records) + 1):
        seen = records[max(0, end - rule.reach) : end]
        found.append([(a.layer, a.head) for a in alarms_at([rule], seen, HEADS)])
    return found


def test_a_head_is_named_when_it_passes_the_limit_and_again_when_it_comes_back() -> None:
    rule = hw.telemetry.Rule("max_logit", above=100.0)
    rows = [[1.0, 1.0, 1.0], [200.0, 100.0, 1.0], [300.0, 1.0, 101.0], [1.0, 1.0, 500.0]]
    rows.append([101.0, 1.0, 1.0])
    records = [maxima(step, row) for step, row in enumerate(rows)]
    assert named(rule, records) == [[], [("low", 0)], [("high", 0)], [], [("low", 0)]]
    alarm = alarms_at([rule], records[:2], HEADS)[0]
    assert alarm == hw.telemetry.Alarm(1, "max_logit > 100", "max_logit", "low", 0, 200.0)


def test_so_many_recorded_steps_in_a_row() -> None:
    rule = hw.telemetry.Rule("entropy", below=0.5, steps=3)
    values = [0.4, 0.4, 0.6, 0.4, 0.4, 0.4, 0.4, 0.4, 0.6, 0.4, 0.4, 0.4]
    found = named(rule, [means(step, [value, 1.0, 1.0]) for step, value in enumerate(values)])
    assert [step for step, heads in enumerate(found) if heads] == [5, 11]


def test_a_sampled_maximum_feeds_no_alarm() -> None:
    rule = hw.telemetry.Rule("max_logit", above=100.0)
    assert named(rule, [maxima(1, [500.0] * 3, sampled=True)]) == [[]]
    assert named(rule, [maxima(1, [500.0] * 3)])[0]


def test_what_is_not_finite_is_above_every_limit() -> None:
    rule = hw.telemetry.Rule("max_logit", above=100.0)
    found = alarms_at([rule], [maxima(1, [np.nan, np.inf, -np.inf])], HEADS)
    assert [(alarm.head, alarm.value) for alarm in found] == [(0, np.inf), (1, np.inf)]


def test_heads_that_were_not_seen_are_not_named() -> None:
    rule = hw.telemetry.Rule("entropy", below=0.5)
    assert named(rule, [means(1, [0.0, 0.0, 0.0], count=0.0)]) == [[]]
    assert named(rule, [means(1, [0.0, 0.0])]) == [[("low", 0), ("low", 1)]]


def test_jumps_are_in_robust_deviations_of_the_head_itself() -> None:
    rule = hw.telemetry.Rule("entropy", jump=6.0, window=8)
    noise = np.random.default_rng(0).normal(0, [0.01, 1.0, 0.0], (30, 3))
    values = np.array([2.0, 2.0, 2.0]) + noise
    values[20:, 0] += 0.2  # 20 deviations of head 0, a fifth of one of head 1
    values[20, 1] += 0.2
    values[25, 2] = 2.02  # 10 times a thousandth of the median
    found = named(rule, [means(step, row.tolist()) for step, row in enumerate(values)])
    assert {step: heads for step, heads in enumerate(found) if heads} == {
        20: [("low", 0)],
        25: [("high", 0)],
    }


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({}, "none of them given"),
        ({"above": 1.0, "below": 2.0}, "above and below given"),
        ({"above": 1.0, "steps": 0}, "steps must be an integer ≥ 1"),
        ({"jump": 0.0}, "jump above 0"),
        ({"jump": 3.0, "window": 2}, "window an integer ≥ 5"),
        ({"above": 1.0, "then": "panic"}, "then='panic'"),
        ({"above": float("nan")}, "above=nan: give a finite number"),
        ({"below": "0.1"}, "below='0.1': give a finite number"),
        ({"above": 1.0, "steps": 2.5}, "steps must be an integer ≥ 1"),
    ],
)
def test_bad_rules_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=r"Rule\('entropy', …\)") as refused:
        hw.telemetry.Rule("entropy", **settings)
    assert why in str(refused.value)


def test_what_is_no_name_of_a_metric_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Rule\(Entropy\(\), …\): the statistic must be the name"):
        hw.telemetry.Rule(hw.Entropy(), below=0.1)  # type: ignore[arg-type]


# ── in a training ───────────────────────────────────────────────────────────────────────────────


def grown(layer: int, factor: float) -> tuple[Any, torch.optim.Optimizer]:
    """A model in which the queries of one layer's head 1 are so many times as long."""
    model, optimizer = made()
    own = model.blocks[layer].own
    with torch.no_grad():
        for name in ("weight", "bias"):
            getattr(own.qkv, name)[own.head_dim : 2 * own.head_dim] *= factor
    return model, optimizer


def test_a_warning_names_head_step_number_and_rule(tmp_path: Path) -> None:
    model, optimizer = grown(1, 1e4)
    path, said = tmp_path / "heads.sqlite", r"step 1: L2H1 \(blocks\.1\.own\): max_logit is .* 100"
    with pytest.warns(UserWarning, match=said):
        monitor = monitored((model, optimizer), range(1), every=1, history=path)
    (alarm,) = [alarm for alarm in monitor.alarms if alarm.rule == "max_logit > 100"]
    assert (alarm.step, alarm.layer, alarm.head) == (1, LAYERS[2], 1)
    assert alarm.value == monitor.latest["max_logit"].values[2 * H + 1] > 100
    assert alarm in hw.History(path).alarms


def test_a_function_is_given_the_alarm() -> None:
    model, optimizer = grown(0, 1e4)
    found: list[hw.telemetry.Alarm] = []
    rules = [hw.telemetry.Rule("max_logit", above=100.0, then=found.append)]
    with hw.Monitor(model, optimizer, every=1, rules=rules) as monitor:
        advance(model, optimizer, 0)
        advance(model, optimizer, 1)
    assert [(alarm.layer, alarm.head) for alarm in found] == [(LAYERS[0], 1)]
    assert monitor.alarms == found


@pytest.mark.filterwarnings("ignore:headwise")
def test_a_stop_saves_first_and_is_in_the_history(tmp_path: Path) -> None:
    model, optimizer = grown(0, 1e4)
    done = []
    rules = [hw.telemetry.Rule("max_logit", above=100.0, then="stop")]
    path = tmp_path / "heads.sqlite"
    monitor = hw.Monitor(
        model, optimizer, every=1, rules=rules, history=path, save=lambda: done.append("saved")
    )
    with pytest.raises(hw.telemetry.StopTraining) as stopped:
        advance(model, optimizer, 0)
    monitor.close()
    assert "H1 (blocks.0.own)" in str(stopped.value)
    assert done == ["saved"]
    assert list(stopped.value.alarms) == monitor.alarms == hw.History(path).alarms


def test_a_resumed_history_raises_no_alarm_twice(tmp_path: Path) -> None:
    path, found = tmp_path / "heads.sqlite", []
    rules = [
        hw.telemetry.Rule("max_logit", above=100.0, then=found.append),
        hw.telemetry.Rule("first", above=-1.0, steps=3, then=found.append),
    ]
    model, optimizer = grown(0, 1e4)
    for start, stop in (0, 2), (2, 5):
        with hw.Monitor(model, optimizer, every=1, rules=rules, history=path, step=start):
            for number in range(start, stop):
                advance(model, optimizer, number)
    assert [alarm.step for alarm in found if alarm.statistic == "max_logit"] == [1]
    assert {alarm.step for alarm in found if alarm.statistic == "first"} == {3}
    assert len(found) == len(set(found)) == 1 + len(LAYERS) * 3
