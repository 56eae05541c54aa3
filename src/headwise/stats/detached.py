"""Tensors of statistics without a graph, which raise a clear error when used in a loss."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..core.modes import traced

_NO_GRADIENT = (
    "this statistic was computed without a graph and has no gradient; compute it with "
    "gradients=True, as in hw.watch(model, …, gradients=True), or call .detach() on it"
)


class Detached(Tensor):
    """A tensor for which `backward()` and `torch.autograd.grad` explain why it has no gradient.

    Tensors computed only from `Detached` tensors are `Detached`, too. A loss that mixes one with
    other tensors is a plain tensor, with a warning that this part has no gradient. `.detach()`
    returns a plain tensor, which causes no warning.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.backward, torch.autograd.backward, torch.autograd.grad):
            first = args[0] if isinstance(args[0], tuple | list) else args[:1]
            if any(isinstance(one, cls) and not one.requires_grad for one in first):
                raise RuntimeError(_NO_GRADIENT)
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        if type(out) is cls and (out.requires_grad or func is Tensor.detach):
            out = out.as_subclass(Tensor)
        elif type(out) is Tensor:
            if out.requires_grad:
                warnings.warn(_NO_GRADIENT, stacklevel=2)
            elif func not in (Tensor.detach, Tensor.as_subclass):
                out = out.as_subclass(cls)
        return out

    # PyTorch supports these for its own tensor class only.

    def __repr__(self, **options: Any) -> str:
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def without_graph(values: Tensor) -> Tensor:
    """Return the values as a `Detached` tensor, which explains why it has no gradient."""
    if values.requires_grad or type(values) is not Tensor:
        return values
    if traced() or torch._C._are_functorch_transforms_active():
        return values
    return values.as_subclass(Detached)
