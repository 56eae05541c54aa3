"""Runs on record: one JSON file an experiment, with the machine, the versions and the settings."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwise import timing

RESULTS = Path(__file__).parents[1] / "results"


def write(name: str, settings: Any, found: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Keep what an experiment found in `claims-<name>.json`; the file is whole or absent."""
    run = {
        "claim": name,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": timing.machine(),
        "settings": asdict(settings),
        **found,
    }
    folder.mkdir(exist_ok=True)
    path = path_of(name, folder)
    part = path.with_suffix(".part")
    part.write_text(dumps(rounded(run)) + "\n")
    os.replace(part, path)
    return path


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The run on record of the experiment `name`."""
    return json.loads(path_of(name, folder).read_text())


def path_of(name: str, folder: Path = RESULTS) -> Path:
    """Where the run of the experiment `name` is kept."""
    return folder / f"claims-{name}.json"


def dumps(value: Any, indent: str = "") -> str:
    """JSON for reading: what fits on a line stands on one.

    >>> print(dumps({"a": [1, 2], "b": "long " * 30}))  # doctest: +ELLIPSIS
    {
     "a": [1, 2],
     "b": "long long ...
    }
    """
    flat = json.dumps(value)
    if len(flat) + len(indent) <= 160 or not isinstance(value, dict | list):
        return flat
    inner = indent + " "
    if isinstance(value, dict):
        lines = [f"{json.dumps(key)}: {dumps(item, inner)}" for key, item in value.items()]
    else:
        lines = [dumps(item, inner) for item in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(lines) + f"\n{indent}{closing}"


def rounded(value: Any, digits: int = 5) -> Any:
    """The same nested value with floats to so many significant digits.

    >>> rounded({"a": [0.123456789, 1, "text"]})
    {'a': [0.12346, 1, 'text']}
    """
    if isinstance(value, timing.Spread):
        return rounded(asdict(value), digits)
    if isinstance(value, Mapping):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
