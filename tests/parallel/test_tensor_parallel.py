"""Heads over ranks compute what one rank does: outputs, gradients, statistics, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import headwise as hw
from headwise.core import observers
from headwise.core.call import Call
from models import E, Make, apart, gpt, pair, train

Layer = hw.MultiHeadAttention

LAYERS: dict[str, Make] = {
    "plain": lambda: Layer(E, 4),
    "grouped": lambda: Layer(E, 8, num_kv_heads=4, head_dim=3),
    "two keys": lambda: Layer(E, 4, num_kv_heads=2),
    "one key": lambda: Layer(E, 4, num_kv_heads=1),
    "no bias": lambda: Layer(E, 4, bias=False),
    "some bias": lambda: Layer(E, 4, num_kv_heads=2, bias=(True, False, True)),
    "some bias, one key": lambda: Layer(E, 4, num_kv_heads=1, bias=(False, False, True)),
    "norms, sinks, rotary": lambda: Layer(E, 4, qk_norm=True, sinks=True, rope=hw.RoPE(6)),
    "context": lambda: Layer(E, 4, kv_dim=10),
    "context of one width": lambda: Layer(E, 4),
    "some bias, context": lambda: Layer(E, 4, kv_dim=10, bias=(True, True, False)),
}
STATISTICS = (
    hw.Entropy(),
    hw.MaxLogit(),
    hw.LSE(),
    hw.Distance(spread=True, absolute=True),
    hw.Mass(hw.First()),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.Window(2), name="near"),
    hw.Sink(),
    hw.Received(),
    hw.OutputNorm(),
    hw.Norms(),
    hw.TopKeys(2),
    hw.Map(4),
    hw.OffsetHistogram(),
)


def inputs(name: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, Any]]:
    x = [torch.randn(2, 7, E, dtype=dtype)]
    if "context" in name:
        x.append(torch.randn(2, 5, E if "one width" in name else 10, dtype=dtype))
    return x, {} if "context" in name else {"mask": hw.Causal()}


def check_layer(mesh: DeviceMesh, name: str) -> None:
    whole, parts = pair(LAYERS[name], mesh, torch.float64)
    assert apart(whole, parts) == 0.0
    given, keywords = inputs(name, torch.float64)
    ends = []
    for module in (whole, parts):
        own = [x.clone().requires_grad_() for x in given]
        with hw.watch(module, *STATISTICS) as seen:
            out = module(*own, **keywords)
        out.square().sum().backward()
        torch.optim.SGD(module.parameters(), 0.1).step()
        ends.append([out, *(x.grad for x in own), seen[""]])
    *one, seen_whole = ends[0]
    *other, seen_parts = ends[1]
    for a, b in zip(one, other, strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-12)
    assert apart(whole, parts) < 1e-12
    some = slice(parts.first_head, parts.first_head + parts.num_heads)
    wanted = seen_whole.table()[some]
    found = seen_parts.table()
    assert [row["head"] for row in found] == [row["head"] for row in wanted]
    for row, right in zip(found, wanted, strict=True):
        assert row == pytest.approx(right, abs=1e-10)
    for figure, reading in seen_whole.calls[0].items():
        values = seen_parts.calls[0][figure].values
        assert torch.allclose(values, reading.values[:, some].to(values), atol=1e-10), figure


def check_loading(mesh: DeviceMesh) -> None:
    """A whole checkpoint goes in, and comes out bit for bit."""
    for name in ("plain", "one key", "some bias", "norms, sinks, rotary"):
        whole, parts = pair(LAYERS[name], mesh, torch.float32)
        fresh = {n: torch.randn_like(x) for n, x in whole.state_dict().items()}
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(parts, dict(fresh), options=options)
        found = get_model_state_dict(parts, options=options)
        assert all(torch.equal(found[n], fresh[n]) for n in fresh)
        parts.load_state_dict(parts.state_dict())
        found = get_model_state_dict(parts, options=options)
        assert all(torch.equal(found[n], fresh[n]) for n in fresh)


def check_gpt(mesh: DeviceMesh) -> None:
    whole, parts = pair(gpt, mesh, torch.float64)
    assert train(whole) == pytest.approx(train(parts), abs=1e-12)
    assert apart(whole, parts) < 1e-8


def check_float32(mesh: DeviceMesh) -> None:
    """Rounding is no worse than four times that of one rank."""
    exact, _ = pair(gpt, mesh, torch.float64)
    whole, parts = gpt(), gpt()
    for module in (whole, parts):
        module.load_state_dict(exact.state_dict())
    parts = parallelize_module(parts, mesh, hw.parallel.plan(parts))
    ids = torch.randint(31, (2, 13))
    right = exact(ids)
    one, several = ((module(ids) - right).abs().max() for module in (whole, parts))
    assert float(several) <= 4 * float(one)


def of_all(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """What all ranks have, one after another."""
    return DTensor.from_local(x.contiguous(), mesh, [Shard(0)]).full_tensor()


def check_dropout(mesh: DeviceMesh) -> None:
    """Heads drop different weights, and what all ranks have stays the same on all of them."""
    torch.manual_seed(0)
    model = gpt(attn_pdrop=0.3, resid_pdrop=0.3).train()
    model = parallelize_module(model, mesh, hw.parallel.plan(model))
    ids, dropped = torch.randint(31, (2, 13)), []

    def hear(call: Call, backend: str, run: Callable[[], Tensor]) -> Tensor:
        if (
            observers.HERE.source is None
            or observers.HERE.source.layer is not model.transformer.h[0].attn
        ):
            return run()
        q, k, zeros = call.q, call.k, torch.zeros_like
        eye = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
        options = {"mask": call.mask, "scale": call.scale, "dropout": call.dropout}
        observers.observers.remove(hear)
        out = hw.attend(zeros(q), zeros(k), eye, **options, backend="eager")
        observers.observers.append(hear)
        dropped.append(out == 0)
        return run()

    observers.observers.append(hear)
    out = model(ids).detach()
    observers.observers.remove(hear)
    for other in of_all(out, mesh).chunk(mesh.size()):
        assert torch.equal(other, out)
    every = of_all(dropped[0].int().transpose(0, 1), mesh)
    assert len(every.unique(dim=0)) == len(every) == 4


def check_cache(mesh: DeviceMesh) -> None:
    whole, parts = pair(gpt, mesh, torch.float64)
    ids = torch.randint(31, (1, 9))
    wanted, cache = whole(ids), parts.new_cache()
    with torch.no_grad():
        found = torch.cat([parts(some, cache=cache) for some in ids.split([4, 1, 4], 1)], 1)
    assert torch.allclose(found, wanted, atol=1e-12)


def refused(call: Callable[[], object], *words: str) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        call()
    assert all(word in str(raised.value) for word in words), raised.value


def check_refusals(mesh: DeviceMesh) -> None:
    ranks = mesh.size()

    def laid(layer: nn.Module) -> Any:
        return parallelize_module(layer, mesh, hw.parallel.plan(layer))

    refused(lambda: laid(Layer(27, 9)), "num_heads=9", f"9 heads do not divide by {ranks} ranks")
    refused(lambda: hw.parallel.plan(nn.Linear(2, 2)), "no hw.MultiHeadAttention")
    refused(lambda: hw.parallel.plan(laid(Layer(E, 4))), "is already sharded")
    refused(lambda: laid(nn.Sequential(Layer(12 * ranks, 3 * ranks, num_kv_heads=3))), "3 key/")
    naive = parallelize_module(Layer(E, 4), mesh, {"qkv": ColwiseParallel()})
    x = torch.randn(2, 7, E)
    refused(lambda: naive(x), "MultiHeadAttention(", "qkv", "hw.parallel.plan")


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    **{f"layer, {name}": partial(check_layer, name=name) for name in LAYERS},
    "loading": check_loading,
    "gpt": check_gpt,
    "float32": check_float32,
    "dropout": check_dropout,
    "cache": check_cache,
    "refusals": check_refusals,
}


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, told: dict[str, str]) -> None:
    assert not told[name], told[name]
