"""The native CPU kernel as Python calls it: the built library, its struct, and nothing else.

The library lies beside this file and is called through ctypes on data pointers; it knows nothing
of PyTorch. `native/headwise.h` says what each function reads and writes; `CCall` mirrors its struct
field by field, and a library whose struct has another size or version is not used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import __path__ as places

INTERFACE = 1
"""`HW_INTERFACE` of the header that `CCall` mirrors."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of q, k and v, and their numbers in the header."""

WIDEST = 256
"""The largest head dimension, and the largest width of the values."""

FIGURES: tuple[str, ...] = ("lse", "max", "entropy", "ahead", "first", "previous", "self")
"""What one pass gives beside the output, each `[B, H, T]`, in the order of the header."""

empty, empty_like = torch.empty, torch.empty_like  # the tests hand out poisoned memory here

_int, _pointer, _three, _four = (
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_int64 * 3,
    ctypes.c_int64 * 4,
)


class CCall(ctypes.Structure):
    """`hw_call`."""

    _fields_ = [
        *((name, _int) for name in ("batch", "heads", "kv_heads", "queries", "keys")),
        *((name, _int) for name in ("dim", "value_dim", "dtype", "threads")),
        *(("scale", ctypes.c_float), ("softcap", ctypes.c_float)),
        *((name, _pointer) for name in "qkv"),
        *((f"{name}_stride", _three) for name in "qkv"),
        *(("offset", _int), ("position", _pointer), ("causal", _int), ("window", _int)),
        *(("low", _pointer), ("high", _pointer)),
        *(("low_stride", _three), ("high_stride", _three)),
        *(("allowed", _pointer), ("allowed_stride", _four)),
        *(("bias", _pointer), ("bias_stride", _four)),
        *(("slopes", _pointer), ("sinks", _pointer)),
        *(("out", _pointer), ("out_stride", _three)),
        *((name, _pointer) for name in FIGURES),
        *(("grad_out", _pointer), ("grad_out_stride", _three)),
        *((f"grad_{name}", _pointer) for name in FIGURES if name != "max"),
        *((f"grad_{name}", _pointer) for name in "qkv"),
        *((f"grad_{name}_stride", _three) for name in "qkv"),
        ("grad_sinks", _pointer),
        *(("weight", _pointer), ("received", _pointer)),
        *(("query_block", _pointer), ("key_block", _pointer), ("blocks", _int), ("map", _pointer)),
    ]


class Terms(NamedTuple):
    """Who may attend, and what is added to the scores, as the kernel takes them.

    Everything that is given must allow a pair. `low`, `high` `[B, H, T]` (int64), `allowed` (bool)
    and `bias` (float32) `[B, H, T, S]` have size 1 where an axis is shared; `position` is `[T]`,
    `slopes` `[H]`.
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


class Problem(NamedTuple):
    """Attention on CPU tensors: all that the kernel reads. `sinks` is float32 `[H]`."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    sinks: Tensor | None
    terms: Terms
    scale: float
    softcap: float


# ── the library ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Library:
    """The loaded library, and the instruction sets that it was built for, best first."""

    handle: ctypes.CDLL
    sets: tuple[str, ...]
    here: tuple[bool, ...]

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The instruction sets that this machine has, best first."""
        return tuple(name for name, here in zip(self.sets, self.here, strict=True) if here)


def library() -> Library | None:
    """The native library; `None` where there is none, and `why_not` says why."""
    return _found if isinstance(_found, Library) else None


def why_not() -> str:
    """Why there is no native library; empty where there is one."""
    return _found if isinstance(_found, str) else ""


def _load() -> Library | str:
    path = _find()
    if isinstance(path, str):
        return path
    try:
        handle = ctypes.CDLL(str(path))
    except OSError as error:
        return f"the native kernel {path} cannot be loaded: {error}"
    return _checked(handle, path)


def _find() -> Path | str:
    for place in places:  # of an editable install, the library may lie apart from the sources
        for name in ("libheadwise.so", "libheadwise.dylib", "headwise.dll"):
            if (Path(place) / name).is_file():
                return Path(place) / name
    return (
        "the native kernel was not built: install headwise where there is g++ 11 or clang++ 14, "
        "or newer"
    )


def _checked(handle: ctypes.CDLL, path: Path) -> Library | str:
    try:
        interface = handle.hw_interface()
        handle.hw_call_size.restype = ctypes.c_int64
        size = handle.hw_call_size()
    except AttributeError:
        return f"{path} is no library of headwise"
    if interface != INTERFACE or size != ctypes.sizeof(CCall):
        return (
            f"the native kernel {path} speaks interface {interface} ({size} bytes a call), this "
            f"headwise {INTERFACE} ({ctypes.sizeof(CCall)}): install headwise again"
        )
    handle.hw_isa_name.restype = ctypes.c_char_p
    for name in ("hw_forward", "hw_backward", "hw_sums"):
        getattr(handle, name).argtypes = (ctypes.c_void_p, ctypes.c_int)
    team = _team()
    if team is not None:
        handle.hw_use_team.argtypes = (ctypes.c_void_p,)
        handle.hw_use_team.restype = None
        handle.hw_use_team(team)
    numbers = range(handle.hw_isa_count())
    sets = tuple(handle.hw_isa_name(number).decode() for number in numbers)
    here = tuple(bool(handle.hw_isa_here(number)) for number in numbers)
    if not any(here):
        return f"the native kernel was built for {', '.join(sets)}, and this machine has none"
    return Library(handle, sets, here)


def _team() -> int | None:
    """The OpenMP runtime that PyTorch computes with, if it is GNU's or speaks its language."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


_found = _load()  # once, as torch.compile cannot look into this
_forced = -1


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Compute with this instruction set in place of the best one.

    Raises:
        ValueError: the library was not built for it, or the machine does not have it.
    """
    global _forced
    loaded = _loaded()
    if name not in loaded.usable:
        raise ValueError(f"instructions({name!r}): there are {', '.join(loaded.usable)}.")
    before, _forced = _forced, loaded.sets.index(name)
    try:
        yield
    finally:
        _forced = before


def _loaded() -> Library:
    if isinstance(_found, str):
        raise RuntimeError(_found)
    return _found


def _run(function: str, call: CCall) -> None:
    code = getattr(_loaded().handle, function)(ctypes.byref(call), _forced)
    if code == 1:
        raise MemoryError(f"the native kernel found no memory for {_describe(call)}")
    if code:
        raise RuntimeError(f"the native kernel refused {_describe(call)} (code {code})")


def _describe(call: CCall) -> str:
    sizes = (call.batch, call.heads, call.kv_heads, call.queries, call.keys)
    letters = ", ".join(f"{a} {n}" for a, n in zip("BHGTS", sizes, strict=True))
    return f"{letters}, D {call.dim}, Dv {call.value_dim}"


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


def forward(problem: Problem, wishes: int) -> list[Tensor | None]:
    """Output and the figures of which `wishes` has the bit set, `None` in place of the others.

    Without values there is no output. The output's memory is `[B, T, H, Dv]`.
    """
    keep: list[Tensor] = []
    call = _start(problem, keep)
    shape = problem.q.shape[:3]
    out = output_like(problem.q, problem.v)
    if out is not None:
        call.out, call.out_stride = out.data_ptr(), out.stride()[:3]
    found: list[Tensor | None] = [out]
    last = None  # like another, a tensor takes half the time to make
    for bit, name in enumerate(FIGURES):
        if not wishes >> bit & 1:
            found.append(None)
            continue
        last = empty(shape, dtype=torch.float32) if last is None else empty_like(last)
        setattr(call, name, last.data_ptr())
        found.append(last)
    _run("hw_forward", call)
    return found


def backward(
    problem: Problem,
    out: Tensor | None,
    figures: dict[str, Tensor | None],
    grad_out: Tensor | None,
    grads: dict[str, Tensor | None],
    needed: tuple[bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients in q, k, v and the sinks `[H]`, where they are needed.

    `figures` are those of the forward as it left them, `grads` what comes in for each.
    """
    keep: list[Tensor] = []
    call = _start(problem, keep)
    if out is not None:
        call.out, call.out_stride = out.data_ptr(), out.stride()[:3]
    for name, figure in figures.items():
        if figure is not None:
            setattr(call, name, figure.data_ptr())
    if grad_out is not None:
        grad_out = _dense_last(grad_out, keep)
        call.grad_out, call.grad_out_stride = grad_out.data_ptr(), grad_out.stride()[:3]
    for name, grad in grads.items():
        if grad is not None:
            keep.append(grad := grad.to(torch.float32).contiguous())
            setattr(call, f"grad_{name}", grad.data_ptr())
    found: list[Tensor | None] = []
    for name, x, wanted in zip("qkv", problem[:3], needed, strict=False):
        grad = gradient_like(x) if wanted and x is not None else None
        if grad is not None:
            setattr(call, f"grad_{name}", grad.data_ptr())
            setattr(call, f"grad_{name}_stride", grad.stride()[:3])
        found.append(grad)
    shares = None
    if needed[3] and problem.sinks is not None:
        shares = empty(problem.q.shape[:3], dtype=torch.float32)
        call.grad_sinks = shares.data_ptr()
    _run("hw_backward", call)
    found.append(None if shares is None else shares.sum(2).sum(0))
    return found


def sums(
    problem: Problem,
    lse: Tensor,
    weight: Tensor | None,
    received: bool,
    blocks: tuple[Tensor, Tensor, int] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """`Σ_i weight_i p_ij` `[B, H, S]` if `received`, and the same by blocks `[B, H, n, n]`.

    `blocks` is the block of every query (int32 `[T]`) and of every key, ascending, and n.
    """
    keep: list[Tensor] = [lse := lse.to(torch.float32).contiguous()]
    call = _start(problem, keep)
    call.lse = lse.data_ptr()
    b, h = problem.q.shape[:2]
    if weight is not None:
        keep.append(weight := weight.to(torch.float32).contiguous())
        call.weight = weight.data_ptr()
    columns = table = None
    if received:
        columns = empty((b, h, problem.k.shape[2]), dtype=torch.float32)
        call.received = columns.data_ptr()
    if blocks is not None:
        of_query, of_key = (x.to(torch.int32).contiguous() for x in blocks[:2])
        keep += of_query, of_key
        table = empty((b, h, blocks[2], blocks[2]), dtype=torch.float32)
        call.query_block, call.key_block = of_query.data_ptr(), of_key.data_ptr()
        call.blocks, call.map = blocks[2], table.data_ptr()
    _run("hw_sums", call)
    return columns, table


def output_like(q: Tensor, v: Tensor | None) -> Tensor | None:
    """Room for the output `[B, H, T, Dv]`, in such order that merging the heads is a view."""
    if v is None:
        return None
    b, h, t, _ = q.shape
    return empty((b, t, h, v.shape[3]), dtype=q.dtype, device=q.device).transpose(1, 2)


def gradient_like(x: Tensor) -> Tensor:
    """Room for the gradient of a tensor `[B, H, T, D]`, its heads and positions in x's order."""
    b, h, t, d = x.shape
    if x.stride(1) < x.stride(2):
        return empty((b, t, h, d), dtype=x.dtype, device=x.device).transpose(1, 2)
    return empty((b, h, t, d), dtype=x.dtype, device=x.device)


# ── the struct ──────────────────────────────────────────────────────────────────────────────────


def _start(problem: Problem, keep: list[Tensor]) -> CCall:
    """The struct with all inputs; `keep` holds the copies that it points into."""
    q, k, v, sinks, terms, scale, softcap = problem
    q, k = _dense_last(q, keep), _dense_last(k, keep)
    b, h, t, d = q.shape
    _, g, s, _ = k.shape
    call: Any = CCall(b, h, g, t, s, d, 0, DTYPES[q.dtype], torch.get_num_threads(), scale, softcap)
    call.q, call.q_stride = q.data_ptr(), q.stride()[:3]
    call.k, call.k_stride = k.data_ptr(), k.stride()[:3]
    if v is not None:
        v = _dense_last(v, keep)
        call.value_dim = v.shape[3]
        call.v, call.v_stride = v.data_ptr(), v.stride()[:3]
    if sinks is not None:
        call.sinks = sinks.data_ptr()
    call.offset, call.causal, call.window = terms.offset, terms.causal, terms.window
    for name, x in zip(Terms._fields[:6], terms[:6], strict=True):
        if x is None:
            continue
        setattr(call, name, x.data_ptr())
        if x.dim() > 1:
            setattr(call, f"{name}_stride", _shared(x))
    return call


def _dense_last(x: Tensor, keep: list[Tensor]) -> Tensor:
    if x.stride(3) == 1 or x.shape[3] == 1:
        return x
    keep.append(x := x.contiguous())
    return x


def _shared(x: Tensor) -> tuple[int, ...]:
    """Strides that are 0 along axes of size 1, which all share."""
    return tuple(
        0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)
    )
