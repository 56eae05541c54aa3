"""Masks of random calls: every kind that headwise has, and kinds that a user may write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

import headwise as hw
from headwise.core.mask_algebra import And, Mask
from headwise.core.masks import Bias, Everything
from headwise.core.shapes import Extent

Parts = tuple[tuple[str, ...], ...]
"""Names of parts: the outer ones are combined by `&`, each group of inner ones by `|`."""


@dataclass(frozen=True)
class Scattered(Mask):
    """A user's own mask: every third key, and those at hand."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (j % 3 == 0) | ((i + extent.offset - j).abs() < 2)


@dataclass(frozen=True)
class Slanted(Mask):
    """A user's own range, wider than the keys, with a bias of its own."""

    biased = True

    def interval(self, i: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
        return i - 3, i + 40

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (j >= i - 3) & (j < i + 40)

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (i + 2.0 * j) % 5 / 4


def mask_of(parts: Parts, extent: Extent, random: Generator) -> Mask | None:
    """The mask with these parts and random contents; `None` for no parts."""
    whole = None
    for group in parts:
        one = None
        for name in group:
            leaf = LEAVES[name](extent, random)
            one = leaf if one is None else one | leaf
        if one is not None:
            whole = one if whole is None else whole & one
    return whole


def biases(mask: Mask | None) -> Iterator[Tensor]:
    """The tensors of the mask's biases, in float64."""
    for part in mask.parts if isinstance(mask, And) else (mask,):
        if isinstance(part, Bias):
            yield part.values.double()


def in_double(mask: Mask | None) -> Mask | None:
    """The same mask with its biases in float64, so that their sum is exact."""
    if isinstance(mask, And):
        return And(tuple(in_double(part) for part in mask.parts))  # type: ignore[misc]
    return Bias(mask.values.double()) if isinstance(mask, Bias) else mask


# ── leaves ──────────────────────────────────────────────────────────────────────────────────────


def _whole(low: int, high: int, random: Generator, *shape: int) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=random)


def _number(low: int, high: int, random: Generator) -> int:
    return int(_whole(low, high, random))


def _lengths(e: Extent, r: Generator) -> Tensor:
    return _whole(0, e.keys, r, e.batch if _number(0, 1, r) else 1)


def _shape(e: Extent, r: Generator) -> list[int]:
    """Axes that are there in full or shared."""
    shape = [n if _number(0, 1, r) else 1 for n in (e.batch, e.heads, e.queries, e.keys)]
    return shape[_number(0, 2, r) if shape[:2] == [1, 1] else 0 :]


def _table(e: Extent, r: Generator) -> Tensor:
    """Booleans in one of the ways that a table may lie."""
    shape = _shape(e, r)
    table = torch.rand(shape, generator=r) < (0.1, 0.5, 0.95)[_number(0, 2, r)]
    return _turned(table, r)


def _turned(table: Tensor, r: Generator) -> Tensor:
    """The same numbers, now and then in another order of axes or with shared axes expanded."""
    way = _number(0, 3, r)
    if way == 1 and table.dim() > 1:
        return table.mT.contiguous().mT
    if way == 2:
        return torch.stack([table, table], dim=-1)[..., 0]
    return table


def _documents(e: Extent, r: Generator) -> Tensor:
    rows = e.batch if _number(0, 1, r) else 1
    ids = (torch.rand((rows, e.keys), generator=r) < 0.2).cumsum(1)
    return (ids.flip(1) if _number(0, 1, r) else ids)[0 if rows == 1 else slice(None)]


def _values(e: Extent, r: Generator, dtype: torch.dtype | None = None) -> Tensor:
    kinds = (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    dtype = dtype or kinds[_number(0, 4, r)]
    return _turned(torch.randn(_shape(e, r), generator=r).to(dtype), r)


def _with(e: Extent, r: Generator, value: float) -> Bias:
    """A bias that has this value at some pairs, or in whole rows."""
    values = _values(e, r, torch.float32).clone()
    some = torch.rand(values.shape, generator=r) < 0.4
    if _number(0, 1, r) and values.dim() > 1:
        some = (torch.rand((*values.shape[:-1], 1), generator=r) < 0.4).expand(values.shape)
    return Bias(values.masked_fill(some, value))


LEAVES: dict[str, Callable[[Extent, Generator], Mask]] = {
    "causal": lambda e, r: hw.Causal(),
    "window": lambda e, r: hw.Window(_number(1, e.keys + 2, r)),
    "padding": lambda e, r: hw.Padding(_lengths(e, r)),
    "left padding": lambda e, r: hw.Padding(_lengths(e, r), side="left"),
    "documents": lambda e, r: hw.Documents(_documents(e, r)),
    "scattered documents": lambda e, r: hw.Documents(torch.arange(e.keys) % 3),
    "prefix": lambda e, r: hw.Prefix(_number(0, e.keys + 1, r)),
    "prefixes": lambda e, r: hw.Prefix(_lengths(e, r)),
    "dense": lambda e, r: hw.Dense(_table(e, r)),
    "nothing": lambda e, r: hw.Dense(torch.zeros(1, dtype=torch.bool)),
    "everything": lambda e, r: Everything(),
    "own": lambda e, r: Scattered(),
    "window with padding": lambda e, r: (
        hw.Window(_number(1, e.keys, r)) & hw.Padding(_lengths(e, r))
    ),
    "bias": lambda e, r: Bias(_values(e, r)),
    "forbidding bias": lambda e, r: _with(e, r, -torch.inf),
    "lowest bias": lambda e, r: _with(e, r, torch.finfo(torch.float32).min),
    "low bias": lambda e, r: _with(e, r, -(10.0 ** _number(1, 30, r))),
    "high bias": lambda e, r: _with(e, r, 10.0 ** _number(1, 30, r)),
    "alibi": lambda e, r: hw.ALiBi(),
    "own bias": lambda e, r: Slanted(),
}
"""Every kind of mask by its name."""

ADDING = ("bias", "forbidding bias", "lowest bias", "low bias", "high bias", "alibi", "own bias")
"""Those that add to the scores, and cannot be parts of `|`."""

ALLOWING = tuple(name for name in LEAVES if name not in ADDING)
