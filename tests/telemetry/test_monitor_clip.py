"""A monitor that clips: as by hand, by the exact maxima of all micro-batches and ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fresh
import headwise as hw
from monitored import LAYERS, E, H, advance, batch, made

LIMIT = 0.3


def by_hand(steps: int, micro: int) -> dict[str, Tensor]:
    """A training that is watched and clipped without a monitor."""
    model, optimizer = made()
    torch.manual_seed(7)
    for number in range(steps):
        with hw.watch(model, hw.MaxLogit()) as seen:
            for part in range(micro):
                (model(batch(number * 10 + part)).square().mean() / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        hw.qk_clip_(model, seen, limit=LIMIT, optimizer=optimizer)
    return dict(model.state_dict())


@pytest.mark.parametrize("maxima", [False, True], ids=["by the bound", "by all maxima"])
@pytest.mark.parametrize("every", [2, 100])
def test_clipping_is_that_by_hand_with_the_bound_and_without(maxima: bool, every: int) -> None:
    model, optimizer = made()
    torch.manual_seed(7)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with hw.Monitor(model, optimizer, every, clip=LIMIT, maxima=maxima):
        for number in range(4):
            advance(model, optimizer, number, micro=2)
    want = by_hand(4, 2)
    found = model.state_dict()
    assert all(torch.equal(found[name], want[name]) for name in want)
    assert not torch.equal(before["blocks.0.own.qkv.weight"], found["blocks.0.own.qkv.weight"])


def test_in_a_loop_of_ones_own() -> None:
    model, optimizer = made()
    torch.manual_seed(7)
    with hw.Monitor(model, optimizer, maxima=True) as monitor:
        for number in range(4):
            advance(model, optimizer, number, micro=2)
            hw.qk_clip_(model, monitor.maxima, limit=LIMIT, optimizer=optimizer)
    want = by_hand(4, 2)
    assert all(torch.equal(x, want[name]) for name, x in model.state_dict().items())


def test_what_cannot_be_clipped_raises() -> None:
    layer = hw.MultiHeadAttention(E, H, qk_norm=True)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    monitor = hw.Monitor(layer, optimizer, every=100, clip=1e-3)
    layer(batch(1)).sum().backward()
    with pytest.raises(ValueError, match="normalised"):
        optimizer.step()
    monitor.close()


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model, optimizer = made()
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    model.blocks.eval()
    settings: dict[str, Any] = {"clip": LIMIT, "history": f"{folder}/heads.sqlite"}
    with hw.Monitor(model, optimizer, every=1, **settings):
        advance(model, optimizer, rank)
    torch.save(model.state_dict(), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="no gloo")
def test_ranks_clip_alike_by_the_largest_of_all(tmp_path: Path) -> None:
    """Two ranks see different batches; their weights stay those of one that sees both."""
    ranks = [fresh.started(_rank, rank, str(tmp_path)) for rank in range(2)]
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    model, optimizer = made()
    for group in optimizer.param_groups:
        group |= {"lr": 0.0, "weight_decay": 0.0}
    model.blocks.eval()
    with hw.Monitor(model, optimizer, every=100, clip=LIMIT):
        for number in range(2):
            model(batch(number * 10)).square().mean().backward()
        optimizer.step()
    for rank in range(2):
        state = torch.load(tmp_path / f"{rank}.pt")
        for name, x in model.state_dict().items():
            torch.testing.assert_close(state[name], x, rtol=1e-6, atol=0)
    assert hw.History(tmp_path / "heads.sqlite").steps == [1]
    assert tuple(hw.History(tmp_path / "heads.sqlite").layers) == LAYERS
