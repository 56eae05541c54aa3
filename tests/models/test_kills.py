"""A training that is killed at any moment goes on as if nothing had been: five kills of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 5


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forked")
def test_a_killed_training_is_resumed_bit_for_bit() -> None:
    script, seed = Path(__file__).parents[1] / "kills.py", 0
    call = [sys.executable, str(script), "--kills", str(KILLS), "--seed", str(seed)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{KILLS} kills, 0 did harm (seed {seed})" in done.stdout
    lines = re.findall(r"^\d+: killed (at|before) .*the same, bit for bit$", done.stdout, re.M)
    assert len(lines) == KILLS
