"""How labels are drawn, as data: a colour for each theme and a glyph, the same everywhere."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LabelStyle:
    """A label's colours, `#rrggbb` on a light and on a dark page, and its glyph, the path of an SVG
    in a box of 12 by 12."""

    label: str
    light: str
    dark: str
    glyph: str


def _read() -> tuple[LabelStyle, ...]:
    text = Path(__file__).with_name("labels.toml").read_text("utf-8")
    return tuple(LabelStyle(**row) for row in tomllib.loads(text)["label"])


LABEL_STYLES = _read()
