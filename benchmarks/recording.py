"""Runs of benchmarks on record: one JSON file a run, and a table on the terminal."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwise.tutorial.timing import Spread, limits, machine


def fastest(taken: Mapping[str, list[float]], without: str) -> str:
    """The contender with the lowest median, `without` left out."""
    others = [name for name in taken if name != without]
    return min(others, key=lambda name: statistics.median(taken[name]))


def record(
    name: str,
    settings: Mapping[str, Any],
    rows: list[dict[str, Any]],
    folder: Path,
    device: str = "cpu",
) -> Path:
    """Writes one run to `<folder>/<name>-<date>.json`, prints it as one line, returns the path."""
    now = datetime.now(UTC)
    run = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "limits": limits(device),
        "settings": dict(settings),
        "rows": rows,
    }
    path = write_run(folder / f"{name}-{now:%Y%m%dT%H%M%SZ}.json", run)
    print(json.dumps(rounded(run)))
    return path


def write_run(path: Path, run: Mapping[str, Any], digits: int = 6) -> Path:
    """Write a run for people to read; the file is whole or absent.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(dumps(rounded(run, digits)) + "\n")
    os.replace(part, path)
    return path


def dumps(value: Any, lines: int = 200) -> str:
    """Spell JSON for reading: what fits on a line stands on one; lines are as long as it takes.

    >>> print(dumps({"a": [1, 2], "b": [{"c": "long " * 40}]}))
    {
     "a": [1, 2],
     "b": [
      {"c": "long long ...
     ]
    }
    """
    wide = 160
    while (text := _cut(value, wide)).count("\n") >= lines:
        wide *= 2
    return text


def _cut(value: Any, wide: int, indent: str = "") -> str:
    flat = json.dumps(value)
    within = list(value.values() if isinstance(value, dict) else value) if _holds(value) else []
    if not any(map(_holds, within)) or len(flat) + len(indent) <= wide:
        return flat
    inner = indent + " "
    lines = [_cut(item, wide, inner) for item in within]
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {line}" for key, line in zip(value, lines, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def _holds(value: Any) -> bool:
    return isinstance(value, dict | list)


def rounded(value: Any, digits: int = 5) -> Any:
    """Round floats in a nested value to so many significant digits; spreads become dicts.

    >>> rounded({"a": [0.123456789, 1, "text"], "b": Spread(1.0, 0.5, 2.0)})
    {'a': [0.12346, 1, 'text'], 'b': {'median': 1.0, 'low': 0.5, 'high': 2.0}}
    """
    if isinstance(value, Spread):
        return rounded(asdict(value), digits)
    if isinstance(value, Mapping):
        return {str(key): rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value if isinstance(value, int | str | None) else str(value)


def show(title: str, columns: list[str], lines: list[list[str]]) -> None:
    """Prints a table; the first column is left-aligned, figures right-aligned."""
    from rich.console import Console  # not on every machine with a GPU
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(width=120).print(table)
