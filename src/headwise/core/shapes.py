"""The letters used in all shapes, and shape checks whose messages quote the call.

`B` batch, `H` query heads, `G` key/value heads, `T` queries, `S` keys, `D` head dimension.
Tensors are `[B, H, T, D]` and `[B, G, S, D]`; query head `h` reads key/value head `h // (H // G)`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from .numbers import as_int, format_value


@dataclass(frozen=True)
class Extent:
    """The sizes of one attention call.

    Query `i` is at key position `i + first_query`. By default that is `i + S − T`, so the last
    query is at the last key.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    first_query: int | None = None

    @property
    def offset(self) -> int:
        """The key position of query 0; by default negative if there are more queries than keys."""
        return self.keys - self.queries if self.first_query is None else self.first_query

    @property
    def inside(self) -> bool:
        """True if every query is at the position of a key."""
        return 0 <= self.offset <= self.keys - self.queries

    @property
    def group(self) -> int:
        """The number of query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        return f"B {self.batch}, H {self.heads}, T {self.queries}, S {self.keys}"


def quote(q: Tensor, k: Tensor, v: Tensor, function: str = "attend") -> str:
    """Return the call with its shapes, for error messages."""
    return f"{function}(q {_shape(q)}, k {_shape(k)}, v {_shape(v)})"


def _shape(x: object) -> str:
    if not isinstance(x, Tensor):
        return type(x).__name__
    return "nested" if x.is_nested else str(list(x.shape))


def extent_of(
    q: Tensor, k: Tensor, v: Tensor, function: str = "attend", first_query: int | None = None
) -> Extent:
    """Return the sizes of q, k and v; raise ValueError if they do not fit together."""
    if fault := _misfit(q, k, v):
        raise ValueError(f"{quote(q, k, v, function)}: {fault}")
    first = None if first_query is None else as_int(first_query)
    if first is None and first_query is not None:
        raise ValueError(
            f"{quote(q, k, v, function)}: first_query={format_value(first_query)}: "
            f"give the key position "
            f"of query 0, a whole number."
        )
    return Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2], first)


def _misfit(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return a description of what is wrong with q, k and v together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if fault := _fault_of(x):
            return f"{name} {fault}."
    heads, dim = q.shape[1], q.shape[3]
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        return "the batch (axis 0) of q, k and v must be the same."
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        return "k and v must have the same heads (axis 1) and length (axis 2)."
    if k.shape[3] != dim:
        return "q and k must have the same head_dim (axis 3)."
    if dim == 0 or heads == 0 or k.shape[1] == 0:
        return "there must be at least one head and one feature."
    if heads % k.shape[1]:
        return (
            f"{heads} query heads cannot share {k.shape[1]} key/value heads evenly; "
            f"the number of key/value heads must divide the number of query heads."
        )
    if not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give all three one dtype."
    if not q.device == k.device == v.device:
        return f"q is on {q.device}, k on {k.device}, v on {v.device}."
    return None


def _fault_of(x: object) -> str | None:
    """Return the reason why something cannot be queries, keys or values."""
    if fault := not_dense(x):
        return fault
    assert isinstance(x, Tensor)
    if x.dim() != 4:
        return (
            f"has {x.dim()} axes and must have 4, [batch, heads, length, head_dim]; "
            f"add the missing axes with unsqueeze"
        )
    if x.is_quantized:
        return f"is quantized ({x.dtype}); call dequantize() first"
    if not x.is_floating_point():
        return f"is {x.dtype}; attention needs a floating-point dtype"
    return None


def not_dense(x: object) -> str | None:
    """Return the reason why something is not a dense tensor."""
    if not isinstance(x, Tensor):
        return f"is a {type(x).__name__}, not a torch.Tensor"
    if x.is_nested:
        return (
            "is a nested tensor; pad the rows with to_padded_tensor(0.0) before they are split "
            "into heads and give mask=Padding(lengths), or concatenate them and give "
            "mask=Documents(ids)"
        )
    if x.layout != torch.strided:
        return f"is {x.layout}; give a dense tensor, for example by to_dense()"
    return None


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context that disables autocast, so that products keep the given dtypes."""
    kind = device.type
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
