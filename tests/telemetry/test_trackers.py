"""Trackers: a scalar a layer, a histogram a statistic; one that fails costs a warning."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.telemetry.trackers import logged
from monitored import LAYERS, H, advance, made, monitored


class Writer:
    """A TensorBoard `SummaryWriter`, as far as it is used."""

    def __init__(self) -> None:
        self.scalars: list[Any] = []
        self.histograms: list[Any] = []
        self.texts: list[Any] = []

    def add_scalar(self, *told: Any) -> None:
        self.scalars.append(told)

    def add_histogram(self, *told: Any) -> None:
        self.histograms.append(told)

    def add_text(self, *told: Any) -> None:
        self.texts.append(told)


def test_a_scalar_a_layer_and_a_histogram_a_statistic() -> None:
    model, optimizer = made()
    writer, numbers = Writer(), []
    trackers = [writer, lambda scalars, step: numbers.append((scalars, step))]
    with hw.Monitor(model, optimizer, every=2, queries=None, trackers=trackers) as monitor:
        for number in range(2):
            advance(model, optimizer, number)
    (_, first), (scalars, step) = numbers
    assert (first, step) == (1, 2)
    assert len(scalars) == len(monitor.latest) * len(LAYERS)
    entropy, largest = monitor.latest["entropy"], monitor.latest["max_logit"]
    name = f"headwise/entropy/{LAYERS[1]}"
    assert scalars[name] == pytest.approx(entropy.values[H : 2 * H].mean())
    name = f"headwise/max_logit/{LAYERS[1]}"
    assert scalars[name] == largest.values[H : 2 * H].max()
    assert writer.scalars[-len(scalars) :] == [(tag, x, 2) for tag, x in scalars.items()]
    assert [tag for tag, _, _ in writer.histograms[len(monitor.latest) :]] == [
        f"headwise/{name}" for name in monitor.latest
    ]
    np.testing.assert_array_equal(
        dict((t, x) for t, x, s in writer.histograms if s == 2)["headwise/entropy"], entropy.values
    )


def test_a_tracker_that_fails_costs_one_warning() -> None:
    def failing(scalars: dict[str, float], step: int) -> None:
        raise ConnectionError(f"no network at step {step}")

    told: list[int] = []
    model, optimizer = made()
    trackers = [failing, lambda scalars, step: told.append(step)]
    with pytest.warns(UserWarning, match="a tracker failed") as warned:
        monitored((model, optimizer), range(3), every=1, trackers=trackers)
    assert len(warned) == 1
    assert told == [1, 2, 3]


def test_wandb_logs_against_a_step_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(Histogram=list))
    calls: list[Any] = []

    class Run:
        def define_metric(self, *told: Any, **more: Any) -> None:
            calls.append((told, more))

        def log(self, told: dict[str, Any]) -> None:
            calls.append(told)

    model, optimizer = made()
    with hw.Monitor(model, optimizer, every=1, statistics=[hw.MaxLogit()], trackers=[Run()]):
        advance(model, optimizer, 0)
        advance(model, optimizer, 1)
    assert calls[:2] == [
        (("headwise/step",), {}),
        (("headwise/*",), {"step_metric": "headwise/step"}),
    ]
    assert [told["headwise/step"] for told in calls[2:]] == [1, 2]
    assert len(calls[2]) == 1 + len(LAYERS) + 1
    assert len(calls[2]["headwise/max_logit/heads"]) == len(LAYERS) * H


def test_only_finite_figures_are_logged() -> None:
    model, optimizer = made()
    with torch.no_grad():
        model.blocks[1].fused.qkv.weight.fill_(torch.nan)
    with pytest.warns(UserWarning, match="entropy is inf .not a finite number"):
        monitor = monitored((model, optimizer), range(1), every=1, statistics=[hw.Entropy()])
    scalars, heads = logged(monitor.latest, monitor.layers)
    assert [name for name in scalars if "share" not in name] == [
        f"headwise/entropy/{name}" for name in LAYERS[:3]
    ]
    assert len(heads["headwise/entropy"]) == 3 * H


def test_alarms_are_logged_as_text() -> None:
    model, optimizer = made()
    writer, raised = Writer(), list[Any]()
    rule = hw.telemetry.Rule("max_logit", above=-1e9, then=raised.append)
    with hw.Monitor(model, optimizer, every=1, rules=[rule], trackers=[writer]):
        advance(model, optimizer, 0)
        advance(model, optimizer, 1)
    ((tag, text, step),) = writer.texts  # at the first step alone: no head begins to at the next
    assert (tag, step) == ("headwise/alarms", 1)
    assert text.split("\n\n") == [str(alarm) for alarm in raised]
    assert "step 1: L0H0 (" in text
