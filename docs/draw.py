"""Draws the pictures of `ladder.md`: `python docs/draw.py` writes the SVG files beside it.

Rows are queries, columns keys; the fuller a cell's color, the more of the query's attention its
key has.
"""

from html import escape
from math import ceil, floor, log10
from pathlib import Path

import torch
from torch import Tensor

import headwise as hw
from headwise.models.corpus import repeated_tokens
from headwise.models.gpt import builtin, load
from headwise.report import token_texts
from headwise.tutorial.compare import Row, climb, parse_sizes

HERE = Path(__file__).parent
TEXT = 'The "with" statement is used. The "with" statement is used.'
CELL, GAP, LEFT, TOP = 11, 22, 70, 40
LEVELS = 40  # shades
DARK = (  # where the reader's theme is dark
    "<style>@media (prefers-color-scheme: dark) { text { fill: #e7e9ec } rect { fill: #1a1d22 } "
    '[fill="#08306b"] { fill: #9ecae1 } [stroke] { stroke: #565d68 } }</style>'
)


def main() -> None:
    model, tokenizer = load(builtin())
    text = torch.tensor([tokenizer.encode(TEXT).ids])
    random = torch.Generator().manual_seed(0)
    twice = repeated_tokens(1, 28, model.config.vocab_size, random, shortest=14, longest=14)

    tokens, maps = token_texts(tokenizer, text[0].tolist()), attention(model, text)
    heads = [
        ("layer 0, head 2", "looks at the token before", maps[0, 2]),
        ("layer 0, head 0", "looks at everything a little", maps[0, 0]),
        ("layer 1, head 0", "rests on the first token", maps[1, 0]),
        ("layer 0, mean of 4 heads", "blurs them all", maps[0].mean(dim=0)),
    ]
    (HERE / "heads.svg").write_text(drawn(heads, tokens), "utf-8")

    tokens, maps = token_texts(tokenizer, twice[0].tolist()), attention(model, twice)
    pair = [
        ("layer 0, head 2", "looks at the token before", maps[0, 2]),
        ("layer 1, head 1", "finds what followed last time", maps[1, 1]),
    ]
    (HERE / "induction.svg").write_text(drawn(pair, tokens), "utf-8")

    result = climb(parse_sizes(["4x256x256x8"]))
    where = f"{result.provenance['machine']['cpu']}, B x T x E x H = 4x256x256x8"
    rows = [row for row in result.rows if row.forward and row.step and row.peak_bytes]
    (HERE / "ladder.svg").write_text(rungs(rows, where), "utf-8")


def attention(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """`[layers, heads, T, T]` of one row of ids."""
    with torch.no_grad(), hw.watch(model, hw.Map(ids.shape[1])) as seen:
        model(ids)
    return torch.stack([seen[name]["map"][0] for name in seen.modules])


def drawn(panels: list[tuple[str, str, Tensor]], tokens: list[str]) -> str:
    """An SVG of maps `[T, T]` side by side, under a name and a line about each."""
    side = CELL * len(tokens)
    width = LEFT + len(panels) * (side + GAP)
    height = TOP + side + LEFT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="10">',
        DARK,
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for number, token in enumerate(tokens):
        y = TOP + CELL * number + 9
        parts.append(f'<text x="{LEFT - 5}" y="{y}" text-anchor="end">{label(token)}</text>')
    for index, (name, what, matrix) in enumerate(panels):
        left = LEFT + index * (side + GAP)
        parts += [
            f'<text x="{left}" y="14" font-size="13" font-weight="bold">{escape(name)}</text>',
            f'<text x="{left}" y="30" font-size="12" fill="#444">{escape(what)}</text>',
            *shades(matrix, left),
            f'<path d="M{left} {TOP}h{side}v{side}h{-side}z" fill="none" stroke="#bbb"/>',
        ]
        for number, token in enumerate(tokens):
            at = f"translate({left + CELL * number + 9} {TOP + side + 5}) rotate(-90)"
            parts.append(f'<text transform="{at}" text-anchor="end">{label(token)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def shades(matrix: Tensor, left: int) -> list[str]:
    """The cells of a map, one path a shade."""
    cells: dict[int, list[str]] = {}
    for query, row in enumerate(matrix.tolist()):
        for key, share in enumerate(row):
            corner = f"M{left + CELL * key} {TOP + CELL * query}"
            cells.setdefault(round(share * LEVELS), []).append(f"{corner}h{CELL}v{CELL}h-{CELL}z")
    return [
        f'<path fill="#08306b" fill-opacity="{level / LEVELS:g}" d="{"".join(paths)}"/>'
        for level, paths in sorted(cells.items())
        if level
    ]


def rungs(rows: list[Row], where: str) -> str:
    """Return an SVG with a line for each rung: times and memory on logarithmic axes."""
    width, line, left, plot = 760, 22, 130, 270
    height = 70 + line * len(rows)
    panels = [
        ("ms: forward (filled), forward and backward (open)", left, _times),
        ("MiB added by forward and backward", left + plot + 50, _memory),
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        DARK,
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="14" font-size="12">{escape(where)}; further left is better</text>',
    ]
    for number, row in enumerate(rows):
        y = 58 + line * number
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{row.rung}</text>')
        parts.append(f'<path d="M{left} {y}h{width - left - 20}" stroke="#ddd"/>')
    for title, start, values_of in panels:
        logs = [[log10(value) for value in values_of(row)] for row in rows]
        low, high = floor(min(map(min, logs))), ceil(max(map(max, logs)))
        parts.append(f'<text x="{start}" y="32" fill="#444">{title}</text>')
        for power in range(low, high + 1):
            x = start + plot * (power - low) / (high - low)
            parts.append(f'<path d="M{x:.1f} 46V{height - 8}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.1f}" y="44" text-anchor="middle">{10.0**power:g}</text>')
        for number, values in enumerate(logs):
            for value, fill in zip(values, ("#08306b", "none"), strict=False):
                x = start + plot * (value - low) / (high - low)
                at = f'cx="{x:.1f}" cy="{58 + line * number}" r="4"'
                parts.append(f'<circle {at} fill="{fill}" stroke="#08306b"/>')
    return "\n".join([*parts, "</svg>", ""])


def _times(row: Row) -> list[float]:
    assert row.forward is not None
    assert row.step is not None
    return [1e3 * row.forward.median, 1e3 * row.step.median]


def _memory(row: Row) -> list[float]:
    assert row.peak_bytes is not None
    return [row.peak_bytes / 2**20]


def label(token: str) -> str:
    return escape(token.replace(" ", "·").replace("\n", "⏎"))


if __name__ == "__main__":
    main()
