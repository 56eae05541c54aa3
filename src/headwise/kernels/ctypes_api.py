"""Calls to the native CPU kernel: the built library and its three functions.

The library is next to this file and is called through ctypes on data pointers; it is independent of
PyTorch. A library whose struct differs in size or version from `interface.py` is not used.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from . import __path__ as places
from .interface import DTYPES, INTERFACE, STATISTICS, CCall, CHost, Problem
from .threads import threads

CPU = torch.device("cpu")

BFLOAT16_ONLY = frozenset({"amx", "avx512bf16", "neonbf16"})
"""Instruction sets with code for bfloat16 only; other dtypes use the next set not among these."""

# Tests replace these to hand out poisoned memory.
empty, empty_like, empty_strided = torch.empty, torch.empty_like, torch.empty_strided


# ── the library ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Library:
    """The loaded library and the instruction sets it was built for, most capable first."""

    handle: ctypes.CDLL
    sets: tuple[str, ...]
    here: tuple[bool, ...]
    best: str
    """The set that calls use: the most capable one that is known to be fast (dispatch.cpp)."""

    @cached_property
    def usable(self) -> tuple[str, ...]:
        """The built instruction sets that this machine has, most capable first."""
        return tuple(name for name, here in zip(self.sets, self.here, strict=True) if here)


def library() -> Library | None:
    """Return the native library; `None` if there is none (see `why_not`)."""
    return _LIBRARY if isinstance(_LIBRARY, Library) else None


def why_not() -> str:
    """Return the reason why there is no native library; empty if there is one."""
    return _LIBRARY if isinstance(_LIBRARY, str) else ""


def _load() -> Library | str:
    path = _find()
    if isinstance(path, str):
        return path
    try:
        handle = ctypes.PyDLL(str(path))  # a call releases the GIL itself, and may raise
    except OSError as error:
        return f"the native kernel {path} cannot be loaded: {error}"
    return _checked(handle, path)


def _find() -> Path | str:
    for place in places:  # an editable install may keep the library outside the sources
        for name in ("libheadwise.so", "libheadwise.dylib", "headwise.dll"):
            if (Path(place) / name).is_file():
                return Path(place) / name
    return "the native kernel was not built: install headwise with g++ 11 or clang++ 14, or newer"


def _checked(handle: ctypes.CDLL, path: Path) -> Library | str:
    try:
        interface = handle.hw_interface()
        handle.hw_call_size.restype = ctypes.c_int64
        size = handle.hw_call_size()
    except AttributeError:
        return f"{path} is not a library of headwise"
    if interface != INTERFACE or size != ctypes.sizeof(CCall):
        return (
            f"the native kernel {path} has interface {interface} ({size} bytes a call), this "
            f"headwise needs {INTERFACE} ({ctypes.sizeof(CCall)}): install headwise again"
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
        return f"the native kernel was built for {', '.join(sets)}; this machine has none of them"
    return Library(handle, sets, here, sets[handle.hw_isa_best()])


def _team() -> int | None:
    """Return the OpenMP runtime of PyTorch if it has GNU's interface, else `None`."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError, TypeError):
        return None


_LIBRARY = _load()  # once, because torch.compile cannot trace this
_forced = -1


@contextmanager
def instructions(name: str) -> Iterator[None]:
    """Compute with this instruction set instead of the default one.

    Raises:
        ValueError: the library was not built for it, or the machine does not have it.
    """
    global _forced
    loaded = _loaded()
    if name not in loaded.usable:
        usable = ", ".join(loaded.usable)
        raise ValueError(f"name must be one of {usable} on this machine, got {name!r}.")
    before, _forced = _forced, loaded.sets.index(name)
    try:
        yield
    finally:
        _forced = before


def unit(dtype: torch.dtype) -> str:
    """Return the instruction set used for calls of a dtype on this machine.

    Raises:
        RuntimeError: there is no library.
    """
    loaded = _loaded()
    sets = loaded.sets[_forced if _forced >= 0 else loaded.sets.index(loaded.best) :]
    return next(x for x in sets if dtype == torch.bfloat16 or x not in BFLOAT16_ONLY)


def _loaded() -> Library:
    if isinstance(_LIBRARY, str):
        raise RuntimeError(_LIBRARY)
    return _LIBRARY


def _host() -> CHost:
    """Return the functions by which a call releases the GIL and checks for Ctrl-C."""
    python = ctypes.pythonapi
    functions = python.PyEval_SaveThread, python.PyEval_RestoreThread, python.PyErr_CheckSignals
    return CHost(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


_HOST = _host()
_HOST_AT = ctypes.addressof(_HOST)

# Nonzero return codes of the functions; the last two may be combined.
_NO_MEMORY, _NO_NUMBER, _OVERFLOW = 1, 8, 16


def _run(function: str, call: CCall) -> int:
    """Run the call; a signal's exception, such as KeyboardInterrupt, is raised from within."""
    loaded = _loaded()
    code = getattr(loaded.handle, function)(ctypes.byref(call), _forced)
    if code == _NO_MEMORY:
        raise MemoryError(f"the native kernel is out of memory for {_describe(call)}")
    if code & ~(_NO_NUMBER | _OVERFLOW):
        raise RuntimeError(f"the native kernel rejected {_describe(call)} (code {code})")
    return code


def _describe(call: CCall) -> str:
    sizes = (call.batch, call.heads, call.kv_heads, call.queries, call.keys)
    letters = ", ".join(f"{a} {n}" for a, n in zip("BHGTS", sizes, strict=True))
    return f"{letters}, D {call.dim}, Dv {call.value_dim}"


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


def forward(problem: Problem, needs: int) -> list[Tensor | None]:
    """Return the output and the statistics whose bit is set in `needs`; `None` for the others.

    Without values there is no output. Its order in memory is `[B, T, H, Dv]`. NaN, and scores that
    float32 cannot hold, give NaN in the rows that see them.
    """
    call = _start_alike(problem)
    out = None
    if problem.v is not None:
        out = output_like(problem.q, problem.v)
        call.out = out.data_ptr()
    found: list[Tensor | None] = [out]
    last = None  # `empty_like` takes half the time of `empty`
    for bit, name in enumerate(STATISTICS):
        if not needs >> bit & 1:
            found.append(None)
            continue
        last = _in_float32(problem.q.shape[:3]) if last is None else empty_like(last)
        setattr(call, name, last.data_ptr())
        found.append(last)
    if _run("hw_forward", call) & _OVERFLOW and out is not None:
        _sum_smaller_numbers(problem, out)
    return found


def statistics(
    problem: Problem, needs: int, into: Tensor, lse: Tensor | None = None, on: Tensor | None = None
) -> None:
    """Write the statistics whose bit is set in `needs` into `into` `[F, B, H, T]`.

    The log-sum-exp is computed even if it is given. If `on` is 0, nothing is done.
    """
    if on is not None and not int(on):
        return
    call = _start_alike(problem._replace(v=None))
    for name, row in zip(STATISTICS, rows_of(into, needs, problem.q), strict=True):
        if row is not None:
            setattr(call, name, row.data_ptr())
    _run("hw_forward", call)


def rows_of(into: Tensor, needs: int, q: Tensor) -> list[Tensor | None]:
    """Return the part of `into` `[F, B, H, T]` for each statistic of `needs`.

    Raises:
        ValueError: `into` has the wrong shape, dtype or device, or its parts are not contiguous.
    """
    shape = (needs.bit_count(), *q.shape[:3])
    found = into.unbind() if into.shape == shape else ()
    alike = into.dtype == torch.float32 and into.device == q.device
    if len(found) != shape[0] or not alike or not all(x.is_contiguous() for x in found):
        raise ValueError(
            f"native kernel: into must be float32 {list(shape)} on {q.device}, dense along its "
            f"last three axes, got {into.dtype} {list(into.shape)} on {into.device}."
        )
    rows = iter(found)
    return [next(rows) if needs >> bit & 1 else None for bit in range(len(STATISTICS))]


def output(problem: Problem) -> Tensor | None:
    """Return only the output, like `forward`; `None` if the weights of a row are NaN."""
    assert problem.v is not None
    call = _start_alike(problem)
    out = output_like(problem.q, problem.v)
    call.out = out.data_ptr()
    code = _run("hw_forward", call)
    if code & _OVERFLOW:
        _sum_smaller_numbers(problem, out)
    return None if code & _NO_NUMBER else out


def backward(
    problem: Problem,
    out: Tensor | None,
    rows: dict[str, Tensor | None],
    grad_out: Tensor | None,
    grads: dict[str, Tensor | None],
    needed: tuple[bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Return the gradients with respect to q, k, v and the sinks `[H]`, where they are needed.

    `rows` are the forward pass's statistics, `grads` the gradients with respect to each of them.
    """
    call = _start(problem)
    q, _, v = problem[:3]
    shape = q.shape[:3]
    for name, x in (("out", out), ("grad_out", grad_out)):
        if x is not None and v is not None:
            call.point(name, x, q.dtype, (*shape, v.shape[3]))
    for name, x in (*rows.items(), *((f"grad_{name}", grad) for name, grad in grads.items())):
        if x is not None:
            call.point(name, x, torch.float32, shape)
    found: list[Tensor | None] = []
    for name, x, wanted in zip("qkv", problem[:3], needed, strict=False):
        grad = gradient_like(x) if wanted and x is not None else None
        if grad is not None:
            call.point(f"grad_{name}", grad, q.dtype, grad.shape)
        found.append(grad)
    shares = None
    if needed[3] and problem.sinks is not None:
        shares = _in_float32(shape)
        call.point("grad_sinks", shares, torch.float32, shape)
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
    """Return `Σ_i weight_i p_ij` `[B, H, S]` if `received`, and sums over `blocks` `[B, H, n, n]`.

    `blocks` holds the block number of every query `[T]` and every key `[S]`, ascending, and n.

    Raises:
        ValueError: a block number is not in 0…n−1.
    """
    call = _start(problem)
    b, h, t, _ = problem.q.shape
    s = problem.k.shape[2]
    call.point("lse", lse.to(torch.float32), torch.float32, (b, h, t))
    if weight is not None:
        call.point("weight", weight.to(torch.float32), torch.float32, (t,))
    columns = table = None
    if received:
        columns = _in_float32((b, h, s))
        call.point("received", columns, torch.float32, columns.shape)
    if blocks is not None:
        of_query, of_key, n = blocks
        call.blocks = n
        for name, of, size in (("query_block", of_query, t), ("key_block", of_key, s)):
            call.point(name, of.to(torch.int32), torch.int32, (size,))
            if not 0 <= int(of.amin()) <= int(of.amax()) < n:
                raise ValueError(f"{_describe(call)}: {name} must be from 0 to {n - 1}.")
        table = _in_float32((b, h, n, n))
        call.point("map", table, torch.float32, table.shape)
    _run("hw_sums", call)
    return columns, table


def _sum_smaller_numbers(problem: Problem, out: Tensor) -> None:
    """Recompute outputs whose sums over finite values overflowed before the division."""
    v = problem.v
    assert v is not None
    if not bool(v.isfinite().all()):
        return
    factor = 2.0 ** -math.ceil(1 + math.log2(v.shape[2]))
    again = forward(problem._replace(v=v * factor), 0)[0]
    assert again is not None
    out.copy_(torch.where(out.isfinite(), out, again / factor))


def _in_float32(shape: tuple[int, ...]) -> Tensor:
    return empty(shape, dtype=torch.float32, device=CPU)


def output_like(q: Tensor, v: Tensor) -> Tensor:
    """Return an empty output `[B, H, T, Dv]` whose heads can be merged as a view."""
    b, h, t, _ = q.shape
    wide = v.shape[3]
    strides = _output_strides(h, t, wide)
    return empty_strided((b, h, t, wide), strides, dtype=q.dtype, device=q.device)


def _output_strides(heads: int, queries: int, wide: int) -> tuple[int, int, int, int]:
    return queries * heads * wide, wide, heads * wide, 1


def gradient_like(x: Tensor) -> Tensor:
    """Return an empty gradient of `x` `[B, H, T, D]` with the same memory order as `x`."""
    b, h, t, d = x.shape
    if x.stride(1) < x.stride(2):
        strides = (t * h * d, d, h * d, 1)
        return empty_strided((b, h, t, d), strides, dtype=x.dtype, device=x.device)
    return empty((b, h, t, d), dtype=x.dtype, device=x.device)


def _start_alike(problem: Problem) -> CCall:
    """Return the struct with all inputs, copied from a call that differs only in addresses."""
    q, k, v, structs = problem.q, problem.k, problem.v, problem.structs
    if structs is None or problem.sinks is not None:
        return _start(problem)
    values = None if v is None else (v.shape, v.stride())
    place = q.stride(), k.stride(), values
    image = structs.get(place)
    at = q.data_ptr(), k.data_ptr(), None if v is None else v.data_ptr()
    if image is None or 0 in at or q.is_neg() or k.is_neg() or (v is not None and v.is_neg()):
        call = _start(problem)
        if (call.q, call.k, call.v) == at:  # no tensor was replaced by a copy
            structs[place] = CCall.from_buffer_copy(call)
        return call
    call = CCall.from_buffer_copy(image)
    call.q, call.k, call.v = at
    call.threads = threads()
    _set_dropout(call, problem)
    return call


def _start(problem: Problem) -> CCall:
    """Return the struct with all inputs."""
    q, k, v, sinks, terms, scale, softcap, *_ = problem
    b, h, t, d = q.shape
    _, g, s, _ = k.shape
    dtype = q.dtype
    if dtype not in DTYPES:
        raise ValueError(f"native kernel: q must be one of {list(DTYPES)}, got {dtype}.")
    call = CCall(b, h, g, t, s, d, 0, DTYPES[dtype], threads(), _HOST_AT, scale, softcap)
    call.tensors = []
    call.point("q", q, dtype, (b, h, t, d))
    call.point("k", k, dtype, (b, g, s, d), readers=t)
    if v is not None:
        call.value_dim = wide = v.shape[3]
        call.point("v", v, dtype, (b, g, s, wide), readers=t)
        call.out_stride = _output_strides(h, t, wide)[:3]
    if sinks is not None:
        call.point("sinks", sinks, torch.float32, (h,))
    position, low, high, allowed, bias, slopes, call.offset, call.causal, call.window = terms
    if position is not None:
        call.point("position", position, torch.int64, (t,))
    if low is not None:
        call.point("low", low, torch.int64, (b, h, t))
    if high is not None:
        call.point("high", high, torch.int64, (b, h, t))
    if allowed is not None:
        call.point("allowed", allowed, torch.bool, (b, h, t, s))
    if bias is not None:
        call.point("bias", bias, torch.float32, (b, h, t, s))
    if slopes is not None:
        call.point("slopes", slopes, torch.float32, (h,))
    _set_dropout(call, problem)
    return call


def _set_dropout(call: CCall, problem: Problem) -> None:
    call.dropped = problem.dropped
    if problem.dropped:
        assert problem.seed is not None
        call.seed = int(problem.seed)
