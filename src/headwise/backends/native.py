"""The native CPU kernel: every figure of every head in the pass that makes the output.

One pass over the scores gives output, log-sum-exp, largest score, entropy, distance and the masses
of the first, previous and own key; without values it gives the same figures for an output that
somebody else made. Masks become flags, ranges of keys or tables (`native_masks.py`).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.call import Call
from ..core.dropout import dropped_of
from ..core.modes import forward_derivatives, transformed
from ..kernels import ctypes_api as cpu
from ..kernels import torch_ops as cpu_ops
from ..kernels.interface import Problem
from .base import Figures, OnePass
from .native_masks import TABLE_LIMIT, table_bytes, terms_of
from .recompute import again


@dataclass(frozen=True)
class Measured:
    """How fast this kernel was beside the fastest other, for calls like this on such a machine."""

    instructions: str
    dtype: str
    training: bool
    queries: int
    keys: int
    dim: int
    speed: float


@functools.cache
def measured() -> tuple[Measured, ...]:
    """Read the speeds on record, `speeds.json`, which `benchmarks/native_choice.py` writes.

    Where nothing is measured, the kernel is taken.
    """
    text = Path(__file__).with_name("speeds.json").read_text("utf-8")
    return tuple(Measured(**row) for row in json.loads(text)["rows"])


class Native(OnePass):
    """The C++ kernel of headwise on CPUs; float32, bfloat16 and float16."""

    name = "native"

    def refuse(self, call: Call) -> list[str]:
        device = call.q.device
        if device.type != "cpu":
            return [f"a kernel for CPUs, and this call is on {device.type}"]
        missing = cpu.why_not()
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
        size = table_bytes(call.mask, extent, device)
        if size > TABLE_LIMIT:
            reasons.append(
                f"the mask would need a table of {size / 2**20:.0f} MiB "
                f"(at most {TABLE_LIMIT / 2**20:.0f} MiB)"
            )
        return reasons

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        out, lse = cpu_ops.compute(_problem(call, call.v), cpu_ops.BIT["lse"], again)[:2]
        assert out is not None
        assert lse is not None
        return out, lse

    def observe(self, call: Call, wishes: Iterable[str], gradients: bool = True) -> Figures:
        """Output, LSE and the wished figures of `cpu.FIGURES`, in one pass."""
        return Figures(*cpu_ops.compute(_problem(call, call.v), _bits(wishes), again, gradients))

    def figures(self, call: Call, wishes: Iterable[str]) -> Figures:
        """The same without the output; the values are not read."""
        return Figures(*cpu_ops.compute(_problem(call, None), _bits(wishes), again))

    def received(
        self,
        call: Call,
        lse: Float[Tensor, "B H T"],
        weight: Float[Tensor, " T"] | None = None,
    ) -> Float[Tensor, "B H S"]:
        """`Σ_i weight_i p_ij`: what each key received, given the LSE. No gradient."""
        found, _ = cpu_ops.sums(_problem(call, None), lse, weight, True, None)
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
        _, found = cpu_ops.sums(_problem(call, None), lse, weight, False, asked)
        assert found is not None
        return found


def faster(call: Call) -> bool:
    """Whether the kernel was measured faster than all others for the calls most like this one."""
    library = cpu.library()
    if library is None or torch.compiler.is_compiling():  # a traced choice would be one for ever
        return True
    sizes = (call.extent.queries, call.extent.keys, call.q.shape[3])
    return _speed(library.best, call.q.dtype, call.needs_grad, sizes) >= 1.0


@functools.lru_cache(maxsize=4096)
def _speed(
    instructions: str, dtype: torch.dtype, training: bool, sizes: tuple[int, int, int]
) -> float:
    """The measured speed of the call nearest in size; 1 where nothing was measured."""
    kind = (instructions, str(dtype).removeprefix("torch."), training)

    def away(m: Measured) -> float:
        pairs = zip((m.queries, m.keys, m.dim), sizes, strict=True)
        return sum(math.log(a / b) ** 2 for a, b in pairs)

    alike = [m for m in measured() if (m.instructions, m.dtype, m.training) == kind]
    return min(alike, key=away).speed if alike else 1.0


def _problem(call: Call, v: Tensor | None) -> Problem:
    sinks = None if call.sinks is None else call.sinks.to(torch.float32)
    known = None if call.kind is None else call.kind.known
    terms = None if known is None else known.get("terms")
    if terms is None:
        terms = terms_of(call.mask, call.extent, call.q.device)
        if any(isinstance(x, Tensor) for x in terms):
            known = None
        if known is not None:
            known["terms"] = terms
    dropped = 0 if v is None else dropped_of(call.dropout)
    softcap, seed = call.softcap or 0.0, call.seed if dropped else None
    return Problem(call.q, call.k, v, sinks, terms, call.scale, softcap, dropped, seed, known)


def _bits(wishes: Iterable[str]) -> int:
    bits = cpu_ops.BIT["lse"]
    for wish in wishes:
        bits |= cpu_ops.BIT[wish]
    return bits
