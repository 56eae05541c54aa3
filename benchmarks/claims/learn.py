"""Do several small heads learn better than one big head? The same model trained with each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headwise.models.run import Run, TrainConfig

from ..pages.words import interval, table

# The 0.975 quantile of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
SMALL = TrainConfig(width=64, layers=2, context=64, batch=16, steps=1000, repeats=0.0)


@dataclass(frozen=True)
class Settings:
    """Each head count is trained at each learning rate with each seed."""

    config: TrainConfig = field(default_factory=lambda: SMALL)
    heads: tuple[int, ...] = (1, 2, 4, 8)
    seeds: int = 5
    rates: tuple[float, ...] = (3e-3, 1e-2)
    measured: int = 10


TOY = Settings(
    TrainConfig(vocab=257, width=8, layers=1, context=16, batch=2, steps=4, repeats=0.0),
    heads=(1, 2),
    seeds=2,
    rates=(1e-2,),
    measured=2,
)


def measure(settings: Settings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train every run; runs of one seed begin with the same weights and see the same batches."""
    runs = []
    for rate in settings.rates:
        for seed in range(settings.seeds):
            first: list[torch.Tensor] | None = None
            for heads in settings.heads:
                run = Run(replace(settings.config, heads=heads, seed=seed, lr=rate))
                weights = [p.detach().clone() for p in run.model.parameters()]
                first = first or weights
                assert all(torch.equal(a, b) for a, b in zip(first, weights, strict=True))
                curve = [(0, run.held_out_loss())]
                while run.step < run.config.steps:
                    run.advance()
                    if run.step % (run.config.steps // settings.measured) == 0:
                        curve.append((run.step, run.held_out_loss()))
                report(f"learn: rate {rate:g}, seed {seed}, {heads} heads: {curve[-1][1]:.3f}")
                size = sum(p.numel() for p in weights)
                row = {"rate": rate, "seed": seed, "heads": heads, "parameters": size}
                runs.append({**row, "curve": curve})
    return {"runs": runs}


def tables(run: dict[str, Any]) -> dict[str, str]:
    """Return the final losses as Markdown, and their differences from one head's, seed by seed."""
    lines = []
    for rate in run["settings"]["rates"]:
        ends: dict[int, list[float]] = {}
        for one in run["runs"]:
            if one["rate"] == rate:
                ends.setdefault(one["heads"], []).append(one["curve"][-1][1])
        for heads, losses in ends.items():
            loss = f"{statistics.mean(losses):.3f} ± {statistics.stdev(losses):.3f}"
            pairs = zip(ends[min(ends)], losses, strict=True)
            beside = compared([one - loss for one, loss in pairs]) if heads > 1 else ["–"] * 2
            lines.append([f"{rate:g}", str(heads), loss, *beside])
    head = ["learning rate", "heads", "held-out loss, mean ± standard deviation"]
    head += ["loss of one head − this loss (95 % interval)", "verdict"]
    return {"learn": table(head, lines)}


def compared(gains: list[float]) -> list[str]:
    """Return the mean gain with its 95 % interval (Student's t over seeds), and the verdict."""
    gain = statistics.mean(gains)
    margin = STUDENT[len(gains) - 2] * statistics.stdev(gains) / len(gains) ** 0.5
    verdict = "no difference" if abs(gain) <= margin else "better" if gain > 0 else "worse"
    return [interval(gain, margin), verdict]
