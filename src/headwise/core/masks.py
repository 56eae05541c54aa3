"""Masks as values: the pairs that may attend, and the bias added to the scores.

`True` means "may attend". `&` allows the pairs that both sides allow (and adds their biases), `|`
the pairs that either side allows, `~` the pairs that a mask does not allow. (`torch.compile` cannot
trace `~`: create such a mask outside the compiled function.) Query `i` is at key position
`i + S − T`, so one mask fits training, prefill, chunked prefill and one-token decode. `allowed`
defines a mask; `interval` is a shortcut that must be equivalent:

* `allowed(i, j)` and `bias(i, j)` at any broadcastable index tensors (a grid or single pairs);
* `interval(i)`: the keys of each query as one range `[low, high)`, if they form one range;
* `dense()`: the whole matrix, for inspection and for the definition.
"""

from __future__ import annotations

import math
import sys
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .index import lookup, take
from .mask_algebra import Interval, Mask
from .modes import readable
from .numbers import as_int, format_value
from .shapes import Extent


def as_mask(mask: object) -> Mask:
    """Return the mask, or `Everything()` for `None`; raise ValueError for anything else."""
    if mask is None:
        return Everything()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        hint = "headwise.Bias(mask) adds its numbers to the scores"
        if mask.dtype == torch.bool:
            hint = (
                "headwise.Dense(mask) where True means 'may attend', headwise.Dense(~mask) where "
                "True means 'hidden'"
            )
        raise ValueError(
            f"mask must be a headwise mask, got a {mask.dtype} tensor {list(mask.shape)}; "
            f"use {hint}."
        )
    if isinstance(mask, type) and issubclass(mask, Mask):
        needs = is_dataclass(mask) and any(field.default is MISSING for field in fields(mask))
        made = f"{mask.__name__}({'…' if needs else ''})"
        raise ValueError(
            f"mask must be a headwise mask, got the class {mask.__name__}; write mask={made}."
        )
    if isinstance(mask, str):
        raise ValueError(
            f"mask must be a headwise mask, such as headwise.Causal(), got the string {mask!r}."
        )
    raise ValueError(f"mask must be a headwise mask or None, got a {type(mask).__name__}.")


@dataclass(frozen=True)
class Everything(Mask):
    """Every query may attend to every key; the meaning of `mask=None`."""

    free = from_first_key = True

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> None:
        return None

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return torch.zeros_like(i), torch.full_like(i, extent.keys)


@dataclass(frozen=True)
class Causal(Mask):
    """No key after the query's own position; aligned to the end.

    >>> Causal().dense(queries=3, keys=3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]

    Source: Vaswani et al. 2017, §3.2.3.
    """

    free = from_first_key = True

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return j <= i + extent.offset

    def looks_ahead(self, extent: Extent) -> bool:
        return False

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return torch.zeros_like(i), (i + (extent.offset + 1)).clamp(0, extent.keys)


@dataclass(frozen=True)
class Window(Mask):
    """The last `size` keys, including the query's own position.

    A window longer than the sequence allows all of it.

    >>> Window(2).dense(queries=3, keys=3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 1, 1]]

    Raises:
        ValueError: `size` is not a whole number or is less than 1.
    """

    free = True

    size: int

    def __post_init__(self) -> None:
        rule = "size must be a whole number of keys, at least 1 (the query's own key)"
        object.__setattr__(self, "size", _count(self, self.size, 1, rule))

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        behind = i + extent.offset - j
        return (behind >= 0) & (behind < self.size)

    def looks_ahead(self, extent: Extent) -> bool:
        return False

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        after = i + (extent.offset + 1)
        return (after - self.size).clamp(0, extent.keys), after.clamp(0, extent.keys)


@dataclass(frozen=True, eq=False, repr=False)
class Padding(Mask):
    """Only the real keys of each batch row: `lengths[b]` of them, on the side without padding.

    `side` is the side of the padding: `"right"` (the default) or `"left"`. Lengths are clamped to
    the range from 0 to the number of keys.

    >>> Padding(torch.tensor([1, 3])).dense(batch=2, keys=3)[:, 0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 1]]
    """

    lengths: Int[Tensor, " B"]
    side: Literal["right", "left"] = "right"

    def __post_init__(self) -> None:
        _must_be_whole_numbers("Padding", self.lengths)
        if self.side not in ("right", "left"):
            raise ValueError(f"Padding(side={self.side!r}): side must be 'right' or 'left'.")

    def check(self, extent: Extent) -> None:
        if self.lengths.dim() != 1 or len(self.lengths) not in (1, extent.batch):
            raise ValueError(
                f"Padding(lengths {list(self.lengths.shape)}) in a call with {extent}: "
                f"give one length per batch row."
            )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        length = _of_batch(self.lengths, i, extent)
        return j < length if self.side == "right" else j >= extent.keys - length

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        length = _of_batch(self.lengths, i, extent)
        zero = torch.zeros_like(length)
        if self.side == "right":
            return zero, length
        return extent.keys - length, zero + extent.keys

    @property
    def from_first_key(self) -> bool:  # type: ignore[override]
        return self.side == "right"


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """Packed sequences: a query sees only keys of its own document. `ids` is `[B, S]` or `[S]`.

    >>> Documents(torch.tensor([0, 0, 1])).dense(queries=3, keys=3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [0, 0, 1]]
    """

    ids: Int[Tensor, "*B S"]

    def __post_init__(self) -> None:
        _must_be_whole_numbers("Documents", self.ids, or_bool=True)

    def check(self, extent: Extent) -> None:
        keys = extent.keys
        if tuple(self.ids.shape) not in ((keys,), (1, keys), (extent.batch, keys)):
            raise ValueError(
                f"Documents(ids {list(self.ids.shape)}) in a call with {extent}: ids must be "
                f"[S] or [B, S], one document number per key."
            )
        if not extent.inside:
            raise ValueError(
                f"Documents(ids) in a call with {extent}: every query needs a key position."
            )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        ids = self.ids.to(i.device)[(None,) * (2 - self.ids.dim())]
        return take(ids, i + extent.offset) == take(ids, j)

    def runs(self, i: Tensor, extent: Extent) -> Interval | None:
        """Return each query's document as in `interval`, if each is a single run of keys."""
        if not readable(self.ids):  # the result depends on its values
            return None
        ids = self.ids.to(i.device, torch.long)  # `searchsorted` takes no booleans
        ids = ids[(None,) * (2 - ids.dim())].contiguous()
        change = ids[:, 1:] != ids[:, :-1]
        if not bool((ids[:, 1:] >= ids[:, :-1]).all()):  # number the runs in order
            ordered = ids.sort(dim=1).values
            if not torch.equal(change.sum(1), (ordered[:, 1:] != ordered[:, :-1]).sum(1)):
                return None
            ids = torch.nn.functional.pad(change, (1, 0)).cumsum(1)
        position = i + extent.offset
        low, high = torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
        return take(low, position), take(high, position)


@dataclass(frozen=True, eq=False, repr=False)
class Prefix(Mask):
    """The first `size` keys (a number, or one per batch row); `Causal() | Prefix(n)` is prefix-LM.

    >>> (Causal() | Prefix(2)).dense(queries=3, keys=3)[0, 0].int().tolist()
    [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """

    from_first_key = True

    size: int | Int[Tensor, " B"]

    def __post_init__(self) -> None:
        if isinstance(self.size, Tensor):
            _must_be_whole_numbers("Prefix", self.size)
            return
        rule = "size must be a whole number of keys, at least 0, or a tensor with one per batch row"
        object.__setattr__(self, "size", _count(self, self.size, 0, rule))

    def check(self, extent: Extent) -> None:
        if isinstance(self.size, Tensor) and (
            self.size.dim() != 1 or len(self.size) not in (1, extent.batch)
        ):
            raise ValueError(
                f"Prefix(size {list(self.size.shape)}) in a call with {extent}: "
                f"give a number, or one per batch row."
            )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return j < self._size(i, extent)

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        high = self._size(i, extent)
        return torch.zeros_like(high), high

    def _size(self, i: Tensor, extent: Extent) -> Tensor:
        return _of_batch(torch.as_tensor(self.size, device=i.device), i, extent)


class _Table(Mask):
    """A tensor that broadcasts to `[B, H, T, S]`."""

    def check(self, extent: Extent) -> None:
        (table,), want = self.tensors(), (extent.batch, extent.heads, extent.queries, extent.keys)
        shape = (1,) * (4 - table.dim()) + tuple(table.shape)
        if table.dim() > 4 or any(a not in (1, b) for a, b in zip(shape, want, strict=True)):
            raise ValueError(
                f"{type(self).__name__}({list(table.shape)}) in a call with {extent}: "
                f"it must broadcast to [B, H, T, S] = {list(want)}."
            )


@dataclass(frozen=True, eq=False, repr=False)
class Dense(_Table):
    """A boolean tensor that broadcasts to `[B, H, T, S]`; True means "may attend".

    Raises:
        ValueError: the tensor is not boolean (use `Bias` for a float tensor).
    """

    mask: Bool[Tensor, "..."]

    def __post_init__(self) -> None:
        _must_be_tensor("Dense", self.mask)
        if self.mask.dtype != torch.bool:
            raise ValueError(
                f"Dense({self.mask.dtype} {list(self.mask.shape)}): Dense takes a boolean tensor, "
                f"True for 'may attend'; use Bias for a float tensor that is added to the scores."
            )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return lookup(self.mask, i, j, extent)


@dataclass(frozen=True, eq=False, repr=False)
class Bias(_Table):
    """A float tensor that broadcasts to `[B, H, T, S]` and is added to the scores.

    It is added after scale and softcap; `−inf` means "may not attend".
    """

    values: Float[Tensor, "..."]

    def __post_init__(self) -> None:
        _must_be_tensor("Bias", self.values)
        if not self.values.is_floating_point():
            raise ValueError(
                f"Bias({self.values.dtype} {list(self.values.shape)}): Bias takes a float tensor "
                f"that is added to the scores; use Dense for booleans, True for 'may attend'."
            )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return ~torch.isneginf(lookup(self.values.detach(), i, j, extent))

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return lookup(self.values, i, j, extent)

    @property
    def biased(self) -> bool:
        return True


@dataclass(frozen=True)
class ALiBi(Mask):
    """Attention with linear biases: `−slope_h · |distance|`; slopes are a geometric sequence in h.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]

    Source: Press et al. 2021 ("Train short, test long"), with its rule for head counts that are
    not powers of two.
    """

    free = True

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        # In the widest dtype: calls in float64 must not get values rounded to float32.
        widest = torch.float32 if i.device.type == "mps" else torch.float64
        slopes = alibi_slopes(extent.heads, i.device, widest).view(1, -1, 1, 1)
        return -slopes * (i + extent.offset - j).abs()

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> None:
        return None

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return Everything().interval(i, extent)

    @property
    def biased(self) -> bool:
        return True


def alibi_slopes(
    heads: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Float[Tensor, " H"]:
    """Return the slope of each head, in the given dtype."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    slopes += [2 ** (-4 * (2 * h + 1) / power) for h in range(heads - power)]
    return torch.tensor(slopes, dtype=dtype, device="cpu").to(device, non_blocking=True)


def _of_batch(counts: Tensor, i: Tensor, extent: Extent) -> Tensor:
    """Return numbers of keys `[B]` as `[B, 1, 1, 1]`, in 64 bits like the call's indices."""
    return counts.to(i.device, torch.long).clamp(0, extent.keys).view(-1, 1, 1, 1)


def _count(mask: Mask, value: object, least: int, rule: str) -> int:
    if (number := as_int(value)) is None or number < least:
        raise ValueError(f"{type(mask).__name__}({format_value(value)}): {rule}.")
    return number


def _must_be_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(
            f"{name}({format_value(value)}): give a torch.Tensor, such as torch.tensor(…)."
        )
    if value.is_nested or value.layout != torch.strided:
        kind = "a nested tensor" if value.is_nested else f"a {value.layout} tensor"
        raise ValueError(f"{name}({kind}): give a dense tensor, as by to_dense().")
    if is_causal_bias(value):
        raise ValueError(
            f"{name}(a CausalBias of torch.nn.attention.bias): its memory holds no mask; give "
            f"Causal(), or Dense(torch.ones(T, S, dtype=torch.bool).tril()) for an upper-left mask "
            f"with different T and S."
        )


def is_causal_bias(value: object) -> bool:
    """Return True for PyTorch's `CausalBias`, whose memory is uninitialized."""
    module = sys.modules.get("torch.nn.attention.bias")  # absent until imported
    return module is not None and isinstance(value, module.CausalBias)


def _must_be_whole_numbers(name: str, value: object, or_bool: bool = False) -> None:
    _must_be_tensor(name, value)
    assert isinstance(value, Tensor)
    boolean = value.dtype == torch.bool and not or_bool
    if boolean or value.is_floating_point() or value.is_complex():
        raise ValueError(
            f"{name}({value.dtype} {list(value.shape)}): give whole numbers, such as a tensor of "
            f"torch.long."
        )
