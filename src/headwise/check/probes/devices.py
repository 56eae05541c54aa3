"""Follow which tensors would be on another device, on a machine that has only one.

`Elsewhere` plays the rules of a GPU: what the layer and its input hold is there; what a function
makes without being told where (`torch.ones(T, T)`) is here; and the two do not mix. PyTorch's own
device `meta` plays them, too, but takes a second to start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..target.call_adapter import tensors_in

MOVES = {"to", "type_as", "cuda", "copy_"}
"""Methods that bring a tensor elsewhere."""
MIXES = {"__getitem__", "__setitem__", "index_put_"}
"""Methods that take indices from here."""
SHAPES = {"expand_as", "view_as", "reshape_as", "sum_to_size"}
"""Methods that read no more than the shape of the other tensor."""


class Elsewhere(TorchFunctionMode):
    """Raise where tensors of two devices meet.

    >>> with Elsewhere(x := torch.ones(2)):
    ...     x + torch.ones(2)
    Traceback (most recent call last):
    RuntimeError: Expected all tensors to be on the same device, but one is on the CPU, whatever ...
    """

    def __init__(self, *there: Any) -> None:
        super().__init__()
        for tensor in tensors_in(there):
            _mark(tensor)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        given, name = list(tensors_in([*args, kwargs])), getattr(func, "__name__", "")
        there = [tensor for tensor in given if _is_marked(tensor)]
        here = [one for one in given if not _is_marked(one) and one.ndim and one.numel()]
        if there and here and name not in MOVES | MIXES | SHAPES:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but one is on the CPU, whatever "
                "the input's device is"
            )
        result = func(*args, **kwargs)
        if there or kwargs.get("device") is not None or (name in MOVES and _told(args)):
            for tensor in tensors_in(result):
                _mark(tensor)
        return result


def everything(module: nn.Module) -> list[Tensor]:
    """What moves with a module: parameters and buffers; and tables that it keeps for each device,
    which it makes anew for another one."""
    kept = (
        value for one in module.modules() for value in {**vars(type(one)), **vars(one)}.values()
    )
    tables = [one for one in kept if isinstance(one, dict) and any(map(_of_device, one))]
    return [*module.parameters(), *module.buffers(), *tensors_in(tables)]


def _of_device(key: Any) -> bool:
    return any(isinstance(one, torch.device) for one in (key if isinstance(key, tuple) else (key,)))


def _told(args: Any) -> bool:
    """Whether `to` was told a place, not only a dtype."""
    return any(isinstance(one, (torch.device, str, int)) for one in args[1:])


def _mark(tensor: Tensor) -> None:
    tensor._headwise_there = True  # type: ignore[attr-defined]


def _is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, "_headwise_there", False)
