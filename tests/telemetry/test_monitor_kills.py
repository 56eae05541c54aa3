"""A monitored training that is killed at any moment leaves a history that opens, and goes on."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 3


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_a_killed_history_opens_and_ends_as_an_uninterrupted_one() -> None:
    script, seed = Path(__file__).parents[1] / "monitor_kills.py", 0
    call = [sys.executable, str(script), "--kills", str(KILLS), "--seed", str(seed)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{KILLS} kills, 0 did harm (seed {seed})" in done.stdout
    lines = re.findall(r"^\d+: killed at .*the same in the end$", done.stdout, re.M)
    assert len(lines) == KILLS
