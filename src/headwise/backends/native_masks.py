"""What a mask says, as the native kernel takes it: flags, a range of keys per query, tables.

Causal masks and windows are flags and hold no tensor at all; whatever has an interval becomes
`[low, high)` for each query; what has none becomes a table over the axes that it has. Parts of an
`&` are each taken in their cheapest form.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.index import grid, lookup
from ..core.mask_algebra import And, Interval, Mask, Rows, added
from ..core.masks import (
    ALiBi,
    Bias,
    Causal,
    Dense,
    Documents,
    Everything,
    Padding,
    Window,
    alibi_slopes,
)
from ..core.modes import readable
from ..core.shapes import Extent
from ..kernels.interface import LARGEST, Terms

TABLE_LIMIT = 256 * 2**20
"""Bytes of tables that may be made of a mask."""

_FLAGS = (Everything, Causal, Window, ALiBi)

_FAR = 2**62
"""Farther than any key; queries may stand behind all keys by more than there are."""


@dataclass(frozen=True)
class _View:
    """Queries of a whole call: all of them, or `rows`."""

    whole: Extent
    rows: Tensor | None = None

    def shows(self, other: _View) -> bool:
        return self.whole == other.whole and self.rows is other.rows

    def grid(self, device: torch.device) -> tuple[Tensor, Tensor]:
        i, j = grid(self.whole, device)
        return (i if self.rows is None else self.rows[:, None]), j


@dataclass(frozen=True)
class _Part:
    """A mask without `&` at its top, and the queries that it is asked for."""

    mask: Mask
    view: _View

    @property
    def free(self) -> bool:
        """Whether it comes to flags alone."""
        return type(self.mask) in _FLAGS


def terms_of(mask: Mask, extent: Extent, device: torch.device) -> Terms:
    """A mask that was checked against the call, as the kernel's terms.

    >>> from headwise.core.masks import Causal, Padding, Window
    >>> call = Extent(2, 1, 1, 5, 7)
    >>> terms_of(Causal() & Window(3), call, torch.device("cpu"))[6:]
    (2, True, 3)
    >>> terms_of(Padding(torch.tensor([4, 7])), call, torch.device("cpu")).high.flatten()
    tensor([4, 7])
    """
    if type(mask) is Causal:
        return Terms(offset=extent.offset, causal=True)
    if type(mask) is Everything:
        return Terms(offset=extent.offset)
    if isinstance(mask, OfTerms):
        return mask.terms
    parts = _parts(mask, extent)
    view = next((p.view for p in parts if p.view.rows is not None), _View(extent))
    found = _Found(extent.heads, device)
    for part in parts:
        found.add(part, flags=part.view.shows(view))
    position = None if view.rows is None else view.rows + view.whole.offset
    return found.terms(position, view.whole.offset)


def table_bytes(mask: Mask, extent: Extent, device: torch.device) -> int:
    """How large the tables are that `terms_of` would make; 0 where it makes none."""
    cells = extent.batch * extent.heads * extent.queries * extent.keys
    if cells * 5 <= TABLE_LIMIT:  # not worth a closer look
        return 0
    allowed, bias = _Size(), _Size()
    for part in _parts(mask, extent):
        kind, copied = type(part.mask), part.view.rows is not None
        if part.free or kind is Padding:
            continue
        if kind is Documents and _runs(part, device) is not None:
            continue
        if isinstance(part.mask, Dense) and kind is Dense:
            allowed.add(part.mask.mask, extent, copied)
        elif isinstance(part.mask, Bias) and kind is Bias:
            values = part.mask.values
            bias.add(values, extent, copied or values.dtype != torch.float32)
        else:
            # Two rows and two columns tell which axes an answer has.
            i, j = part.view.grid(device)
            few = i[:2], j[:, :2], part.view.whole
            if part.mask.biased or part.mask.interval(i, part.view.whole) is None:
                allowed.add(part.mask.allowed(*few), extent, True)
            bias.add(part.mask.bias(*few), extent, True)
    return allowed.bytes(1) + bias.bytes(4)


class _Size:
    """The axes of a table that several parts make together."""

    def __init__(self) -> None:
        self.axes, self.parts, self.copied = [1, 1, 1, 1], 0, False

    def add(self, answer: Tensor | None, extent: Extent, copied: bool) -> None:
        if answer is None:
            return
        whole = (extent.batch, extent.heads, extent.queries, extent.keys)
        for axis, size in enumerate(answer.shape, start=4 - answer.dim()):
            self.axes[axis] = max(self.axes[axis], whole[axis] if size > 1 else 1)
        self.parts += 1
        self.copied |= copied

    def bytes(self, each: int) -> int:
        return each * math.prod(self.axes) if self.copied or self.parts > 1 else 0


def _parts(mask: Mask, extent: Extent) -> list[_Part]:
    return list(_split(mask, _View(extent)))


def _split(mask: Mask, view: _View) -> Iterator[_Part]:
    if type(mask) is And:
        for part in mask.parts:
            yield from _split(part, view)
    elif type(mask) is Rows:
        rows = mask.rows if view.rows is None else mask.rows[view.rows]
        yield from _split(mask.mask, _View(mask.whole, rows))
    else:
        yield _Part(mask, view)


@dataclass
class _Found:
    """The terms of the parts that were added."""

    heads: int
    device: torch.device
    causal: bool = False
    window: int = 0
    slopes: Tensor | None = None
    lows: list[Tensor] = field(default_factory=list)
    highs: list[Tensor] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)
    biases: list[Tensor] = field(default_factory=list)

    def add(self, part: _Part, flags: bool) -> None:
        mask, kind = part.mask, type(part.mask)
        if kind is Everything:
            return
        if kind is Causal and flags:
            self.causal = True
        elif isinstance(mask, Window) and kind is Window and flags:
            size = min(mask.size, _FAR)
            self.causal = True
            self.window = min(self.window or size, size)
        elif kind is ALiBi and flags:
            slopes = alibi_slopes(self.heads, self.device)
            self.slopes = slopes if self.slopes is None else self.slopes + slopes
        elif isinstance(mask, Dense) and kind is Dense and part.view.rows is None:
            self._table(mask.mask.to(self.device))
        elif isinstance(mask, Bias) and kind is Bias:  # what it forbids is −inf already
            if part.view.rows is None:
                self._bias(mask.values.to(self.device))
            else:
                self._bias(mask.bias(*part.view.grid(self.device), part.view.whole))
        elif kind is Documents:
            runs = _runs(part, self.device)
            if runs is None:
                self._table(mask.allowed(*part.view.grid(self.device), part.view.whole))
            else:
                self._range(*runs)
        elif isinstance(mask, Padding) and kind is Padding:  # no query asks for more than these
            length = _per_query(mask.lengths.to(self.device).view(-1, 1, 1, 1))
            if mask.side == "right":
                self.highs.append(length)
            else:
                self.lows.append(part.view.whole.keys - length)
        else:
            self._ask(part)

    def _ask(self, part: _Part) -> None:
        """Any mask, through what every mask answers."""
        mask, whole = part.mask, part.view.whole
        i, j = part.view.grid(self.device)
        interval = mask.interval(i, whole)
        if interval is not None:
            self._range(*interval)
        if interval is None or mask.biased:
            self._table(mask.allowed(i, j, whole))
        if mask.biased:
            self._bias(mask.bias(i, j, whole))

    def _range(self, low: Tensor, high: Tensor) -> None:
        self.lows.append(_per_query(low))
        self.highs.append(_per_query(high))

    def _table(self, allowed: Tensor | None) -> None:
        if allowed is not None:
            self.tables.append(allowed.bool())

    def _bias(self, bias: Tensor | None) -> None:
        if bias is not None:
            self.biases.append(_in_float32(bias.detach()))

    def terms(self, position: Tensor | None, offset: int) -> Terms:
        low = high = allowed = bias = None
        if self.lows:
            low = functools.reduce(torch.maximum, self.lows)
        if self.highs:
            high = functools.reduce(torch.minimum, self.highs)
        if self.tables:
            allowed = _table(functools.reduce(torch.logical_and, self.tables))
        if self.biases:
            bias = _table(functools.reduce(added, self.biases))
        return Terms(
            position, low, high, allowed, bias, self.slopes, offset, self.causal, self.window
        )


def _in_float32(bias: Tensor) -> Tensor:
    """A bias in float32, where only −inf itself forbids a key, and no number beyond float32."""
    if bias.dtype == torch.float64:
        bias = torch.where(bias.isfinite(), bias.clamp(-LARGEST, LARGEST), bias)
    return bias.to(torch.float32)


def _runs(part: _Part, device: torch.device) -> Interval | None:
    """Each query's document as a range of keys, where every document is one run of keys."""
    assert isinstance(part.mask, Documents)
    if not readable(part.mask.ids):  # the answer depends on the numbers in it
        return None
    view = part.view
    ids = part.mask.ids.to(device, torch.long)  # `searchsorted` takes no booleans
    ids = ids[(None,) * (2 - ids.dim())]
    if not bool((ids[:, 1:] >= ids[:, :-1]).all()):  # number the runs as they come
        change = ids[:, 1:] != ids[:, :-1]
        ordered = ids.sort(dim=1).values
        distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(1)
        if not torch.equal(change.sum(1), distinct):
            return None
        ids = torch.nn.functional.pad(change, (1, 0)).cumsum(1)
    ids = ids.contiguous()
    if view.rows is None:
        of_query = ids[:, view.whole.offset :][:, : view.whole.queries].contiguous()
    else:
        of_query = ids[:, view.rows + view.whole.offset]
    low = torch.searchsorted(ids, of_query)
    high = torch.searchsorted(ids, of_query, right=True)
    return low[:, None, :, None], high[:, None, :, None]


def _per_query(edge: Tensor) -> Tensor:
    """`[B, H, T]` (int64), with size 1 where an axis is shared."""
    return edge[(None,) * (4 - edge.dim())][..., 0].long()


def _table(table: Tensor) -> Tensor:
    """`[B, H, T, S]`, with size 1 where an axis is shared, dense along the keys."""
    table = table[(None,) * (4 - table.dim())]
    return table if table.stride(3) == 1 or table.shape[3] == 1 else table.contiguous()


# ── terms as a mask ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class OfTerms(Mask):
    """What the kernel's terms say, as a mask for others.

    >>> from headwise.core.masks import Causal, Window
    >>> call = Extent(1, 1, 1, 2, 3)
    >>> mask = OfTerms(terms_of(Causal() & Window(2), call, torch.device("cpu")))
    >>> mask.dense(queries=2, keys=3)[0, 0].int().tolist()
    [[1, 1, 0], [0, 1, 1]]
    """

    terms: Terms

    def positions(self, i: Tensor) -> Tensor:
        """Where queries stand among the keys."""
        position = self.terms.position
        return i + self.terms.offset if position is None else position[i]

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        found = (j >= 0) & (i >= 0)
        interval = self._range(i, extent)
        found = found & (j >= interval[0]) & (j < interval[1])
        if self.terms.allowed is not None:
            found = found & lookup(self.terms.allowed, i, j, extent)
        if self.terms.bias is not None:
            found = found & ~lookup(self.terms.bias, i, j, extent).isneginf()
        return found

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        bias, slopes = self.terms.bias, self.terms.slopes
        found = None if bias is None else lookup(bias, i, j, extent)
        if slopes is not None:
            away = -slopes.view(1, -1, 1, 1) * (self.positions(i) - j).abs()
            found = away if found is None else found + away
        return found

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        if self.terms.allowed is not None or self.terms.bias is not None:
            return None
        return self._range(i, extent)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.terms[:6] if isinstance(x, Tensor))

    @property
    def biased(self) -> bool:
        return self.terms.bias is not None or self.terms.slopes is not None

    def _range(self, i: Tensor, extent: Extent) -> Interval:
        """The keys of each query as flags and ranges have them."""
        terms, position = self.terms, self.positions(i)
        low, high = torch.zeros_like(i), torch.full_like(i, extent.keys)
        if terms.causal:
            high = torch.minimum(high, position + 1)
        if terms.window:
            low = torch.maximum(low, position + 1 - terms.window)
        every_key = torch.zeros_like(i)
        if terms.low is not None:
            low = torch.maximum(low, lookup(terms.low[..., None], i, every_key, extent))
        if terms.high is not None:
            high = torch.minimum(high, lookup(terms.high[..., None], i, every_key, extent))
        return low, torch.maximum(low, high)
