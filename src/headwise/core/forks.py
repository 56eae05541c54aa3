"""Processes that are forked after attention was computed."""

from __future__ import annotations

import os
from functools import cache

import torch


@cache
def keep_forks_going() -> None:
    """See that processes forked from now on compute on one thread.

    A fork has none of the threads of PyTorch's pool, and its first call would wait for them for
    ever. PyTorch's `DataLoader` does the same for its own workers; `os.fork` and
    `multiprocessing.Process` do not.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
