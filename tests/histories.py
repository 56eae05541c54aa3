"""Histories of trainings that never ran, as the tests of timelines share them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from headwise.telemetry import Alarm
from headwise.telemetry.figures import HeadMetrics
from headwise.telemetry.history import HistoryWriter, Scalar
from headwise.telemetry.rules import RecordedStep

LAYERS = {"blocks.0.attn": 3, "blocks.1.attn": 2}
STEPS = (1, 10, 20, 30, 40, 50, 60)
ABOUT = {"every": 10, "queries": 4, "model": "Tiny", "torch": "2.x", "rules": ["max_logit > 100"]}
ALARMS = (
    Alarm(30, "max_logit > 100", "max_logit", "blocks.1.attn", 1, 123.5),
    Alarm(50, "all sink", "first", "blocks.0.attn", 2, 0.997),
)


def drawn(step: int, heads: int, seed: int) -> dict[str, HeadMetrics]:
    """Figures of a step: two sampled means, a share among them, and a maximum that grows."""
    draw = np.random.default_rng((seed, step))

    def mean(values: np.ndarray, error: float) -> HeadMetrics:
        count = np.full(heads, 12.0)
        return HeadMetrics(
            "mean", np.stack([count, count * values, count, (count * error) ** 2]), 4, 8
        )

    largest = draw.uniform(3, 9, heads)
    largest[-1] *= 1 + step
    return {
        "entropy": mean(draw.uniform(0.5, 3, heads), 0.05),
        "first": mean(draw.uniform(0, 1, heads), 0.01),
        "max_logit": HeadMetrics("maximum", largest[None], 8, 8),
    }


def write_history(
    path: Path,
    steps: Sequence[int] = STEPS,
    layers: Mapping[str, int] = LAYERS,
    alarms: Sequence[Alarm] = ALARMS,
    seed: int = 0,
    after: int = 0,
    changed: Mapping[int, Mapping[str, HeadMetrics]] | None = None,
    scalars: Sequence[Scalar] = (),
) -> Path:
    """Write a history, all steps at once; `changed` replaces figures of some of them."""
    heads = sum(layers.values())
    records = [
        (
            RecordedStep(step, drawn(step, heads, seed) | dict((changed or {}).get(step, {}))),
            [alarm for alarm in alarms if alarm.step == step],
        )
        for step in steps
    ]
    writer = HistoryWriter(path, after, ABOUT)
    writer.write(records, layers, scalars=scalars)
    writer.close()
    return path
