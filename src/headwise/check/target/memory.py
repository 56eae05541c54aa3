"""Weights that nothing sets: `torch.empty` and `torch.Tensor(…)` give whatever lay in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def marked() -> Iterator[None]:
    """Let fresh memory hold NaN, as in PyTorch's deterministic mode, until somebody sets numbers.

    >>> with marked():
    ...     torch.empty(2), torch.zeros(2)
    (tensor([nan, nan]), tensor([0., 0.]))
    """
    mode = torch._C  # of which `torch.use_deterministic_algorithms` first imports a compiler
    before = mode._get_deterministic_algorithms(), mode._get_deterministic_algorithms_warn_only()
    mode._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        mode._set_deterministic_algorithms(before[0], warn_only=before[1])


def unset_in(thing: Any) -> list[str]:
    """The parameters of a module that still hold a mark: they get small numbers instead, and zeros
    come where other tensors are marked."""
    if not isinstance(thing, nn.Module):
        return []
    names, draw = list[str](), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in thing.named_parameters():
            if _is_marked(parameter):
                names.append(name)
                wide = parameter.shape[-1] if parameter.ndim else 1
                parameter.copy_(torch.randn(parameter.shape, generator=draw) / wide**0.5)
        held = (
            value for part in thing.modules() for value in {**vars(part), **part._buffers}.values()
        )
        for value in held:
            if isinstance(value, Tensor) and _is_marked(value):
                value.nan_to_num_()
    return names


def _is_marked(tensor: Tensor) -> bool:
    if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
        return False
    return tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any())
