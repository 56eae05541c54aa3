"""The report: a `Look` in, one HTML file out that needs no network and no other file.

The page is `template.html` with the style sheet, the scripts and the data put in. Everything that
comes from outside (tokens, names) travels as JSON whose `<` is written `\\u003c`, and reaches the
document through `textContent` only; a token `<script>` stays text. Plotly's own offline bundle and
the maps are packed with gzip and base64, and the browser unpacks them.
"""

from __future__ import annotations

import base64
import gzip
import html
import importlib
import importlib.metadata
import json
import os
import re
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from headwise._files import write_whole
from headwise.figures import COLUMNS, NO_LABEL, RULES
from headwise.look import Look, finite

__all__ = ["PageError", "check_out", "render_page", "write_page"]

SCRIPTS = ("core.js", "heads.js", "attention.js", "main.js")
LEVELS = 65535  # the page's weights are whole 65535ths: 16 bits, an error of at most 7.7e-6


class PageError(ValueError):
    """The page cannot be written: the message says what, where and what to do."""


def write_page(look: Look, path: str | os.PathLike[str]) -> Path:
    """Write `look` as one HTML file at `path`; an existing file is replaced in one step.

    Raises `PageError` when the folder does not exist or cannot be written, or when the `plotly`
    package is missing. Nothing half-written is left behind.
    """
    path = check_out(path)
    return write_html(path, render_page(look))


def write_html(path: Path, text: str) -> Path:
    """Write a page's text, whole or not at all.

    Raises `PageError` when the folder cannot be written.
    """
    try:
        write_whole(path.parent, {path.name: lambda part: part.write_bytes(text.encode("utf-8"))})
    except OSError as error:
        raise PageError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def check_out(path: str | os.PathLike[str]) -> Path:
    """The path for a page, if a page could be written there; else `PageError`.

    Call it before the slow part, so that a wrong `--out` costs nothing.
    """
    path = Path(path)
    if path.is_dir():
        raise PageError(f"cannot write {path}: it is a folder; name a file, such as page.html")
    if not path.parent.is_dir():
        raise PageError(f"cannot write {path}: there is no folder {path.parent}; create it first")
    _plotly()
    return path


def render_page(look: Look) -> str:
    """The whole page as a string. The same `look` gives the same string."""
    plotly = _plotly()
    name = (
        f"{look.provenance.get('model', 'model')}: heads on {look.provenance.get('text', 'text')}"
    )
    parts = {
        "title": html.escape(name),
        "style": _file("style.css"),
        "data": _json(page_data(look)),
        "maps": "\n".join(_packed(f"map-{layer}", pack(m)) for layer, m in look.maps.items()),
        "plotly": _packed("plotly", plotly.encode("utf-8")),
        "script": "\n".join(_file(script) for script in SCRIPTS),
    }
    # One pass: what is put in is never searched for further marks.
    return re.sub(r"@@(\w+)@@", lambda mark: parts[mark[1]], _file("template.html"))


def page_data(look: Look) -> dict[str, Any]:
    """What the page's scripts read, except the maps."""
    side = next(iter(look.maps.values())).shape[-1] if look.maps else 0
    return {
        "rows": look.rows,
        "tokens": look.tokens,
        "layers": 1 + max(row["layer"] for row in look.rows),
        "heads": 1 + max(row["head"] for row in look.rows),
        "side": side,
        "levels": LEVELS,
        "columns": [asdict(column) for column in COLUMNS],
        "rules": [asdict(rule) for rule in RULES],
        "no_label": NO_LABEL,
        "provenance": look.provenance,
        "made": made(look),
    }


def made(look: Look) -> list[tuple[str, str]]:
    """How the page was made, as names and values to read."""
    facts = look.provenance
    side, shown = facts["map_side"], facts["tokens_shown"]
    maps = "one cell a query and key" if side == shown else f"{shown} tokens in {side} blocks"
    versions = {**facts["versions"], "plotly": _version("plotly")}
    return [
        (
            "Model",
            f"{facts['model']}: GPT-2 architecture, {facts['layers']} layers of "
            f"{facts['heads']} heads, {facts['parameters']:,} parameters, "
            f"context {facts['context']} tokens",
        ),
        ("Text", f"{facts['text']}: {shown:,} of {facts['tokens']:,} tokens"),
        (
            "Random repeats",
            f"{facts['random_rows']} rows of {facts['random_period']} random tokens that come "
            f"twice, seed {facts['seed']}; nothing else on this page is random",
        ),
        ("Attention", "causal; figures describe the probabilities before dropout (which is off)"),
        ("Numbers", f"{facts['dtype']} on {facts['device']}, statistics in float32 or finer"),
        ("Maps", f"{maps}; weights are stored in steps of 1/{LEVELS}"),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]


def pack(maps: np.ndarray) -> bytes:
    """Maps [H, n, n] in 0..1 as 16-bit whole numbers, all high bytes, then all low bytes.

    >>> pack(np.array([[[1.0, 0.0], [0.5, 0.5]]])).hex()
    'ff008080ff000000'
    """
    levels = np.rint(np.clip(maps, 0.0, 1.0) * LEVELS).astype(np.uint16)
    # Separate planes: the high bytes are mostly zeros, and gzip then finds that out.
    return (levels >> 8).astype(np.uint8).tobytes() + (levels & 255).astype(np.uint8).tobytes()


def _packed(name: str, content: bytes) -> str:
    text = base64.b64encode(gzip.compress(content, 9, mtime=0)).decode("ascii")
    return f'<script type="text/plain" id="{name}">{text}</script>'


def _json(value: Any) -> str:
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _file(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text("utf-8")


def _plotly() -> str:
    try:
        offline = importlib.import_module("plotly.offline")
    except ModuleNotFoundError as error:
        raise PageError(
            "the page needs the plotly package: pip install 'headwise[page]' (or use --json)"
        ) from error
    return offline.get_plotlyjs()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
