"""The native kernels with their gradient: under autograd, and as operators of compiled graphs.

Eager calls use the library directly, which is in C++ for CPUs and in Triton for CUDA; under
`torch.compile`, the operators `headwise::native_forward`, `native_backward` and `native_sums`
perform the same computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch.compiler import is_compiling
from torch.utils.flop_counter import register_flop_formula

from . import ctypes_api as cpu
from . import triton_api as cuda
from .interface import STATISTICS, Problem, Structs, Terms

BIT = {name: 1 << bit for bit, name in enumerate(STATISTICS)}

DIFFERENTIABLE = tuple(name for name in STATISTICS if name != "max")
"""The statistics with a gradient; the backward pass reads those that the forward pass computed."""

Again = Callable[[Problem], list[Tensor]]
"""Computes the output and the `DIFFERENTIABLE` statistics with differentiable operations."""


def compute(
    problem: Problem, needs: int, again: Again, gradients: bool = True, lse: Tensor | None = None
) -> list[Tensor | None]:
    """Return the output (`None` without values) and the statistics of `needs`.

    `needs` is a sum of `BIT`s. The largest score has no gradient. Without `gradients`, only the
    log-sum-exp has one: the backward pass then keeps the same tensors as for a call without needs,
    which activation checkpointing requires. Second derivatives are those of `again`. On CUDA,
    statistics without a graph share one tensor `[F, B, H, T]` and are computed from `lse` if
    another kernel has returned it with the output.
    """
    q, k, v, sinks, terms, *numbers, seed, _ = problem
    both = (needs | BIT["lse"], needs | BIT["lse"] if gradients else BIT["lse"])
    if not _by_pointer(problem):
        found = torch.ops.headwise.native_forward(q, k, v, sinks, *terms, *numbers, seed, *both)
        given = [v is not None, *(bool(needs & bit) for bit in BIT.values())]
        return [x if yes else None for x, yes in zip(found, given, strict=True)]
    if _differentiated(problem):
        return list(_Attention.apply(*problem, *both, again))
    if not q.is_cuda:
        return cpu.forward(problem, needs)
    if lse is not None:
        needs &= ~BIT["lse"]
    into = q.new_empty((needs.bit_count(), *q.shape[:3]), dtype=torch.float32)
    found, rows = [cuda.statistics(problem, needs, into, lse)], iter(into.unbind())
    found += (next(rows) if needs & bit else None for bit in BIT.values())
    return found if lse is None else [found[0], lse, *found[2:]]


def statistics(
    problem: Problem, needs: int, into: Tensor, lse: Tensor | None = None, on: Tensor | None = None
) -> None:
    """Write the statistics of `needs` into `into` `[F, B, H, T]` (float32, dense). No gradient.

    On CUDA this is one launch without allocation or synchronization. `lse` is that of the kernel
    that computed the output, if it returns one. If `on` (int32 `[]`) is 0, nothing is written.
    Compiled graphs contain it as the operator `headwise::statistics`.
    """
    q, k, _, sinks, terms, scale, softcap, *_ = problem
    q, k, sinks = q.detach(), k.detach(), None if sinks is None else sinks.detach()
    problem = Problem(q, k, None, sinks, terms, scale, softcap, structs=problem.structs)
    if _by_pointer(problem, into, lse, on):
        _library(problem).statistics(problem, needs, into, lse, on)
    else:
        torch.ops.headwise.statistics(q, k, sinks, *terms, scale, softcap, lse, into, on, needs)


def sampled(
    problem: Problem, needs: int, rows: Tensor, lse: Tensor, every: int = 0
) -> tuple[list[Tensor | None], list[Tensor | None]] | None:
    """Return statistics of the queries `rows`, and others of all queries, from their log-sum-exp.

    They have no gradient. Return `None` if no kernel computes them in one launch: on CPUs, and when
    operators are traced.
    """
    q, k, sinks = problem.q.detach(), problem.k.detach(), problem.sinks
    sinks = None if sinks is None else sinks.detach()
    problem = problem._replace(q=q, k=k, v=None, sinks=sinks)
    if not q.is_cuda or not _by_pointer(problem, rows, lse):
        return None
    return cuda.sampled(problem, needs, rows, lse, every)


def output(problem: Problem) -> Tensor | None:
    """Return only the output, without gradient.

    Return `None` if `compute()` is required: the call is differentiated or traced, or the weights
    of a row are NaN.
    """
    if _differentiated(problem) or not _by_pointer(problem):
        return None
    return _library(problem).output(problem)


def sums(
    problem: Problem,
    lse: Tensor,
    weight: Tensor | None,
    received: bool,
    blocks: tuple[Tensor, Tensor, int] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return column sums and block maps of P (see `cpu.sums`); they have no gradient."""
    q, k, _, sinks, terms, scale, softcap, *_ = problem
    q, k, lse = q.detach(), k.detach(), lse.detach()
    sinks, weight = (None if x is None else x.detach() for x in (sinks, weight))
    problem = Problem(q, k, None, sinks, terms, scale, softcap)
    if _by_pointer(problem, lse, weight):
        return _library(problem).sums(problem, lse, weight, received, blocks)
    columns, table = torch.ops.headwise.native_sums(
        q, k, sinks, *terms, scale, softcap, lse, weight, received, *(blocks or (None, None, 0))
    )
    return columns if received else None, None if blocks is None else table


def _library(problem: Problem) -> Any:
    """Return the module that computes a problem on its device."""
    return cuda if problem.q.is_cuda else cpu


def _differentiated(problem: Problem) -> bool:
    """Return True if autograd differentiates any part of the problem."""
    if not torch.is_grad_enabled():
        return False
    return any(x is not None and x.requires_grad for x in problem[:4])


def _by_pointer(problem: Problem, *others: Tensor | None) -> bool:
    """Return True if the library may read and write the tensors by pointer.

    Otherwise the operators compute the problem: compilers, `torch.export`, `torch.jit.trace` and
    modes such as FLOP counters do not see writes through a pointer, and tensors without memory of
    their own (fake, meta and functional tensors, and wrappers) have no pointer.
    """
    if is_compiling() or _len_torch_dispatch_stack() > 0 or _get_tracing_state() is not None:
        return False
    if problem.structs is None or problem.sinks is not None:  # otherwise all are known to be plain
        others = (*problem[:4], *problem.terms[:6], problem.seed, *others)
    return not others or all(x is None or (type(x) in _PLAIN and not _elsewhere(x)) for x in others)


def _elsewhere(x: Tensor) -> bool:
    """Return True if a plain tensor has no memory, or another tensor holds its values."""
    return x.is_meta or torch._is_functional_tensor(x)  # pyright: ignore[reportPrivateImportUsage]


_PLAIN = frozenset({Tensor, torch.nn.Parameter})


# ── eager autograd ──────────────────────────────────────────────────────────────────────────────


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
        terms: Terms,
        scale: float,
        softcap: float,
        dropped: int,
        seed: Tensor | None,
        structs: Structs | None,
        needs: int,
        saved: int,
        again: Again,
    ) -> tuple[Tensor | None, ...]:
        problem = Problem(q, k, v, sinks, terms, scale, softcap, dropped, seed, structs)
        found = _library(problem).forward(problem, needs)
        ctx.set_materialize_grads(False)
        rows = _saved(found[1:], saved, ctx)
        ctx.save_for_backward(q, k, v, sinks, seed, *terms[:6], found[0], *rows)
        ctx.flags, ctx.numbers, ctx.again = terms[6:], (scale, softcap, dropped), again
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, seed, *rest = ctx.saved_tensors
        terms = Terms(*rest[:6], *ctx.flags)
        scale, softcap, dropped = ctx.numbers
        problem = Problem(q, k, v, sinks, terms, scale, softcap, dropped, seed)
        incoming = [g for name, g in zip(("out", *STATISTICS), grads, strict=True) if name != "max"]
        needed = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():
            found = _gradient_with_graph(problem, incoming, needed, ctx.again)
        elif not _by_pointer(problem, *rest[6:], *incoming):
            found = _gradient_by_operator(problem, rest[6:], incoming, needed)
        else:
            rows, gradients = (
                dict(zip(DIFFERENTIABLE, x, strict=True)) for x in (rest[7:], incoming[1:])
            )
            library = _library(problem)
            found = library.backward(problem, rest[6], rows, incoming[0], gradients, needed)
        return (*found, *(None,) * 9)


def _gradient_with_graph(
    problem: Problem, incoming: list[Tensor | None], needed: Sequence[bool], again: Again
) -> list[Tensor | None]:
    """Return gradients in q, k, v and the sinks that are themselves differentiable."""
    # Views exclude the graph between the inputs, for example if keys are computed from queries.
    own = [None if x is None else x.view_as(x) for x in problem[:4]]
    q, k, v, sinks = own
    assert q is not None
    assert k is not None
    outputs = again(Problem(q, k, v, sinks, *problem[4:9]))
    return list(gradients_of(outputs, own, incoming, needed, create_graph=True))


def gradients_of(
    results: Sequence[Tensor],
    inputs: Sequence[Tensor | None],
    grads: Sequence[Tensor | None],
    needed: Sequence[bool],
    create_graph: bool,
) -> tuple[Tensor | None, ...]:
    """Return `torch.autograd.grad` for the inputs that need it, and `None` for the others."""
    pairs = [(x, grad) for x, grad in zip(results, grads, strict=True) if grad is not None]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    found = iter(
        torch.autograd.grad(
            [x for x, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
    )
    return tuple(
        next(found) if need and x is not None else None
        for x, need in zip(inputs, needed, strict=True)
    )


def _gradient_by_operator(
    problem: Problem,
    saved: list[Tensor | None],
    incoming: list[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    q, k, v, sinks, terms, *numbers, seed, _ = problem
    found = torch.ops.headwise.native_backward(
        q, k, v, sinks, *terms, *numbers, seed, *saved, *incoming, list(needed)
    )
    return [g if yes else None for g, yes in zip(found, needed, strict=True)]


def _saved(rows: Sequence[Tensor | None], saved: int, ctx: Any) -> list[Tensor | None]:
    """Return the statistics that the backward pass reads; mark the others as non-differentiable."""
    found = dict(zip(STATISTICS, rows, strict=True))
    read = {name: x for name, x in found.items() if name in DIFFERENTIABLE and saved & BIT[name]}
    rest = [x for name, x in found.items() if x is not None and name not in read]
    if rest:
        ctx.mark_non_differentiable(*rest)
    return [read.get(name) for name in DIFFERENTIABLE]


# ── operators ───────────────────────────────────────────────────────────────────────────────────

# Operators return tensors only: one that was not requested is empty, of shape [0].
_READ = (
    "Tensor q, Tensor k, Tensor? v, Tensor? sinks, Tensor? position, Tensor? low, Tensor? high, "
    "Tensor? allowed, Tensor? bias, Tensor? slopes, SymInt offset, bool causal, int window, "
    "float scale, float softcap"
)
_DROPOUT = "int dropped, Tensor? seed"
_GRADS = ", ".join(f"Tensor? grad_{name}" for name in ("out", *DIFFERENTIABLE))
_SAVED = ", ".join(f"Tensor? {name}" for name in ("out", *DIFFERENTIABLE))
_EIGHT = ", ".join(["Tensor"] * (1 + len(STATISTICS)))


def _problem(args: tuple[Any, ...]) -> Problem:
    """Return the arguments of `_READ`, and `_DROPOUT` if given, as a problem."""
    q, k, v, sinks, *terms = args[:13]
    return Problem(q, k, v, sinks, Terms(*terms), *args[13:17])


def _filled(tensors: list[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in tensors)


@torch.library.custom_op(
    "headwise::native_forward",
    mutates_args=(),
    schema=f"({_READ}, {_DROPOUT}, int needs, int saved) -> ({_EIGHT})",
)
def _forward(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem(args)
    return _filled(_library(problem).forward(problem, args[17]), args[0])


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    q, v, needs = args[0], args[2], args[17]
    rows = [
        q.new_empty(q.shape[:3], dtype=torch.float32) if needs & bit else None
        for bit in BIT.values()
    ]
    return _filled([None if v is None else cpu.output_like(q, v), *rows], q)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    out = None if inputs[2] is None else output[0]
    rows = _saved(output[1:], inputs[18], ctx)
    ctx.save_for_backward(*inputs[:10], inputs[16], out, *rows)
    ctx.numbers = inputs[10:16]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *read, seed, out = ctx.saved_tensors[:12]
    problem = _problem((*read, *ctx.numbers, seed))
    saved = [out, *ctx.saved_tensors[12:]]
    incoming = [g for name, g in zip(("out", *STATISTICS), grads, strict=True) if name != "max"]
    needed = [
        x is not None and want
        for x, want in zip(problem[:4], ctx.needs_input_grad[:4], strict=True)
    ]
    found = _gradient_by_operator(problem, saved, incoming, needed)
    return (*found, *(None,) * 15)


_forward.register_autograd(_differentiate, setup_context=_remember)


@torch.library.custom_op(
    "headwise::native_backward",
    mutates_args=(),
    schema=(
        f"({_READ}, {_DROPOUT}, {_SAVED}, {_GRADS}, bool[] needed)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def _backward(*args: Any) -> tuple[Tensor, ...]:
    (out, *rows), (grad_out, *grads), needed = args[17:24], args[24:31], args[31]
    saved = dict(zip(DIFFERENTIABLE, rows, strict=True))
    incoming = dict(zip(DIFFERENTIABLE, grads, strict=True))
    problem = _problem(args)
    found = _library(problem).backward(problem, out, saved, grad_out, incoming, tuple(needed))
    return _filled(found, args[0])


def _refuse_second(ctx: Any, *grads: Any) -> Any:
    raise RuntimeError(
        "the native kernel's operators have no second derivative under a compiler, a mode or a "
        "tensor subclass; for double backward (create_graph=True) use backend='blocked'"
    )


_backward.register_autograd(_refuse_second)


@_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *inputs, sinks = args[:4]
    *wanted, for_sinks = args[31]
    found = [cpu.gradient_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
    return _filled([*found, torch.empty_like(sinks) if for_sinks else None], args[0])


@torch.library.custom_op(
    "headwise::native_sums",
    mutates_args=(),
    schema=(
        f"({_READ.replace('Tensor? v, ', '')}, Tensor lse, Tensor? weight, "
        "bool received, Tensor? query_block, Tensor? key_block, SymInt blocks) -> (Tensor, Tensor)"
    ),
)
def _sums(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem((*args[:2], None, *args[2:14]))
    lse, weight, received, *blocks = args[14:]
    of_blocks = None if blocks[0] is None else (blocks[0], blocks[1], blocks[2])
    return _filled(list(_library(problem).sums(problem, lse, weight, received, of_blocks)), args[0])


@_sums.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    q, k, (received, of_query, _, blocks) = args[0], args[1], args[16:20]
    b, h = q.shape[:2]
    columns = q.new_empty(b, h, k.shape[2], dtype=torch.float32) if received else None
    table = None if of_query is None else q.new_empty(b, h, blocks, blocks, dtype=torch.float32)
    return _filled([columns, table], q)


# It returns no tensor; calling an operator that is defined this way takes a ninth of the time.
_operators = torch.library.Library("headwise", "FRAGMENT")
_operators.define(
    f"statistics({_READ.replace('Tensor? v, ', '')}, Tensor? lse, Tensor(a!) into, Tensor? on, "
    "int needs) -> ()"
)


def _statistics(*args: Any) -> None:
    problem = _problem((*args[:2], None, *args[2:14]))
    lse, into, on, needs = args[14:]
    _library(problem).statistics(problem, needs, into, lse, on)


for _key in ("CPU", "CUDA"):
    _operators.impl("statistics", _statistics, _key)


@torch.library.register_fake("headwise::statistics", lib=_operators)
def _(*args: Any) -> None:
    return None


# ── FLOPs ───────────────────────────────────────────────────────────────────────────────────────


@register_flop_formula(torch.ops.headwise.native_forward)
def _(q: torch.Size, k: torch.Size, v: torch.Size | None, *_: Any, **__: Any) -> int:
    """Count both products in full, regardless of the mask, as for PyTorch's kernels."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + (0 if v is None else v[3]))


@register_flop_formula(torch.ops.headwise.native_backward)
def _(q: torch.Size, k: torch.Size, v: torch.Size | None, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * (0 if v is None else v[3]))


@register_flop_formula([torch.ops.headwise.native_sums, torch.ops.headwise.statistics])
def _(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * q[3]
