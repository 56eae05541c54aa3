"""Positions over ranks compute what one rank does: outputs, gradients, statistics, a GPT."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import headwise as hw
from headwise.telemetry.figures import merged, sums_of_each
from models import LENGTH, E, Make, apart, batch, gpt, twins

pytestmark = pytest.mark.ranks

Layer = hw.MultiHeadAttention
B, H, T, D = 2, 4, 16, 6
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 2, [0] * 16])
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": hw.Causal,
    "window": lambda: hw.Window(3),
    "padded": lambda: hw.Causal() & hw.Padding(torch.tensor([16, 9])),
    "documents": lambda: hw.Causal() & hw.Documents(DOCUMENTS),
    "prefix": lambda: hw.Prefix(5),
    "alibi": lambda: hw.Causal() & hw.ALiBi(),
    "dense": lambda: hw.Causal() & hw.Dense(torch.rand(T, T) < 0.8) | hw.Dense(torch.eye(T).bool()),
    "bias": lambda: hw.Causal() & hw.Bias(torch.randn(H, T, T)),
}
STATISTICS = (
    hw.Entropy(),
    hw.MaxLogit(),
    hw.Distance(),
    hw.Mass(hw.First()),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.Self()),
    hw.OutputNorm(),
)
LAYERS: dict[str, Make] = {
    "plain": lambda: Layer(E, 4),
    "grouped, rotary": lambda: Layer(E, 4, num_kv_heads=2, rope=hw.RoPE(6)),
    "norms, sinks": lambda: Layer(E, 4, num_kv_heads=1, qk_norm=True, sinks=True),
}


def check_attend(mesh: DeviceMesh, mask: str, backend: str) -> None:
    drawn = [torch.randn(B, n, T, D, dtype=torch.float64) for n in (H, H // 2, H // 2)]
    given = MASKS[mask]()
    whole = [x.clone().requires_grad_() for x in drawn]
    right = hw.attend(*whole, mask=given)
    (right * torch.arange(T)[:, None]).sum().backward()
    parts = [x.clone().requires_grad_() for x in drawn]
    own = [hw.parallel.shard(x, mesh, 2) for x in parts]
    out = hw.parallel.attend(*own, mesh=mesh, mask=given, backend=backend)
    wanted = hw.parallel.shard(right, mesh, 2)
    assert torch.allclose(out, wanted, atol=1e-12)
    at = hw.parallel.positions(T, mesh)
    (out * at[:, None]).sum().backward()
    assert torch.equal(hw.parallel.unshard(out.detach(), mesh, 2), unsharded(out, mesh))
    for one, other in zip(whole, parts, strict=True):
        summed = other.grad  # each rank has that of its own positions
        dist.all_reduce(summed)
        assert torch.allclose(one.grad, summed, atol=1e-12)


def unsharded(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The same as `unshard`, by the positions that each rank has."""
    every: list[Any] = [None] * mesh.size()
    dist.all_gather_object(every, (hw.parallel.positions(T, mesh), x.detach()))
    found = torch.empty(B, H, T, D, dtype=x.dtype)
    for positions, part in every:
        found[:, :, positions] = part
    return found


def check_layer(mesh: DeviceMesh, name: str, mask: str) -> None:
    whole, parts = twins(LAYERS[name], torch.float64)
    parts = parallelize_module(parts, mesh, hw.parallel.context_plan(parts))
    x, given = torch.randn(B, T, E, dtype=torch.float64), MASKS[mask]()
    with hw.watch(whole, *STATISTICS) as seen:
        right = whole(x, mask=given)
    with hw.watch(parts, *STATISTICS) as own:
        out = parts(hw.parallel.shard(x, mesh), mask=given)
    assert torch.allclose(out, hw.parallel.shard(right, mesh), atol=1e-12)
    right.square().sum().backward()
    out.square().sum().backward()
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        dist.all_reduce(other.grad)
        assert torch.allclose(one.grad, other.grad, atol=1e-10)
    wanted, found = figures_of(seen), figures_of(own)
    for statistic, right_one in wanted.items():
        every: list[Any] = [None] * mesh.size()
        dist.all_gather_object(every, found[statistic])
        total = every[0]
        for part in every[1:]:
            total = merged(total, part)
        assert torch.allclose(total, right_one, atol=1e-9), statistic


def figures_of(seen: hw.capture.Watched) -> dict[str, Tensor]:
    """What is kept of each statistic, over the calls."""
    found: dict[str, Tensor] = {}
    for call in seen[""].calls:
        for name, reading in call.items():
            (kept,) = sums_of_each([reading])
            assert kept is not None
            found[name] = merged(found[name], kept) if name in found else kept
    return found


def check_gpt(mesh: DeviceMesh, heads: bool) -> None:
    """A training step, with heads over ranks as well."""
    whole, parts = twins(gpt, torch.float64)
    positions = mesh
    if heads:
        both = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("rows", "heads"))
        positions = both["rows"]
        parts = parallelize_module(parts, both["heads"], hw.parallel.plan(parts))
    parts = parallelize_module(parts, positions, hw.parallel.context_plan(parts))
    ids = batch(3, length=LENGTH)
    at = hw.parallel.positions(LENGTH, positions)
    right, found = whole(ids), parts(hw.parallel.shard(ids, positions), positions=at)
    assert torch.allclose(found, hw.parallel.shard(right, positions), atol=1e-10)
    right.square().mean().backward()
    (found.square().sum() / right.numel()).backward()
    optimizer = torch.optim.SGD(parts.parameters(), 0.5)
    for parameter in parts.parameters():
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        dist.all_reduce(local, group=positions.get_group())
    torch.optim.SGD(whole.parameters(), 0.5).step()
    optimizer.step()
    assert apart(whole, parts) < 1e-10


def check_float32(mesh: DeviceMesh) -> None:
    """Rounding of outputs and gradients is at most four times that of one rank."""
    exact, whole = twins(gpt, torch.float32)
    exact = exact.double()
    _, parts = twins(gpt, torch.float32)
    parts.load_state_dict(whole.state_dict())
    parts = parallelize_module(parts, mesh, hw.parallel.context_plan(parts))
    ids = batch(3, length=LENGTH)
    at, own = hw.parallel.positions(LENGTH, mesh), hw.parallel.shard(ids, mesh)
    logits = [exact(ids), whole(ids), parts(own, positions=at)]
    for one in logits:
        (one.square().sum() / (len(ids) * LENGTH)).backward()
    for parameter in parts.parameters():
        dist.all_reduce(parameter.grad)
    logits[2] = hw.parallel.unshard(logits[2].detach(), mesh)
    right, *found = [
        [x, *(p.grad for p in m.parameters())]
        for x, m in zip(logits, (exact, whole, parts), strict=True)
    ]
    one, several = (
        max(float((a - b).norm() / b.norm()) for a, b in zip(some, right, strict=True))
        for some in found
    )
    assert several <= 4 * one


def check_refusals(mesh: DeviceMesh) -> None:
    layer = parallelize_module(Layer(E, 4), mesh, hw.parallel.ContextParallel())
    with pytest.raises(ValueError, match="a context cannot be given"):
        layer(torch.randn(1, 4, E), torch.randn(1, 4, E))
    with pytest.raises(ValueError, match="pad it"):
        layer(torch.randn(1, 3, E))
    with pytest.raises(ValueError, match="that has whole sequences"):
        parallelize_module(layer, mesh, hw.parallel.ContextParallel())
    with pytest.raises(ValueError, match=r"it has no hw\.MultiHeadAttention"):
        hw.parallel.context_plan(nn.Linear(2, 2))


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    **{
        f"attend, {mask}, {backend}": partial(check_attend, mask=mask, backend=backend)
        for mask in MASKS
        for backend in ("auto", "eager")
    },
    **{
        f"layer, {name}, {mask}": partial(check_layer, name=name, mask=mask)
        for name in LAYERS
        for mask in ("none", "causal", "padded", "documents")
    },
    "gpt": partial(check_gpt, heads=False),
    "gpt, heads": partial(check_gpt, heads=True),
    "float32": check_float32,
    "refusals": check_refusals,
}


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, told: dict[str, str]) -> None:
    assert not told[name], told[name]
