"""A fixed batch on which a model is observed during training, without the noise of its data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.modules import evaluating

Probe = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any] | Callable[[nn.Module], object]
"""A batch for the model, by name or in order, or a function that runs the model on one."""


def run_probe(model: nn.Module, probe: Probe) -> None:
    """Run the model on the batch in evaluation mode, without gradients or side effects."""
    with evaluating(model), _same_random_numbers(model), torch.no_grad():
        if isinstance(probe, Tensor):
            model(probe)
        elif isinstance(probe, Mapping):
            model(**probe)
        elif callable(probe):
            probe(model)
        else:
            model(*probe)


def _same_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Restore the state of the random generators afterwards."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(n for n in devices if n is not None))
