"""What collectives move between ranks, counted as they are called."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_AROUND = ("wait_tensor", "wrap_tensor_autograd")


class Moved(TorchDispatchMode):
    """Counts collectives by name, and the bytes of the larger of what each takes and gives."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # what it does with its shards comes next
        name = func.__name__.split(".")[0]
        out = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional") and name.strip("_") not in _AROUND:
            given = [_bytes(part) for part in (*args, out)]
            self.calls[name.strip("_")] += 1
            self.bytes[name.strip("_")] += max(given)
        return out


def _bytes(part: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(part) if isinstance(x, Tensor))
