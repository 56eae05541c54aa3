"""The figures of a head that `headwise look` shows: as data, so that the terminal and the page say
the same."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Column:
    """A figure of a head: its key in a row, and how to show and explain it."""

    key: str
    title: str
    short: str
    brief: str  # for terminals: a word a line
    unit: Literal["share", "nats", "tokens", "logit"]
    formula: str  # `_{…}` stands for a subscript
    meaning: str


def _read() -> tuple[Column, ...]:
    text = Path(__file__).with_name("columns.toml").read_text("utf-8")
    return tuple(Column(**row) for row in tomllib.loads(text)["column"])


COLUMNS = _read()
