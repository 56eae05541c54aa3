"""Do heads specialise? The built-in model is trained again and its heads are labeled on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from headwise.models import corpus
from headwise.models.run import Run, TrainConfig
from headwise.report import look

from ..pages.words import percent, table

ROLES = {
    "induction": ("induction_random", "≥", 0.4),
    "duplicate token": ("same_token_random", "≥", 0.4),
    "previous token": ("previous", "≥", 0.4),
    "first token": ("first", "≥", 0.5),
    "itself": ("self", "≥", 0.4),
    "broad": ("entropy_share", "≥", 0.8),
    "local": ("distance", "≤", 8.0),
}
"""The rules of this experiment: a head's role is the first that holds."""
IDLE = ("broad", "unlabeled")


@dataclass(frozen=True)
class Settings:
    """The built-in model's configuration, and a seed and a share of repeated rows for each run."""

    config: TrainConfig = field(default_factory=TrainConfig)
    runs: tuple[tuple[int, float], ...] = ((0, 0.5), (1, 0.5), (0, 0.0))


TOY = Settings(
    TrainConfig(vocab=257, context=16, layers=2, heads=2, width=8, steps=3, batch=2), ((0, 0.5),)
)


def marks(steps: int) -> list[int]:
    """Return the steps before which the heads are labeled, denser early; the last is the end."""
    early, middle = steps // 4, steps // 2
    dense, wide, wider = max(1, steps // 48), max(1, steps // 24), max(1, steps // 12)
    points = {*range(0, early, dense), *range(early, middle, wide), *range(middle, steps, wider)}
    return sorted(points | {steps})


def measure(settings: Settings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Train every run and record the metrics of every head at every mark."""
    runs = []
    for seed, repeats in settings.runs:
        run = Run(replace(settings.config, seed=seed, repeats=repeats))
        found = []
        for step in marks(run.config.steps):
            while run.step < step:
                run.advance()
            found.append(state(run))
            report(f"specialise: seed {seed}, repeats {repeats:.0%}, step {step}")
        layers, heads = range(run.config.layers), range(run.config.heads)
        names = [f"{layer}.{head}" for layer in layers for head in heads]
        runs.append({"seed": seed, "repeats": repeats, "heads": names, "marks": found})
    return {"runs": runs}


def state(run: Run) -> dict[str, Any]:
    """Return the roles and metrics of the heads, as `headwise look` shows them, and the loss."""
    shown = look(run.model, run.tokenizer, corpus.manual_passage())
    kept = {key: [row[key] for row in shown.rows] for key, _, _ in ROLES.values()}
    return {
        "step": run.step,
        "held_out": run.held_out_loss(),
        "apart": [total_variation(torch.from_numpy(layer.maps)) for layer in shown.layers],
        "label": [role(row) for row in shown.rows],
        **kept,
    }


def role(row: dict[str, Any]) -> str:
    """Return the role of a head with these metrics."""
    for name, (key, sign, threshold) in ROLES.items():
        score = row.get(key)
        if score is not None and (score >= threshold if sign == "≥" else score <= threshold):
            return name
    return IDLE[1]


def total_variation(maps: Tensor) -> float:
    """Return `½ Σ_j |p_ij − p'_ij|`, mean over queries and pairs of heads; maps `[H, T, S]`."""
    pairs = [(one - two).abs().sum(-1).mean() / 2 for one, two in combinations(maps, 2)]
    return float(torch.stack(pairs).mean())


def tables(run: dict[str, Any]) -> dict[str, str]:
    """Return as Markdown the first and last state of each run, and how many heads have a role."""
    lines = []
    for one in run["runs"]:
        first, last = one["marks"][0], one["marks"][-1]
        repeats = f"{percent(one['repeats'])} repeats" if one["repeats"] else "text alone"
        title = f"seed {one['seed']}, {repeats}"
        line = [f"{first['held_out']:.2f} → {last['held_out']:.2f}"]
        metrics = ("previous", "induction_random")
        line += [f"{max(first[n]):.2f} → {max(last[n]):.2f}" for n in metrics]
        counts = Counter(last["label"])
        roles = (f"{counts[role]} {role}" for role in ROLES if role not in IDLE and counts[role])
        lines.append([title, *line, ", ".join(roles)])
    head = ["run", "held-out loss (nats)", "largest weight on the previous token"]
    head += ["largest induction on repeated random tokens", "heads with a role at the end"]
    return {"specialise": table(head, lines)}
