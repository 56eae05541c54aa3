"""Call the Triton kernels: what `ctypes_api` does for CPUs, on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .ctypes_api import gradient_like, output_like, rows_of
from .interface import FIGURES, Problem, Terms

WIDEST_EXACT = 128
"""The widest heads and values in float32, of which less fits into the memory of a program."""

COLUMNS = 64
"""Of a block map, how many are made in one pass: as values they are in float32."""

_BEYOND = 2**30
"""Farther than any key."""


def why_not(device: torch.device | None = None) -> str:
    """Return what keeps the kernels from running on a device; empty if nothing does."""
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return "its kernels for GPUs need Triton, which is not installed"
    if torch.version.hip is not None:
        return "its kernels for GPUs were never run on ROCm"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels for GPUs need compute capability 8.0"
    return ""


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # it imports Triton, which takes a while

    return triton_kernels


def forward(problem: Problem, wishes: int) -> list[Tensor | None]:
    """Output and the figures of which `wishes` has the bit set, as `ctypes_api.forward`."""
    q, v = problem.q, problem.v
    out = None if v is None else output_like(q, v)
    found = [
        q.new_empty(q.shape[:3], dtype=torch.float32) if wishes >> bit & 1 else None
        for bit in range(len(FIGURES))
    ]
    _forward(problem, out, found)
    return [out, *found]


def statistics(
    problem: Problem,
    wishes: int,
    into: Tensor,
    lse: Tensor | None = None,
    on: Tensor | None = None,
) -> Tensor | None:
    """Write the figures of which `wishes` has the bit set into `into` `[F, B, H, T]`.

    That is one launch. Return the output, where there are values. Without them the log-sum-exp
    `[B, H, T]` of another kernel may be given: then nothing is rescaled. The kernel reads `on`, an
    int32 `[]`: with 0 it leaves what is there.
    """
    found = rows_of(into, wishes, problem.q)
    out = None if problem.v is None else output_like(problem.q, problem.v)
    _forward(problem, out, found, None if lse is None else lse.contiguous(), on)
    return out


def _forward(
    problem: Problem,
    out: Tensor | None,
    figures: Sequence[Tensor | None],
    lse: Tensor | None = None,
    on: Tensor | None = None,
    softmax: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> None:
    named = {f"{name}_out": x for name, x in zip(FIGURES, figures, strict=True)}
    named |= {"top_out": softmax[0], "total_out": softmax[1], "lse": lse, "on": on}
    named |= {"out": out, "out_at": None if out is None else out.stride()}
    _launch("forward", problem, "queries", **named)


def output(problem: Problem) -> Tensor | None:
    """The output alone; to see whether all weights are numbers the call would have to wait."""
    return forward(problem, 0)[0]


def backward(
    problem: Problem,
    out: Tensor | None,
    figures: dict[str, Tensor | None],
    grad_out: Tensor | None,
    grads: dict[str, Tensor | None],
    needed: tuple[bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Gradients in q, k, v and the sinks `[H]`, as `ctypes_api.backward`.

    `dS = P ∘ (dP + c − g_H (s − top) + g_J (j − position) + …)`, where all that is the same for
    every key of a row is put into one number c.
    """
    q, k, v, sinks = problem[:4]
    lse = figures["lse"]
    assert lse is not None
    gone = lse == -torch.inf
    top, total = _softmax_of(problem, lse)
    constant = torch.zeros_like(lse)
    if v is None:
        grad_out = None
    if grad_out is not None:
        assert out is not None
        constant -= (grad_out.float() * out.float()).sum(-1)
    incoming = {name: g.float().contiguous() for name, g in grads.items() if g is not None}
    for name, g in incoming.items():
        figure = figures[name]
        assert figure is not None
        if name == "lse":
            constant += g
        elif name == "entropy":
            constant -= g * (figure - total.log())
        else:
            constant -= g * figure
    constant.masked_fill_(gone, 0.0)
    each = ("entropy", "ahead", "first", "previous", "self")
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    strides = None if grad_out is None else grad_out.stride()
    common: dict[str, Any] = {f"g_{name}": incoming.get(name) for name in each}
    common |= {"top": top, "total": total, "g_out": grad_out, "g_at": strides, "constant": constant}
    g_q = gradient_like(q) if needed[0] else None
    if g_q is not None:
        _launch("backward_queries", problem, "queries", g_q=g_q, gq_at=g_q.stride(), **common)
    g_k = g_v = None
    if needed[1] or (needed[2] and grad_out is not None):
        g_k = gradient_like(k)
        g_v = gradient_like(v) if v is not None and grad_out is not None else None
        places = {"gk_at": g_k.stride(), "gv_at": None if g_v is None else g_v.stride()}
        _launch("backward_keys", problem, "keys", g_k=g_k, g_v=g_v, **places, **common)
    if needed[2] and v is not None and g_v is None:
        g_v = torch.zeros_like(v)
    g_sinks = None
    if needed[3] and sinks is not None:
        above = sinks.float()[:, None] - top.masked_fill(gone, torch.inf)
        weight = above.exp() / total
        change = constant
        if "entropy" in incoming:
            change = change - incoming["entropy"] * above.masked_fill(weight == 0, 0.0)
        g_sinks = (weight * change).sum((0, 2))
    return [g_q, g_k if needed[1] else None, g_v if needed[2] else None, g_sinks]


def sums(
    problem: Problem,
    lse: Tensor,
    weight: Tensor | None,
    received: bool,
    blocks: tuple[Tensor, Tensor, int] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Column sums and block maps of P, as `ctypes_api.sums`."""
    q, k = problem.q, problem.k
    lse = lse.float().contiguous()
    weight = None if weight is None else weight.float().contiguous()
    columns = table = None
    if received:
        columns = q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
        top, total = _softmax_of(problem, lse)
        named = {"top": top, "total": total, "weight": weight, "received": columns}
        _launch("columns", problem, "keys", **named)
    if blocks is not None:
        table = _block_map(problem, weight, blocks)
    return columns, table


def _softmax_of(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    """What the scores of each row are taken relative to, and the sum of the weights then.

    That is the log-sum-exp and 1, but where it is so large that its last place shows in the
    weights: there it is the largest score. The kernel itself looks; the host does not wait.
    """
    lse = lse.contiguous()
    softmax = torch.empty_like(lse), torch.empty_like(lse)
    _forward(problem._replace(v=None), None, [None] * len(FIGURES), lse, softmax=softmax)
    return softmax


def _block_map(
    problem: Problem, weight: Tensor | None, blocks: tuple[Tensor, Tensor, int]
) -> Tensor:
    """Sums over blocks of queries of what each gives to blocks of keys: one-hot columns are the
    values, `COLUMNS` of them to a pass."""
    of_query, of_key, n = blocks
    q, k = problem.q, problem.k
    b, h, _, _ = q.shape
    table = q.new_zeros(b, h, n, n, dtype=torch.float32)
    for start in range(0, n, COLUMNS):
        wide = min(COLUMNS, n - start)
        inside = of_key[:, None] == torch.arange(start, start + wide, device=q.device)
        v = inside.to(torch.float32).expand(b, k.shape[1], -1, -1)
        out = q.new_empty(b, h, q.shape[2], wide, dtype=torch.float32)
        _forward(problem._replace(v=v), out, [None] * len(FIGURES))
        if weight is not None:
            out *= weight[:, None]
        table[..., start : start + wide].index_add_(2, of_query.long(), out)
    return table


def _launch(name: str, problem: Problem, over: str, **rest: Any) -> None:
    """Run a kernel, with a program for each block of queries or of keys of each head."""
    q, k, v, sinks, terms, scale, softcap = problem[:7]
    heads, kv_heads = q.shape[1], k.shape[1]
    wide = 0 if v is None else v.shape[3]
    kernel, known, chosen = _chosen(name, q.shape[3], wide, q.dtype, None if v is None else v.dtype)
    asked: dict[str, Any] = {
        **{"q": q, "k": k, "v": v, "sinks": sinks},
        **{"q_at": q.stride(), "k_at": k.stride(), "v_at": None if v is None else v.stride()},
        **{"heads": heads, "group": heads // kv_heads, "D": q.shape[3], "DV": wide},
        **{"queries": q.shape[2], "keys": k.shape[2], "offset": terms.offset},
        **{"scale": float(scale), "softcap": softcap or None, "CAUSAL": terms.causal},
        **{"window": min(terms.window, _BEYOND) or None, "slopes": terms.slopes},
        **{"position": terms.position, **_shared(terms), **rest},
    }
    block = chosen["BM"] if over == "queries" else chosen["BN"]
    length = q.shape[2] if over == "queries" else k.shape[2]
    rows = q.shape[0] * (kv_heads if name == "backward_keys" else heads)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        kernel[(-(-length // block) * rows,)](
            **{x: y for x, y in asked.items() if x in known}, **chosen
        )


@functools.cache
def _chosen(
    name: str, dim: int, wide: int, dtype: torch.dtype, dtype_v: torch.dtype | None
) -> tuple[Any, frozenset[str], dict[str, Any]]:
    """A kernel, its arguments, and those of them that its sizes and dtypes say."""
    kernel = getattr(_kernels(), name)
    known = frozenset(kernel.arg_names)
    sizes = {"BD": _power(dim), "BV": _power(wide)}
    blocks = _blocks(
        name, max(sizes.values()), torch.float32 in (dtype, dtype_v), dtype_v is not None
    )
    chosen = {
        **{"EVEN": sizes["BD"] == dim, "EVEN_V": sizes["BV"] == wide, **sizes},
        **{"PRECISION": _precision(dtype), "PRECISION_V": _precision(dtype_v), **blocks},
    }
    meant = known | {"num_warps", "num_stages"}
    return kernel, known, {x: y for x, y in chosen.items() if x in meant}


def _shared(terms: Terms) -> dict[str, Any]:
    """Ranges and tables with their strides, 0 along axes that all share."""
    found: dict[str, Any] = {}
    for name in ("low", "high", "allowed", "bias"):
        x = getattr(terms, name)
        found[name], found[f"{name}_at"] = x, None
        if x is not None:
            if x.dtype == torch.bool:
                found[name] = x.view(torch.uint8)
            steps = zip(x.shape, x.stride(), strict=True)
            found[f"{name}_at"] = tuple(0 if n == 1 else step for n, step in steps)
    return found


def _precision(dtype: torch.dtype | None) -> str:
    """How products are made: in float32 by three of TF32, which keep its digits."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _power(width: int) -> int:
    """The power of 2 that holds so many columns; matrix units take no fewer than 16."""
    return max(16, 1 << (width - 1).bit_length())


def _blocks(name: str, wide: int, exact: bool, values: bool) -> dict[str, int]:
    """How many queries and keys a program takes at a time, and how it is run.

    The best of five to eight tried on an H100 at widths of 64 and 128.
    """
    if exact:
        return {"BM": 64, "BN": 32, "num_warps": 4 if wide <= 64 else 8, "num_stages": 1}
    if wide > 128:
        return {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1}
    if name in ("backward_keys", "backward_queries"):
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
    if name == "columns":
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    if not values:
        return {"BM": 64, "BN": 128, "num_warps": 4, "num_stages": 3}
    if wide <= 64:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 2}
