"""The benchmark for GPUs runs without one: tiny sizes, and times that mean nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = ["ceilings", "observe", "host", "graphs", "watch", "decode", "memory"]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "none"])
def test_a_dry_run(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part gives its rows, with transformers and with a model of our own."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    if library == "none":
        monkeypatch.setitem(sys.modules, "transformers", None)
    import gpu

    parts = PARTS if library == "transformers" else ["watch", "train"]
    assert gpu.main(["--dry", "--parts", ",".join(parts)]) == 0
    (path,) = tmp_path.glob("gpu-dry-*.json")
    run = json.loads(path.read_text())
    assert not [row for row in run["rows"] if "failed" in row]
    assert {row["part"] for row in run["rows"]} == set(parts)
    ratios = [
        row["ratio"]["median"] for row in run["rows"] if row["part"] == "watch" and "ratio" in row
    ]
    assert len(ratios) == 12
    assert min(ratios) > 0
    assert run["machine"]["versions"]["torch"]


def test_parts_that_there_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu

    with pytest.raises(SystemExit):
        gpu.main(["--dry", "--parts", "observe,speed"])
