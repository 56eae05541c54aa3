"""The native kernel's struct in ctypes, and the values that fill it.

`cpp/headwise.h` documents the fields; `CCall` mirrors its struct field by field, and `CCall.point`
checks every tensor that it points to: dtype, device, shape, strides and memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, MutableMapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

INTERFACE = 3
"""`HW_INTERFACE` of the header that `CCall` mirrors."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of q, k and v, and their numbers in the header."""

WIDEST = 256
"""The largest head dimension, and the largest width of the values."""

LARGEST = torch.finfo(torch.float32).max
"""The largest scale."""

SOFTCAPS = (2.0**-120, 2.0**120)
"""The smallest and the largest softcap."""

STATISTICS: tuple[str, ...] = ("lse", "max", "entropy", "ahead", "first", "previous", "self")
"""The statistics of one pass, each `[B, H, T]`, in the order of the header."""

_int, _pointer, _three, _four = (
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64 * 3,
    ctypes.c_int64 * 4,
)


class CHost(ctypes.Structure):
    """`hw_host`: the functions of Python that the kernel calls."""

    _fields_ = [(name, _pointer) for name in ("leave", "enter", "stop")]


def _fields(kind: type, names: str) -> Iterator[tuple[str, type]]:
    return ((name, kind) for name in names.split())


class CCall(ctypes.Structure):
    """`hw_call`."""

    _fields_ = [
        *_fields(_int, "batch heads kv_heads queries keys dim value_dim dtype threads"),
        *_fields(_pointer, "host"),
        *_fields(ctypes.c_float, "scale softcap"),
        *_fields(_pointer, "q k v"),
        *_fields(_three, "q_stride k_stride v_stride"),
        *_fields(_int, "offset"),
        *_fields(_pointer, "position"),
        *_fields(_int, "causal window"),
        *_fields(_pointer, "low high"),
        *_fields(_three, "low_stride high_stride"),
        *_fields(_pointer, "allowed"),
        *_fields(_four, "allowed_stride"),
        *_fields(_pointer, "bias"),
        *_fields(_four, "bias_stride"),
        *_fields(_pointer, "slopes sinks"),
        *_fields(_int, "dropped seed"),
        *_fields(_pointer, "out"),
        *_fields(_three, "out_stride"),
        *_fields(_pointer, "lse max entropy ahead first previous self grad_out"),
        *_fields(_three, "grad_out_stride"),
        *_fields(_pointer, "grad_lse grad_entropy grad_ahead grad_first grad_previous grad_self"),
        *_fields(_pointer, "grad_q grad_k grad_v"),
        *_fields(_three, "grad_q_stride grad_k_stride grad_v_stride"),
        *_fields(_pointer, "grad_sinks weight received query_block key_block"),
        *_fields(_int, "blocks"),
        *_fields(_pointer, "map"),
    ]

    tensors: list[Tensor]
    """The tensors that the fields point into."""

    def point(
        self, name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], readers: int = 0
    ) -> None:
        """Point a field at a tensor, or at a copy if C cannot read the tensor directly.

        It is copied if its last axis has gaps, if a flag marks values as negated or zero, or if
        many distant rows, as in a fused projection, have many `readers` (`FAR`): each row then lies
        on its own memory page, and the processor caches fewer pages than there are rows.

        Raises:
            ValueError: dtype, shape or device is wrong, or the tensor has no memory of its own.
        """
        shared = name in _SHARED
        fits = x.shape == shape or (shared and _spreads(x, shape))
        if not fits or x.dtype is not dtype or not x.is_cpu:
            given = f"{x.dtype} {list(x.shape)} on {x.device}"
            want = f"{dtype} {list(shape)} on the CPU"
            raise ValueError(f"native kernel: {name} must be {want}, got {given}.")
        pointer = x.data_ptr()
        if not pointer or x.is_neg():
            x = _in_memory(name, x)
            pointer = x.data_ptr()
        if shared:
            strides = x.stride()
            if 1 in x.shape:
                strides = (0 if n == 1 else by for n, by in zip(x.shape, strides, strict=True))
            setattr(self, f"{name}_stride", tuple(strides))
        elif name in _STRIDED:
            strides, (rows, least) = x.stride(), FAR
            far = readers >= least and shape[2] >= rows and strides[2] > shape[3] and strides[1]
            if far or (strides[3] != 1 and shape[3] != 1):
                x = x.contiguous()
                pointer, strides = x.data_ptr(), x.stride()
            setattr(self, f"{name}_stride", strides[:3])
        elif not x.is_contiguous():
            x = x.contiguous()
            pointer = x.data_ptr()
        self.tensors.append(x)
        setattr(self, name, pointer)


_STRIDED = frozenset({"q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"})
"""Tensors with a dense last axis and a stride for each other axis; tensors in no set are dense."""

FAR = 2048, 256
"""The numbers of rows and of readers from which rows are copied to be contiguous."""

_SHARED = frozenset({"low", "high", "allowed", "bias"})
"""Tensors with a stride for each axis; shared axes have size 1."""


def _spreads(x: Tensor, shape: tuple[int, ...]) -> bool:
    """Return True if each axis of a tensor has the size in `shape`, or size 1."""
    return x.dim() == len(shape) and all(n in (1, m) for n, m in zip(x.shape, shape, strict=True))


def _in_memory(name: str, x: Tensor) -> Tensor:
    """Return a tensor whose values are in memory, resolving flags such as negation."""
    if x.is_neg():
        return x.resolve_neg()
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device="cpu")
    raise ValueError(
        f"native kernel: {name} must have memory of its own, got a {type(x).__name__} "
        f"{list(x.shape)} without it; choose another backend."
    )


class Terms(NamedTuple):
    """The mask and bias in the form that the kernel takes.

    A key is visible if every given part allows it. `low`, `high` `[B, H, T]` (int64), `allowed`
    (bool) and `bias` (float32) `[B, H, T, S]` have size 1 where an axis is shared; `position` is
    `[T]`, `slopes` `[H]`.
    """

    position: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    allowed: Tensor | None = None
    bias: Tensor | None = None
    slopes: Tensor | None = None
    offset: int = 0
    causal: bool = False
    window: int = 0


Structs = MutableMapping[Any, CCall]
"""Structs to copy, by the strides of q, k and v."""


class Problem(NamedTuple):
    """One attention call: everything that the kernels read. `sinks` is float32 `[H]`.

    Of every 65536 weights, `dropped` are dropped, selected by `seed` (int64 `[]`). `structs` caches
    structs for calls with the same sizes, dtypes, terms and numbers.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    sinks: Tensor | None
    terms: Terms
    scale: float
    softcap: float
    dropped: int = 0
    seed: Tensor | None = None
    structs: Structs | None = None
