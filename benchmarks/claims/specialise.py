"""Do heads specialise? The built-in model trained again, its heads looked at on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headwise.models import corpus
from headwise.models.gpt import GPT, builtin
from headwise.models.run import Run, TrainConfig
from headwise.report import look
from headwise.report.head_labels import NO_LABEL
from headwise.report.label_styles import LABEL_STYLES
from headwise.report.schema import Look

from ..pages import draw
from ..pages.words import and_list, percent, prose, table

KEPT = (
    "previous",
    "previous_random",
    "induction_random",
    "same_token_random",
    "first",
    "self",
    "entropy_share",
    "distance",
)
ROLES = {
    "induction": ("induction_random", "≥", 0.4),
    "duplicate token": ("same_token_random", "≥", 0.4),
    "previous token": ("previous", "≥", 0.4),
    "first token": ("first", "≥", 0.5),
    "itself": ("self", "≥", 0.4),
    "broad": ("entropy_share", "≥", 0.8),
    "local": ("distance", "≤", 8.0),
}
"""A head's role is the first of these that holds: a figure, and its threshold."""
FOLLOWED = ("previous token", "induction")
IDLE = ("broad", NO_LABEL)


@dataclass(frozen=True)
class Settings:
    """`config` is that of the built-in model; `runs` are the seeds and shares of repeated rows."""

    config: TrainConfig = field(default_factory=TrainConfig)
    runs: tuple[tuple[int, float], ...] = ((0, 0.5), (1, 0.5), (0, 0.0))


TOY = Settings(
    TrainConfig(vocab=257, context=16, layers=2, heads=2, width=8, steps=3, batch=2), ((0, 0.5),)
)


def marks(steps: int) -> list[int]:
    """The steps before which the heads are looked at, denser early; the last is the end.

    >>> marks(2400)[:3], marks(2400)[-2:], len(marks(2400))
    ([0, 50, 100], [2200, 2400], 25)
    """
    early, middle = steps // 4, steps // 2
    dense, wide, wider = max(1, steps // 48), max(1, steps // 24), max(1, steps // 12)
    points = {*range(0, early, dense), *range(early, middle, wide), *range(middle, steps, wider)}
    return sorted(points | {steps})


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """The figures of every head at every mark, for each run."""
    runs = []
    for seed, repeats in settings.runs:
        told(f"specialise: seed {seed}, {repeats:.0%} of the rows repeat random tokens")
        run = Run(replace(settings.config, seed=seed, repeats=repeats))
        found = [seen(run)]
        for step in marks(run.config.steps)[1:]:
            while run.step < step:
                run.advance()
            found.append(seen(run))
            told(f"  step {step}: held-out loss {found[-1]['held_out']:.3f}")
        runs.append(
            {
                "seed": seed,
                "repeats": repeats,
                "heads": heads_of(run.config),
                "off_builtin": _distance(run.model),
                "marks": found,
            }
        )
    return {"runs": runs}


def seen(run: Run) -> dict[str, Any]:
    """What `headwise look` shows of the model as it stands, its heads' roles and its losses."""
    shown = look(run.model, run.tokenizer, corpus.manual_passage())
    first, second = run.repeat_losses()
    return {
        "step": run.step,
        "held_out": run.held_out_loss(),
        "first_copy": first,
        "second_copy": second,
        "apart": apart(shown),
        "label": [role(row) for row in shown.rows],
        **{key: [row[key] for row in shown.rows] for key in KEPT},
    }


def role(row: dict[str, Any]) -> str:
    """The role of a head with these figures.

    >>> role({"induction_random": 0.1, "previous": 0.6, "distance": 1.4})
    'previous token'
    """
    for name, (key, sign, threshold) in ROLES.items():
        score = row.get(key)
        if score is not None and (score >= threshold if sign == "≥" else score <= threshold):
            return name
    return NO_LABEL


def heads_of(config: TrainConfig) -> list[str]:
    """The names `layer.head`, in the order of every list of figures."""
    return [f"{layer}.{head}" for layer in range(config.layers) for head in range(config.heads)]


def apart(shown: Look) -> list[float]:
    """How far apart the heads of each layer are: 0 if all look alike, 1 if no key is shared.

    The total variation `½ Σ_j |p_ij − p'_ij|` of two heads' rows, mean over rows and pairs.
    """
    return [total_variation(torch.from_numpy(layer.maps)) for layer in shown.layers]


def total_variation(maps: Tensor) -> float:
    heads = range(len(maps))
    pairs = [(maps[a] - maps[b]).abs().sum(-1).mean() / 2 for a in heads for b in heads if a < b]
    return float(torch.stack(pairs).mean())


def _distance(model: GPT) -> float | None:
    """The largest difference of a weight from the built-in model's; None for other sizes."""
    shipped = GPT.from_pretrained(builtin())
    if shipped.config != model.config:
        return None
    pairs: Iterable[tuple[Tensor, Tensor]] = zip(
        shipped.parameters(), model.parameters(), strict=True
    )
    return max(float((a - b).abs().max()) for a, b in pairs)


def title(one: dict[str, Any]) -> str:
    """A run in a few words."""
    mix = f"{percent(one['repeats'])} repeats" if one["repeats"] else "text alone"
    return f"seed {one['seed']}, {mix}"


def roles(one: dict[str, Any]) -> dict[str, list[tuple[str, int]]]:
    """The heads of each label at the end, in the order of the rules, and the mark since when."""
    marks = one["marks"]
    found: dict[str, list[tuple[str, int]]] = {}
    for index, name in enumerate(one["heads"]):
        labels = [mark["label"][index] for mark in marks]
        since = next(n for n in range(len(marks)) if set(labels[n:]) == {labels[-1]})
        found.setdefault(labels[-1], []).append((name, marks[since]["step"]))
    order = [*ROLES, NO_LABEL]
    return {label: found[label] for label in order if label in found}


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    config = run["settings"]["config"]
    lines = [[title(one), *_ends(one)] for one in run["runs"]]
    ends = [
        [title(one), label, ", ".join(f"{name} from {step}" for name, step in heads)]
        for one in run["runs"]
        for label, heads in roles(one).items()
        if label not in IDLE
    ]
    rules = "; ".join(f"*{name}*: {key} {sign} {t:g}" for name, (key, sign, t) in ROLES.items())
    same = any(one["off_builtin"] == 0 for one in run["runs"])
    again = "The first run ended with the shipped weights, bit for bit." if same else ""
    head = [
        "run",
        "held-out loss",
        "most on the previous token",
        "most induction, random repeats",
        "kinds of label",
        "heads apart, by layer",
    ]
    return "\n\n".join(
        [
            '## "Heads specialise"',
            prose(
                f"""**Experiment.** The built-in model ({config["layers"]} layers of
                {config["heads"]} heads) is trained again by its recorded settings,
                {config["steps"]:,} steps, and looked at {len(run["runs"][0]["marks"])} times on the
                way; then with another seed, and on text alone, without the rows of repeated random
                tokens. A head's label is the first of these rules that holds: {rules}.
                {again}"""
            ),
            table(head, lines),
            prose(
                """Each cell is step 0 → the last step. *Apart* is the mean total variation between
                the rows of two heads of a layer: 0 if they look at the same keys, 1 if they share
                none."""
            ),
            table(["run", "role at the end", "layer.head, and since which step"], ends),
            "![Labels and scores of every head over training](claims-specialise.svg)",
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def _ends(one: dict[str, Any]) -> list[str]:
    """Figures at the first and the last mark."""
    first, last = one["marks"][0], one["marks"][-1]

    def change(figure: Callable[[dict[str, Any]], str]) -> str:
        return f"{figure(first)} → {figure(last)}"

    lowest = min(mark["held_out"] for mark in one["marks"])
    past = f" (lowest {lowest:.2f})" if lowest < last["held_out"] - 0.05 else ""
    return [
        change(lambda mark: f"{mark['held_out']:.2f}") + past,
        change(lambda mark: f"{max(mark['previous']):.2f}"),
        change(lambda mark: f"{max(mark['induction_random']):.2f}"),
        change(lambda mark: str(len(set(mark["label"])))),
        change(lambda mark: ", ".join(f"{apart:.2f}" for apart in mark["apart"])),
    ]


def verdict(run: dict[str, Any]) -> str:
    """What came out, in words that follow the figures."""
    every = [roles(one) for one in run["runs"]]
    total = len(run["runs"][0]["heads"])
    named = [sum(len(heads) for label, heads in one.items() if label not in IDLE) for one in every]
    began = {label for one in run["runs"] for label in one["marks"][0]["label"]}
    said = ["Some do." if any(named) else "Not here."]
    said.append(
        f"""All begin as {_quoted(sorted(began))}; {and_list(map(str, named))} of {total} end with a
        role (a label other than {_quoted(IDLE)})."""
    )
    said += [_appearance(run, every, label) for label in FOLLOWED]
    said += _causes(run, every)
    first, last = ([one["marks"][at]["apart"] for one in run["runs"]] for at in (0, -1))
    said.append(
        f"To be different is not to have a role: random heads are {_range(first)} apart before the "
        f"first step, and {_range(last)} at the end."
    )
    return " ".join(said)


def _appearance(
    run: dict[str, Any], every: list[dict[str, list[tuple[str, int]]]], label: str
) -> str:
    """In which head and at which step a label first came to stay, run by run."""
    told = []
    for one, found in zip(run["runs"], every, strict=True):
        name, step = min(found.get(label, [("", -1)]), key=lambda pair: pair[1])
        where = f"in {name} at step {step}" if name else "never"
        told.append(f"{where} ({title(one)})")
    return f"The label *{label}* comes to stay first {and_list(told)}."


def _causes(run: dict[str, Any], every: list[dict[str, list[tuple[str, int]]]]) -> list[str]:
    """What the runs say when they are held beside each other."""
    by_data = {bool(one["repeats"]): [] for one in run["runs"]}
    for one, found in zip(run["runs"], every, strict=True):
        by_data[bool(one["repeats"])].append("induction" in found)
    said = []
    if by_data.get(True) and all(by_data[True]) and not any(by_data.get(False, [True])):
        said.append("The data decide what there is to become: without repeats, no induction.")
    where = {
        tuple(name for name, _ in found.get("previous token", []))
        for one, found in zip(run["runs"], every, strict=True)
        if one["repeats"]
    }
    if len(where) > 1:
        said.append("The seed decides which head becomes it.")
    return said


def _quoted(labels: Iterable[str]) -> str:
    return and_list(f"*{label}*" for label in labels)


def _range(values: list[list[float]]) -> str:
    flat = [value for row in values for value in row]
    return f"{min(flat):.2f} to {max(flat):.2f}"


LABEL_COLOURS = {style.label: style.light for style in LABEL_STYLES}


def pictures(run: dict[str, Any]) -> dict[str, str]:
    """A column a run: the label of every head over the steps, then three figures."""
    count = len(run["runs"])
    picture = draw.Picture(30 + 340 * count, 930)
    used = {label for one in run["runs"] for mark in one["marks"] for label in mark["label"]}
    draw.legend(picture, 50, 24, {k: v for k, v in LABEL_COLOURS.items() if k in used})
    layers = range(run["settings"]["config"]["layers"])
    by_layer = {f"layer {n}": draw.COLOURS[n % len(draw.COLOURS)] for n in layers}
    draw.legend(picture, 50, 290, by_layer)
    for column, one in enumerate(run["runs"]):
        _draw_run(picture, 50 + 340 * column, one, list(by_layer.values()))
    return {"claims-specialise.svg": picture.svg()}


def _draw_run(picture: draw.Picture, left: float, one: dict[str, Any], of_layer: list[str]) -> None:
    marks, steps = one["marks"], one["marks"][-1]["step"]
    ticks = [steps * k / 4 for k in range(5)]
    _draw_labels(picture, draw.Axes(left, 60, 270, 170, (0, steps), (0, 1)), one, ticks)
    panels = {
        "previous": "mass on the previous token",
        "induction_random": "induction, on random repeats",
    }
    top = 330.0
    for key, name in panels.items():
        axes = draw.Axes(left, top, 270, 140, (0, steps), (0, 1))
        draw.frame(picture, axes, name, ticks, (0, 0.2, 0.4, 0.6, 0.8, 1))
        for index, head in enumerate(one["heads"]):
            points = [(mark["step"], mark[key][index]) for mark in marks]
            draw.curve(picture, axes, points, of_layer[int(head.split(".")[0])], 1.4)
        top += 210
    axes = draw.Axes(left, top, 270, 140, (0, steps), (0, 1))
    draw.frame(picture, axes, "heads apart, by layer", ticks, (0, 0.2, 0.4, 0.6, 0.8, 1))
    for layer, colour in enumerate(of_layer):
        points = [(mark["step"], mark["apart"][layer]) for mark in marks]
        draw.curve(picture, axes, points, colour, 1.8)


def _draw_labels(
    picture: draw.Picture, axes: draw.Axes, one: dict[str, Any], ticks: list[float]
) -> None:
    """A row a head; each label is drawn from its mark to the next."""
    draw.frame(picture, axes, f"labels: {title(one)}", ticks, ())
    marks = one["marks"]
    row = axes.height / len(one["heads"])
    for index, name in enumerate(one["heads"]):
        top = axes.top + index * row
        picture.text(axes.left - 6, top + row / 2 + 4, name, "end", 10)
        for mark, following in pairwise(marks):
            x, _ = axes.at(mark["step"], 0)
            end, _ = axes.at(following["step"], 0)
            colour = LABEL_COLOURS[mark["label"][index]]
            picture.box(x, top + 0.5, end - x, row - 1, colour)
