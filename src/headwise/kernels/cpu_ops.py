"""The native CPU kernel with its gradient: under autograd, and as operators that compile whole.

Eager calls take the shortest way to the library; under `torch.compile` the same computation is the
operators `headwise::native_forward`, `native_backward` and `native_sums`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import cpu
from .cpu import FIGURES, Problem, Terms

BIT = {name: 1 << bit for bit, name in enumerate(FIGURES)}

DIFFERENTIABLE = tuple(name for name in FIGURES if name != "max")
"""The figures with a gradient; the backward pass reads them as the forward left them."""


def compute(problem: Problem, wishes: int) -> list[Tensor | None]:
    """Output (`None` without values) and the wished figures, differentiable where anything is.

    `wishes` is a sum of `BIT`s. The largest score has no gradient.
    """
    if _observed() or not _plain(problem):
        q, k, v, sinks, terms, scale, softcap = problem
        found = torch.ops.headwise.native_forward(
            q, k, v, sinks, *terms, scale, softcap, wishes | BIT["lse"]
        )
        wished = [v is not None, *(bool(wishes & bit) for bit in BIT.values())]
        return [x if yes else None for x, yes in zip(found, wished, strict=True)]
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in problem[:4]):
        return list(_Attention.apply(*problem, wishes | BIT["lse"]))
    return cpu.forward(problem, wishes)


def sums(
    problem: Problem,
    lse: Tensor,
    weight: Tensor | None,
    received: bool,
    blocks: tuple[Tensor, Tensor, int] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Column sums and block maps of P (see `cpu.sums`); they have no gradient."""
    # The log-sum-exp knows of the sinks already.
    problem = problem._replace(q=problem.q.detach(), k=problem.k.detach(), v=None, sinks=None)
    lse, weight = lse.detach(), None if weight is None else weight.detach()
    if not _observed() and _plain(problem):
        return cpu.sums(problem, lse, weight, received, blocks)
    q, k, _, _, terms, scale, softcap = problem
    columns, table = torch.ops.headwise.native_sums(
        q, k, *terms, scale, softcap, lse, weight, received, *(blocks or (None, None, 0))
    )
    return columns if received else None, None if blocks is None else table


def _observed() -> bool:
    """Whether somebody follows the operators: a compiler, or a mode such as a counter of FLOPs."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _plain(problem: Problem) -> bool:
    """Whether the data pointers are what they seem: no fake tensors and no wrappers."""
    kinds = (Tensor, torch.nn.Parameter)
    return type(problem.q) in kinds and type(problem.k) in kinds


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
        wishes: int,
    ) -> tuple[Tensor | None, ...]:
        found = cpu.forward(Problem(q, k, v, sinks, terms, scale, softcap), wishes)
        ctx.set_materialize_grads(False)
        figures = dict(zip(FIGURES, found[1:], strict=True))
        if figures["max"] is not None:
            ctx.mark_non_differentiable(figures["max"])
        ctx.save_for_backward(
            q, k, v, sinks, *terms[:6], found[0], *(figures[name] for name in DIFFERENTIABLE)
        )
        ctx.numbers, ctx.factors = terms[6:], (scale, softcap)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the native kernel has no second derivative; for double backward "
                "(create_graph=True) call attention with backend='eager'"
            )
        q, k, v, sinks, *rest = ctx.saved_tensors
        problem = Problem(q, k, v, sinks, Terms(*rest[:6], *ctx.numbers), *ctx.factors)
        figures = dict(zip(DIFFERENTIABLE, rest[7:], strict=True))
        incoming = dict(zip(FIGURES, grads[1:], strict=True))
        incoming.pop("max")
        found = cpu.backward(
            problem, rest[6], figures, grads[0], incoming, ctx.needs_input_grad[:4]
        )
        return (*found, None, None, None, None)


# ── operators ───────────────────────────────────────────────────────────────────────────────────

# Operators give tensors only: one that is not there is empty, of shape [0].
_READ = (
    "Tensor q, Tensor k, Tensor? v, Tensor? sinks, Tensor? position, Tensor? low, Tensor? high, "
    "Tensor? allowed, Tensor? bias, Tensor? slopes, SymInt offset, bool causal, int window, "
    "float scale, float softcap"
)
_GRADS = ", ".join(f"Tensor? grad_{name}" for name in ("out", *DIFFERENTIABLE))
_KEPT = ", ".join(f"Tensor? {name}" for name in ("out", *DIFFERENTIABLE))
_EIGHT = ", ".join(["Tensor"] * (1 + len(FIGURES)))


def _problem(args: tuple[Any, ...]) -> Problem:
    """What `_READ` says, put together again."""
    q, k, v, sinks, *terms, scale, softcap = args[:15]
    return Problem(q, k, v, sinks, Terms(*terms), scale, softcap)


def _filled(found: list[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    return tuple(like.new_empty(0, dtype=torch.float32) if x is None else x for x in found)


@torch.library.custom_op(
    "headwise::native_forward", mutates_args=(), schema=f"({_READ}, int wishes) -> ({_EIGHT})"
)
def _forward(*args: Any) -> tuple[Tensor, ...]:
    return _filled(cpu.forward(_problem(args), args[15]), args[0])


@_forward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    q, v, wishes = args[0], args[2], args[15]
    figures = [
        q.new_empty(q.shape[:3], dtype=torch.float32) if wishes & bit else None
        for bit in BIT.values()
    ]
    return _filled([cpu.output_like(q, v), *figures], q)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    has, figures = inputs[15], dict(zip(FIGURES, output[1:], strict=True))
    ctx.mark_non_differentiable(figures["max"])
    kept = [figures[name] if has & BIT[name] else None for name in DIFFERENTIABLE]
    out = None if inputs[2] is None else output[0]
    ctx.save_for_backward(*inputs[:10], out, *kept)
    ctx.numbers = inputs[10:15]


def _differentiate(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    needed = [
        x is not None and want for x, want in zip(saved, ctx.needs_input_grad[:4], strict=False)
    ]
    incoming = [g for name, g in zip(("out", *FIGURES), grads, strict=True) if name != "max"]
    found = torch.ops.headwise.native_backward(
        *saved[:10], *ctx.numbers, *saved[10:], *incoming, needed
    )
    asked = [g if yes else None for g, yes in zip(found, needed, strict=True)]
    return (*asked, *(None,) * 12)


_forward.register_autograd(_differentiate, setup_context=_remember)


@torch.library.custom_op(
    "headwise::native_backward",
    mutates_args=(),
    schema=f"({_READ}, {_KEPT}, {_GRADS}, bool[] needed) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _backward(*args: Any) -> tuple[Tensor, ...]:
    (out, *figures), (grad_out, *grads), needed = args[15:22], args[22:29], args[29]
    kept = dict(zip(DIFFERENTIABLE, figures, strict=True))
    incoming = dict(zip(DIFFERENTIABLE, grads, strict=True))
    found = cpu.backward(_problem(args), out, kept, grad_out, incoming, tuple(needed))
    return _filled(found, args[0])


@_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    *inputs, sinks = args[:4]
    *wanted, for_sinks = args[29]
    found = [cpu.gradient_like(x) if want else None for x, want in zip(inputs, wanted, strict=True)]
    return _filled([*found, torch.empty_like(sinks) if for_sinks else None], args[0])


@torch.library.custom_op(
    "headwise::native_sums",
    mutates_args=(),
    schema=(
        f"({_READ.replace('Tensor? v, Tensor? sinks, ', '')}, Tensor lse, Tensor? weight, "
        "bool received, Tensor? query_block, Tensor? key_block, SymInt blocks) -> (Tensor, Tensor)"
    ),
)
def _sums(*args: Any) -> tuple[Tensor, ...]:
    problem = _problem((*args[:2], None, None, *args[2:13]))
    lse, weight, received, *blocks = args[13:]
    asked = None if blocks[0] is None else (blocks[0], blocks[1], blocks[2])
    return _filled(list(cpu.sums(problem, lse, weight, received, asked)), args[0])


@_sums.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    q, k, (received, of_query, _, blocks) = args[0], args[1], args[15:19]
    b, h = q.shape[:2]
    columns = q.new_empty(b, h, k.shape[2], dtype=torch.float32) if received else None
    table = None if of_query is None else q.new_empty(b, h, blocks, blocks, dtype=torch.float32)
    return _filled([columns, table], q)


# ── what they count as ──────────────────────────────────────────────────────────────────────────


@register_flop_formula(torch.ops.headwise.native_forward)
def _(q: torch.Size, k: torch.Size, v: torch.Size | None, *_: Any, **__: Any) -> int:
    """As PyTorch counts its own kernels: both products in full, whatever the mask spares."""
    return 2 * math.prod(q[:3]) * k[2] * (q[3] + (0 if v is None else v[3]))


@register_flop_formula(torch.ops.headwise.native_backward)
def _(q: torch.Size, k: torch.Size, v: torch.Size | None, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * (3 * q[3] + 2 * (0 if v is None else v[3]))


@register_flop_formula(torch.ops.headwise.native_sums)
def _(q: torch.Size, k: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * math.prod(q[:3]) * k[2] * q[3]
