"""Do several small heads learn better than a big one? The same model trained with each."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headwise.models.run import Run, TrainConfig

from ..pages import draw
from ..pages.words import and_list, interval, prose, signed, table

# The 0.975 quantile of Student's t for 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True)
class Settings:
    """Each number of heads is trained at each learning rate with each seed."""

    config: TrainConfig = field(
        default_factory=lambda: TrainConfig(
            width=64, layers=2, context=64, batch=16, steps=1000, repeats=0.0
        )
    )
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


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """Held-out loss along every run. Runs of one seed begin with the same weights and batches."""
    runs = []
    for rate in settings.rates:
        for seed in range(settings.seeds):
            began: list[torch.Tensor] | None = None
            for heads in settings.heads:
                run = Run(replace(settings.config, heads=heads, seed=seed, lr=rate))
                weights = [p.detach().clone() for p in run.model.parameters()]
                began = began or weights
                assert all(torch.equal(a, b) for a, b in zip(began, weights, strict=True))
                curve = _curve(run, settings.measured)
                told(f"learn: rate {rate:g}, seed {seed}, {heads} heads: {curve[-1][1]:.3f}")
                parameters = sum(p.numel() for p in weights)
                runs.append(
                    {
                        "rate": rate,
                        "seed": seed,
                        "heads": heads,
                        "parameters": parameters,
                        "curve": curve,
                    }
                )
    return {"runs": runs}


def _curve(run: Run, points: int) -> list[tuple[int, float]]:
    every = run.config.steps // points
    curve = [(0, run.held_out_loss())]
    while run.step < run.config.steps:
        run.advance()
        if run.step % every == 0:
            curve.append((run.step, run.held_out_loss()))
    return curve


@dataclass(frozen=True)
class Outcome:
    """Final held-out losses of one number of heads at one rate, and what one head's exceed them by.

    `gain` is positive where these heads do better than one head from the same seed; `margin` is
    the half-width of its 95 % interval (Student's t over seeds).
    """

    mean: float
    spread: float
    gain: float
    margin: float
    wins: int

    @property
    def word(self) -> str:
        """What the interval says."""
        if abs(self.gain) <= self.margin:
            return "no difference shown"
        return "better" if self.gain > 0 else "worse"


def outcomes(run: dict[str, Any], rate: float) -> dict[int, Outcome]:
    """What came out at a learning rate, by number of heads."""
    ends: dict[int, list[float]] = {}
    for one in run["runs"]:
        if one["rate"] == rate:
            ends.setdefault(one["heads"], []).append(one["curve"][-1][1])
    single = ends[min(ends)]
    found = {}
    for heads, losses in ends.items():
        gains = [one - loss for one, loss in zip(single, losses, strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        found[heads] = Outcome(
            statistics.mean(losses),
            statistics.stdev(losses),
            statistics.mean(gains),
            STUDENT[len(gains) - 2] * error,
            sum(gain > 0 for gain in gains),
        )
    return found


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    settings, config = run["settings"], run["settings"]["config"]
    sizes = {one["parameters"] for one in run["runs"]}
    assert len(sizes) == 1, sizes
    seeds = settings["seeds"]
    rows = []
    for rate in settings["rates"]:
        for heads, end in outcomes(run, rate).items():
            beside = ["–", "–", "–"]
            if heads > 1:
                beside = [interval(end.gain, end.margin), f"{end.wins} of {seeds}", end.word]
            rows.append([f"{rate:g}", str(heads), f"{end.mean:.3f} ± {end.spread:.3f}", *beside])
    head = [
        "learning rate",
        "heads",
        "held-out loss, mean ± deviation over seeds",
        "one head's loss minus this, same seed (95 % interval)",
        "seeds where better",
        "so, beside one head",
    ]
    return "\n\n".join(
        [
            '## "Several small heads learn better than one big head"',
            prose(
                f"""**Experiment.** A GPT of {config["layers"]} layers, width {config["width"]},
                context {config["context"]}, is trained for {config["steps"]:,} steps on Python's
                manual with {and_list(map(str, settings["heads"]))} heads: {sizes.pop():,}
                parameters whatever the number. Runs of one seed begin with the same weights, bit
                for bit, and see the same batches, so only the cut into heads differs. {seeds}
                seeds, {len(settings["rates"])} learning rates; the loss is in nats a token on
                held-out text."""
            ),
            table(head, rows),
            "![Held-out loss over training for each number of heads](claims-learn.svg)",
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def verdict(run: dict[str, Any]) -> str:
    """What came out, in words that follow the figures."""
    found = {rate: outcomes(run, rate) for rate in run["settings"]["rates"]}
    words = [end.word for ends in found.values() for n, end in ends.items() if n > 1]
    better, worse = words.count("better"), words.count("worse")
    answer = "Not at this size."
    if better:
        answer = "Yes at this size." if better == len(words) else "It depends, even at this size."
    rate = min(found, key=lambda rate: min(end.mean for end in found[rate].values()))
    gains = [f"{signed(end.gain)} with {n}" for n, end in found[rate].items() if n > 1]
    return f"""{answer} Of {len(words)} comparisons, several heads are better in {better}, worse in
        {worse}, and the seeds do not settle {len(words) - better - worse}. At the best rate,
        {rate:g}, one head's loss minus theirs is {and_list(gains)}. One small model, one text and
        a short training say nothing of large ones, only that the sentence is no law."""


def pictures(run: dict[str, Any]) -> dict[str, str]:
    """Mean held-out loss over training, with the range over seeds, a panel a learning rate."""
    rates, counts = run["settings"]["rates"], run["settings"]["heads"]
    picture = draw.Picture(80 + 400 * len(rates), 340)
    colours = {f"{n} head{'s'[: n > 1]}": c for n, c in zip(counts, draw.COLOURS, strict=False)}
    draw.legend(picture, 50, 24, colours)
    picture.text(60 + 90 * len(counts), 24, "lines: means over seeds; bands: their ranges")
    steps = run["settings"]["config"]["steps"]
    start = 0.3 * steps  # the steep part would press the rest together
    late = [point for one in run["runs"] for point in one["curve"] if point[0] >= start]
    low, high = min(loss for _, loss in late), max(loss for _, loss in late)
    first = min(step for step, _ in late)
    ticks = _ticks(low, high)
    for number, rate in enumerate(rates):
        room = (high - low) * 0.04 + 1e-3
        axes = draw.Axes(50 + 410 * number, 70, 350, 220, (first, steps), (low - room, high + room))
        x_ticks = sorted({step for step, _ in late})
        draw.frame(picture, axes, f"held-out loss, learning rate {rate:g}", x_ticks, ticks)
        for heads, colour in zip(counts, colours.values(), strict=True):
            curves = [o["curve"] for o in run["runs"] if o["rate"] == rate and o["heads"] == heads]
            columns = [column for column in zip(*curves, strict=True) if column[0][0] >= start]
            losses = {column[0][0]: [loss for _, loss in column] for column in columns}
            spread = [(step, min(found), max(found)) for step, found in losses.items()]
            draw.band(picture, axes, spread, colour)
            means = [(step, statistics.mean(found)) for step, found in losses.items()]
            draw.curve(picture, axes, means, colour, 1.8)
    return {"claims-learn.svg": picture.svg()}


def _ticks(low: float, high: float) -> list[float]:
    """Round values in a range, about five.

    >>> _ticks(2.87, 4.6)
    [3.0, 3.5, 4.0, 4.5]
    """
    size = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (high - low) / s <= 5)
    return [
        round(k * size, 3)
        for k in range(round(low / size), round(high / size) + 1)
        if low <= k * size <= high
    ]
