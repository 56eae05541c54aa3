"""Forward, backward and decoding: what `native.py` times of the kernel itself, and beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.backends import Call
from headwise.backends.native import Native
from headwise.core.reference import attention
from headwise.kernels import ctypes_api as cpu
from native_run import COLUMNS, DTYPES, MATMUL, NATIVE, SCORES, SDPA, SEEING, Run, Shape, Work

MATRIX = 4096  # the longest for contenders that build the T×T matrix
KERNEL = Native()

# ── forward ─────────────────────────────────────────────────────────────────────────────────────


def plain(q: Tensor, k: Tensor, v: Tensor, later: Tensor | None = None) -> Tensor:
    """Attention in three lines; `later` is True where a key is hidden."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if later is not None:
        scores = scores.masked_fill(later, -torch.inf)
    return scores.softmax(-1) @ v


def later(shape: Shape) -> Tensor | None:
    """The hidden keys of a causal call."""
    return torch.ones(shape.queries, shape.keys).triu(1).bool() if shape.causal else None


def forward_calls(shape: Shape, dtype: torch.dtype) -> dict[str, Work]:
    """Everything that makes an output of these shapes, or figures without one."""
    q, k, v = shape.inputs(dtype)
    mask, hidden = shape.mask, later(shape)
    lse = KERNEL.observe(Call.of(q, k, v, mask=mask), ()).lse
    assert lse is not None

    def seeing() -> Any:
        return KERNEL.observe(Call.of(q, k, v, mask=mask), cpu.STATISTICS)

    calls: dict[str, Work] = {
        NATIVE: partial(hw.attend, q, k, v, mask=mask, backend="native"),
        SEEING: seeing,
        SCORES: lambda: KERNEL.statistics(Call.of(q, k, v, mask=mask), cpu.STATISTICS),
        COLUMNS: lambda: KERNEL.received(Call.of(q, k, v, mask=mask), lse),
        SDPA: partial(F.scaled_dot_product_attention, q, k, v, is_causal=shape.causal),
    }
    if shape.keys <= MATRIX or shape.queries == 1:
        calls[MATMUL] = partial(plain, q, k, v, hidden)
    return calls


def assert_forward(shape: Shape, dtype: torch.dtype, calls: dict[str, Work]) -> None:
    """Every contender against SDPA in float32; figures of the last head against the definition."""
    q, k, v = (x.float() for x in shape.inputs(dtype))
    close = partial(torch.testing.assert_close, **tolerance(dtype))
    want = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)
    outputs = {name: calls[name]() for name in (NATIVE, SDPA, MATMUL) if name in calls}
    seen = calls[SEEING]()
    for name, out in {**outputs, SEEING: seen.out}.items():
        close(out.float(), want, msg=lambda text, name=name: f"{shape}, {name}: {text}")
    exact = attention(*(x[-1:, -1:] for x in (q, k, v)), mask=shape.mask)
    p, last = exact.weights, shape.keys - shape.queries
    j = torch.arange(shape.keys)
    wanted = {
        "lse": exact.lse,
        "max": exact.logits.amax(-1),
        "entropy": torch.special.entr(p).sum(-1),
        "ahead": (p.double() @ j.double() - (torch.arange(shape.queries) + last)).float(),
        "first": p[..., 0],
        "previous": F.pad(p, (1, 0)).diagonal(last, -2, -1),
        "self": p.diagonal(last, -2, -1),
    }
    for figures in (seen, calls[SCORES]()):
        for name, figure in wanted.items():
            text = partial("{}, {}: {}".format, shape, name)
            # places are up to S, and a rounding of the sum of P moves their mean by its share
            atol = 1e-6 * shape.keys + 1e-4 if name == "ahead" else 1e-4
            found = getattr(figures, name)[-1:, -1:]
            torch.testing.assert_close(found, figure, rtol=1e-4, atol=atol, msg=text)
    text = partial("{}, received: {}".format, shape)
    found = calls[COLUMNS]()[-1:, -1:]
    torch.testing.assert_close(found, p.sum(2), rtol=1e-4, atol=1e-4, msg=text)


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    """Of outputs and gradients of unit size: a few roundings of bfloat16, many of float32."""
    return {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}


def forward(run: Run, shape: Shape) -> None:
    """One shape in both dtypes."""
    calls: dict[str, Work] = {}
    refused = {}
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            own = forward_calls(shape, dtype)
            assert_forward(shape, dtype, own)
            calls |= {f"{name}: {contender}": work for contender, work in own.items()}
            if MATMUL not in own:
                refused[f"{name}: {MATMUL}"] = f"not tried above T {MATRIX}"
        taken = run.take(calls)
    run.keep("forward", shape, taken, refused)
    for name in DTYPES:
        where, (own, seeing, sdpa) = (
            f"{shape} {name}",
            (f"{name}: {x}" for x in (NATIVE, SEEING, SDPA)),
        )
        if name == "float32" and 128 <= shape.queries <= 4096:
            run.goal("causal" if shape.causal else "full", where, taken, sdpa, seeing)
        if name == "bfloat16":
            run.goal("bf16", where, taken, sdpa, seeing)
            run.goal("half", where, taken, f"float32: {NATIVE}", own)
        run.goal("never", where, taken, sdpa, seeing)
        run.goal("seeing", where, taken, seeing, own)
        run.goal("scores", where, taken, f"{name}: {SCORES}", own)
        run.goal("columns", where, taken, f"{name}: {COLUMNS}", own)


def decode(run: Run, keys: int, dim: int) -> None:
    """One query of each of 8 × 12 heads on many keys."""
    shape, calls = Shape(8, 12, 1, keys, dim), {}
    with torch.no_grad():
        for name, dtype in DTYPES.items():
            own = forward_calls(shape, dtype)
            assert_forward(shape, dtype, own)
            calls |= {f"{name}: {x}": own[x] for x in (NATIVE, SEEING, SDPA, MATMUL)}
        taken = run.take(calls)
    run.keep("decode", shape, taken, {})
    where, half, single = str(shape), f"bfloat16: {NATIVE}", f"float32: {NATIVE}"
    run.goal("decode", where, taken, f"bfloat16: {SDPA}", half)
    run.goal("decode_bf16", where, taken, f"bfloat16: {MATMUL}", half)
    run.goal("decode_float32", where, taken, f"float32: {MATMUL}", single)


# ── forward and backward ────────────────────────────────────────────────────────────────────────


def backward_calls(shape: Shape, dtype: torch.dtype) -> dict[str, Work]:
    """Forward and gradients of q, k and v; seeing, with LSE, entropy and distance in the loss."""
    q, k, v = leaves = [x.requires_grad_() for x in shape.inputs(dtype)]
    mask, hidden = shape.mask, later(shape)
    pull, pulls = torch.randn_like(q), list(torch.randn(3, *q.shape[:3]))

    def of(attend: Callable[[], Tensor]) -> Work:
        return lambda: torch.autograd.grad(attend(), leaves, pull)

    def seeing() -> tuple[Tensor, ...]:
        f = KERNEL.observe(Call.of(q, k, v, mask=mask), ("entropy", "ahead"))
        return torch.autograd.grad([f.out, f.lse, f.entropy, f.ahead], leaves, [pull, *pulls])  # type: ignore[list-item]

    def identities() -> tuple[Tensor, ...]:
        """The same by way of PyTorch's kernel, of the last head; not timed."""
        last = [x[-1:, -1:].detach().float().requires_grad_() for x in leaves]
        wanted = (hw.LSE(), hw.Entropy(), hw.Distance())
        seen = hw.observe(*last, *wanted, mask=mask, backend="sdpa")  # type: ignore[misc]
        outputs = [seen.out, seen.lse, seen["entropy"], -seen["distance"]]
        return torch.autograd.grad(outputs, last, [x[-1:, -1:].float() for x in (pull, *pulls)])

    calls: dict[str, Work] = {
        NATIVE: of(lambda: hw.attend(q, k, v, mask=mask, backend="native")),
        SEEING: seeing,
        SDPA: of(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)),
        "identities": identities,
    }
    if shape.keys <= MATRIX // 2:
        calls[MATMUL] = of(lambda: plain(q, k, v, hidden))
    return calls


def backward(run: Run, shape: Shape) -> None:
    """One shape in both dtypes."""
    calls: dict[str, Work] = {}
    refused = {}
    for name, dtype in DTYPES.items():
        own = backward_calls(shape, dtype)
        pairs = [(NATIVE, own[NATIVE]()), (SEEING, [g[-1:, -1:] for g in own[SEEING]()])]
        wanted = own[SDPA](), own.pop("identities")()
        for (contender, gradients), theirs in zip(pairs, wanted, strict=True):
            for mine, want in zip(gradients, theirs, strict=True):
                error = (mine.float() - want.float()).abs().max() / want.abs().max()
                assert error < tolerance(dtype)["rtol"], (str(shape), name, contender, error)
        calls |= {f"{name}: {contender}": work for contender, work in own.items()}
        if MATMUL not in own:
            refused[f"{name}: {MATMUL}"] = f"not tried above T {MATRIX // 2}"
    taken = run.take(calls)
    run.keep("backward", shape, taken, refused)
    for name in DTYPES:
        where, own = f"{shape} {name}", f"{name}: {NATIVE}"
        goal = "training" if name == "float32" else "training_bf16"
        run.goal(goal, where, taken, f"{name}: {SDPA}", own)
        run.goal("learning", where, taken, f"{name}: {SEEING}", own)
