"""Commands under `torchrun`: whether there are several ranks, and how long to wait for one."""

from __future__ import annotations

import os

TIMEOUT = 600.0
"""Seconds until a rank that hangs is given up: a first step may compile."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether a launcher such as `torchrun` has started this process as one of several."""
    if not all(name in os.environ for name in _ENVIRONMENT):
        return False
    return int(os.environ["WORLD_SIZE"]) > 1
