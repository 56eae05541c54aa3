"""The ladder's page: a `Ladder` in, one HTML file out that needs no network and no other file.

As the page of `headwise look`: `ladder.html` with the style sheet, the script and the data put in.
"""

from __future__ import annotations

import html
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwise.report.page.parts import (
    check_out,
    fill,
    json_text,
    part,
    write_html,
)
from headwise.tutorial.compare import Ladder, notes

SCRIPTS = (
    "views/core.js",
    "views/draw.js",
    "views/tip.js",
    "views/save.js",
    "views/chart.js",
    "ladder.js",
)


def write_ladder(ladder: Ladder, path: str | os.PathLike[str]) -> Path:
    """Write `ladder` as one HTML file at `path`; an existing file is replaced in one step.

    Raises `PageError` when the folder does not exist or cannot be written. Nothing half-written is
    left behind.
    """
    path = check_out(path)
    return write_html(path, render_ladder(ladder))


def render_ladder(ladder: Ladder) -> str:
    """The whole page as a string. The same `ladder` gives the same string."""
    parts = {
        "title": html.escape(f"the ladder on {_where(ladder)}"),
        "style": part("style.css") + part("chart.css"),
        "data": json_text(page_data(ladder)),
        "script": "\n".join(part(script) for script in SCRIPTS),
    }
    return fill(part("ladder.html"), parts)


def page_data(ladder: Ladder) -> dict[str, Any]:
    """What the page's script reads."""
    sizes = ladder.provenance["settings"]["sizes"]
    return {
        "where": _where(ladder),
        "sizes": [
            {
                "name": size,
                "rows": [
                    asdict(row) for row in ladder.rows if row.size == size and row.left_out is None
                ],
                "notes": notes(ladder, size),
            }
            for size in sizes
        ],
        "made": made(ladder),
    }


def made(ladder: Ladder) -> list[tuple[str, str]]:
    """How the figures came about, as names and values to read."""
    facts = ladder.provenance
    machine, limits, settings = facts["machine"], facts["limits"], facts["settings"]
    versions = {"Python": machine["python"], **machine["versions"]}
    compiled = "every rung but the scalar one compiled" if settings["compile"] else "not compiled"
    return [
        ("Machine", f"{_where(ladder)}; threads {machine['threads']}, cores {machine['cores']}"),
        (
            "Its limits",
            f"{limits['matmul_gflops']:,.0f} GFLOP/s in a matrix product, "
            f"{limits['copy_gb_per_s']:,.0f} GB/s in a copy, measured in the same run; "
            f"load {machine['load']:.1f} when it ended",
        ),
        (
            "Rungs",
            f"causal self-attention, {settings['dtype']}, {compiled}; the same weights converted "
            f"to each, no biases, seed {settings['seed']}",
        ),
        (
            "Times",
            f"medians of {settings['rounds']} rounds with quartiles; in a round every rung has its "
            "turn, and ratios are taken round by round",
        ),
        (
            "Memory",
            "what a forward and a backward pass add at most: activations, temporaries, gradients",
        ),
        ("Date", facts["date"]),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def _where(ladder: Ladder) -> str:
    machine = ladder.provenance["machine"]
    on_gpu = ladder.provenance["settings"]["device"] == "cuda"
    return machine["gpu"] if on_gpu else machine["cpu"]
