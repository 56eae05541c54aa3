"""The mask protocol, the operators `&`, `|` and `~`, and masks of some rows of a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from .._text import Brief
from .index import grid
from .shapes import Extent

Interval = tuple[Tensor, Tensor]


class Mask(Brief):
    """A mask: the pairs that it allows and its bias. Subclasses are frozen dataclasses.

    Index tensors `i` (queries, 0 … T−1) and `j` (keys, 0 … S−1) broadcast against each other and
    have at most four axes `[B, H, t, s]`; results broadcast to the same shape.
    """

    free = False
    """True for masks that hold no tensors, so equal masks always have the same meaning."""

    fixed = False
    """True for masks that own their tensors, which never change."""

    from_first_key = False
    """True if each range of `interval` starts at key 0, so that unions of ranges are ranges."""

    @property
    def known(self) -> dict[Hashable, Any]:
        """Cached results of a `fixed` mask, by name and the sizes of the call."""
        return vars(self).setdefault("_known", {})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in ("free", "fixed", "from_first_key"):  # not inherited: each subclass declares it
            if name not in vars(cls):
                setattr(cls, name, False)
        if cls.interval is not Mask.interval and cls.allowed is Mask.allowed:
            raise TypeError(
                f"class {cls.__name__}(Mask): interval() is a shortcut for allowed(), which is the "
                f"mask's meaning; define allowed(i, j, extent) as well."
            )
        torch.serialization.add_safe_globals([cls])  # for example inputs saved with exports
        register_pytree_node(
            *(cls, _leaves, lambda leaves, rest: _of_leaves(cls, leaves, rest)),
            serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
            flatten_with_keys_fn=_named_leaves,
        )

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        """Return True where query i may attend to key j, or `None` if all pairs are allowed."""
        return None

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        """Return the bias added to the scores of (i, j), or `None` if there is none."""
        return None

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        """Return each query's keys as `[low, high)`, broadcastable to `[B, 1, t, 1]`."""
        return None

    def key_ranges(self, extent: Extent, device: torch.device) -> Interval | None:
        """Return each query's keys as `[low, high)`: edges `[B or 1, 1, T]`, 0 ≤ low ≤ high ≤ S.

        `None` if the keys of a query are not one range. A bias may mask keys inside a range.
        """
        i = torch.arange(extent.queries, device=device)[:, None]
        found = self.interval(i, extent)
        if found is None:
            return None
        shape = torch.broadcast_shapes((1, 1, *i.shape), *(edge.shape for edge in found))
        low, high = (edge.expand(shape)[..., 0].clamp(0, extent.keys) for edge in found)
        return low, high.maximum(low)

    def looks_ahead(self, extent: Extent) -> bool:
        """Return True if, for these sizes, a query may attend beyond its own position."""
        return extent.queries > 1 or extent.offset + 1 < extent.keys

    def check(self, extent: Extent) -> None:
        """Raise ValueError if the mask does not fit the call's sizes."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the tensors that the mask holds."""
        return tuple(x for x in vars(self).values() if isinstance(x, Tensor))

    @property
    def biased(self) -> bool:
        """True if the mask adds a bias to the scores."""
        return False

    def dense(
        self,
        batch: int = 1,
        heads: int = 1,
        queries: int = 1,
        keys: int = 1,
        device: torch.device | str | None = None,
    ) -> Bool[Tensor, "B H T S"]:
        """Return the whole boolean matrix, True for "may attend".

        >>> from headwise.core.masks import Causal
        >>> Causal().dense(queries=2, keys=3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
        """
        extent = Extent(batch, heads, heads, queries, keys)
        self.check(extent)
        allowed = self.allowed(*grid(extent, device), extent)
        if allowed is None:
            allowed = torch.ones((), dtype=torch.bool, device=device)
        return allowed.expand(batch, heads, queries, keys)

    def __and__(self, other: Mask) -> Mask:
        _must_be_mask("&", self, other)
        return And((*_parts(self, And), *_parts(other, And)))

    def __or__(self, other: Mask) -> Mask:
        _must_be_mask("|", self, other)
        for side in (self, other):
            if side.biased:
                raise ValueError(
                    f"{self!r} | {other!r}: {type(side).__name__} adds a bias to the scores, and "
                    f"'|' is not defined for biases; combine it with &."
                )
        return Or((*_parts(self, Or), *_parts(other, Or)))

    def __invert__(self) -> Mask:
        if self.biased:
            raise ValueError(
                f"~{self!r}: {type(self).__name__} adds a bias to the scores, which has no "
                f"complement; negate a boolean mask, such as ~Causal() or Dense(~allowed)."
            )
        return Not((self,))


def _parts(mask: Mask, kind: type[And] | type[Or]) -> tuple[Mask, ...]:
    return mask.parts if isinstance(mask, kind) else (mask,)


def _leaves(mask: Mask) -> tuple[list[Any], Any]:
    """Return the fields that may hold tensors, as leaves of a pytree, and everything else."""
    if not is_dataclass(mask):
        return [], mask
    own = {field.name: getattr(mask, field.name) for field in fields(mask) if field.init}
    held = {name: x for name, x in own.items() if isinstance(x, Tensor | Mask | tuple)}
    return [*held.values()], [[*held], {n: x for n, x in own.items() if n not in held}]


def _of_leaves(kind: type[Mask], leaves: Iterable[Any], rest: Any) -> Mask:
    """Rebuild a mask from its leaves and the rest."""
    if isinstance(rest, Mask):
        return rest
    names, others = rest
    return kind(**dict(zip(names, leaves, strict=True)), **others)


def _named_leaves(mask: Mask) -> tuple[list[Any], Any]:
    """Return the same as `_leaves`, with the name of each leaf."""
    leaves, rest = _leaves(mask)
    names = [] if isinstance(rest, Mask) else rest[0]
    return [(GetAttrKey(name), x) for name, x in zip(names, leaves, strict=True)], rest


def _must_be_mask(sign: str, left: object, right: object) -> None:
    if isinstance(right, Mask):
        return
    hint = (
        "wrap a boolean tensor in headwise.Dense(...), a float one in headwise.Bias(...)"
        if isinstance(right, Tensor)
        else "both sides must be masks of headwise"
    )
    raise ValueError(f"{left!r} {sign} {type(right).__name__}: {hint}.")


def _reduced(
    operation: Callable[[Tensor, Tensor], Tensor], answers: list[Tensor | None]
) -> Tensor | None:
    found = [answer for answer in answers if answer is not None]
    return functools.reduce(operation, found) if found else None


@dataclass(frozen=True)
class _Combined(Mask):
    parts: tuple[Mask, ...]

    def __post_init__(self) -> None:
        # A list, as torch.compile cannot trace a generator here.
        object.__setattr__(self, "free", all([part.free for part in self.parts]))
        object.__setattr__(self, "fixed", all([part.free or part.fixed for part in self.parts]))

    def check(self, extent: Extent) -> None:
        for part in self.parts:
            part.check(extent)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for p in self.parts for t in p.tensors())


@dataclass(frozen=True)
class And(_Combined):
    """The pairs allowed by all parts, with the sum of their biases; written `a & b`."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return _reduced(torch.logical_and, [p.allowed(i, j, extent) for p in self.parts])

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return _reduced(added, [p.bias(i, j, extent) for p in self.parts])

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        lows: list[Tensor] = []
        highs: list[Tensor] = []
        for part in self.parts:
            if (found := part.interval(i, extent)) is None:
                return None
            if not (lows and part.from_first_key):  # it would add no constraint
                lows.append(found[0])
            highs.append(found[1])
        return functools.reduce(torch.maximum, lows), functools.reduce(torch.minimum, highs)

    def looks_ahead(self, extent: Extent) -> bool:
        return all(part.looks_ahead(extent) for part in self.parts)

    @property
    def from_first_key(self) -> bool:  # type: ignore[override]
        return all(p.from_first_key for p in self.parts)

    @property
    def biased(self) -> bool:
        return any(p.biased for p in self.parts)


@dataclass(frozen=True)
class Or(_Combined):
    """The pairs allowed by any part; written `a | b`. Parts must not have a bias."""

    from_first_key = True

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        result = None
        for part in self.parts:
            if (more := part.allowed(i, j, extent)) is None:
                return None
            result = more if result is None else result | more
        return result

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        # The union of ranges that all start at key 0 (causal, prefix, right padding) is a range.
        highs = []
        for part in self.parts:
            found = part.interval(i, extent) if part.from_first_key else None
            if found is None:
                return None
            highs.append(found[1])
        high = functools.reduce(torch.maximum, highs)
        return torch.zeros_like(high), high

    def looks_ahead(self, extent: Extent) -> bool:
        return any(part.looks_ahead(extent) for part in self.parts)


@dataclass(frozen=True)
class Not(_Combined):
    """The pairs not allowed by its one part; written `~a`."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        found = self.parts[0].allowed(i, j, extent)
        return torch.zeros_like(j, dtype=torch.bool) if found is None else found.logical_not()

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        # The keys after a range that starts at key 0 are a range as well.
        found = self.parts[0].interval(i, extent) if self.parts[0].from_first_key else None
        return None if found is None else (found[1], torch.full_like(found[1], extent.keys))

    def __invert__(self) -> Mask:
        return self.parts[0]


def added(one: Tensor, two: Tensor) -> Tensor:
    """Add two biases in at least float32, so that two finite numbers never sum to −inf."""
    dtype = torch.promote_types(torch.promote_types(one.dtype, two.dtype), torch.float32)
    one, two = one.to(dtype), two.to(dtype)
    total, largest = one + two, torch.finfo(dtype).max
    return torch.where(one.isfinite() & two.isfinite(), total.clamp(-largest, largest), total)


@dataclass(frozen=True, eq=False, repr=False)
class Rows(Mask):
    """A mask of a larger call, restricted to some of its queries."""

    mask: Mask
    rows: Tensor
    whole: Extent

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return self.mask.allowed(self.rows[i], j, self.whole)

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return self.mask.bias(self.rows[i], j, self.whole)

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        return self.mask.interval(self.rows[i], self.whole)

    def looks_ahead(self, extent: Extent) -> bool:
        return self.mask.looks_ahead(self.whole)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()

    @property
    def fixed(self) -> bool:  # type: ignore[override]
        return self.mask.free or self.mask.fixed

    @property
    def biased(self) -> bool:
        return self.mask.biased
