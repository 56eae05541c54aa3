"""What do split heads cost? Multiply-adds counted by PyTorch's operators, beside the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import headwise as hw
from headwise.tutorial import timing

from ..pages.words import prose, spread, table, threads

FULL, SPLIT, WIDE = "full-width heads", "split heads", "one wide head"


@dataclass(frozen=True)
class Settings:
    """The tutorial's width and heads; then a size and a past at which time can be taken."""

    width: int = 16
    heads: int = 4
    past: int = 7
    timed_width: int = 512
    timed_past: int = 4096
    rounds: int = 21


TOY = Settings(6, 3, 5, 6, 8, 2)


def layers(width: int, heads: int) -> dict[str, hw.MultiHeadAttention]:
    """The three that are compared, without biases."""
    return {
        FULL: hw.MultiHeadAttention(width, heads, head_dim=width, bias=False).eval(),
        SPLIT: hw.MultiHeadAttention(width, heads, bias=False).eval(),
        WIDE: hw.MultiHeadAttention(width, 1, bias=False).eval(),
    }


def expected(width: int, heads: int, head_dim: int) -> dict[str, int]:
    """By hand: with each past token a head multiplies its key once and its value once.

    >>> expected(16, 4, 4)["past"], expected(16, 4, 16)["past"], expected(16, 1, 16)["past"]
    (32, 128, 32)
    """
    return {
        "past": 2 * heads * head_dim,
        "own": 4 * width * heads * head_dim + 2 * heads * head_dim,
        "parameters": 4 * width * heads * head_dim,
    }


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts at the tutorial's size, and times of one decoded token at a larger one."""
    told("sixteenth: counts")
    rows = []
    for name, layer in layers(settings.width, settings.heads).items():
        counted = count(layer, settings.past)
        assert counted == expected(settings.width, layer.num_heads, layer.head_dim), (name, counted)
        rows.append({"name": name, "heads": layer.num_heads, "dim": layer.head_dim, **counted})
    told("sixteenth: times")
    timed = layers(settings.timed_width, settings.heads)
    turns = {name: decoding(layer, settings.timed_past) for name, layer in timed.items()}
    taken = timing.interleaved(turns, settings.rounds)
    for row in rows:
        row["seconds"] = timing.Spread.of(taken[row["name"]])
        row["beside_split"] = timing.ratio(taken, row["name"], SPLIT)
    return {"rows": rows}


def count(layer: hw.MultiHeadAttention, past: int) -> dict[str, int]:
    """Multiply-adds to decode one token: for each past token, and for the token itself."""
    fewer, more = (timing.multiply_adds(decoding(layer, tokens)) for tokens in (past, past + 1))
    return {
        "past": more - fewer,
        "own": fewer - past * (more - fewer),
        "parameters": sum(p.numel() for p in layer.parameters()),
    }


def decoding(layer: hw.MultiHeadAttention, past: int) -> Callable[[], None]:
    """One token after `past` others, again and again."""
    cache, mask = hw.KVCache(max_length=past + 1), hw.Causal()
    x = torch.randn(1, past + 1, layer.embed_dim)
    with torch.no_grad():
        layer(x[:, :past], mask=mask, cache=cache)

    def step() -> None:
        mark = cache.mark()
        with torch.no_grad():
            layer(x[:, past:], mask=mask, cache=cache)
        cache.rewind(mark)

    return step


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    settings = run["settings"]
    lines = [
        [
            f"{row['name']}, {row['heads']} × {row['dim']}",
            f"{row['parameters']:,}",
            f"{row['own']:,}",
            f"{row['past']:,}",
            f"{1e3 * row['seconds']['median']:.2f}",
            spread(row["beside_split"]),
        ]
        for row in run["rows"]
    ]
    head = [
        "layer, heads × width of a head",
        "parameters",
        "multiply-adds for the token itself",
        "for each past token",
        f"ms a token at width {settings['timed_width']} after {settings['timed_past']:,}",
        "× split heads",
    ]
    return "\n\n".join(
        [
            '## "Split heads cost a sixteenth"',
            prose(
                f"""**Experiment.** One token is decoded with a cache, at width {settings["width"]}
                with {settings["heads"]} heads, as in the example that the sentence comes with.
                PyTorch's operators count the multiply-adds of the matrix products, without biases;
                that they equal the sums by hand is checked: `2 · heads · width of a head` for each
                past token. Times are of the same three layers at width {settings["timed_width"]},
                also with {settings["heads"]} heads, on {threads(run)}, medians of
                {settings["rounds"]} rounds in turns."""
            ),
            table(head, lines),
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def verdict(run: dict[str, Any]) -> str:
    """What came out; the words hold only for these figures, so they are checked."""
    heads = run["settings"]["heads"]
    full, split, wide = run["rows"]
    for what in ("past", "parameters"):
        assert full[what] == heads * split[what]
        assert split[what] == wide[what]
    one, every = split["past"] // heads, full["past"]
    assert every == one * heads**2
    times = [row["beside_split"]["median"] for row in run["rows"]]
    return f"""No. Beside full-width heads they cost {heads} times fewer multiply-adds per past
        token, and those have {heads} times the parameters; beside one wide head, which has the same
        parameters, they cost the same ({split["past"]} and {wide["past"]}). In time the full-width
        heads take {times[0]:.2f} times as long as split heads, and the wide one {times[2]:.2f}
        times. 1/{heads**2} comes out only where ONE split head ({one}) is set beside ALL the
        full-width ones ({every})."""
