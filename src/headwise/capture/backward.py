"""Backward passes, in which checkpointed activations are computed again.

A function mode is off while a function that it has seen runs. Here it must not be: what an ablation
took out of a layer must be out when the layer is computed a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .net import Net, Road
from .private_torch import unasked


def backward(net: Net, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A backward pass, with the mode on."""
    with net.functions:
        return unasked(function)(*args, **kwargs)


def functions() -> dict[Any, Road]:
    """The functions of this file."""
    return dict.fromkeys((torch.autograd.backward, torch.autograd.grad, Tensor.backward), backward)
