"""The native kernels: every figure of every head in the pass that makes the output.

There is one in C++ for CPUs, and one in Triton for CUDA. One pass over the scores gives output,
log-sum-exp, largest score, entropy, distance and the masses of the first, previous and own key;
without values it gives the same figures for an output that somebody else made. Masks become flags,
ranges of keys or tables (`native_masks.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.call import Call
from ..core.dropout import dropped_of
from ..core.masks import Causal, Everything
from ..core.modes import forward_derivatives, traced, transformed
from ..kernels import ctypes_api as cpu
from ..kernels import torch_ops as native_ops
from ..kernels import triton_api as cuda
from ..kernels.interface import Problem, Terms
from .base import Figures, OnePass
from .native_masks import TABLE_LIMIT, table_bytes, terms_of
from .recompute import again
from .sdpa import Sdpa
from .tiles import whole


class Native(OnePass):
    """The kernels of headwise: C++ on CPUs, Triton on CUDA; float32, bfloat16 and float16.

    On CUDA the output of a call without a mask, or with a causal one that is square, is that of
    PyTorch's fused kernel, which is faster still; the figures come from a pass without values that
    knows its log-sum-exp.
    """

    name = "native"

    def refuse(self, call: Call) -> list[str]:
        device = call.q.device.type
        if device not in ("cpu", "cuda"):
            return [f"kernels for CPUs and CUDA, and this call is on {device}"]
        missing = cpu.why_not() if device == "cpu" else cuda.why_not(call.q.device)
        if missing:
            return [missing]
        reasons = []
        extent, dim, wide = call.extent, call.q.shape[3], call.v.shape[3]
        if call.q.dtype not in cpu.DTYPES:
            reasons.append(f"no native kernel for {call.q.dtype}")
        if dim > cpu.WIDEST or wide > cpu.WIDEST:
            reasons.append(f"heads wider than {cpu.WIDEST} ({max(dim, wide)})")
        if 0 in (extent.batch, extent.queries, extent.keys) or wide == 0:
            return [*reasons, "the native kernel does not take empty tensors"]
        if torch.is_grad_enabled() and any(x.requires_grad for x in call.mask.tensors()):
            reasons.append("the native kernel gives no gradient for a bias")
        if forward_derivatives() or transformed():
            reasons.append("the native kernel knows no torch.func and no forward derivative")
        if not -cpu.LARGEST <= call.scale <= cpu.LARGEST:
            reasons.append(f"a scale beyond float32 ({call.scale})")
        if call.softcap is not None and not cpu.SOFTCAPS[0] <= call.softcap <= cpu.SOFTCAPS[1]:
            reasons.append(f"a softcap of extreme size ({call.softcap})")
        if device == "cuda":
            reasons += _refuse_on_cuda(call)
        size = table_bytes(call.mask, extent, call.q.device)
        if size > TABLE_LIMIT:
            reasons.append(
                f"the mask would need a table of {size / 2**20:.0f} MiB "
                f"(at most {TABLE_LIMIT / 2**20:.0f} MiB)"
            )
        return reasons

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        if _fused(call):
            return Sdpa().run(call, lse_gradient)
        out, lse = native_ops.compute(_problem(call, call.v), native_ops.BIT["lse"], again)[:2]
        assert out is not None
        assert lse is not None
        return out, lse

    def output(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if _fused(call):
            return Sdpa().run(call)
        found = native_ops.output(_problem(call, call.v))
        return self.run(call) if found is None else (found, None)

    def observe(self, call: Call, wishes: Iterable[str], gradients: bool = True) -> Figures:
        """Output, LSE and the wished figures of `cpu.FIGURES`, in one pass."""
        if _fused(call):
            wishes = tuple(wishes)
            out, lse = Sdpa().run(call, gradients and not wishes)
            with nullcontext() if gradients else torch.no_grad():
                given = self.figures(call, wishes, lse) if wishes else Figures(None, lse)
            return replace(given, out=out)
        return Figures(*native_ops.compute(_problem(call, call.v), _bits(wishes), again, gradients))

    def figures(self, call: Call, wishes: Iterable[str], lse: Tensor | None = None) -> Figures:
        """The same without the output; the values are not read.

        A log-sum-exp that is at hand spares the kernel for GPUs half of its work.
        """
        known = None if lse is None else lse.detach()
        return Figures(*native_ops.compute(_problem(call, None), _bits(wishes), again, lse=known))

    def received(
        self,
        call: Call,
        lse: Float[Tensor, "B H T"],
        weight: Float[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "B H S"]:
        """`Σ_i weight_i p_ij`: what each key received, given the LSE. No gradient."""
        found, _ = native_ops.sums(_problem(call, None), lse, weight, True, None)
        assert found is not None
        return found

    def block_map(
        self,
        call: Call,
        lse: Float[Tensor, "B H T"],
        query_block: Int[Tensor, " T"],
        key_block: Int[Tensor, " S"],
        blocks: int,
        weight: Float[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "B H n n"]:
        """`Σ weight_i p_ij` over the queries and keys of each pair of blocks. No gradient.

        `query_block` and `key_block` say in ascending order which of `blocks` each belongs to.
        """
        asked = (query_block, key_block, blocks)
        _, found = native_ops.sums(_problem(call, None), lse, weight, False, asked)
        assert found is not None
        return found


def _refuse_on_cuda(call: Call) -> Iterator[str]:
    wide = max(call.q.shape[3], call.v.shape[3])
    if call.q.dtype == torch.float32 and wide > cuda.WIDEST_EXACT:
        yield f"heads of float32 wider than {cuda.WIDEST_EXACT} ({wide})"
    if call.dropout:
        yield "the kernel for GPUs has no dropout"


def _fused(call: Call) -> bool:
    """Whether PyTorch's fused kernel makes the output: on CUDA, where no mask keeps it from it."""
    if not call.q.is_cuda or call.sinks is not None:
        return False
    if call.kind is None:
        return _unmasked(call)
    asked = "fused", call.needs_grad
    found = call.kind.known.get(asked)
    if found is None:
        found = call.kind.known[asked] = _unmasked(call)
    return found


def _unmasked(call: Call) -> bool:
    if type(call.mask) not in (Everything, Causal):  # others would have to be looked into
        return False
    if call.softcap is not None or call.scale <= 0 or Sdpa().refuse(call):
        return False
    return whole(call.mask, call.extent, call.q.device) is not None


def faster(call: Call) -> bool:
    """Whether the kernel is faster than all others, as measured for the calls most like this one.

    Where nothing was measured, it is taken for faster.
    """
    if traced() or call.q.is_cuda:  # a traced choice would be for ever
        return True
    return (_speed(call) or 1.0) >= 1.0


def measured(call: Call) -> str:
    """How fast the kernel was in the calls most like this one, by which unit, on what, and when.

    Empty on CUDA, for which there is no table.
    """
    if call.q.is_cuda:
        return ""
    unit, table, speed = cpu.unit(call.q.dtype), cpu.table(), _speed(call)
    assert table is not None
    if speed is None:
        return f"by {unit}; not measured for {call.q.dtype} on {table.cpu}"
    return f"by {unit}, measured {speed:.2f} × as fast as the others: {table.cpu}, {table.measured}"


def _speed(call: Call) -> float | None:
    table, dtype = cpu.table(), call.q.dtype
    sizes = (call.extent.queries, call.extent.keys, call.q.shape[3])
    return table and table.speed(dtype, call.needs_grad, sizes, cpu.unit(dtype))


def _problem(call: Call, v: Tensor | None) -> Problem:
    sinks = None if call.sinks is None else call.sinks.to(torch.float32)
    known = None if call.kind is None else call.kind.known
    terms = None if known is None else known.get("terms")
    if terms is None:
        terms = _terms(call)
    if known is not None and any(isinstance(x, Tensor) for x in terms):
        known = None
    dropped = dropped_of(call.dropout) if call.dropout and v is not None else 0
    softcap, seed = call.softcap or 0.0, call.seed if dropped else None
    return Problem(call.q, call.k, v, sinks, terms, call.scale, softcap, dropped, seed, known)


def _terms(call: Call) -> Terms:
    """The terms of a call's mask; where it holds no tensors, calls of a kind share them."""
    if call.kind is None:
        return terms_of(call.mask, call.extent, call.q.device)
    with torch.inference_mode(False):  # graphs keep them
        terms = terms_of(call.mask, call.extent, call.q.device)
    if terms.allowed is None and terms.bias is None:  # which may be large
        call.kind.known["terms"] = terms
    return terms


def _bits(wishes: Iterable[str]) -> int:
    bits = native_ops.BIT["lse"]
    for wish in wishes:
        bits |= native_ops.BIT[wish]
    return bits
