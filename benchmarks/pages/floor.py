"""`docs/entropy-floor.md` and its picture, from the recorded run of `examples/entropy_floor.py`."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from examples import entropy_floor as example

import headwise as hw
from headwise.models import corpus
from headwise.models.run import Run
from headwise.tutorial import timing

from . import runs
from .draw import Axes, Picture, curve, frame, legend
from .words import and_list, prose, signed, spread, table

RECORD = "entropy_floor.json"
PAGE, PICTURE = "entropy-floor.md", "entropy-floor.svg"
PLAIN, HELD = "#d55e00", "#0072b2"

# What a user writes; it runs in the tests with the rest of the page.
SNIPPET = """
```python
>>> import torch, headwise as hw
>>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
>>> floor = hw.EntropyFloor(layer, floor=0.5, strength=1.0)
>>> with floor:                                              # around each forward pass
...     loss = layer(x, mask=hw.Causal()).square().mean()
>>> (loss + floor.loss).backward()
>>> floor.entropies[""].shape                                # by module, of each head
torch.Size([3])

```
""".strip()


def measure(settings: example.Settings) -> dict[str, Any]:
    """The example's runs, and what the floor adds to the time of a step."""
    config = settings.config
    run = Run(config)
    held = hw.EntropyFloor(run.model, settings.floor, settings.strength)
    taken = timing.interleaved(
        {
            "plain": lambda: example.step(run, None),
            "floor": lambda: example.step(run, held),
        },
        rounds=21,
    )
    q = torch.zeros(config.batch, config.heads, config.context, config.width // config.heads)
    return {
        "backend": hw.explain(q, q, q, mask=hw.Causal()).chosen,
        "step": timing.ratio(taken, "floor", "plain"),
        "unigram": corpus.unigram_loss(run.train_ids, run.targets, run.vocab),
        "runs": example.measure(settings),
    }


def write(settings: example.Settings, found: dict[str, Any], folder: Path = runs.RESULTS) -> Path:
    return runs.keep(folder / RECORD, settings, found, digits=4)


def read(folder: Path = runs.RESULTS) -> dict[str, Any]:
    return json.loads((folder / RECORD).read_text())


def toy() -> example.Settings:
    """Sizes that take seconds, at a rate where heads collapse all the same."""
    usual = example.Settings()
    config = replace(usual.config, vocab=300, width=32, layers=1, context=32, batch=8, steps=60)
    return replace(usual, config=config, schedules=((0.1, 0),), seeds=1, measured=6)


def least(one: dict[str, Any]) -> float:
    """The entropy of the run's least head at the end."""
    return min(one["marks"][-1]["entropy"])


def collapsed(some: list[dict[str, Any]]) -> int:
    """How many heads of these runs end collapsed."""
    return sum(e < example.COLLAPSED for one in some for e in one["marks"][-1]["entropy"])


def loss(one: dict[str, Any]) -> float:
    return one["marks"][-1]["held_out"]


def chosen(run: dict[str, Any], schedule: list[float], floor: bool) -> list[dict[str, Any]]:
    """The runs of a schedule, by seed."""
    return [
        one
        for one in run["runs"]
        if [one["rate"], one["warmup"]] == list(schedule) and (one["floor"] is not None) == floor
    ]


def named(schedule: list[float]) -> str:
    rate, warmup = schedule
    return f"{rate:g}, warm-up {warmup}" if warmup else f"{rate:g}, no warm-up"


def render(run: dict[str, Any]) -> dict[str, str]:
    """The page and its picture."""
    return {PAGE: _page(run), PICTURE: _picture(run)}


def _page(run: dict[str, Any]) -> str:
    settings, config = run["settings"], run["settings"]["config"]
    machine = run["machine"]
    heads = config["layers"] * config["heads"]
    head = [
        "learning rate",
        "loss",
        "lowest entropy of a head, by seed",
        f"heads under {example.COLLAPSED:g} nats",
        "largest logit, by seed",
        "held-out loss, mean",
    ]
    rows = [
        [
            named(schedule) if not floor else "",
            "with the floor" if floor else "plain",
            *_cells(chosen(run, schedule, floor), heads),
        ]
        for schedule in settings["schedules"]
        for floor in (False, True)
    ]
    parts = [
        "# An entropy floor",
        prose(
            """A head has collapsed when each of its queries puts all weight on one key: its entropy
            and the gradient of its softmax are near 0 (Zhai et al. 2023). Entropy is differentiable
            in headwise, so it can be part of the loss: `strength · Σ_h relu(floor − H_h)`, with H_h
            the mean entropy of head h over the batch in nats. Heads above the floor are unaffected.
            `hw.EntropyFloor` is this term."""
        ),
        SNIPPET,
        "## Experiment",
        prose(
            f"""A GPT of {config["layers"]} layers of {config["heads"]} heads, width
            {config["width"]}, context {config["context"]}, is trained for {config["steps"]} steps
            of {config["batch"]} rows of Python's manual with AdamW and gradients clipped to norm
            {config["clip"]:g}. Each seed runs with the plain loss and with a floor of
            {settings["floor"]:g} nats at strength {settings["strength"]:g}, from the same weights
            and batches. Floor and strength were not tuned. Entropies are means over held-out
            text."""
        ),
        prose(
            f"""`python examples/entropy_floor.py` runs the experiment. This run is from
            {run["date"][:10]} ({machine["cpu"]}, PyTorch {machine["versions"]["torch"]});
            `benchmarks/results/{RECORD}` has all results."""
        ),
        table(head, rows),
        "![Lowest entropy of a head and held-out loss over training, plain and with the floor]"
        f"({PICTURE})",
        "## Results",
        *(prose(said) for said in _verdict(run)),
    ]
    return "\n\n".join(parts) + "\n"


def _cells(some: list[dict[str, Any]], heads: int) -> list[str]:
    logits = [one["marks"][-1]["max_logit"] for one in some]
    return [
        ", ".join(f"{least(one):.2f}" for one in some),
        f"{collapsed(some)} of {heads * len(some)}",
        ", ".join(f"{logit:,.0f}" for logit in logits),
        f"{statistics.mean(map(loss, some)):.3f}",
    ]


def _verdict(run: dict[str, Any]) -> list[str]:
    """What came out, in words that follow the figures."""
    trios = [
        Trio(tuple(schedule), chosen(run, schedule, False), chosen(run, schedule, True))
        for schedule in run["settings"]["schedules"]
    ]
    fell = [trio for trio in trios if collapsed(trio.plain)]
    kept = [trio for trio in trios if not collapsed(trio.plain)]
    said = [_where_heads_fell(fell, run["unigram"])]
    if kept:
        told = and_list(f"{_range(trio.changes)} {trio.told}" for trio in kept)
        said.append(
            f"""Where no head of the plain run collapses, the floor changes the held-out loss of
            a seed by {told}. {_warmed(fell, kept)}"""
        )
    said.append(
        f"""At this size, a step with the floor takes {spread(run["step"])} times as long as a plain
        step. One small model does not show which floor a large model needs."""
    )
    return said


@dataclass(frozen=True)
class Trio:
    """A schedule, its plain runs and those with the floor, by seed."""

    schedule: tuple[float, int]
    plain: list[dict[str, Any]]
    held: list[dict[str, Any]]

    @property
    def told(self) -> str:
        rate, warmup = self.schedule
        return f"at {rate:g} " + (
            f"after {warmup} steps of warm-up" if warmup else "without warm-up"
        )

    @property
    def changes(self) -> list[float]:
        """What the floor adds to each seed's held-out loss."""
        return [loss(h) - loss(p) for p, h in zip(self.plain, self.held, strict=True)]


def _where_heads_fell(fell: list[Trio], unigram: float) -> str:
    if not fell:
        return "No head collapsed under any schedule, so these runs say nothing about the floor."
    said = []
    for trio in fell:
        words = f"""{trio.told.capitalize()}, {collapsed(trio.plain)} heads collapse with the plain
            loss and {collapsed(trio.held)} with the floor; the floor changes the held-out loss
            by {_range(trio.changes)}, depending on the seed."""
        if min(map(loss, trio.plain + trio.held)) > unigram - 0.3:
            words += f"""  Neither run learns much: predicting from token frequencies alone gives a
                loss of {unigram:.3f}."""
        said.append(words)
    least_held = min(least(one) for trio in fell for one in trio.held)
    said.append(f"With the floor, no head of these runs ends below {least_held:.2f} nats.")
    return " ".join(said)


def _warmed(fell: list[Trio], kept: list[Trio]) -> str:
    """Whether warm-up alone was enough at a rate where heads fell without it."""
    cold = {trio.schedule[0] for trio in fell if not trio.schedule[1]}
    saved = [trio for trio in kept if trio.schedule[1] and trio.schedule[0] in cold]
    return " ".join(
        f"""At {trio.schedule[0]:g}, warm-up alone prevents the collapse, and gives lower losses
        than the floor without warm-up."""
        for trio in saved
        for other in fell
        if other.schedule[0] == trio.schedule[0]
        and max(map(loss, trio.plain)) < min(map(loss, other.held))
    )


def _range(values: list[float]) -> str:
    """
    >>> _range([0.01, -0.2, 0.1])
    '−0.200 to +0.100'
    """
    return f"{signed(min(values))} to {signed(max(values))}" if any(values) else "nothing"


def _picture(run: dict[str, Any]) -> str:
    """A column a schedule: the least entropy of a head, and the held-out loss."""
    schedules, steps = run["settings"]["schedules"], run["settings"]["config"]["steps"]
    picture = Picture(50 + 205 * len(schedules), 400)
    legend(picture, 40, 20, {"plain": PLAIN, "with the floor": HELD})
    words = "one line per seed; lowest entropy of a head, nats (top), held-out loss (bottom)"
    picture.text(240, 20, words)
    top = max(least_of(mark) for one in run["runs"] for mark in one["marks"])
    losses = [mark["held_out"] for one in run["runs"] for mark in one["marks"] if mark["held_out"]]
    ticks = [round(0.5 * n, 1) for n in range(20)]
    for column, schedule in enumerate(schedules):
        left = 40 + 205 * column
        upper = Axes(left, 60, 165, 120, (0, steps), (0, 1.05 * top))
        lower = Axes(left, 235, 165, 120, (0, steps), (min(losses) - 0.1, max(losses) + 0.1))
        frame(picture, upper, named(schedule), (0, steps), _within(ticks, upper), "")
        frame(picture, lower, "", (0, steps), _within(ticks, lower))
        floor = run["settings"]["floor"]
        picture.line([upper.at(0, floor), upper.at(steps, floor)], "#555555", 0.7)
        for held, color in ((False, PLAIN), (True, HELD)):
            for one in chosen(run, schedule, held):
                entropies = [(mark["step"], least_of(mark)) for mark in one["marks"]]
                curve(picture, upper, entropies, color, 1.3)
                known = [(m["step"], m["held_out"]) for m in one["marks"] if m["held_out"]]
                curve(picture, lower, known, color, 1.3)
    return picture.svg()


def least_of(mark: dict[str, Any]) -> float:
    return min(mark["entropy"])


def _within(ticks: list[float], axes: Axes) -> list[float]:
    return [tick for tick in ticks if axes.y[0] <= tick <= axes.y[1]]
