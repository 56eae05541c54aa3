"""Runs on record: one JSON file an experiment, with the machine, the versions and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwise.tutorial import timing

from .. import recording

RESULTS = Path(__file__).parents[1] / "results"


def write(name: str, settings: Any, found: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Keep what an experiment found in `claims-<name>.json`; the file is whole or absent."""
    return keep(path_of(name, folder), settings, {"claim": name, **found})


def keep(path: Path, settings: Any, found: Mapping[str, Any], digits: int = 6) -> Path:
    """Keep a run with its date, settings and machine; the file is whole or absent."""
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": timing.machine(),
        "settings": asdict(settings),
        **found,
    }
    return recording.write_run(path, run, digits)


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The run on record of the experiment `name`."""
    return json.loads(path_of(name, folder).read_text())


def path_of(name: str, folder: Path = RESULTS) -> Path:
    """Where the run of the experiment `name` is kept."""
    return folder / f"claims-{name}.json"
