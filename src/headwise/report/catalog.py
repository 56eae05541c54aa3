"""The metrics of a head and the styles of labels, as data for the terminal and the pages."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class Column:
    """A metric of a head: its key in a row, and how to show and explain it."""

    key: str
    title: str
    short: str
    brief: str  # for terminals: one word per line
    unit: Literal["share", "nats", "tokens", "logit"]
    formula: str  # `_{…}` stands for a subscript
    meaning: str


@dataclass(frozen=True)
class LabelStyle:
    """The colors of a label (`#rrggbb`, for light and dark pages) and its glyph, an SVG path in a
    12 × 12 box."""

    label: str
    light: str
    dark: str
    glyph: str


def _tables(file: str, name: str) -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name(file).read_text("utf-8"))[name]


COLUMNS = tuple(Column(**row) for row in _tables("columns.toml", "column"))
LABEL_STYLES = tuple(LabelStyle(**row) for row in _tables("labels.toml", "label"))
