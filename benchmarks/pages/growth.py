"""`docs/logit-growth.md` and its picture, from the recorded run of `examples/logit_growth.py`."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from examples import logit_growth as example

from . import runs
from .draw import Axes, Picture, curve, frame, legend
from .words import prose, table

RECORD = "logit_growth.json"
PAGE, PICTURE = "logit-growth.md", "logit-growth.svg"
COLORS = {
    "plain": "#d55e00",
    "warm-up": "#555555",
    "clip": "#0072b2",
    "floor": "#009e73",
    "clip and floor": "#cc79a7",
}
NAMES = {"clip": "clipping", "floor": "the floor", "clip and floor": "clipping and the floor"}
FLAT = 0.1
"""The normalized entropy under which a head counts as collapsed."""
EARLY = 50
"""The step by which an alarm is early."""

# What a user writes; it runs in the tests with the rest of the page.
SNIPPET = """
```python
>>> import torch, headwise as hw
>>> layer, x = hw.MultiHeadAttention(24, num_heads=3), 9 * torch.randn(2, 7, 24)
>>> optimizer = torch.optim.AdamW(layer.parameters(), lr=0.01)
>>> with hw.watch(layer, hw.MaxLogit(above=30.0)) as seen:   # all micro-batches of a step
...     layer(x, mask=hw.Causal()).square().mean().backward()
>>> optimizer.step()
>>> clipped = hw.qk_clip_(layer, seen, limit=30.0, optimizer=optimizer)
>>> sorted(clipped)                                          # modules of which heads were scaled
['']

```
""".strip()


CLIPPING = """
    `MaxLogit(above=limit)` computes scores only for heads whose `scale · max ‖q‖ · max ‖k‖` is
    above the limit, and always uses all queries. For a largest score S, `γ = limit / S` multiplies
    weights and biases in place, in every layout that `convert` supports and in multi-head latent
    attention. By default γ
    scales the queries, so other heads stay unchanged bit for bit; `rule="both"` scales queries and
    keys by √γ each. Weights in half precision need `optimizer=`. Layers with QK-norm raise
    `ValueError`. Under LoRA and DoRA, save the base model too. [The API](api/training.md) has the
    details."""


def measure(settings: example.Settings) -> dict[str, Any]:
    """The example's runs, and what token frequencies alone would give."""
    return {
        "unigram": example.Text(settings.context).unigram,
        "methods": {name: asdict(method) for name, method in example.METHODS.items()},
        "runs": example.measure(settings),
    }


def write(settings: example.Settings, found: dict[str, Any], folder: Path = runs.RESULTS) -> Path:
    return runs.keep(folder / RECORD, settings, found, digits=4)


def read(folder: Path = runs.RESULTS) -> dict[str, Any]:
    return json.loads((folder / RECORD).read_text())


def toy() -> example.Settings:
    """Sizes that take seconds."""
    return replace(
        example.Settings(), rates=(0.1,), seeds=1, steps=30, layers=1, width=32, context=16, batch=4
    )


def chosen(run: dict[str, Any], rate: float, method: str) -> list[dict[str, Any]]:
    """The runs of a method at a rate, by seed."""
    return [one for one in run["runs"] if (one["rate"], one["method"]) == (rate, method)]


def last(some: Iterable[dict[str, Any]], figure: str) -> list[Any]:
    """A figure of the runs' ends, by seed."""
    return [one["marks"][-1][figure] for one in some]


def losses(some: Iterable[dict[str, Any]]) -> list[float]:
    return [one["held_out"] for one in some]


def shares(some: Iterable[dict[str, Any]]) -> list[float]:
    """The mean entropy share of all heads at the end, by seed."""
    return [statistics.mean(heads) for heads in last(some, "entropy_share")]


def collapsed(some: Iterable[dict[str, Any]]) -> int:
    """How many heads of these runs end collapsed."""
    return sum(share < FLAT for heads in last(some, "entropy_share") for share in heads)


def passed(one: dict[str, Any], limit: float) -> int | None:
    """The step by which a run's largest logit was above a limit."""
    return next((mark["step"] for mark in one["marks"] if mark["max_logit"] > limit), None)


def render(run: dict[str, Any]) -> dict[str, str]:
    """The page and its picture."""
    return {PAGE: _page(run), PICTURE: _picture(run)}


def _page(run: dict[str, Any]) -> str:
    settings, methods, machine = run["settings"], run["methods"], run["machine"]
    heads = settings["layers"] * settings["heads"] * settings["seeds"]
    head = [
        "learning rate",
        "method",
        "largest logit at the end, by seed",
        f"heads with normalized entropy under {FLAT:g}",
        "held-out loss, mean",
    ]
    rows = [
        [f"{rate:g}" if name == "plain" else "", name, *_cells(chosen(run, rate, name), heads)]
        for rate in settings["rates"]
        for name in methods
    ]
    parts = [
        "# Logit growth",
        prose(
            """At a high learning rate, the scores of a head can grow without bound: its softmax
            selects one key, the gradient vanishes, and the model learns slowly.
            `hw.qk_clip_` scales the query weights of heads whose largest score exceeds a limit,
            after the optimizer's step (Kimi K2 2025). [`hw.EntropyFloor`](entropy-floor.md) is a
            loss term that raises the entropy of collapsing heads (after Zhai et al. 2023)."""
        ),
        SNIPPET,
        prose(CLIPPING),
        "## Experiment",
        prose(
            f"""A GPT-2 of {settings["layers"]} layers of {settings["heads"]} heads, width
            {settings["width"]}, context {settings["context"]}, is trained for
            {settings["steps"]} steps of {settings["batch"]} rows of Python's manual with AdamW
            (0.9, 0.95) at a constant rate and no gradient clipping, QK-norm or softcap. Each seed
            runs with every method from the same weights and batches. Warm-up takes
            {methods["warm-up"]["warmup"]} steps; clipping at {methods["clip"]["limit"]:g} follows
            every step; the floor is {methods["floor"]["floor"]:g} nats at strength 1. These values
            were not tuned."""
        ),
        prose(
            f"""`python examples/logit_growth.py` runs the experiment. This run is from
            {run["date"][:10]} ({machine["cpu"]}, PyTorch {machine["versions"]["torch"]});
            `benchmarks/results/{RECORD}` has all results."""
        ),
        table(head, rows),
        f"![Largest logit and loss over training, by method]({PICTURE})",
        "## Results",
        *(prose(_verdict(run, rate)) for rate in settings["rates"]),
        "## When alarms are raised",
        prose(
            f"""The plain runs were recorded by `hw.Monitor` with its default rules at every
            {settings["every"]}th step. Losses are means of {settings["every"]} steps."""
        ),
        table(ALARM_HEAD, _alarm_rows(run)),
        prose(_silent(run)),
        prose("""One small model does not show which limit or floor a large model needs."""),
    ]
    return "\n\n".join(parts) + "\n"


ALARM_HEAD = [
    "learning rate",
    "seed",
    "first alarm",
    "at step",
    f"heads with alarms by step {EARLY}",
    "loss at that step",
    "loss of the clipped run",
]


def _alarm_rows(run: dict[str, Any]) -> list[list[str]]:
    """The first alarm of each plain run, beside the losses of that moment."""
    rows = []
    for rate in run["settings"]["rates"]:
        for plain, held in zip(chosen(run, rate, "plain"), chosen(run, rate, "clip"), strict=True):
            place = ["" if plain["seed"] else f"{rate:g}", str(plain["seed"])]
            if not plain["alarms"]:
                rows.append([*place, "none", "–", "0", "–", "–"])
                continue
            first = plain["alarms"][0]
            early = {one["head"] for one in plain["alarms"] if one["step"] <= EARLY}
            then = [f"{loss_at(one, first['step']):.3f}" for one in (plain, held)]
            rule = f"{first['rule']} ({first['head']})"
            rows.append([*place, rule, str(first["step"]), str(len(early)), *then])
    return rows


def loss_at(one: dict[str, Any], step: int) -> float:
    """A run's loss when a step was recorded."""
    return next(mark["loss"] for mark in one["marks"] if mark["step"] >= step)


def _silent(run: dict[str, Any]) -> str:
    """What the alarms did where nothing went wrong."""
    settings = run["settings"]
    healthy = chosen(run, settings["healthy"], "plain")
    named = sum(bool(one["alarms"]) for one in healthy)
    said = f"""Plain runs at {settings["healthy"]:g}, where the largest logit ends at
        {_range(last(healthy, "max_logit"))} and the held-out loss at
        {_range(losses(healthy), "{:.3f}".format)}: """
    return said + (f"an alarm in {named} of {len(healthy)}." if named else "no alarm.")


def _cells(some: list[dict[str, Any]], heads: int) -> list[str]:
    return [
        ", ".join(f"{logit:,.0f}" for logit in last(some, "max_logit")),
        f"{collapsed(some)} of {heads}",
        f"{statistics.mean(losses(some)):.3f}",
    ]


def _verdict(run: dict[str, Any], rate: float) -> str:
    """What came out at a rate, in words that follow the figures."""
    plain, limit = chosen(run, rate, "plain"), run["methods"]["clip"]["limit"]
    steps = [passed(one, limit) for one in plain]
    said = f"At {rate:g}, the largest logit of the plain run "
    if None in steps:
        said += f"does not exceed {limit:g} with every seed"
    else:
        said += f"exceeds {limit:g} by step {_range(steps)}"
    said += f" and is {_range(last(plain, 'max_logit'))} at the end."
    said += f""" Its held-out loss is {_range(losses(plain), "{:.3f}".format)} (token frequencies
        alone: {run["unigram"]:.3f})."""
    means = {name: statistics.mean(losses(chosen(run, rate, name))) for name in run["methods"]}
    best = min(means, key=means.__getitem__)
    named = NAMES.get(best, best)
    return f"{said} The lowest mean over the seeds is {means[best]:.3f}, with {named}."


def _range(values: Sequence[Any], told: Any = "{:,.0f}".format) -> str:
    """
    >>> _range([3, 1, 2]), _range([7])
    ('1 to 3', '7')
    """
    low, high = told(min(values)), told(max(values))
    return low if low == high else f"{low} to {high}"


def _picture(run: dict[str, Any]) -> str:
    """A column a rate: the largest logit in powers of ten, and the loss of the batches."""
    rates, steps = run["settings"]["rates"], run["settings"]["steps"]
    picture = Picture(60 + 400 * len(rates), 480)
    legend(picture, 50, 20, COLORS)
    picture.text(
        50, 40, "one line per seed; largest logit, powers of 10 (top), loss in nats (bottom)"
    )
    marks = [mark for one in run["runs"] for mark in one["marks"]]
    powers = [math.log10(max(mark["max_logit"], 0.1)) for mark in marks]
    tops = [mark["loss"] for mark in marks if mark["step"] > run["settings"]["every"]]
    for column, rate in enumerate(rates):
        left = 50 + 400 * column
        upper = Axes(left, 75, 350, 150, (0, steps), (-1, math.ceil(max(powers))))
        edges = math.floor(min(tops)), math.ceil(max(tops))
        lower = Axes(left, 270, 350, 160, (0, steps), edges)
        frame(picture, upper, f"learning rate {rate:g}", (), range(-1, int(upper.y[1]) + 1), "")
        frame(picture, lower, "", (0, steps), range(edges[0], edges[1] + 1))
        for name, color in COLORS.items():
            for one in chosen(run, rate, name):
                logits = [
                    (mark["step"], math.log10(max(mark["max_logit"], 0.1))) for mark in one["marks"]
                ]
                curve(picture, upper, logits, color, 1.1)
                known = [(mark["step"], min(mark["loss"], edges[1])) for mark in one["marks"]]
                curve(picture, lower, known, color, 1.1)
    return picture.svg()
