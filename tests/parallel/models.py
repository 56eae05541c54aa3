"""Models for tests over ranks, alone and laid over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import headwise as hw
from headwise.models.gpt import GPT, GPTConfig

E, VOCABULARY, LENGTH = 24, 31, 16
Make = Callable[[], nn.Module]


def gpt(**changes: Any) -> GPT:
    sizes = {"vocab_size": VOCABULARY, "n_positions": LENGTH, "n_embd": E, "n_layer": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT(GPTConfig(**{**sizes, "n_head": 4, **dropouts, **changes}))


def twins(make: Make, dtype: torch.dtype) -> tuple[Any, Any]:
    """Two modules with the same weights, which are not those of a start."""
    one, other = make().to(dtype), make().to(dtype)
    with torch.no_grad():
        for parameter in one.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    other.load_state_dict(one.state_dict())
    return one, other


def pair(make: Make, mesh: DeviceMesh, dtype: torch.dtype) -> tuple[Any, Any]:
    """A module on one rank, and the same with its heads over ranks."""
    whole, parts = twins(make, dtype)
    return whole, parallelize_module(parts, mesh, hw.parallel.plan(parts))


def whole_of(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def apart(whole: nn.Module, parts: nn.Module) -> float:
    """By how much two modules' parameters differ, under the names of their checkpoints."""
    wanted, found = whole.state_dict(), parts.state_dict()
    assert wanted.keys() == found.keys()
    return max(float((whole_of(found[n]) - wanted[n]).abs().max()) for n in wanted)


def batch(number: int, rows: int = 2, length: int = 13) -> Tensor:
    """Token ids `[rows, length]`, drawn by their number."""
    drawn = torch.Generator().manual_seed(number)
    return torch.randint(VOCABULARY, (rows, length), generator=drawn)


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def train(
    model: nn.Module, steps: int = 3, optimizer: torch.optim.Optimizer | None = None
) -> list[float]:
    """Train on the same rows on every rank; the losses."""
    optimizer, losses = optimizer or torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(steps):
        loss = loss_of(model, batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses
