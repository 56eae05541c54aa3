"""What monitoring costs a training: a small GPT's steps, monitored and not.

    python benchmarks/monitor.py [--rounds N] [--part steps] [--cpu-time] [--no-record]

4 layers of 4 heads, width 256, context 256, batch 16, float32, AdamW, on the CPU; random tokens. A
step is forward, backward and the optimizer's. All contenders take turns in every round, each with a
model of its own from the same start; the losses are compared before the clock starts. The history
is written to a file. Runs are counted in steps: 10 with `every=10`, 100 with `every=100`. With
`--cpu-time` the clock counts what this process computes, whoever else is at work.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import headwise as hw
import recording
from headwise.models.gpt import GPT, GPTConfig
from headwise.tutorial import timing

RESULTS = Path(__file__).parent / "results"
LAYERS, HEADS, WIDTH, CONTEXT, BATCH, VOCAB = 4, 4, 256, 256, 16, 512
SAMPLED = (hw.Entropy(), hw.Mass(hw.First()), hw.Mass(hw.Previous()))
NEVER = 10**9


def training(**settings: Any) -> Callable[[], float]:
    """One step of a training, with a monitor of these settings or none; gives its loss."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": CONTEXT, "n_embd": WIDTH}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = GPT(GPTConfig(**sizes, n_layer=LAYERS, n_head=HEADS, **dropouts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if settings:
        hw.Monitor(model, optimizer, rules=(), **settings)
    numbers = count()

    def step() -> float:
        drawn = torch.Generator().manual_seed(next(numbers))
        x = torch.randint(VOCAB, (BATCH, CONTEXT + 1), generator=drawn)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def times(work: Callable[[], float], steps: int) -> Callable[[], list[float]]:
    """So many steps at a time."""
    return lambda: [work() for _ in range(steps)]


Contenders = dict[str, tuple[str, Callable[[], object]]]
"""Each with what it is compared to."""


def single_steps(folder: Path) -> Contenders:
    """One step at a time; trainings that are monitored compute the same."""
    made: dict[str, dict[str, Any]] = {
        "plain": {},
        "monitored, no step recorded": {"every": NEVER},
        "recorded": {"every": 1, "history": folder / "recorded.sqlite"},
        "recorded, sampled statistics alone": {
            "every": 1,
            "statistics": SAMPLED,
            "history": folder / "sampled.sqlite",
        },
        "clip=100 after every step": {"every": NEVER, "clip": 100.0},
    }
    steps = {name: training(**settings) for name, settings in made.items()}
    first = {name: [step() for _ in range(3)] for name, step in steps.items()}
    assert all(losses == first["plain"] for losses in first.values()), first
    return {f"a step, {name}": ("a step, plain", step) for name, step in steps.items()}


def runs(folder: Path) -> Contenders:
    """As many steps as lie between two that are recorded."""
    found: Contenders = {}
    for every in (10, 100):
        plain = f"{every} steps, plain"
        found[plain] = plain, times(training(), every)
        monitored = training(every=every, history=folder / f"{every}.sqlite")
        monitored()  # the first step is recorded besides
        found[f"{every} steps, every={every}"] = plain, times(monitored, every)
    return found


def main() -> None:
    """Measure, print the table, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--part", choices=("steps", "runs"))
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    chosen = parser.parse_args()
    rows, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        found = single_steps(Path(folder)) if chosen.part != "runs" else {}
        found |= runs(Path(folder)) if chosen.part != "steps" else {}
        works = {name: work for name, (_, work) in found.items()}
        clock = time.process_time if chosen.cpu_time else time.perf_counter
        taken = timing.interleaved(works, rounds=chosen.rounds, least=0, clock=clock)
    for name, seconds in taken.items():
        spent, over = timing.Spread.of(seconds), timing.ratio(taken, name, found[name][0])
        rows.append({"contender": name, "seconds": spent, "ratio": over})
        spread = f"{over.median:.3f} ({over.low:.3f} to {over.high:.3f})"
        lines.append([name, f"{1e3 * spent.median:.1f}", spread])
    title = f"{LAYERS} layers × {HEADS} heads, width {WIDTH}, context {CONTEXT}, batch {BATCH}"
    recording.show(title, ["", "ms", "× plain"], lines)
    if not chosen.no_record:
        settings = {"rounds": chosen.rounds, "queries": 64, "cpu_time": chosen.cpu_time}
        name = "monitor" if chosen.part is None else f"monitor_{chosen.part}"
        print(f"kept in {recording.record(name, settings, rows, RESULTS)}")


if __name__ == "__main__":
    main()
