"""What moves between ranks is what docs/scaling.md says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moved import Moved
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import headwise as hw
from models import LENGTH, E, batch, gpt, loss_of

B, T, H, D, LAYERS = 2, 12, 4, 6, 2
FLOAT = 4


def check_heads(mesh: DeviceMesh) -> None:
    """A block sums `[B, T, E]` twice on the way forward, and twice on the way back."""
    model = gpt()
    model = parallelize_module(model, mesh, hw.parallel.plan(model))
    with Moved() as forward:
        loss = loss_of(model, batch(0, B, T + 1))
    with Moved() as backward:
        loss.backward()
    sums = 2 * LAYERS
    for moved in (forward, backward):
        assert moved.calls == {"all_reduce": sums}, moved.calls
        assert moved.bytes == {"all_reduce": sums * B * T * E * FLOAT}
    layer = hw.MultiHeadAttention(E, H, num_kv_heads=1)
    layer = parallelize_module(layer, mesh, hw.parallel.HeadParallel())
    with Moved() as moved:
        layer(torch.randn(B, T, E, requires_grad=True)).sum().backward()
    shared = 2 * (E * D + D)  # weights and biases of one key head and one value head
    assert moved.bytes == {"all_reduce": (2 * B * T * E + shared) * FLOAT}


def check_positions(mesh: DeviceMesh) -> None:
    """A layer gathers keys and values, and scatters their gradients."""
    layer = parallelize_module(
        hw.MultiHeadAttention(E, H, num_kv_heads=2), mesh, hw.parallel.ContextParallel()
    )
    x = torch.randn(B, LENGTH // mesh.size(), E)
    with Moved() as moved:
        layer(x, mask=hw.Causal()).sum().backward()
    both = 2 * B * 2 * LENGTH * D * FLOAT
    wanted = {"all_gather_into_tensor": both, "reduce_scatter_tensor": both}
    assert moved.bytes == wanted, (moved.bytes, wanted)
    assert set(moved.calls.values()) == {1}


def check_monitor(mesh: DeviceMesh) -> None:
    """Recorded steps gather a number of float64 a head and row; clipped ones take one maximum."""
    model = gpt()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    found = []
    with hw.Monitor(model, optimizer, every=2, queries=4, clip=1e9) as monitor:
        for _ in range(4):
            with Moved() as moved:
                loss_of(model, batch(0)).backward()
                optimizer.step()
            found.append(moved)
        rows = {name: len(figures.data) for name, figures in monitor.latest.items()}
    heads = LAYERS * H
    snapshot = 8 * (1 + 2 * len(rows) + heads * sum(rows.values()))
    largest = FLOAT * (1 + heads)
    for moved in found[2:]:
        assert moved.bytes["allreduce"] == largest
        assert moved.calls["allreduce"] == 1
    assert not found[2].calls["allgather"]
    assert found[3].calls["allgather"] == 1
    assert found[3].bytes["allgather"] == mesh.size() * snapshot


def check_split_keys(mesh: DeviceMesh) -> None:
    """A gather of log-sum-exps and maxima, and a sum of outputs and figures."""
    q, k = torch.randn(B, H, 3, D), torch.randn(B, 2, 5, D)
    with Moved() as moved:
        hw.parallel.observe_split_keys(
            q,
            k,
            k,
            hw.Entropy(),
            hw.MaxLogit(),
            hw.Mass(hw.First()),
            mesh=mesh,
            first_key=5 * mesh.get_local_rank(),
            first_query=100,
        )
    rows, figures = B * H * 3, 3  # entropy, its share, the mass
    assert moved.bytes == {
        "allgather": mesh.size() * FLOAT * (rows + B * H),
        "allreduce": FLOAT * rows * (D + 1 + 3 * figures),
    }
    assert set(moved.calls.values()) == {1}


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    "heads": check_heads,
    "positions": check_positions,
    "monitor": check_monitor,
    "split keys": check_split_keys,
}


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, told: dict[str, str]) -> None:
    assert not told[name], told[name]
