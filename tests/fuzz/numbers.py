"""Numbers of every size, and tensors that lie in memory in every way that PyTorch has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Shape = Sequence[int]


def generator(seed: int, stream: int) -> Generator:
    """A source of random numbers for one tensor of a case."""
    return torch.Generator().manual_seed(seed * 16 + stream)


def numbers(kind: str, shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """Finite numbers of this kind and dtype."""
    limits = torch.finfo(dtype)
    found = KINDS[kind](shape, dtype, random)
    return found.clamp(limits.min, limits.max).to(dtype)


def _normal(shape: Shape, random: Generator) -> Tensor:
    return torch.randn(tuple(shape), generator=random, dtype=torch.float64)


def _whole(low: int, high: int, shape: Shape, random: Generator) -> Tensor:
    return torch.randint(low, high + 1, tuple(shape), generator=random).double()


def _constant(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    return (_normal((), random) * 3).expand(tuple(shape))


def _quarters(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """Few bits, so that sums of products are exact."""
    return _whole(-8, 8, shape, random) / 4


def _power(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """Few bits times one power of two, up to the limits of the dtype."""
    top = 14 if dtype == torch.float16 else 124
    low = -24 if dtype == torch.float16 else -130
    return _whole(-2, 2, shape, random) * 2.0 ** float(_whole(low, top, (), random))


def _one_feature(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """One number in each row that is not zero, of any size: scores are single products."""
    limits = torch.finfo(dtype)
    low, high = torch.tensor([limits.tiny, limits.max], dtype=torch.float64).log2()
    top = low + (high - low) * torch.rand((), generator=random, dtype=torch.float64)
    size = 2 ** (top - 6 * torch.rand(tuple(shape), generator=random, dtype=torch.float64))
    chosen = int(_whole(0, shape[-1] - 1, (), random))
    feature = torch.arange(shape[-1]) == chosen
    return torch.where(feature, size * _normal(shape, random).sign(), 0.0)


def _outlier(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """One number that is far larger than all others."""
    found = _normal(shape, random)
    at = int(_whole(0, found.numel() - 1, (), random))
    found.view(-1)[at] *= 10 ** float(_whole(1, 5, (), random))
    return found


def _limits(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """Mostly zeros and ones, and a few of the largest and smallest numbers that there are."""
    limits = torch.finfo(dtype)
    choice = torch.tensor([0, 0, 0, 1, 1, -1, 0.5, limits.tiny, limits.max, limits.min])
    choice = torch.cat([choice.double(), torch.tensor([-limits.tiny / 2, limits.max / 4])])
    return choice[_whole(0, len(choice) - 1, shape, random).long()]


def _twins(shape: Shape, dtype: torch.dtype, random: Generator) -> Tensor:
    """The same row at every position: all scores of a query are equal."""
    return _normal((*shape[:2], 1, shape[3]), random).expand(tuple(shape))


KINDS: dict[str, Callable[[Shape, torch.dtype, Generator], Tensor]] = {
    "normal": lambda s, d, r: _normal(s, r),
    "zeros": lambda s, d, r: torch.zeros(tuple(s), dtype=torch.float64),
    "constant": _constant,
    "quarters": _quarters,
    "twins": _twins,
    "small": lambda s, d, r: _normal(s, r) * 1e-3,
    "large": lambda s, d, r: _normal(s, r) * 20,
    "huge": lambda s, d, r: _normal(s, r) * torch.finfo(d).max ** 0.4,
    "tiny": lambda s, d, r: _normal(s, r) * torch.finfo(d).tiny ** 0.6,
    "denormal": lambda s, d, r: _whole(-8, 8, s, r) * torch.finfo(d).smallest_normal / 32,
    "outlier": _outlier,
    "power": _power,
    "one feature": _one_feature,
    "limits": _limits,
}
"""Kinds of numbers, tame ones first."""

TAME = tuple(KINDS)[:7]
"""Kinds whose scores are of ordinary size."""


# ── where they lie ──────────────────────────────────────────────────────────────────────────────


def _amid(x: Tensor) -> Tensor:
    """A view into rows of odd width, among numbers that must not be read."""
    b, h, t, d = x.shape
    room = x.new_full((b, t + 1, h, d + 3), torch.nan)
    room[:, :t, :, 1 : d + 1] = x.transpose(1, 2)
    return room[:, :t, :, 1 : d + 1].transpose(1, 2)


def _every_other(x: Tensor) -> Tensor:
    """Every other head and position of a larger tensor of NaN."""
    b, h, t, d = x.shape
    room = x.new_full((b, 2 * h, 2 * t, d), torch.nan)
    room[:, ::2, 1::2] = x
    return room[:, ::2, 1::2]


def _overlapping(x: Tensor) -> Tensor:
    """Rows that begin one number after the row before, and share all others with it."""
    b, h, t, d = x.shape
    length = t + d - 1
    flat = x.reshape(b * h, t * d)[:, :length].contiguous()
    return flat.as_strided((b, h, t, d), (h * length, length, 1, 1))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x.contiguous(),
    "positions first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "amid others": _amid,
    "every other": _every_other,
    "features apart": lambda x: x.mT.contiguous().mT,
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "one for all": lambda x: x[:1, :1].contiguous().expand(x.shape),
    "one position": lambda x: x[:, :, :1].contiguous().expand(x.shape),
    "one number a row": lambda x: x[..., :1].contiguous().expand(x.shape),
    "overlapping": _overlapping,
}
"""Views with the same shape as their argument; the last four hold fewer numbers."""
