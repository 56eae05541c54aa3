"""Statistics that were taken without their graph: tensors which say so where a loss wants it."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..core.modes import traced

_NO_GRADIENT = (
    "this statistic was taken without its graph and has no gradient; take it with gradients=True, "
    "as in hw.watch(model, …, gradients=True), or say .detach() where none is meant"
)


class Detached(Tensor):
    """A tensor like any other, but that `backward()` and `torch.autograd.grad` name its cause.

    What is computed of it alone is one too. A loss that it becomes a part of is a plain tensor, and
    a warning says that this part has no gradient; after `.detach()` there is no warning.
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

    # What PyTorch gives to tensors of its own class alone.

    def __repr__(self, **options: Any) -> str:
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.as_subclass(Tensor).clone()


def without_graph(values: Tensor) -> Tensor:
    """Values that could have had a gradient and say that they have none."""
    if values.requires_grad or type(values) is not Tensor:
        return values
    if traced() or torch._C._are_functorch_transforms_active():
        return values
    return values.as_subclass(Detached)
