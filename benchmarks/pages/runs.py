"""Recorded runs: one JSON file each, with the machine, the versions and the settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from headwise.tutorial import timing

from .. import recording

RESULTS = Path(__file__).parents[1] / "results"


def keep(path: Path, settings: Any, found: Mapping[str, Any], digits: int = 6) -> Path:
    """Write a run with its date, settings and machine; the file is whole or absent."""
    run = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": timing.machine(),
        "settings": asdict(settings),
        **found,
    }
    return recording.write_run(path, run, digits)
