"""Which keys: the patterns that heads are known for, each as a range of keys in some ordering.

Positions are key positions; query `i` stands at `i + S − T`. A pattern says what a head following
it would look at; the call's mask still decides what may be looked at.

Sources: Clark et al. 2019 and Voita et al. 2019 (positional heads), Olsson et al. 2022 (induction,
previous token), Xiao et al. 2023 (first-token sinks), Wang et al. 2022 (duplicate tokens).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from .._text import Brief
from ..core.numbers import check_whole
from ..core.shapes import Extent


@dataclass(frozen=True)
class KeyRanges:
    """A set of keys for every query, each a range `[start, stop)` in one ordering of the keys.

    `order` is `[B or 1, S]` (key positions), `start` and `stop` are `[B or 1, T]`. First, previous,
    same-token and induction keys all have this shape, and so need no T×T matrix to be written down.
    `omit` leaves out one key per query (−1 for none).
    """

    order: Int[Tensor, "#B S"]
    start: Int[Tensor, "#B T"]
    stop: Int[Tensor, "#B T"]
    omit: Int[Tensor, "#B T"] | None = None


@runtime_checkable
class Pattern(Protocol):
    """Which keys a head that follows the pattern looks at.

    It may also have a `figure`: the field of `Figures` that holds the mass on its keys.
    """

    @property
    def name(self) -> str: ...

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges: ...

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        """The pattern as a boolean matrix `[B or 1, T, S]`, for the definition."""
        ...


def _positions(extent: Extent, device: torch.device) -> Tensor:
    return torch.arange(extent.queries, device=device)[None] + extent.offset


def _in_order(extent: Extent, device: torch.device) -> Tensor:
    return torch.arange(extent.keys, device=device)[None]


def _one_key(offset: int, extent: Extent, device: torch.device) -> KeyRanges:
    """The key that stands so far after the query; none where that is outside the keys."""
    key = _positions(extent, device) + offset
    start = key.clamp(0, extent.keys)
    stop = torch.where((key >= 0) & (key < extent.keys), start + 1, start)
    return KeyRanges(_in_order(extent, device), start, stop)


@dataclass(frozen=True)
class First:
    """The first `count` keys, where attention sinks form."""

    count: int = 1
    name = "first"

    free = True

    @property
    def figure(self) -> str | None:
        return "first" if self.count == 1 else None

    def __post_init__(self) -> None:
        check_whole(self, "count", 1)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        start = torch.zeros(1, extent.queries, dtype=torch.long, device=device)
        return KeyRanges(_in_order(extent, device), start, start + min(self.count, extent.keys))

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        j = torch.arange(extent.keys, device=device)
        return (j < self.count).expand(1, extent.queries, -1)


@dataclass(frozen=True)
class Previous:
    """The key `distance` before the query's own position."""

    distance: int = 1
    name = "previous"

    free = True

    @property
    def figure(self) -> str | None:
        return "previous" if self.distance == 1 else None

    def __post_init__(self) -> None:
        check_whole(self, "distance", 1)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        return _one_key(-self.distance, extent, device)

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        j = torch.arange(extent.keys, device=device)
        return j == (_positions(extent, device) - self.distance)[..., None]


@dataclass(frozen=True)
class Self:
    """The query's own position."""

    name = "self"
    figure = "self"

    free = True

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        return _one_key(0, extent, device)

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        return torch.arange(extent.keys, device=device) == _positions(extent, device)[..., None]


@dataclass(frozen=True)
class At:
    """The key at a fixed offset from the query's own position: ahead where it is positive.

    It is called `next` and `ahead_2`, `ahead_3`, …; `previous` and `back_2`, `back_3`, …; `self`.

    >>> [At(offset).name for offset in (-2, -1, 0, 1, 2)]
    ['back_2', 'previous', 'self', 'next', 'ahead_2']

    Source: Voita et al. 2019, §4 (positional heads).
    """

    offset: int

    free = True

    def __post_init__(self) -> None:
        check_whole(self, "offset")

    @property
    def name(self) -> str:
        if abs(self.offset) < 2:
            return {-1: "previous", 0: "self", 1: "next"}[self.offset]
        return f"{'ahead' if self.offset > 0 else 'back'}_{abs(self.offset)}"

    @property
    def figure(self) -> str | None:
        return self.name if self.offset in (-1, 0) else None

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        return _one_key(self.offset, extent, device)

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        j = torch.arange(extent.keys, device=device)
        return j == (_positions(extent, device) + self.offset)[..., None]


@dataclass(frozen=True, eq=False, repr=False)
class SameToken(Brief):
    """Other positions with the query's own token. `ids` is `[B, S]` or `[S]`."""

    ids: Int[Tensor, "*B S"]
    name = "same_token"

    def __post_init__(self) -> None:
        _check_ids(self, self.ids)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        ids, own = _tokens(self, self.ids, extent, device)
        return _sorted_ranges(ids, own, omit=_positions(extent, device))

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        ids, own = _tokens(self, self.ids, extent, device)
        j = torch.arange(extent.keys, device=device)
        return (ids[:, None] == own[..., None]) & (j != _positions(extent, device)[..., None])


@dataclass(frozen=True, eq=False, repr=False)
class Induction(Brief):
    """Followers of earlier occurrences: keys `j` with `token[j−1] == token[i]`.

    What followed this token before. The query's own follower (where the mask lets it be seen) is
    no occurrence before it and is left out. `ids` is `[B, S]` or `[S]`.

    Source: Olsson et al. 2022, "prefix matching".
    """

    ids: Int[Tensor, "*B S"]
    name = "induction"

    def __post_init__(self) -> None:
        _check_ids(self, self.ids)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        ids, own = _tokens(self, self.ids, extent, device)
        before = torch.roll(ids, 1, dims=1)
        before[:, :1] = torch.iinfo(before.dtype).min  # key 0 follows nothing
        return _sorted_ranges(before, own, omit=_positions(extent, device) + 1)

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        ids, own = _tokens(self, self.ids, extent, device)
        follows = torch.zeros(ids.shape[0], *own.shape[1:], extent.keys, dtype=torch.bool)
        follows = follows.to(device)
        follows[..., 1:] = ids[:, None, :-1] == own[..., None]
        j = torch.arange(extent.keys, device=device)
        return follows & (j != _positions(extent, device)[..., None] + 1)


def _check_ids(pattern: object, ids: object) -> None:
    dtype = ids.dtype if isinstance(ids, Tensor) else None
    if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        raise ValueError(
            f"{type(pattern).__name__}({dtype or type(ids).__name__}): ids must be a tensor of "
            f"whole numbers, [S] or [B, S], one token per key; give torch.tensor(ids) of a list."
        )


def _tokens(
    pattern: object, ids: Tensor, extent: Extent, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Token ids of keys `[B or 1, S]` and of queries `[B or 1, T]`."""
    said = f"{type(pattern).__name__}(ids {list(ids.shape)}) in a call with {extent}"
    table = ids.to(device).view(1, -1) if ids.dim() == 1 else ids.to(device)
    if table.dim() != 2 or table.shape[1] != extent.keys:
        raise ValueError(f"{said}: ids must be [S] or [B, S], one token per key.")
    if table.shape[0] not in (1, extent.batch):
        raise ValueError(f"{said}: give one row of ids, or one per batch row.")
    if not extent.inside:
        raise ValueError(f"{said}: every query needs the token at its key position.")
    table = table.long()
    return table, table[:, extent.offset :][:, : extent.queries]


def _sorted_ranges(of_keys: Tensor, of_queries: Tensor, omit: Tensor) -> KeyRanges:
    """Keys sorted by what they carry: those that match a query are one range of that order."""
    ordered, order = of_keys.sort(dim=1, stable=True)
    queries = of_queries.contiguous()
    start = torch.searchsorted(ordered, queries)
    return KeyRanges(order, start, torch.searchsorted(ordered, queries, right=True), omit)
