"""Runs on record: one JSON file an experiment, with the machine, the versions and the settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwise.tutorial import timing

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
    return timing.write_run(path_of(name, folder), run)


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """The run on record of the experiment `name`."""
    return json.loads(path_of(name, folder).read_text())


def path_of(name: str, folder: Path = RESULTS) -> Path:
    """Where the run of the experiment `name` is kept."""
    return folder / f"claims-{name}.json"
