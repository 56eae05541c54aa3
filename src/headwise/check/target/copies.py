"""Copies of what is checked, and other weights for them: what was given is never written to."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


def randomise(module: nn.Module, seed: int) -> None:
    """Fresh values for every parameter: matrices keep the size of what goes through them, biases
    are no longer zero, and gains stay near 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            if parameter.ndim >= 2:
                single = parameter.shape[-1] == 1  # a convolution of width 1
                inputs = parameter[0].numel() if single else parameter.shape[-1]
                noise = noise * (1.5 / max(1, inputs) ** 0.5)
            elif bool((parameter == 1).all()):
                noise = 1 + 0.2 * noise
            else:
                noise = 0.5 * noise
            parameter.copy_(noise.to(parameter.dtype))


def copied(target: Any) -> Any:
    """An independent copy of a module; anything else as it is."""
    if not isinstance(target, nn.Module):
        return target
    try:
        return copy.deepcopy(target)
    except Exception:  # locks, generators and tensors of a graph cannot be copied deeply
        return _rebuilt(target, {})


def _rebuilt(module: nn.Module, done: dict[int, Any]) -> nn.Module:
    """A copy with weights and buffers of its own, whose other attributes are shared."""
    if id(module) in done:
        return done[id(module)]
    new = done[id(module)] = copy.copy(module)
    for table in ("_parameters", "_buffers"):
        new.__dict__[table] = {
            name: value if value is None else done.setdefault(id(value), _own(value))
            for name, value in getattr(module, table).items()
        }
    children = module._modules.items()
    new.__dict__["_modules"] = {
        name: child if child is None else _rebuilt(child, done) for name, child in children
    }
    return new


def _own(value: Tensor) -> Tensor:
    own = value.detach().clone()
    return nn.Parameter(own, value.requires_grad) if isinstance(value, nn.Parameter) else own
