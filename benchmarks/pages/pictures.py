"""A picture of each statistic: every head of the built-in model on Python's own manual."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.models import corpus
from headwise.models.gpt import builtin, load

from .. import recording
from . import runs
from .draw import COLORS, Picture

RECORD = "statistics-pictures.json"
TOKENS, BINS, BLOCKS, NEAR = 96, 8, 16, 16
INK, NONE = "#08306b", "#e9e9e9"
LEVELS = 20
LEFT, CELL, ROW, GAP = 30, 5, 8, 3  # pixels: head names, a query, a head, between layers

# What each picture shows: names of figures, with their unit. Shares go from 0 to 1, other figures
# to their largest; the first key of a head may receive much more than the scale's end.
STRIPS: dict[str, dict[str, str]] = {
    "lse": {"lse": "nats"},
    "entropy": {"entropy": "nats", "entropy_share": "share"},
    "masses": {"first": "share", "previous": "share", "self": "share"},
    "same_token": {"same_token": "share"},
    "induction": {"induction": "share"},
    "near": {"near": "share"},
    "distance": {"distance": "tokens"},
    "distance_spread": {"distance_spread": "tokens"},
    "output_norm": {"output_norm": "length", "contribution": "length"},
    "received": {"received": "queries"},
}
BARS = {"max_logit": ("max_logit",), "norms": ("query_norm", "key_norm")}
MOST = {"received": 6.0}


def passage() -> list[int]:
    """The first tokens of the built-in text."""
    tokenizer = load(builtin())[1]
    return tokenizer.encode(corpus.manual_passage()).ids[:TOKENS]


def measure(ids: list[int]) -> dict[str, Any]:
    """Every statistic of every head on these tokens, as shades."""
    model = load(builtin())[0]
    text = torch.tensor([ids])
    statistics = (
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Distance(spread=True),
        hw.OutputNorm(),
        hw.Mass(hw.First()),
        hw.Mass(hw.Previous()),
        hw.Mass(hw.Self()),
        hw.Mass(hw.SameToken(text)),
        hw.Mass(hw.Induction(text)),
        hw.Mass(hw.Window(NEAR), name="near"),
        hw.Received(),
        hw.TopKeys(3),
        hw.Map(BLOCKS),
        hw.OffsetHistogram(BINS),
        hw.Similarity(),
        hw.Norms(),
    )
    with torch.no_grad(), hw.watch(model, *statistics) as seen:
        model(text)
    readings = [seen[name].calls[0] for name in seen.modules]
    units = {name: unit for group in STRIPS.values() for name, unit in group.items()}
    return {
        "ids": ids,
        "layers": [[f"{n}.{h}" for h in range(model.config.n_head)] for n in range(len(readings))],
        "shades": {name: _shaded(name, readings, unit) for name, unit in units.items()}
        | {"offsets": _shaded("offsets", readings), "map": _shaded("map", readings)},
        **{name: _by_head(name, readings) for group in BARS.values() for name in group},
        "similarity": [
            recording.rounded(one["similarity"].values[0].tolist(), 2) for one in readings
        ],
        "top": [_surest(one) for one in readings],
    }


def _by_head(name: str, readings: list[Any]) -> list[float]:
    """A figure of every head, of which there is one number each."""
    return recording.rounded([h for one in readings for h in one[name].values[0].tolist()], 3)


def _shaded(name: str, readings: list[Any], unit: str = "") -> dict[str, Any]:
    """A figure of all heads, a letter a value: `a` at the low end of the scale; `.` for none."""
    values = torch.cat([one[name].values[0] for one in readings]).flatten(0, -2)
    rows = readings[0][name].rows
    counts = torch.ones_like(values, dtype=torch.bool)
    if rows is not None:
        counts = torch.cat([one[name].rows.expand_as(one[name].values)[0] for one in readings])
    least, most = values[counts].min().item(), values[counts].max().item()
    low, high = (0.0, 1.0) if unit == "share" else (min(0.0, least), MOST.get(name, most))
    levels = (LEVELS * (values - low) / (high - low)).round().clamp(max=LEVELS).long()
    lines = [
        "".join(chr(ord("a") + level) if here else "." for level, here in zip(*pair, strict=True))
        for pair in zip(levels.tolist(), counts.tolist(), strict=True)
    ]
    return recording.rounded({"low": low, "high": high, "most": most, "rows": lines}, 3)


def _surest(reading: Any) -> dict[str, Any]:
    """The keys and weights of the head that gives its first key most."""
    weights, keys = reading["top_weights"].values[0], reading["top_keys"].values[0]
    head = int(weights[..., 0].mean(-1).argmax())
    return {
        "head": head,
        "keys": keys[head].tolist(),
        "weights": recording.rounded(weights[head].tolist(), 2),
    }


def write(found: dict[str, Any], folder: Path = runs.RESULTS) -> Path:
    """Keep what was measured; the file is whole or absent."""
    return recording.write_run(folder / RECORD, found)


def read(folder: Path = runs.RESULTS) -> dict[str, Any]:
    return json.loads((folder / RECORD).read_text())


def render(found: dict[str, Any]) -> dict[str, str]:
    """The pictures: names of statistics and SVG."""
    drawn = {name: _strips(found, group) for name, group in STRIPS.items()}
    drawn |= {name: _bars(found, group) for name, group in BARS.items()}
    drawn |= {
        "top_keys": _top_keys(found),
        "map": _maps(found),
        "offsets": _offsets(found),
        "similarity": _similarity(found),
    }
    return drawn


def _strips(found: dict[str, Any], group: dict[str, str]) -> str:
    """For each figure a row a head and a column a query (of `received`: a key)."""
    tall = 24 + _height(found)
    picture = Picture(LEFT + CELL * TOKENS + 8, tall * len(group) + 18)
    for number, (name, unit) in enumerate(group.items()):
        top = tall * number
        _scale(picture, name, unit, found["shades"][name], top)
        _heads(picture, found, top + 24)
        _shades(picture, found["shades"][name]["rows"], _tops(found, top + 24))
    what = "key" if "received" in group else "query"
    bottom = tall * len(group) + 10
    for at in (0, TOKENS // 2, TOKENS - 1):
        anchor = {0: "start", TOKENS - 1: "end"}.get(at, "middle")
        picture.text(LEFT + CELL * (at + (at > 0)), bottom, f"{what} {at}", anchor, 9)
    return picture.svg()


def _height(found: dict[str, Any]) -> int:
    return sum(ROW * len(layer) + GAP for layer in found["layers"])


def _tops(found: dict[str, Any], top: float) -> list[float]:
    """The upper edge of every head's row; layers stand a little apart."""
    tops = []
    for layer in found["layers"]:
        tops += [top + ROW * n for n in range(len(layer))]
        top += ROW * len(layer) + GAP
    return tops


def _heads(picture: Picture, found: dict[str, Any], top: float) -> None:
    names = [name for layer in found["layers"] for name in layer]
    for name, at in zip(names, _tops(found, top), strict=True):
        picture.text(LEFT - 4, at + ROW - 1, name, "end", 8)


def _scale(picture: Picture, name: str, unit: str, shaded: dict[str, Any], top: float) -> None:
    """The figure's name, and what white and dark stand for."""
    title = f"{name}, {unit}" if unit not in ("share", "") else name
    picture.text(LEFT, top + 16, title, size=12, bold=True)
    right = LEFT + CELL * TOKENS
    high = f"{shaded['high']:.3g}"
    if shaded["most"] > shaded["high"]:
        high += f" and more (to {shaded['most']:.3g})"
    left = right - 6 * len(high) - 4
    picture.text(right, top + 16, high, "end", 10)
    for step in range(6):
        _fill(picture, left - 11 * (6 - step), top + 8, 11, 9, step / 5)
    low = f"{shaded['low']:.3g}".replace("-", "−")
    picture.text(left - 70, top + 16, low, "end", 10)


def _fill(
    picture: Picture, x: float, y: float, width: float, height: float, opacity: float
) -> None:
    picture.parts.append(
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{INK}" '
        f'fill-opacity="{opacity:.2g}"/>'
    )


def _shades(
    picture: Picture,
    rows: Sequence[str],
    tops: Sequence[float],
    left: float = LEFT,
    cell: float = CELL,
    row: float = ROW,
) -> None:
    """Cells as strokes: one path a shade, neighbours of a shade in one stroke."""
    strokes: dict[str, list[str]] = {}
    for line, top in zip(rows, tops, strict=True):
        at = 0
        for letter, same in groupby(line):
            length = len(list(same))
            path = f"M{left + cell * at:g} {top + row / 2:g}h{cell * length:g}"
            strokes.setdefault(letter, []).append(path)
            at += length
    for letter, paths in sorted(strokes.items()):
        if letter != "a":
            _stroke(picture, paths, None if letter == "." else ord(letter) - ord("a"), row)
    lines = "".join(f"M{left:g} {top + row:g}h{cell * len(rows[0]):g}" for top in tops)
    picture.parts.append(f'<path d="{lines}" stroke="#fff" stroke-width="0.6"/>')


def _stroke(picture: Picture, paths: Sequence[str], level: int | None, width: float) -> None:
    color = f'"{NONE}"' if level is None else f'"{INK}" stroke-opacity="{level / LEVELS:g}"'
    picture.parts.append(f'<path d="{"".join(paths)}" stroke={color} stroke-width="{width:g}"/>')


def _bars(found: dict[str, Any], names: Sequence[str]) -> str:
    """Figures of which each head has one number, a bar each."""
    tall = 30 + _height(found)
    picture = Picture(LEFT + CELL * TOKENS + 8, tall * len(names))
    for number, name in enumerate(names):
        values, upper = found[name], tall * number
        picture.text(LEFT, upper + 16, name, bold=True)
        _heads(picture, found, upper + 24)
        for value, top in zip(values, _tops(found, upper + 24), strict=True):
            length = 430 * max(value, 0.0) / max(*values, 1e-9)
            picture.box(LEFT, top + 1, length, ROW - 2, COLORS[0])
            picture.text(LEFT + length + 4, top + ROW - 1, f"{value:.1f}", size=8)
    return picture.svg()


def _maps(found: dict[str, Any]) -> str:
    """The block map of each head, side by side; rows are queries."""
    side, across = 4 * BLOCKS, 6
    picture = Picture(LEFT + CELL * TOKENS + 8, 30 + 2 * (side + 18))
    shaded = found["shades"]["map"]
    _scale(picture, f"map, {BLOCKS} × {BLOCKS} blocks", "", shaded, 0)
    for index, name in enumerate(name for layer in found["layers"] for name in layer):
        left = LEFT + (side + 17) * (index % across)
        top = 36 + (side + 18) * (index // across)
        rows = shaded["rows"][BLOCKS * index : BLOCKS * (index + 1)]
        picture.text(left, top - 3, name, size=9)
        _shades(picture, rows, [top + 4 * n for n in range(BLOCKS)], left, 4, 4)
        _frame(picture, left, top, side)
    return picture.svg()


def _frame(picture: Picture, left: float, top: float, side: float) -> None:
    picture.parts.append(
        f'<path d="M{left:g} {top:g}h{side:g}v{side:g}h{-side:g}z" fill="none" stroke="#bbb"/>'
    )


def _offsets(found: dict[str, Any]) -> str:
    """Mass by distance: a row a head, a column a bin."""
    cell, shaded = CELL * TOKENS / BINS, found["shades"]["offsets"]
    picture = Picture(LEFT + CELL * TOKENS + 8, 24 + _height(found) + 18)
    _scale(picture, "offsets", "", shaded, 0)
    _heads(picture, found, 24)
    _shades(picture, shaded["rows"], _tops(found, 24), LEFT, cell, ROW)
    for b in range(BINS):
        first, last = (1 << b) >> 1, (1 << b) - 1
        words = str(first) if first >= last else f"{first}–{last}"
        words = {0: "0 back", BINS - 1: f"{first} and more"}.get(b, words)
        at = LEFT + cell * (b + 0.5)
        picture.text(at, 24 + _height(found) + 10, words, "middle", 9)
    return picture.svg()


def _similarity(found: dict[str, Any]) -> str:
    """The distance between any two heads of a layer."""
    cell = 24
    picture = Picture(LEFT + CELL * TOKENS + 8, 150)
    picture.text(LEFT, 16, "similarity", bold=True)
    pairs = zip(found["layers"], found["similarity"], strict=True)
    for number, (layer, matrix) in enumerate(pairs):
        left, top = LEFT + 160 * number, 44
        for row, name in enumerate(layer):
            y = top + cell * row
            picture.text(left - 4, y + 15, name, "end", 9)
            picture.text(left + cell * row + 12, top - 4, name, "middle", 9)
            for column, value in enumerate(matrix[row]):
                x = left + cell * column
                _fill(picture, x, y, cell - 1, cell - 1, value)
                color = ' fill="#fff"' if value > 0.5 else ""
                picture.parts.append(
                    f'<text x="{x + 12}" y="{y + 15}" text-anchor="middle" font-size="9"{color}>'
                    f"{value:.2f}</text>"
                )
    return picture.svg()


def _top_keys(found: dict[str, Any]) -> str:
    """One head a layer: where its three most attended keys lie, by weight."""
    side, step = 144, 144 / TOKENS
    picture = Picture(LEFT + CELL * TOKENS + 8, 60 + side)
    picture.text(LEFT, 16, "top_keys, by top_weights", bold=True)
    for number, (layer, top) in enumerate(zip(found["layers"], found["top"], strict=True)):
        left, upper = LEFT + 163 * number, 42
        picture.text(left, upper - 5, f"head {layer[top['head']]}", size=10)
        dots: dict[int, list[str]] = {}
        for query, pairs in enumerate(zip(top["keys"], top["weights"], strict=True)):
            for key, weight in zip(*pairs, strict=True):
                if key >= 0 and (level := round(LEVELS * weight)):
                    at = f"M{left + step * key:g} {upper + step * (query + 0.5):g}h{step:g}"
                    dots.setdefault(level, []).append(at)
        for level, paths in sorted(dots.items()):
            _stroke(picture, paths, level, 2)
        _frame(picture, left, upper, side)
        picture.text(left + side, upper + side + 12, "key", "end", 9)
        if not number:
            picture.text(left - 4, upper + side, "query", "end", 9)
    return picture.svg()
