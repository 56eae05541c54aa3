"""Checks that run on several ranks, each a process of its own with gloo."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from worlds import gloo, values

Check = Callable[[DeviceMesh], Any]

SECONDS = 240
RANKS = [2, pytest.param(4, marks=pytest.mark.ranks)]


def on_ranks(module: str, ranks: int) -> dict[str, str]:
    """Run the `CHECKS` of a test module on so many ranks; what went wrong, by their names.

    A mapping from names to functions of the mesh, each of which all ranks run in its turn.
    """
    said = values(ranks, _said, module, seconds=SECONDS)
    return {name: "".join(one[name] for one in said) for name in said[0]}


def _said(module: str) -> dict[str, str]:
    gloo()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ranks",))
    said: dict[str, str] = {}
    checks: dict[str, Check] = import_module(module).CHECKS
    for name, check in checks.items():
        said[name] = ""
        try:
            torch.manual_seed(0)
            check(mesh)
        except Exception:
            said[name] = f"rank {dist.get_rank()}: {traceback.format_exc()}\n"
            print(said[name], file=sys.stderr)  # others may wait for this rank in vain
        dist.barrier()
    return said
