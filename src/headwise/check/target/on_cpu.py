"""What others' code makes on a GPU, where there is none."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """Leaves on the CPU what others' code makes on a GPU, or moves to one, that is not there."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args = [_on_cpu(one) if place else one for place, one in enumerate(args)]
        return func(*args, **{name: _on_cpu(one) for name, one in (kwargs or {}).items()})


def _on_cpu(value: Any) -> Any:
    """What stands for a device, if it is a GPU; anything else as it is."""
    gpu = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if gpu else value


def wants_gpu(error: BaseException) -> bool:
    """Whether a call failed for a GPU that is not there."""
    return re.search("CUDA enabled|NVIDIA driver", str(error)) is not None
