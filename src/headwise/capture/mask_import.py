"""Masks of others: the tensors that a model masks its attention with, as masks of headwise.

PyTorch's models say who may attend in many ways: booleans, zeros beside minus infinity, zeros
beside the smallest number of the dtype. What they mean is found out once for a tensor: everything,
`Causal()`, a range of keys for each query (which kernels take without a T×T table), or a table.

Padding is found here too. In self-attention a key that no query may attend to is padding, and so
is the query at its position: that one is left out of every mean, as if it might attend to nothing.

The host reads numbers for that where it need not wait for them. On a GPU a table stays a table,
beside the range of keys in which each query's lie, and padded queries are computed there.
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
"""Beside zeros alone, such numbers and smaller ones mean "may not attend": BERT's −10,000, −1e9,
the smallest number of a dtype, −∞."""

FORBIDDEN_BIAS = -1e8
"""The same beside other numbers, which may be a bias that is large on purpose."""


@dataclass(frozen=True, eq=False)
class Ranges(Mask):
    """Each query's keys as one range `[low, high)`.

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
    """A `Bias` in which −∞ has many names: whatever is not above `low` means "may not attend".

    >>> Added(torch.tensor([0.5, -1e30]), -1e8).dense(queries=1, keys=2).tolist()
    [[[[True, False]]]]
    """

    values: Float[Tensor, "..."]
    low: float

    def check(self, extent: Extent) -> None:
        Bias(self.values).check(extent)

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        hidden = lookup(self.values.detach(), i, j, extent) <= self.low  # which NaN is not
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
    """A `Dense` whose tensor nobody else has."""

    fixed = True


@dataclass(frozen=True, eq=False, repr=False)
class OwnBias(Bias):
    """A `Bias` whose tensor nobody else has."""

    fixed = True


@dataclass(frozen=True, eq=False)
class QueryMask(Mask):
    """Only some queries attend at all.

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
    """`table[b, 0, i, 0]`, which broadcasts to the pairs of i with any keys."""
    return lookup(table, i, torch.zeros(1, 1, dtype=torch.long, device=i.device), extent)


def as_mask(
    given: Tensor | None, extent: Extent, *, causal: bool = False, wait: bool = False
) -> Mask:
    """Return a mask as PyTorch's attention takes it, as a value.

    Args:
        given: booleans, True for "may attend", or floats that are added to the scores; broadcasts
            to `[B, H, T, S]`. `None` for everything.
        extent: the sizes of the call.
        causal: in place of a mask, query i sees the keys 0 … i, counted from the start of both.
        wait: read numbers also where the host has to wait for them.

    Returns:
        `Everything()`, `Causal()`, `Ranges`, or `Dense`; `Added` of floats that are no mere yes
        and no. The same to every kernel as what was given. Where numbers are not read, a table and
        `Ranges` in which each query's keys lie.

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
    """What is added to the scores, with numbers of `forbidden` and below as −∞."""
    return Added(table, max(forbidden, torch.finfo(table.dtype).min / 2))


def _causal_from_start(extent: Extent, device: torch.device | None) -> Mask:
    if not extent.offset:
        return Causal()
    high = torch.arange(1, extent.queries + 1, device=device).clamp(max=extent.keys)
    return Ranges(torch.zeros_like(high)[None, None, :, None], high[None, None, :, None])


def _collapsed(table: Tensor) -> Tensor:
    """A table `[b, h, t, s]` with one entry along the axes on which it repeats itself."""
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
    """Return what is added to the scores, −inf where it means "may not attend"."""
    hidden = table <= FORBIDDEN
    low = torch.where(((table == 0) | hidden).all(), FORBIDDEN, as_bias(table).low)
    allowed = (table <= low).logical_not_()
    return _unread(OwnBias(table.masked_fill(~allowed, -torch.inf)), allowed)


def _unread(mask: OwnDense | OwnBias, allowed: Tensor) -> Mask:
    """Return a mask beside the range of keys in which each query's lie."""
    if allowed.shape[3] < 2:
        return mask
    return And((mask, Ranges(*_range_of(allowed.any(1, keepdim=True)))))


def _range_of(allowed: Tensor) -> Interval:
    """Return the smallest range of keys `[low, high)` with all allowed ones, of each query."""
    bits = allowed.contiguous().view(torch.uint8)
    low = bits.argmax(-1, keepdim=True)
    high = bits.shape[-1] - bits.flip(-1).argmax(-1, keepdim=True)
    return low, high * bits.amax(-1, keepdim=True)


def _attended_of_unread(mask: Mask, keys: int) -> Bool[Tensor, "B S"] | None:
    """Return the keys that some query of some head may attend to; `None` of another mask."""
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
    """Return the keys that their own queries may attend to, by lengths; `None` of another mask."""
    parts = mask.parts if isinstance(mask, And) else (mask,)
    padding = [part for part in parts if isinstance(part, Padding)]
    if not padding or not all(isinstance(x, Padding) or reaches_all(x) for x in parts):
        return None
    j = torch.arange(extent.keys, device=device)[None]
    return torch.stack([part.allowed(j.T, j, extent)[:, 0, 0] for part in padding]).all(0)


def without_padding(mask: Mask, extent: Extent, device: torch.device) -> Mask:
    """The mask, with the queries that are padding seeing nothing; for self-attention.

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
            return mask  # mostly, queries may attend to themselves
        real = attended(mask, extent, device)
        if bool(real[:, extent.offset :][:, : extent.queries].all()):
            return mask
    return mask & QueryMask(real[:, extent.offset :][:, : extent.queries])


def with_padding(mask: Mask) -> Mask:
    """The mask as it was: what `without_padding()` took from padded queries, given back."""
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
    """Return a mask without padded queries, how many keys count, and how many are `behind`.

    Where the mask tells each query apart, the call is one of self-attention. A static cache is
    empty behind the last key that anybody sees. The last query stands at the last key, unless the
    mask tells that keys without a position stand behind the sequence.

    Args:
        find: gives the mask of a call of these sizes, which may have fewer keys.
        extent: the sizes of the call.
        device: where its tensors are.
        own: whether queries and keys are of one sequence; `None` where only the mask can tell.
        behind: so many keys are known to stand behind those that have a position.
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
    """Return the key position of query 0, of self-attention with more keys than queries.

    Each query sees its own key there, unless nobody sees that key. It is the last position at
    which, among the own keys, queries do not look ahead; of a mask that is not causal, the end. If
    it is `sure` that this is self-attention, it is the last at which the own keys that somebody
    sees stand side by side, before padding or behind it. `None` where there is none.
    """
    end, queries = extent.offset, extent.queries
    if not end or not queries:
        return end
    own = _own_keys(mask, extent, end, device)
    j = torch.arange(extent.keys, device=device)[None]
    some = sorted({0, queries // 2, queries - 1})  # these rule most positions out
    i = torch.tensor(some, device=device)[:, None]
    allowed = None if reaches_all(mask) else mask.allowed(i, j, extent)
    if allowed is None or (own is None and not bool((allowed & (j > i + end)).any())):
        return end
    real = attended(mask, extent, device)
    seen = _of_all_heads(allowed).expand(-1, len(some), extent.keys)

    def among(keys: Tensor, start: int, stop: int) -> Tensor:
        """Count those of `[B, S]` among such own keys, for each position."""
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
    """Return the places of the last flags that are True, the very last first."""
    return flags.nonzero().flatten().flip(0)[:count].tolist()


def _own_keys(mask: Mask, extent: Extent, first: int, device: torch.device) -> Tensor | None:
    """Return which queries may attend to their own keys, `[B or 1, T, 1]`; `None` if all may."""
    i = torch.arange(extent.queries, device=device)[:, None]
    own = None if reaches_all(mask) else mask.allowed(i, i + first, extent)
    return None if own is None or bool(own.all()) else _of_all_heads(own)


def _of_all_heads(allowed: Tensor) -> Tensor:
    """Return where some head may attend, `[B or 1, t, s]`."""
    return allowed[(None,) * (4 - allowed.dim())].any(1)


def reaches_all(mask: Mask) -> bool:
    """Whether every query sees its own key, whatever the sizes."""
    if isinstance(mask, And):
        return all(reaches_all(part) for part in mask.parts)
    return type(mask) in (Everything, Causal, Window, ALiBi)


def at_the_end(mask: Mask, extent: Extent) -> bool:
    """Whether the queries stand at the keys' end, as far as sizes and mask can tell.

    They do where there are as many keys as queries; among more keys, where the mask tells queries
    apart, as no mask of another sequence's keys does.
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
    """The number of keys up to the last one that some query may attend to."""
    if reaches_all(mask):
        return extent.keys
    seen = attended(mask, extent, device).any(0).nonzero()
    return int(seen[-1]) + 1 if len(seen) else 0


def attended(mask: Mask, extent: Extent, device: torch.device) -> Bool[Tensor, "B S"]:
    """The keys that some query of some head may attend to."""
    return attended_keys(mask, extent, device).any(1)


class Copy:
    """A copy of a tensor, without what is only repeated; on a GPU, how often it was changed.

    The host would wait there for a comparison. In inference mode PyTorch does not count changes.
    """

    def __init__(self, x: Tensor) -> None:
        self._kept = once(x).clone() if read_at_once(x) else None
        self._version = -1 if x.is_inference() else x._version

    def same(self, x: Tensor) -> bool:
        """Return True if it is known that a tensor of the same layout holds the same numbers."""
        if self._kept is None:
            return not x.is_inference() and x._version == self._version
        return torch.equal(self._kept, once(x))


def once(x: Tensor) -> Tensor:
    """A tensor with one entry along the axes on which it repeats itself."""
    x = x.detach()
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


Found = TypeVar("Found")


class MaskMemo:
    """What masks were found to mean: one mask mostly serves all layers of a model.

    Few are kept, and none longer than a call of the model. A mask that holds other numbers than
    before is another mask, whoever has changed it.
    """

    SIZE = 8
    LARGEST = 2**28
    """In bytes; of a larger one no copy is kept, and it is looked at anew each time."""

    def __init__(self) -> None:
        self._found: OrderedDict[object, tuple[list[tuple[Tensor, Copy]], Any]] = OrderedDict()

    def of(
        self, given: Tensor, what: object, find: Callable[[], Found], reads: Sequence[Tensor] = ()
    ) -> Found:
        """`find()`, or what it gave when this tensor was asked about before, for `what`.

        `reads` are the other tensors that it depends on.
        """
        at = given.data_ptr() if readable(given) else id(given)
        place = (at, given.shape, given.stride(), given.dtype, given.device)
        before = self._found.get((place, what))
        if before is not None and all(copy.same(x) for x, copy in before[0]):
            return before[1]
        result = find()
        if all(once(x).nbytes <= self.LARGEST for x in (given, *reads)):
            # Held, so that its memory is no other mask's.
            self._found[place, what] = [(x, Copy(x)) for x in (given, *reads)], result
            if len(self._found) > self.SIZE:
                self._found.popitem(last=False)
        return result

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
