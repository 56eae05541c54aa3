"""A model with its heads over ranks is saved and loaded on any number of ranks, through DCP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from worlds import gloo, values

import headwise as hw
from models import apart, gpt, train, twins


def laid() -> tuple[Any, Any, torch.optim.Optimizer]:
    """A model of one process, the same over all ranks, and that one's optimizer."""
    gloo()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole, parts = twins(gpt, torch.float64)
    parts = parallelize_module(parts, mesh, hw.parallel.plan(parts))
    return whole, parts, torch.optim.AdamW(parts.parameters(), 1e-2)


def saved(folder: str) -> None:
    whole, parts, optimizer = laid()
    train(parts, optimizer=optimizer)
    train(whole)
    assert apart(whole, parts) < 1e-8
    model, moments = get_state_dict(parts, optimizer)
    dcp.save({"model": model, "optimizer": moments}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        torch.save(whole.state_dict(), f"{folder}/whole.pt")


def loaded(folder: str, alone: bool) -> None:
    whole, parts, optimizer = laid()
    whole.load_state_dict(torch.load(f"{folder}/whole.pt"))
    if alone:  # a model without a plan, of which an optimizer's moments are not
        model = whole.state_dict()
        right = {name: x.clone() for name, x in model.items()}
        dcp.load({"model": model}, checkpoint_id=folder)
        assert all(torch.allclose(x, right[name], atol=1e-8) for name, x in model.items())
        return
    model, moments = get_state_dict(parts, optimizer)
    dcp.load({"model": model, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(parts, optimizer, model_state_dict=model, optim_state_dict=moments)
    assert apart(whole, parts) < 1e-8
    assert {int(state["step"]) for state in optimizer.state.values()} == {3}


@pytest.mark.ranks
def test_a_checkpoint_of_two_ranks_fits_one_and_four(tmp_path: Path) -> None:
    values(2, saved, str(tmp_path))
    values(1, loaded, str(tmp_path), True)
    for ranks in (1, 2, 4):
        values(ranks, loaded, str(tmp_path), False)
