"""Launch the Triton kernels: the functions of `ctypes_api`, but on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .ctypes_api import gradient_like, output_like, rows_of
from .interface import STATISTICS, Problem, Terms

WIDEST_EXACT = 128
"""The largest width of heads and values in float32 that fits into the memory of a program."""

COLUMNS = 64
"""The number of columns of a block map that one pass computes, as values in float32."""

FEW = 16
"""The number of sampled queries per program, small because there are few in total."""

_BEYOND = 2**30
"""A window wider than any sequence."""


def why_not(device: torch.device | None = None) -> str:
    """Return the reason why the kernels cannot run on a device; empty if they can."""
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
    from . import triton_kernels  # imports Triton, which is slow

    return triton_kernels


def forward(problem: Problem, needs: int) -> list[Tensor | None]:
    """Return the output and the statistics whose bit is set in `needs`, from one launch."""
    q, v = problem.q, problem.v
    out = None if v is None else output_like(q, v)
    rows = [
        q.new_empty(q.shape[:3], dtype=torch.float32) if needs >> bit & 1 else None
        for bit in range(len(STATISTICS))
    ]
    _forward(problem, out, rows)
    return [out, *rows]


def statistics(
    problem: Problem, needs: int, into: Tensor, lse: Tensor | None = None, on: Tensor | None = None
) -> Tensor | None:
    """Write the statistics whose bit is set in `needs` to `into` `[F, B, H, T]`, in one launch.

    Return the output, if there are values. Without values, the log-sum-exp `[B, H, T]` from another
    kernel may be given, which avoids rescaling. If `on`, an int32 `[]` that the kernel reads, is
    0, nothing is written.
    """
    rows = rows_of(into, needs, problem.q)
    out = None if problem.v is None else output_like(problem.q, problem.v)
    _forward(problem, out, rows, None if lse is None else lse.contiguous(), on)
    return out


def sampled(
    problem: Problem, needs: int, rows: Tensor, lse: Tensor, every: int = 0
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Return statistics of the queries `rows` `[n]` (int64, ascending), and others of all queries.

    Bits of `needs` and `every` select them: `[B, H, n]` and `[B, H, T]`. Those of all queries can
    only be the largest score and the masses of single keys. As the log-sum-exp of all queries is
    given, this takes one launch.
    """
    q = problem.q
    extents = (needs, len(rows)), (every, q.shape[2])
    some, whole = (
        q.new_empty((bits.bit_count(), *q.shape[:2], n), dtype=torch.float32) if bits else None
        for bits, n in extents
    )
    some_rows, every_rows = (_rows_of(bits, x) for bits, x in ((needs, some), (every, whole)))
    named = {f"{name}_out": x for name, x in zip(STATISTICS, some_rows, strict=True)}
    named |= {
        f"every_{name}": x for name, x in zip(STATISTICS, every_rows, strict=True) if x is not None
    }
    programs = -(-len(rows) // FEW) * q.shape[0] * q.shape[1]
    named |= {"lse": lse.contiguous(), "chosen": rows, "count": len(rows), "programs": programs}
    _launch("sampled", problem._replace(v=None), "queries" if every else "", **named)
    return some_rows, every_rows


def _rows_of(bits: int, into: Tensor | None) -> list[Tensor | None]:
    """Return the part of a tensor for each statistic whose bit is set."""
    rows = iter(() if into is None else into.unbind())
    return [next(rows) if bits >> bit & 1 else None for bit in range(len(STATISTICS))]


def _forward(
    problem: Problem,
    out: Tensor | None,
    rows: Sequence[Tensor | None],
    lse: Tensor | None = None,
    on: Tensor | None = None,
    softmax: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
) -> None:
    named = {f"{name}_out": x for name, x in zip(STATISTICS, rows, strict=True)}
    named |= {"base_out": softmax[0], "total_out": softmax[1], "lse": lse, "on": on}
    named |= {"out": out, "out_at": None if out is None else out.stride()}
    _launch("forward", problem, "queries", **named)


def output(problem: Problem) -> Tensor | None:
    """Return only the output, without the check for NaN, which would make the host wait."""
    return forward(problem, 0)[0]


def backward(
    problem: Problem,
    out: Tensor | None,
    rows: dict[str, Tensor | None],
    grad_out: Tensor | None,
    grads: dict[str, Tensor | None],
    needed: tuple[bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Return the gradients with respect to q, k, v and the sinks, like `ctypes_api.backward`.

    `dS = P ∘ (dP + c − g_H (s − base) + g_J (j − position) + …)`; c holds all terms that are equal
    for every key of a row.
    """
    q, k, v, sinks = problem[:4]
    lse = rows["lse"]
    assert lse is not None
    dead = lse == -torch.inf
    base, total = _softmax_of(problem, lse)
    constant = torch.zeros_like(lse)
    if v is None:
        grad_out = None
    if grad_out is not None:
        assert out is not None
        constant -= (grad_out.float() * out.float()).sum(-1)
    incoming = {name: g.float().contiguous() for name, g in grads.items() if g is not None}
    for name, g in incoming.items():
        row = rows[name]
        assert row is not None
        if name == "lse":
            constant += g
        elif name == "entropy":
            constant -= g * (row - total.log())
        else:
            constant -= g * row
    constant.masked_fill_(dead, 0.0)
    each = ("entropy", "ahead", "first", "previous", "self")
    if grad_out is not None and grad_out.stride(-1) != 1:
        grad_out = grad_out.contiguous()
    strides = None if grad_out is None else grad_out.stride()
    common: dict[str, Any] = {f"g_{name}": incoming.get(name) for name in each}
    common |= {"base": base, "total": total, "g_out": grad_out, "g_at": strides}
    common["constant"] = constant
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
        above = sinks.float()[:, None] - base.masked_fill(dead, torch.inf)
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
    """Return column sums and block maps of P, like `ctypes_api.sums`."""
    q, k = problem.q, problem.k
    lse = lse.float().contiguous()
    weight = None if weight is None else weight.float().contiguous()
    columns = table = None
    if received:
        columns = q.new_empty(*q.shape[:2], k.shape[2], dtype=torch.float32)
        base, total = _softmax_of(problem, lse)
        named = {"base": base, "total": total, "weight": weight, "received": columns}
        _launch("columns", problem, "keys", **named)
    if blocks is not None:
        table = _block_map(problem, weight, blocks)
    return columns, table


def _softmax_of(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's base, which is subtracted from its scores, and its sum of weights.

    These are the log-sum-exp and 1 or, if rounding of a large log-sum-exp would affect the weights,
    the largest score and the sum relative to it. The kernel chooses, so the host does not wait.
    """
    lse = lse.contiguous()
    softmax = torch.empty_like(lse), torch.empty_like(lse)
    _forward(problem._replace(v=None), None, [None] * len(STATISTICS), lse, softmax=softmax)
    return softmax


def _block_map(
    problem: Problem, weight: Tensor | None, blocks: tuple[Tensor, Tensor, int]
) -> Tensor:
    """Return sums of P over blocks of queries and keys, with one-hot columns as the values,
    `COLUMNS` per pass."""
    of_query, of_key, n = blocks
    q, k = problem.q, problem.k
    b, h, _, _ = q.shape
    table = q.new_zeros(b, h, n, n, dtype=torch.float32)
    for start in range(0, n, COLUMNS):
        wide = min(COLUMNS, n - start)
        inside = of_key[:, None] == torch.arange(start, start + wide, device=q.device)
        v = inside.to(torch.float32).expand(b, k.shape[1], -1, -1)
        out = q.new_empty(b, h, q.shape[2], wide, dtype=torch.float32)
        _forward(problem._replace(v=v), out, [None] * len(STATISTICS))
        if weight is not None:
            out *= weight[:, None]
        table[..., start : start + wide].index_add_(2, of_query.long(), out)
    return table


class _Plan(NamedTuple):
    """A kernel with its arguments in order; arguments that differ between launches are `None`."""

    kernel: Any
    arguments: list[Any]
    places: dict[str, int]
    tensors: tuple[tuple[int, int], ...]
    """Indices of the problem's tensors among the arguments, and in the problem."""
    options: dict[str, int]
    blocks: int
    """The number of queries or keys per program."""
    compiled: dict[tuple[Any, ...], Any]
    """Compiled kernels, by the properties of a launch's arguments that Triton specializes on."""


_PLANS: dict[tuple[Any, ...], _Plan] = {}
_MOST_PLANS = 512


def _launch(name: str, problem: Problem, over: str, **rest: Any) -> None:
    """Run a kernel, with one program per block of queries or keys of each head."""
    q, k, v, sinks, terms, scale, softcap = problem[:7]
    tensors = (q, k, v, sinks, *terms[:6])
    about = [None if x is None else (x.shape, x.stride(), x.dtype) for x in tensors]
    key = (name, *about, terms[6:], scale, softcap)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _plan(name, problem)
    arguments, places = plan.arguments.copy(), plan.places
    variant: list[Any] = [q.device]
    for place, number in plan.tensors:
        x = tensors[number]
        arguments[place] = x
        variant.append(x.data_ptr() % 16)  # type: ignore[union-attr]
    if terms.allowed is not None:
        arguments[places["allowed"]] = terms.allowed.view(torch.uint8)
    for one, value in rest.items():
        arguments[places[one]] = value
        if isinstance(value, Tensor):
            variant.append((value.dtype, value.data_ptr() % 16))
        elif type(value) is not int:  # integers are not specialized on
            variant.append(value)
    length = {"queries": q.shape[2], "keys": k.shape[2]}.get(over, 0)
    rows = q.shape[0] * (k if name == "backward_keys" else q).shape[1]
    programs = rest.get("programs", 0) + -(-length // plan.blocks) * rows
    elsewhere = q.is_cuda and q.device.index != torch.cuda.current_device()
    with torch.cuda.device(q.device) if elsewhere else nullcontext():
        variant_key = tuple(variant)
        compiled = plan.compiled.get(variant_key)
        if compiled is not None:  # Triton does not inspect the arguments again
            compiled[programs, 1, 1](*arguments)
            return
        compiled = plan.kernel[(programs,)](*arguments, **plan.options)
        if hasattr(compiled, "packed_metadata"):  # neither interpreted nor still being compiled
            plan.compiled[variant_key] = compiled


def _plan(name: str, problem: Problem) -> _Plan:
    """Return the plan that launches of one kind share."""
    q, k, v, sinks, terms, scale, softcap = problem[:7]
    wide, heads = 0 if v is None else v.shape[3], q.shape[1]
    tables = terms.allowed is not None or terms.bias is not None
    kernel, chosen, options = _chosen(
        name, terms.causal, q.shape[3], wide, q.dtype, None if v is None else v.dtype, tables
    )
    given: dict[str, Any] = {
        **{"q_at": q.stride(), "k_at": k.stride(), "v_at": None if v is None else v.stride()},
        **{"heads": heads, "group": heads // k.shape[1], "C": chosen, "FEW": FEW},
        **{"queries": q.shape[2], "keys": k.shape[2], "offset": terms.offset},
        **{"scale": float(scale), "softcap": softcap or None, **_strides(terms)},
        **{"window": min(terms.window, _BEYOND) or None},
    }
    places = {one: place for place, one in enumerate(kernel.arg_names)}
    own = ("q", "k", "v", "sinks", *Terms._fields[:6])
    tensors = (q, k, v, sinks, *terms[:6])
    return _Plan(
        kernel,
        [given.get(one) for one in places],
        places,
        tuple(
            (places[one], number)
            for number, (one, x) in enumerate(zip(own, tensors, strict=True))
            if one in places and x is not None
        ),
        options,
        chosen.BN if name in _OVER_QUERIES else chosen.BM,
        {},
    )


_OVER_QUERIES = ("columns", "backward_keys")
"""Names of launches of the kernel `over_queries`, whose programs each take a block of keys."""


@functools.cache
def _chosen(
    name: str,
    causal: bool,
    dim: int,
    wide: int,
    dtype: torch.dtype,
    dtype_v: torch.dtype | None,
    tables: bool,
) -> tuple[Any, Any, dict[str, int]]:
    """Return a kernel, its `Constants`, and its launch options."""
    kernels = _kernels()
    kernel = getattr(kernels, "over_queries" if name in _OVER_QUERIES else name)
    (first, more), whole = _pieces(dim), _power(wide)
    exact = [x == torch.float32 for x in (dtype, dtype_v)]
    options = _blocks(name, max(first + more, whole), any(exact), dtype_v is not None, tables)
    blocks = {one: options.pop(one) for one in ("BM", "BN")}
    sizes = dim, wide, first, more, whole, first + more == dim, whole == wide
    constants = kernels.Constants(causal, *sizes, *exact, **blocks)
    return kernel, constants, options


def _strides(terms: Terms) -> dict[str, Any]:
    """Return the strides of ranges and tables, 0 along shared axes."""
    strides: dict[str, Any] = {}
    for name in ("low", "high", "allowed", "bias"):
        x = getattr(terms, name)
        if x is not None:
            steps = zip(x.shape, x.stride(), strict=True)
            strides[f"{name}_at"] = tuple(0 if n == 1 else step for n, step in steps)
    return strides


def _power(width: int) -> int:
    """Return the smallest power of 2 ≥ `width`, but at least 16, which matrix units require."""
    return max(16, 1 << (width - 1).bit_length())


def _pieces(width: int) -> tuple[int, int]:
    """Return one or two powers of 2 (or 0) that hold `width` columns with the least padding."""
    whole = _power(width)
    first = whole // 2
    more = _power(width - first) if first >= 16 else whole
    return (first, more) if first + more < whole else (whole, 0)


def _blocks(name: str, wide: int, exact: bool, values: bool, tables: bool) -> dict[str, int]:
    """Return the numbers of queries, keys, warps and stages of a program.

    These are the fastest of five to eight settings on an H100 at widths of 64 and 128, or the
    nearest setting that fits, where a program later needed more registers than are available.
    """
    if exact:
        return {"BM": 64, "BN": 32, "num_warps": 4 if wide <= 64 else 8, "num_stages": 1}
    if wide > 128:
        return {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 1}
    if name == "backward_keys":
        return {"BM": 64, "BN": 64, "num_warps": 4 if wide <= 64 else 8, "num_stages": 1}
    if name == "backward_queries":
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 2}
    if name == "columns":
        return {"BM": 128, "BN": 64, "num_warps": 4, "num_stages": 3}
    if not values:
        keys = (64 if wide <= 64 else 32) if tables else 128
        if name == "sampled":  # so few programs that all run at once: more warps speed up each
            return {"BM": 64, "BN": 2 * keys, "num_warps": 8, "num_stages": 2}
        return {"BM": 64, "BN": keys, "num_warps": 4, "num_stages": 3}
    if wide <= 64:
        return {"BM": 64, "BN": 64, "num_warps": 4, "num_stages": 3}
    return {"BM": 128, "BN": 128, "num_warps": 8, "num_stages": 2}
