"""The native kernels: statistics of every head in the pass that computes the output.

There is one in C++ for CPUs and one in Triton for CUDA. One pass over the scores computes output,
log-sum-exp, largest score, entropy, distance and the masses on the first, previous and own key;
without values, it computes the statistics for an output of another kernel. Masks become flags,
ranges of keys or tables (`native_masks.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.call import Call
from ..core.dropout import STEPS, dropped_of
from ..core.mask_algebra import Mask, Rows
from ..core.masks import Causal, Everything
from ..core.modes import forward_derivatives, traced, transformed
from ..core.shapes import Extent
from ..kernels import ctypes_api as cpu
from ..kernels import torch_ops as native_ops
from ..kernels import triton_api as cuda
from ..kernels.interface import DTYPES, LARGEST, SOFTCAPS, WIDEST, Problem, Terms
from .base import Backend, RowStatistics
from .blocked import statistics_again
from .native_masks import TABLE_LIMIT, table_bytes, terms_of
from .sdpa import Sdpa
from .tiles import single_tile


class Native(Backend):
    """The kernels of headwise: C++ on CPUs, Triton on CUDA; float32, bfloat16 and float16.

    On CUDA PyTorch's fused kernel computes the output of a call without a mask, or with a square
    causal one, and a pass without values computes the statistics from its log-sum-exp: two
    launches, bit-exact with PyTorch. With `own_output`, as when chosen by name, one launch of this
    kernel computes output and statistics together.
    """

    name = "native"

    def __init__(self, own_output: bool = False) -> None:
        self.own_output = own_output

    def refuse(self, call: Call) -> list[str]:
        device = call.q.device.type
        if device not in ("cpu", "cuda"):
            return [f"the native kernels run on CPUs and CUDA, and this call is on {device}"]
        missing = cpu.why_not() if device == "cpu" else cuda.why_not(call.q.device)
        if missing:
            return [missing]
        reasons = []
        extent, dim, wide = call.extent, call.q.shape[3], call.v.shape[3]
        if call.q.dtype not in DTYPES:
            reasons.append(f"no native kernel for {call.q.dtype}")
        if dim > WIDEST or wide > WIDEST:
            reasons.append(f"heads are wider than {WIDEST} ({max(dim, wide)})")
        if 0 in (extent.batch, extent.queries, extent.keys) or wide == 0:
            return [*reasons, "the native kernel does not support empty tensors"]
        if torch.is_grad_enabled() and any(x.requires_grad for x in call.mask.tensors()):
            reasons.append("the native kernel computes no gradient for a bias")
        if forward_derivatives() or transformed():
            reasons.append("the native kernel does not support torch.func or forward derivatives")
        if not -LARGEST <= call.scale <= LARGEST:
            reasons.append(f"scale is too large for float32 ({call.scale})")
        if call.softcap is not None and not SOFTCAPS[0] <= call.softcap <= SOFTCAPS[1]:
            reasons.append(f"softcap is too large or too small ({call.softcap})")
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
        if self._by_pytorch(call):
            return Sdpa().run(call, lse_gradient)
        found = self.observe(call, ())
        assert found.out is not None
        assert found.lse is not None
        return found.out, found.lse

    def output(self, call: Call) -> tuple[Tensor, Tensor | None]:
        if self._by_pytorch(call):
            return Sdpa().run(call)
        found = native_ops.output(_problem(call, call.v))
        return self.run(call) if found is None else (found, None)

    def observe(self, call: Call, needs: Iterable[str], gradients: bool = True) -> RowStatistics:
        """Return output, LSE and the `STATISTICS` named in `needs`, in one pass.

        Without `gradients`, the statistics have no gradient, and the graph of the output keeps the
        same tensors as `run()`, as activation checkpoints recomputed without statistics require.
        """
        if self._by_pytorch(call):
            needs = tuple(needs)
            out, lse = Sdpa().run(call, gradients and not needs)
            with nullcontext() if gradients else torch.no_grad():
                given = self.statistics(call, needs, lse)
            return replace(given, out=out)
        return _computed(call, call.v, needs, gradients)

    def sampled(
        self,
        call: Call,
        needs: Iterable[str],
        rows: Int[Tensor, " n"],
        every: bool,
        lse: Float[Tensor, "B H T"] | None = None,
    ) -> tuple[RowStatistics, RowStatistics] | None:
        """Return output and LSE of all queries, and the LSE and statistics of the queries `rows`.

        If the LSE of all queries is given, the output is not computed. With `every`, largest scores
        and masses on single keys also cover all queries. The statistics have no gradient. Return
        `None` if one pass over all queries costs no more: if this kernel computes the output, or
        PyTorch's returns no log-sum-exp.
        """
        out = None
        if lse is None:
            if not self._by_pytorch(call):
                return None
            out, lse = Sdpa().run(call)
        needs = ("lse", *needs)
        of_all = [name for name in needs if every and name in _OF_ALL]
        found = native_ops.sampled(
            _problem(call, None), bits_of(needs), rows, lse.detach(), bits_of(of_all)
        )
        if found is None:
            return None
        some, whole = found
        return RowStatistics(out, lse, *whole[1:]), RowStatistics(None, *some)

    def _by_pytorch(self, call: Call) -> bool:
        """Return True if PyTorch's fused kernel computes the output: on CUDA, for simple masks."""
        if self.own_output or not call.q.is_cuda or call.sinks is not None:
            return False
        if call.prepared is None:
            return _unmasked(call)
        fused, graph = call.prepared.fused, call.needs_grad
        if graph not in fused:
            fused[graph] = _unmasked(call)
        return fused[graph]

    def statistics(
        self, call: Call, needs: Iterable[str], lse: Tensor | None = None
    ) -> RowStatistics:
        """Return LSE and statistics without the output; the values are not read.

        A known log-sum-exp saves the GPU kernel half of its work, or all if nothing else is needed.
        """
        needs = tuple(needs)
        if lse is not None and not needs:
            return RowStatistics(None, lse)
        return _computed(call, None, needs, lse=None if lse is None else lse.detach())

    def received(
        self, call: Call, lse: Float[Tensor, "B H T"], weight: Float[Tensor, " T"] | None = None
    ) -> Float[Tensor, "B H S"]:
        """Return `Σ_i weight_i p_ij` of each key, given the LSE with the sinks. No gradient."""
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
        """Return `Σ weight_i p_ij` over the queries and keys of each pair of blocks. No gradient.

        `query_block` and `key_block` are the block of each query and key, in ascending order.
        """
        cut = (query_block, key_block, blocks)
        _, found = native_ops.sums(_problem(call, None), lse, weight, False, cut)
        assert found is not None
        return found


_OF_ALL = ("max", "first", "previous", "self")
"""Statistics of all queries even if queries are sampled: maxima, and masses on single keys."""


def bits_of(needs: Iterable[str]) -> int:
    """Return the sum of the bits of these statistics."""
    return functools.reduce(lambda bits, name: bits | native_ops.BIT[name], needs, 0)


def _refuse_on_cuda(call: Call) -> Iterator[str]:
    wide = max(call.q.shape[3], call.v.shape[3])
    if call.q.dtype == torch.float32 and wide > cuda.WIDEST_EXACT:
        yield f"heads of float32 are wider than {cuda.WIDEST_EXACT} ({wide})"
    if call.dropout:
        yield "the kernel for GPUs does not support dropout"


def _unmasked(call: Call) -> bool:
    if type(call.mask) not in (Everything, Causal):  # tensors of other masks would have to be read
        return False
    if call.softcap is not None or call.scale <= 0 or Sdpa().refuse(call):
        return False
    return single_tile(call.mask, call.extent, call.q.device) is not None


def slower(call: Call) -> bool:
    """Return True if PyTorch's kernel is known to be faster: float32 on CPUs without vector code.

    There PyTorch took 0.63 to 0.96 of the native kernel's time in 6 of 7 calls. With AVX2, AVX-512
    or AMX, no class of calls was slower on every measured CPU.
    """
    library = None if call.q.is_cuda else cpu.library()
    return library is not None and library.best == "plain" and call.q.dtype == torch.float32


def _problem(call: Call, v: Tensor | None) -> Problem:
    sinks = None if call.sinks is None else call.sinks.to(torch.float32)
    known, structs = call.prepared, None
    terms = None if known is None else known.terms
    if terms is None:
        terms = _terms(call)
    if known is not None and known.terms is terms:
        structs = known.structs
    dropped = dropped_of(call.dropout) if call.dropout and v is not None else 0
    softcap, seed = call.softcap or 0.0, call.seed if dropped else None
    return Problem(call.q, call.k, v, sinks, terms, call.scale, softcap, dropped, seed, structs)


def _terms(call: Call) -> Terms:
    """Return the terms of a call's mask; equal calls share them if the mask holds no tensors."""
    known, mask, device = call.prepared, call.mask, call.q.device
    if known is None and mask.fixed and type(mask) is not Rows and not traced():
        if (place := ("terms", call.extent, device)) not in mask.known:
            mask.known[place] = terms_of(mask, call.extent, device)
        return mask.known[place]
    if known is None:
        return terms_of(mask, call.extent, device)
    with torch.inference_mode(False):  # graphs keep them
        terms = terms_of(mask, call.extent, device)
    if terms.allowed is None and terms.bias is None:  # which may be large
        known.terms = terms
    if any(isinstance(x, Tensor) for x in terms):  # structs hold pointers to them
        known.structs = None
    return terms


def _computed(
    call: Call,
    v: Tensor | None,
    needs: Iterable[str],
    gradients: bool = True,
    lse: Tensor | None = None,
) -> RowStatistics:
    bits = bits_of(("lse", *needs))
    again = partial(_again, call.mask, call.extent)
    return RowStatistics(*native_ops.compute(_problem(call, v), bits, again, gradients, lse=lse))


def _again(mask: Mask, extent: Extent, problem: Problem) -> list[Tensor]:
    """Compute the kernel's results differentiably, for a second derivative."""
    q, k, v, sinks, terms, scale, softcap, dropped, seed, _ = problem
    rate, values = dropped / STEPS, k if v is None else v
    call = Call(q, k, values, mask, scale, softcap or None, rate, extent, sinks, seed=seed)
    position = terms.position
    return statistics_again(call, lambda i: i + terms.offset if position is None else position[i])
