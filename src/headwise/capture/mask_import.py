"""Convert the mask tensors of models to masks of headwise.

PyTorch models represent masks in many ways: booleans, zeros and minus infinity, or zeros and the
smallest number of the dtype. Each tensor is analyzed once: it becomes `Everything()`, `Causal()`, a
range of keys for each query (which kernels support without a T×T table), or a table.

Padding is detected here too. In self-attention a key that no query may attend to is padding, and so
is the query at its position, which is excluded from all means.

The host reads mask values only if it does not have to wait for them. On a GPU a table remains a
table, with the range of keys that contains those of each query, and padded queries are found on
the GPU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.index import grid, lookup
from ..core.mask_algebra import And, Interval, Mask
from ..core.masks import ALiBi, Bias, Causal, Dense, Everything, Padding, Window
from ..core.modes import read_at_once, readable
from ..core.shapes import Extent
from ..stats.view import attended_keys

FORBIDDEN = -9e3
"""In a mask of only zeros and numbers up to this one, the latter mean "must not attend": −10,000
in BERT, −1e9, the smallest number of a dtype, −∞."""

FORBIDDEN_BIAS = -1e8
"""The same for masks with other numbers, which may be an intentionally large bias."""


@dataclass(frozen=True, eq=False)
class Ranges(Mask):
    """The keys of each query as one range `[low, high)`.

    >>> low, high = torch.tensor([[0, 0, 1], [1, 3, 3]]).view(2, 1, 1, 3, 1)
    >>> Ranges(low, high).dense(queries=3, keys=3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 1], [0, 1, 1]]
    """

    fixed = True

    low: Int[Tensor, "#B #H #T 1"]
    high: Int[Tensor, "#B #H #T 1"]

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        low, high = self.interval(i, extent)
        return (j >= low) & (j < high)

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return _of_queries(self.low, i, extent), _of_queries(self.high, i, extent)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.low, self.high


@dataclass(frozen=True, eq=False)
class Added(Mask):
    """A `Bias` in which every number that is not above `low` means "must not attend", like −∞.

    >>> Added(torch.tensor([0.5, -1e30]), -1e8).dense(queries=1, keys=2).tolist()
    [[[[True, False]]]]
    """

    values: Float[Tensor, "..."]
    low: float

    def check(self, extent: Extent) -> None:
        Bias(self.values).check(extent)

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        hidden = lookup(self.values.detach(), i, j, extent) <= self.low  # False for NaN
        return hidden.logical_not_()

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return lookup(self.values, i, j, extent)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.values,)

    @property
    def biased(self) -> bool:
        return True


@dataclass(frozen=True, eq=False, repr=False)
class OwnDense(Dense):
    """A `Dense` with a tensor that is not shared."""

    fixed = True


@dataclass(frozen=True, eq=False, repr=False)
class OwnBias(Bias):
    """A `Bias` with a tensor that is not shared."""

    fixed = True


@dataclass(frozen=True, eq=False)
class QueryMask(Mask):
    """A mask that lets only some queries attend.

    >>> QueryMask(torch.tensor([[True, False]])).dense(queries=2, keys=3)[0, 0].int().tolist()
    [[1, 1, 1], [0, 0, 0]]
    """

    fixed = True

    real: Bool[Tensor, "#B T"]

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return _of_queries(self.real[:, None, :, None], i, extent)

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        high = _of_queries(self.real[:, None, :, None], i, extent) * extent.keys
        return torch.zeros_like(high), high

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.real,)


def _of_queries(table: Tensor, i: Tensor, extent: Extent) -> Tensor:
    """Return `table[b, 0, i, 0]`, which broadcasts over the keys."""
    return lookup(table, i, torch.zeros(1, 1, dtype=torch.long, device=i.device), extent)


def as_mask(
    given: Tensor | None, extent: Extent, *, causal: bool = False, wait: bool = False
) -> Mask:
    """Convert a mask in the form of PyTorch's attention to a mask of headwise.

    Args:
        given: booleans, True for "may attend", or floats that are added to the scores; broadcasts
            to `[B, H, T, S]`. `None` for everything.
        extent: the sizes of the call.
        causal: without a mask, query i sees the keys 0 … i, counted from the start of both.
        wait: read values even if the host has to wait for them.

    Returns:
        `Everything()`, `Causal()`, `Ranges` or `Dense`; `Added` for floats that are not only
        allowed or forbidden. Every kernel computes the same with it as with `given`. If values are
        not read, a table and `Ranges` that contain the keys of each query.

    >>> square = Extent(1, 1, 1, 3, 3)
    >>> as_mask(torch.full((3, 3), -torch.inf).triu(1), square)
    Causal()
    >>> type(as_mask(torch.tensor([0.0, 0.0, -1e9]), square)).__name__  # the last key is padding
    'Ranges'
    """
    if causal:
        return _causal_from_start(extent, None if given is None else given.device)
    if given is None:
        return Everything()
    table = _collapsed(given[(None,) * (4 - given.dim())])
    read = wait or read_at_once(table)
    if table.dtype == torch.bool:
        return _of_booleans(table, extent) if read else _unread(OwnDense(table.clone()), table)
    if not table.requires_grad:
        if not read:
            return _unread_floats(table)
        allowed = table == 0
        if bool((allowed | (table <= FORBIDDEN)).all()):
            return _of_booleans(allowed, extent)
    return as_bias(table)


def as_bias(table: Tensor, forbidden: float = FORBIDDEN_BIAS) -> Added:
    """Return the values added to the scores, with numbers up to `forbidden` as −∞."""
    return Added(table, max(forbidden, torch.finfo(table.dtype).min / 2))


def _causal_from_start(extent: Extent, device: torch.device | None) -> Mask:
    if not extent.offset:
        return Causal()
    high = torch.arange(1, extent.queries + 1, device=device).clamp(max=extent.keys)
    return Ranges(torch.zeros_like(high)[None, None, :, None], high[None, None, :, None])


def _collapsed(table: Tensor) -> Tensor:
    """Return a table `[b, h, t, s]` with size 1 on axes along which it repeats."""
    for axis in range(3):
        if table.shape[axis] > 1 and table.stride(axis) == 0:
            table = table.narrow(axis, 0, 1)
    return table


def _of_booleans(allowed: Tensor, extent: Extent) -> Mask:
    if allowed.shape[1] > 1 and bool((allowed == allowed[:, :1]).all()):
        allowed = allowed[:, :1]
    keys = allowed.shape[3]
    if allowed.shape[1] > 1 or keys != extent.keys or not allowed.numel():
        return Dense(allowed)
    low, high = _range_of(allowed)
    if not bool((high - low == allowed.sum(-1, keepdim=True)).all()):
        return Dense(allowed)
    if bool((low == 0).all()):
        if bool((high == keys).all()):
            return Everything()
        i, _ = grid(extent, allowed.device)
        if allowed.shape[2] == extent.queries and bool((high == i + 1 + extent.offset).all()):
            return Causal()
    return Ranges(low, high)


def _unread_floats(table: Tensor) -> Mask:
    """Return the values added to the scores, −inf for "must not attend"."""
    hidden = table <= FORBIDDEN
    low = torch.where(((table == 0) | hidden).all(), FORBIDDEN, as_bias(table).low)
    allowed = (table <= low).logical_not_()
    return _unread(OwnBias(table.masked_fill(~allowed, -torch.inf)), allowed)


def _unread(mask: OwnDense | OwnBias, allowed: Tensor) -> Mask:
    """Return a mask with the range of keys that contains those of each query."""
    if allowed.shape[3] < 2:
        return mask
    return And((mask, Ranges(*_range_of(allowed.any(1, keepdim=True)))))


def _range_of(allowed: Tensor) -> Interval:
    """Return, for each query, the smallest range `[low, high)` with all its allowed keys."""
    bits = allowed.contiguous().view(torch.uint8)
    low = bits.argmax(-1, keepdim=True)
    high = bits.shape[-1] - bits.flip(-1).argmax(-1, keepdim=True)
    return low, high * bits.amax(-1, keepdim=True)


def _attended_of_unread(mask: Mask, keys: int) -> Bool[Tensor, "B S"] | None:
    """Return the keys that some query of some head may attend to; `None` for other masks."""
    table = mask.parts[0] if isinstance(mask, And) else mask
    if isinstance(table, OwnDense):
        allowed = table.mask
    elif isinstance(table, OwnBias):
        allowed = table.values != -torch.inf
    else:
        return None
    return allowed.flatten(1, 2).any(1).expand(-1, keys)


def _attended_of_padding(
    mask: Mask, extent: Extent, device: torch.device
) -> Bool[Tensor, "B S"] | None:
    """Return the keys that their own queries may attend to, by lengths; `None` for other masks."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    padding = [part for part in parts if isinstance(part, Padding)]
    if not padding or not all(isinstance(x, Padding) or reaches_all(x) for x in parts):
        return None
    j = torch.arange(extent.keys, device=device)[None]
    return torch.stack([part.allowed(j.T, j, extent)[:, 0, 0] for part in padding]).all(0)


def without_padding(mask: Mask, extent: Extent, device: torch.device) -> Mask:
    """Return the mask of self-attention without any allowed key for padded queries.

    >>> from headwise.core.masks import Padding
    >>> call, padded = Extent(1, 1, 1, 3, 3), Padding(torch.tensor([2]))
    >>> without_padding(padded, call, torch.device("cpu")).dense(queries=3, keys=3).int()[0, 0]
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 0]], dtype=torch.int32)
    """
    if not extent.inside or reaches_all(mask):
        return mask
    real = _attended_of_unread(mask, extent.keys)
    if real is None and device.type != "cpu":
        real = _attended_of_padding(mask, extent, device)
    if real is None:
        if _own_keys(mask, extent, extent.offset, device) is None:
            return mask  # usually, queries may attend to themselves
        real = attended(mask, extent, device)
        if bool(real[:, extent.offset :][:, : extent.queries].all()):
            return mask
    return mask & QueryMask(real[:, extent.offset :][:, : extent.queries])


def with_padding(mask: Mask) -> Mask:
    """Return the original mask, before `without_padding()` changed the padded queries."""
    if not isinstance(mask, And) or not any(isinstance(part, QueryMask) for part in mask.parts):
        return mask
    first, *others = (part for part in mask.parts if not isinstance(part, QueryMask))
    return And((first, *others)) if others else first


def resolve_padding(
    find: Callable[[Extent], Mask],
    extent: Extent,
    device: torch.device,
    own: bool | None,
    behind: int = 0,
) -> tuple[Mask, int, int]:
    """Return a mask without padded queries, the number of valid keys, and the number `behind` them.

    If the mask differs between queries, the call is self-attention. A static cache is empty after
    the last visible key. The last query is at the position of the last key, unless the mask shows
    that keys without a position follow the sequence.

    Args:
        find: returns the mask of a call of these sizes, which may have fewer keys.
        extent: the sizes of the call.
        device: the device of its tensors.
        own: True if queries and keys belong to one sequence; `None` if only the mask can decide.
        behind: the number of keys that are known to follow those that have a position.
    """
    if behind:
        extent = replace(extent, first_query=extent.offset - behind)
    mask = find(extent)
    here = at_the_end(mask, extent) if own is None else own
    alone = own is None and extent.queries == 1
    if not behind and extent.offset > 0 and (here or alone):
        extent = replace(extent, keys=max(reach(mask, extent, device), extent.queries))
        mask = find(extent)
        first = _first_query(mask, extent, device, bool(own)) if here else extent.offset
        here = here and first is not None
        if first not in (None, extent.offset):
            behind, extent = extent.offset - first, replace(extent, first_query=first)
    return (without_padding(mask, extent, device) if here else mask), extent.keys, behind


def _first_query(mask: Mask, extent: Extent, device: torch.device, sure: bool) -> int | None:
    """Return the key position of query 0, for self-attention with more keys than queries.

    At this position each query sees its own key, unless no query sees it. It is the last position
    at which queries do not see later keys among their own; for a mask that is not causal, the end.
    If `sure` that it is self-attention, it is the last position at which the visible own keys are
    contiguous, before or after padding. `None` if there is no such position.
    """
    end, queries = extent.offset, extent.queries
    if not end or not queries:
        return end
    own = _own_keys(mask, extent, end, device)
    j = torch.arange(extent.keys, device=device)[None]
    some = sorted({0, queries // 2, queries - 1})  # these exclude most positions
    i = torch.tensor(some, device=device)[:, None]
    allowed = None if reaches_all(mask) else mask.allowed(i, j, extent)
    if allowed is None or (own is None and not bool((allowed & (j > i + end)).any())):
        return end
    real = attended(mask, extent, device)
    seen = _of_all_heads(allowed).expand(-1, len(some), extent.keys)

    def among(keys: Tensor, start: int, stop: int) -> Tensor:
        """Count the True entries of `[B, S]` at own keys `start` to `stop`, for each position."""
        sums = F.pad(keys.int().cumsum(1), (1, 0))
        return sums[:, stop : stop + end + 1] - sums[:, start : start + end + 1]

    fits = torch.ones(end + 1, dtype=torch.bool, device=device)
    causal = (among(real, 1, queries) > 0).any(0)
    for row, query in enumerate(some):
        mine = seen[:, row]
        fits &= among(real & ~mine, query, query + 1).eq(0).all(0)
        causal &= among(mine, query + 1, queries).eq(0).all(0)
    places = _last(causal & fits)
    if sure and own is not None:
        turns = F.pad(real.int().diff(dim=1).abs(), (1, 0))
        places += _last(fits & (among(turns, 1, queries) < 2).all(0)) + _last(fits)
    for first in [*places, *([end] if own is None or not sure else [])]:
        own = _own_keys(mask, extent, first, device)
        if own is None or not bool((real[:, first : first + queries] & ~own[..., 0]).any()):
            return first
    return None


def _last(flags: Tensor, count: int = 8) -> list[int]:
    """Return the indices of the last flags that are True, in descending order."""
    return flags.nonzero().flatten().flip(0)[:count].tolist()


def _own_keys(mask: Mask, extent: Extent, first: int, device: torch.device) -> Tensor | None:
    """Return which queries may attend to their own keys, `[B or 1, T, 1]`; `None` if all may."""
    i = torch.arange(extent.queries, device=device)[:, None]
    own = None if reaches_all(mask) else mask.allowed(i, i + first, extent)
    return None if own is None or bool(own.all()) else _of_all_heads(own)


def _of_all_heads(allowed: Tensor) -> Tensor:
    """Return the pairs at which some head may attend, `[B or 1, t, s]`."""
    return allowed[(None,) * (4 - allowed.dim())].any(1)


def reaches_all(mask: Mask) -> bool:
    """Return True if every query sees its own key, for any sizes."""
    if isinstance(mask, And):
        return all(reaches_all(part) for part in mask.parts)
    return type(mask) in (Everything, Causal, Window, ALiBi)


def at_the_end(mask: Mask, extent: Extent) -> bool:
    """Return True if the queries are at the end of the keys, by sizes and mask.

    They are if there are as many keys as queries; with more keys, if the mask differs between
    queries, which a mask for the keys of another sequence does not.
    """
    if extent.offset <= 0 or isinstance(mask, Everything | Causal):
        return not extent.offset or isinstance(mask, Causal)
    if isinstance(mask, Ranges):
        return any(bool((edge != edge[:, :, :1]).any()) for edge in (mask.low, mask.high))
    if isinstance(mask, Dense | Added):
        table = mask.mask if isinstance(mask, Dense) else ~(mask.values <= mask.low)
        table = table[(None,) * (4 - table.dim())]
        return bool((table != table[:, :, :1]).any())
    return not isinstance(mask, Padding)


def reach(mask: Mask, extent: Extent, device: torch.device) -> int:
    """Return the number of keys up to the last visible one."""
    if reaches_all(mask):
        return extent.keys
    seen = attended(mask, extent, device).any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 0


def attended(mask: Mask, extent: Extent, device: torch.device) -> Bool[Tensor, "B S"]:
    """Return the keys that some query of some head may attend to."""
    return attended_keys(mask, extent, device).any(1)


class Copy:
    """A copy of a tensor without repeated entries; on a GPU, its version counter.

    On a GPU, the host would have to wait for a comparison. In inference mode, PyTorch does not
    count changes.
    """

    def __init__(self, x: Tensor) -> None:
        self._clone = once(x).clone() if read_at_once(x) else None
        self._version = -1 if x.is_inference() else x._version

    def same(self, x: Tensor) -> bool:
        """Return True if a tensor of the same layout certainly holds the same numbers."""
        if self._clone is None:
            return not x.is_inference() and x._version == self._version
        return torch.equal(self._clone, once(x))


def once(x: Tensor) -> Tensor:
    """Return a tensor with size 1 on axes along which it repeats."""
    x = x.detach()
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


Result = TypeVar("Result")


class MaskMemo:
    """A cache of converted masks, because one mask is usually shared by all layers of a model.

    It keeps few masks, and none longer than a call of the model. A mask whose values have changed
    counts as a new one.
    """

    SIZE = 8
    LARGEST = 2**28
    """The maximal size in bytes of a mask that is kept; larger ones are converted every time."""

    def __init__(self) -> None:
        self._results: OrderedDict[object, tuple[list[tuple[Tensor, Copy]], Any]] = OrderedDict()

    def of(
        self, given: Tensor, key: object, find: Callable[[], Result], reads: Sequence[Tensor] = ()
    ) -> Result:
        """Return `find()`, or the cached result for this tensor and `key`.

        `reads` are the other tensors that the result depends on.
        """
        at = given.data_ptr() if readable(given) else id(given)
        place = (at, given.shape, given.stride(), given.dtype, given.device)
        before = self._results.get((place, key))
        if before is not None and all(copy.same(x) for x, copy in before[0]):
            return before[1]
        result = find()
        if all(once(x).nbytes <= self.LARGEST for x in (given, *reads)):
            # Kept alive, so that its memory is not reused by another mask.
            self._results[place, key] = [(x, Copy(x)) for x in (given, *reads)], result
            if len(self._results) > self.SIZE:
                self._results.popitem(last=False)
        return result

    def clear(self) -> None:
        """Clear the cache."""
        self._results.clear()
