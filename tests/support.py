"""Cases and derived tolerances that several test files share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.core.reference import Definition, attention
from headwise.kernels import ctypes_api as cpu

# Every axis has its own prime.
B, H, G, T, S, D, DV = 2, 6, 3, 7, 11, 5, 13

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32)}
EPS |= {dtype: torch.finfo(dtype).eps for dtype in (torch.bfloat16, torch.float16)}

Masks = dict[str, Callable[[int, int], "hw.Mask | None"]]


def _ids(length: int) -> Tensor:
    return torch.arange(B)[:, None] + torch.arange(length)[None] // 3


MASKS: Masks = {
    "none": lambda t, s: None,
    "causal": lambda t, s: hw.Causal(),
    "window": lambda t, s: hw.Window(3),
    "wide window": lambda t, s: hw.Window(100),
    "padding": lambda t, s: hw.Padding(torch.tensor([s - 2, 3])),
    "left padding": lambda t, s: hw.Causal() & hw.Padding(torch.tensor([s, 2]), side="left"),
    "prefix": lambda t, s: hw.Causal() | hw.Prefix(4),
    "prefix per row": lambda t, s: hw.Causal() | hw.Prefix(torch.tensor([1, 5])),
    "random": lambda t, s: hw.Dense(_noise(B, 1, t, s) > 0.7),
    "random per head": lambda t, s: hw.Dense(_noise(1, H, t, s) > 0.7),
    "bias": lambda t, s: hw.Bias(_noise(H, t, s)) & hw.Causal(),
    "forbidding bias": lambda t, s: hw.Bias(_noise(t, s).masked_fill(_noise(t, s) > 1, -torch.inf)),
    "alibi": lambda t, s: hw.ALiBi() & hw.Causal(),
    "nothing": lambda t, s: hw.Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
}
# A query's document is that of its key position, so there must be one.
MASKS_WITH_POSITIONS: Masks = MASKS | {
    "documents": lambda t, s: hw.Documents(_ids(s)) & hw.Causal(),
    "windowed documents": lambda t, s: hw.Documents(_ids(s)) & hw.Window(4) & hw.Causal(),
}


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


BACKENDS = ["sdpa", "blocked", "eager"]
if cpu.library() is not None:
    BACKENDS.insert(0, "native")

IN_DOUBLE = [name for name in BACKENDS if name != "native"]
"""Those that serve float64."""

SERVED = [
    *((name, dtype) for name in BACKENDS for dtype in (torch.float32, torch.bfloat16)),
    *((name, torch.float16) for name in BACKENDS),
    *((name, torch.float64) for name in IN_DOUBLE),
]
"""Each backend with each dtype that it serves."""

ULPS = {"sdpa": 24.0}
"""PyTorch's CPU kernel takes its exponential to 20 units in the last place."""


def qkv(
    t: int = T, s: int = S, g: int = G, dv: int = D, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    """Fresh random q, k and v."""
    q, k, v = torch.randn(B, H, t, D), torch.randn(B, g, s, D), torch.randn(B, g, s, dv)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def truth(q: Tensor, k: Tensor, v: Tensor, **keywords: object) -> Definition:
    """The definition in float64 on exactly these inputs."""
    return attention(q.double(), k.double(), v.double(), **keywords)  # type: ignore[arg-type]


def score_rounding(q: Tensor, k: Tensor) -> float:
    """How far rounding alone may move a score of `q` and `k` in float32, and so its logarithm.

    A sum of d products is exact to d half ulps of the sum of their sizes (Higham, Accuracy and
    Stability of Numerical Algorithms, 2002, eq. 3.5), and the scale rounds once more. The error of
    one drawn definition does not show this: with few queries it is small by chance.
    """
    width = q.shape[-1]
    size = q.abs().amax((-2, -3)) * k.abs().amax((-2, -3))
    return (width + 1) / 2 * EPS[torch.float32] * size.sum(-1).max().item() * width**-0.5


def of_halves(backend: str, dtype: torch.dtype) -> float:
    """The error of a sum of weights on which a backend gets its figures, relative to itself.

    PyTorch's CPU kernel takes the exponential of float16 and bfloat16 to 1e-4 only, wherever it
    works with vectors; how long these are, and so which lengths they are used for, is the CPU's.
    """
    halves = dtype in (torch.float16, torch.bfloat16)
    return 1e-4 if halves and backend in ("sdpa", "tiles") else 0.0


def assert_as_good(
    got: Tensor,
    plain: Tensor,
    exact: Tensor,
    dtype: torch.dtype,
    factor: float = 4.0,
    ulps: float = 4.0,
    own: float = 0.0,
) -> None:
    """The error of `got` may not exceed that of the plain definition in the same dtype.

    Times a factor for another order of summation, plus some ulps for the result itself, and the
    error that the backend's `own` exponential has.
    """
    assert got.shape == exact.shape
    if dtype == torch.float64:  # the definition's own dtype: there is no error to compare with
        torch.testing.assert_close(got, exact, rtol=1e-11, atol=1e-11)
        return
    finite = torch.isfinite(exact)
    assert torch.equal(torch.isfinite(got), finite)
    assert torch.equal(got.double()[~finite], exact[~finite])
    if not finite.any():
        return
    error = (got.double() - exact)[finite].abs().max().item()
    allowed = (plain.double() - exact)[finite].abs().max().item()
    rounding = (ulps * EPS[dtype] + own) * max(1.0, exact[finite].abs().max().item())
    assert error <= factor * allowed + rounding, f"error {error:.2e}, definition's {allowed:.2e}"


def pairwise(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Return combinations in which any two values of two axes meet, in place of all of them."""
    values = [list(axis) for axis in axes]
    every = list(product(*(range(len(axis)) for axis in values)))
    pairs = [{(a, b, c[a], c[b]) for a, b in combinations(range(len(axes)), 2)} for c in every]
    missing, chosen = set().union(*pairs), []
    while missing:
        best = max(range(len(every)), key=lambda number: len(pairs[number] & missing))
        missing -= pairs[best]
        chosen.append(tuple(axis[at] for axis, at in zip(values, every[best], strict=True)))
    return chosen
