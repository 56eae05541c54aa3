"""An entropy floor in the loss: heads that collapse at a high learning rate no longer do.

    python examples/entropy_floor.py                          # all of it: six minutes on one core
    python examples/entropy_floor.py --seeds 1 --rates 0.03   # half a minute of it

A head has collapsed when its queries put all their weight on one key each. Its entropy is then
near 0, and so is the gradient of its softmax, so that it stays as it is (Zhai et al. 2023). Here
a small GPT is trained on Python's manual, each time twice from the same weights and on the same
batches: with its loss alone, and with `strength · Σ_h relu(floor − H_h)` added to it, where H_h
is the mean entropy of head h over the batch, in nats. Heads above the floor are left alone.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.models.run import Run, TrainConfig

COLLAPSED = 0.1  # nats: e^0.1, 1.1 keys


@dataclass(frozen=True)
class Settings:
    """Every schedule, a peak learning rate with its steps of warm-up, is run with every seed."""

    config: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            width=64, layers=2, context=64, batch=16, steps=400, repeats=0.0
        )
    )
    schedules: tuple[tuple[float, int], ...] = (
        (0.003, 0),
        (0.01, 0),
        (0.03, 0),
        (0.1, 0),
        (0.03, 100),
    )
    seeds: int = 3
    floor: float = 0.5
    strength: float = 1.0
    measured: int = 20


def step(run: Run, floor: hw.EntropyFloor | None) -> None:
    """One step of training, with the floor in its loss if there is one."""
    batch = run.batch(run.step)
    for group in run.optimizer.param_groups:
        group["lr"] = run.config.learning_rate(run.step)
    run.model.train()
    with floor or nullcontext():
        logits = run.model(batch[:, :-1])
    loss = next_token_loss(logits, batch)
    if floor is not None:
        loss = loss + floor.loss
    run.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(run.model.parameters(), run.config.clip)
    run.optimizer.step()
    run.step += 1


def next_token_loss(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def train(
    config: TrainConfig, floor: float | None, strength: float, measured: int
) -> list[dict[str, Any]]:
    """A run, looked at `measured` times on the way, each fifth time with its held-out loss."""
    run, marks = Run(config), []
    held = None if floor is None else hw.EntropyFloor(run.model, floor, strength)
    every = max(1, config.steps // measured)
    while run.step < config.steps:
        step(run, held)
        if run.step % every == 0 or run.step == config.steps:
            marks.append(look(run, loss=run.step % (5 * every) == 0 or run.step == config.steps))
    return marks


@torch.no_grad()
def look(run: Run, loss: bool) -> dict[str, Any]:
    """Mean entropy of every head on held-out text, and its loss where that is wanted."""
    run.model.eval()
    with hw.watch(run.model, hw.Entropy(), hw.MaxLogit()) as seen:
        run.model(run.inputs[:16])
    rows = seen.table()
    return {
        "step": run.step,
        "entropy": [row["entropy"] for row in rows],
        "max_logit": max(row["max_logit"] for row in rows),
        "held_out": run.held_out_loss() if loss else None,
    }


def measure(settings: Settings) -> list[dict[str, Any]]:
    """All runs, each told in a line when it ends."""
    rows = []
    print("learning rate, warm-up, seed, floor: held-out loss, least entropy, collapsed heads")
    for rate, warmup in settings.schedules:
        for seed in range(settings.seeds):
            config = replace(settings.config, lr=rate, warmup=warmup, seed=seed)
            for floor in (None, settings.floor):
                marks = train(config, floor, settings.strength, settings.measured)
                run = {"rate": rate, "warmup": warmup, "seed": seed, "floor": floor}
                rows.append({**run, "marks": marks})
                end = marks[-1]
                collapsed = sum(entropy < COLLAPSED for entropy in end["entropy"])
                print(
                    f"{rate:g}, {warmup}, {seed}, {'none' if floor is None else floor}: "
                    f"{end['held_out']:.3f}, {min(end['entropy']):.3f}, "
                    f"{collapsed} of {len(end['entropy'])}",
                    flush=True,
                )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """The command, with the process's arguments unless others are given."""
    usual = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", help="these, without warm-up, alone")
    parser.add_argument("--seeds", type=int, default=usual.seeds)
    parser.add_argument("--steps", type=int, default=usual.config.steps)
    parser.add_argument("--floor", type=float, default=usual.floor, help="nats")
    parser.add_argument("--strength", type=float, default=usual.strength)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is too small for two
    settings = replace(
        usual,
        config=replace(usual.config, steps=chosen.steps),
        schedules=tuple((rate, 0) for rate in chosen.rates or ()) or usual.schedules,
        seeds=chosen.seeds,
        floor=chosen.floor,
        strength=chosen.strength,
    )
    measure(settings)


if __name__ == "__main__":
    main()
