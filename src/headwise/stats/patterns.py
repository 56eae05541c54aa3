"""Masks that select the keys that heads are known to attend to.

Positions are key positions; query `i` is at position `i + S − T`. A pattern selects the keys that a
head following it would attend to; the call's mask still determines which keys are allowed.

Sources: Clark et al. 2019 and Voita et al. 2019 (positional heads), Olsson et al. 2022 (induction,
previous token), Xiao et al. 2023 (first-token sinks), Wang et al. 2022 (duplicate tokens).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ..core.index import take
from ..core.mask_algebra import Interval, Mask
from ..core.numbers import check_whole
from ..core.shapes import Extent


@dataclass(frozen=True)
class KeyRanges:
    """A set of keys for every query, each a range `[start, stop)` in one ordering of the keys.

    `order` is `[B or 1, S]` (key positions), `start` and `stop` are `[B or 1, T]`. First, previous,
    same-token and induction keys all have this form, which needs no T×T matrix. `omit` excludes
    one key per query (−1 for none).
    """

    order: Int[Tensor, "#B S"]
    start: Int[Tensor, "#B T"]
    stop: Int[Tensor, "#B T"]
    omit: Int[Tensor, "#B T"] | None = None

    def of(self, rows: Tensor | None) -> KeyRanges:
        """Return the ranges of the queries `rows`, or of all queries if it is `None`."""
        if rows is None:
            return self
        omit = None if self.omit is None else self.omit[:, rows]
        return KeyRanges(self.order, self.start[:, rows], self.stop[:, rows], omit)


def ranges_of(mask: Mask, extent: Extent, device: torch.device) -> KeyRanges | None:
    """Return a mask's keys as ranges, in any order of the keys; `None` if they are not ranges."""
    if isinstance(mask, OfTokens | AmongPositions):
        return mask.ranges(extent, device)
    found = mask.key_ranges(extent, device)
    if found is None:
        return None
    start, stop = (edge[:, 0] for edge in found)
    return KeyRanges(torch.arange(extent.keys, device=device)[None], start, stop)


class Pattern(Mask):
    """A mask that heads are known to follow, and the name of the attention to its keys."""

    name: str
    kernel: str | None = None
    """The field of `RowStatistics` that holds the mass on these keys."""


@dataclass(frozen=True)
class First(Pattern):
    """The first `count` keys, where attention sinks form.

    In a packed row, these are the keys of its first document; see `FirstOfDocument`.
    """

    count: int = 1
    name = "first"
    free = from_first_key = True

    def __post_init__(self) -> None:
        check_whole(self, "count", 1)

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        return "first" if self.count == 1 else None

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return j < self.count

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return torch.zeros_like(i), torch.full_like(i, min(self.count, extent.keys))


class OneKey(Pattern):
    """The key at a fixed offset from the query's own position."""

    behind: int
    """The distance from the query's own position back to the key; negative for keys ahead."""

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        return {0: "self", 1: "previous"}.get(self.behind)

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return j == i + extent.offset - self.behind

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        key = i + extent.offset - self.behind
        return key.clamp(0, extent.keys), (key + 1).clamp(0, extent.keys)

    def looks_ahead(self, extent: Extent) -> bool:
        return self.behind < 0


@dataclass(frozen=True)
class Previous(OneKey):
    """The key `distance` before the query's own position."""

    distance: int = 1
    name = "previous"
    free = True

    def __post_init__(self) -> None:
        check_whole(self, "distance", 1)

    @property
    def behind(self) -> int:  # type: ignore[override]
        return self.distance


@dataclass(frozen=True)
class Self(OneKey):
    """The query's own position."""

    name = "self"
    free = True
    behind = 0


@dataclass(frozen=True)
class At(OneKey):
    """The key at a fixed offset from the query's own position; a positive offset is ahead.

    Its name is `next`, `ahead_2`, `ahead_3`, …; `previous`, `back_2`, `back_3`, …; or `self`.

    >>> [At(offset).name for offset in (-2, -1, 0, 1, 2)]
    ['back_2', 'previous', 'self', 'next', 'ahead_2']

    Source: Voita et al. 2019, §4 (positional heads).
    """

    offset: int
    free = True

    def __post_init__(self) -> None:
        check_whole(self, "offset")

    @property
    def behind(self) -> int:  # type: ignore[override]
        return -self.offset

    @property
    def name(self) -> str:  # type: ignore[override]
        if abs(self.offset) < 2:
            return {-1: "previous", 0: "self", 1: "next"}[self.offset]
        return f"{'ahead' if self.offset > 0 else 'back'}_{abs(self.offset)}"


@dataclass(frozen=True, eq=False, repr=False)
class OfTokens(Pattern):
    """Keys selected by token ids, `[B, S]` or `[S]`: all keys with the query's token, except the
    one at a fixed offset from the query's own position."""

    ids: Int[Tensor, "*B S"]

    omitted = 0
    """The offset of the excluded key."""

    def __post_init__(self) -> None:
        dtype = self.ids.dtype if isinstance(self.ids, Tensor) else None
        if dtype is None or dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
            raise ValueError(
                f"{type(self).__name__}({dtype or type(self.ids).__name__}): ids must be a tensor "
                f"of whole numbers, [S] or [B, S], one token per key; give torch.tensor(ids) of a "
                f"list."
            )

    def check(self, extent: Extent) -> None:
        quote = f"{type(self).__name__}(ids {list(self.ids.shape)}) in a call with {extent}"
        if self.ids.dim() not in (1, 2) or self.ids.shape[-1] != extent.keys:
            raise ValueError(f"{quote}: ids must be [S] or [B, S], one token per key.")
        if self.ids.dim() == 2 and self.ids.shape[0] not in (1, extent.batch):
            raise ValueError(f"{quote}: give one row of ids, or one per batch row.")
        if not extent.inside:
            raise ValueError(f"{quote}: every query needs the token at its key position.")

    def carried(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the token of each key and the token that each query looks for: both `[B, S]`."""
        ids = self.ids.to(device).long()
        ids = ids[None] if ids.dim() == 1 else ids
        return ids, ids

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        keys, tokens = self.carried(i.device)
        here = i + extent.offset
        return (take(keys, j) == take(tokens, here)) & (j != here + self.omitted)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.ids,)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        """Return the keys as ranges: in order of their tokens, each token is one range."""
        self.check(extent)
        keys, tokens = self.carried(device)
        own = tokens[:, extent.offset :][:, : extent.queries].contiguous()
        ordered, order = keys.sort(dim=1, stable=True)
        start, stop = (torch.searchsorted(ordered, own, right=right) for right in (False, True))
        here = torch.arange(extent.queries, device=device)[None] + extent.offset
        return KeyRanges(order, start, stop, here + self.omitted)


@dataclass(frozen=True, eq=False, repr=False)
class SameToken(OfTokens):
    """Other positions with the query's own token. `ids` is `[B, S]` or `[S]`."""

    name = "same_token"


@dataclass(frozen=True, eq=False, repr=False)
class Induction(OfTokens):
    """Tokens that followed earlier occurrences: keys `j` with `token[j−1] == token[i]`.

    The token right after the query (if the mask allows it) is excluded, since it follows the query
    itself. `ids` is `[B, S]` or `[S]`.

    Source: Olsson et al. 2022, "prefix matching".
    """

    name = "induction"
    omitted = 1

    def carried(self, device: torch.device) -> tuple[Tensor, Tensor]:
        ids, _ = super().carried(device)
        before = torch.roll(ids, 1, dims=1)
        before[:, :1] = torch.iinfo(before.dtype).min  # key 0 follows nothing
        return before, ids


@dataclass(frozen=True, eq=False, repr=False)
class FirstOfDocument(OfTokens):
    """The first `count` keys of the query's document in a packed row, where sinks form.

    `ids` holds the document of each key, `[B, S]` or `[S]`, as in `Documents(ids)`.

    >>> import headwise as hw
    >>> ids = torch.tensor([0, 0, 1, 1])
    >>> hw.FirstOfDocument(ids).dense(queries=4, keys=4)[0, 0].int().tolist()
    [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]]
    """

    count: int = 1
    name = "first"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole(self, "count", 1)

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        ids, _ = self.carried(i.device)
        ordered, order = ids.sort(dim=1, stable=True)
        place = torch.arange(ids.shape[1], device=ids.device) - torch.searchsorted(ordered, ordered)
        place = torch.empty_like(order).scatter_(1, order, place)
        return (take(ids, j) == take(ids, i + extent.offset)) & (take(place, j) < self.count)

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges:
        """Return the keys as ranges: in order of their documents, the first `count` of each."""
        found = super().ranges(extent, device)
        return KeyRanges(found.order, found.start, found.stop.minimum(found.start + self.count))


@dataclass(frozen=True, eq=False, repr=False)
class AmongPositions(Pattern):
    """The keys of another pattern, except the last `without` keys, which have no position."""

    mask: Pattern
    without: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.mask.name

    @property
    def kernel(self) -> str | None:  # type: ignore[override]
        return self.mask.kernel

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        most = extent.keys - self.without - 1
        allowed = self.mask.allowed(i, j.clamp(max=most), self._among(extent))
        return j <= most if allowed is None else allowed & (j <= most)

    def check(self, extent: Extent) -> None:
        self.mask.check(self._among(extent))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()

    def ranges(self, extent: Extent, device: torch.device) -> KeyRanges | None:
        """Return the keys as ranges in an order that ends with the keys without a position."""
        found = ranges_of(self.mask, self._among(extent), device)
        if found is None:
            return None
        rest = torch.arange(extent.keys - self.without, extent.keys, device=device)
        order = torch.cat([found.order, rest.expand(len(found.order), -1)], dim=1)
        return replace(found, order=order)

    def _among(self, extent: Extent) -> Extent:
        return replace(extent, keys=extent.keys - self.without, first_query=extent.offset)
