"""A call as its statistics read it: in their dtype, at the observed queries."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import fields, replace
from typing import Any, Generic, TypeVar, overload

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..backends.blocked import blocks
from ..core.call import Call, PreparedCall
from ..core.index import grid
from ..core.mask_algebra import And, Interval, Mask, Or, Rows
from ..core.masks import Bias, Dense, Documents, Padding, Prefix
from ..core.modes import traced
from ..core.shapes import Extent
from .sampling import QuerySample

T = TypeVar("T")


class Lazy(Generic[T]):
    """`functools.cached_property` without its lock, which `torch.compile` cannot trace.

    >>> class Circle:
    ...     @Lazy
    ...     def area(self) -> int:
    ...         print("worked out")
    ...         return 3
    >>> circle = Circle()
    >>> circle.area + circle.area
    worked out
    6
    """

    def __init__(self, work_out: Callable[[Any], T]) -> None:
        self.work_out, self.name, self.__doc__ = work_out, work_out.__name__, work_out.__doc__

    @overload
    def __get__(self, owner: None, kind: Any) -> Lazy[T]: ...

    @overload
    def __get__(self, owner: object, kind: Any) -> T: ...

    def __get__(self, owner: Any, kind: Any) -> Any:
        if owner is None:
            return self
        value = self.work_out(owner)
        setattr(owner, self.name, value)  # found before this descriptor from now on
        return value


class View:
    """A call without its values, observed at the queries `rows`, or at all if `rows` is `None`.

    `n` is the number of observed queries. Without `gradients` it adds nothing to the call's graph.
    For a random sample, `drawn` `[n]` is the number of queries that each one represents.
    """

    rows: Int[Tensor, " n"] | None = None
    drawn: Float[Tensor, " n"] | None = None

    def __init__(self, original: Call, sample: QuerySample | None, gradients: bool) -> None:
        self.original, self.gradients = original, gradients
        self.prepared, self.has_sinks = original.prepared, original.sinks is not None
        self.whole = self.extent = original.extent
        self.mask: Mask = original.mask
        self.device = original.q.device
        self.dtype = torch.float64 if original.q.dtype is torch.float64 else torch.float32
        self._once: dict[Hashable, Any] = {}
        self.keeps_mask = original.mask.free or original.mask.fixed
        if sample is not None:
            self.rows, self.drawn = rows, _ = sample.rows, sample.weights
            self.extent = replace(self.whole, queries=len(rows))
            self.mask = Rows(original.mask, rows, self.whole)

    def let_go(self) -> None:
        """Release the call's tensors, and masks that hold tensors owned by others."""
        known = vars(self)
        for name in _TENSORS:
            known.pop(name, None)
        if not self.keeps_mask:
            self.mask = _Gone()
        if "of_all" in known:
            self.of_all.let_go()

    def keep_mask(self) -> bool:
        """Return True if the view owns its mask, which then cannot change; copy it if small."""
        if not self.keeps_mask and (own := _copied(self.original.mask)) is not None:
            self.mask = own if self.rows is None else Rows(own, self.rows, self.whole)
            self.keeps_mask = True
        return self.keeps_mask

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the state for copies: the call, without anything computed from it."""
        sample = None if self.rows is None else QuerySample(self.rows, self.drawn)
        return View, (self.original, sample, False)

    @Lazy
    def call(self) -> Call:
        """The call without sinks, in the dtype of statistics.

        No statistic reads the values; if a kernel requires values, keys are passed.
        """
        return self._in(self.dtype)

    @Lazy
    def constant(self) -> Call:
        """The same without gradients."""
        return self.call.with_(**{name: getattr(self.call, name).detach() for name in "qkv"})

    @Lazy
    def scored(self) -> Call:
        """The call with its sinks, as a one-pass backend reads it.

        On CUDA it keeps its own dtype: scores are still in float32, but are computed faster.
        """
        own = self.device.type == "cuda"
        call = self._in(self.original.q.dtype) if own else self.call
        return call.with_(sinks=self.sinks) if self.has_sinks else call

    @Lazy
    def scored_constant(self) -> Call:
        """The same without gradients."""
        parts = {name: getattr(self.scored, name) for name in ("q", "k", "v", "sinks")}
        found = {name: None if x is None else x.detach() for name, x in parts.items()}
        return self.scored.with_(**found)

    def _in(self, dtype: torch.dtype) -> Call:
        original = self.original
        q, k = original.q, original.k
        if not self.gradients and torch.is_grad_enabled():
            q, k = q.detach(), k.detach()
        if self.rows is not None:
            q = q[:, :, self.rows]
        if q.dtype is not dtype:
            q, k = q.to(dtype), k.to(dtype)
        scale, softcap = original.scale, original.softcap
        known, prepared = original.prepared, None
        if known is not None and self.rows is None:
            prepared = known.statistics.get(dtype)
            if prepared is None:
                prepared = PreparedCall(self.extent, self.mask, scale, softcap)
                known.statistics[dtype] = prepared
        return Call(q, k, k, self.mask, scale, softcap, 0.0, self.extent, prepared=prepared)

    @property
    def sinks(self) -> Tensor | None:
        """The call's learned sinks, in the dtype of statistics."""
        sinks = self.original.sinks
        if sinks is None:
            return None
        return (sinks if self.gradients else sinks.detach()).to(self.dtype)

    def rows_of(self, figure: Tensor) -> Tensor:
        """Select the observed queries of a metric of all queries, `[B, H, T, …]`."""
        if not self.gradients:
            figure = figure.detach()
        return figure if self.rows is None else figure[:, :, self.rows]

    @Lazy
    def queries(self) -> Int[Tensor, " n"]:
        """The indices of the observed queries."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.extent.queries, device=self.device)

    @property
    def weights(self) -> Float[Tensor, " n"]:
        """The number of queries that each observed one represents, in the dtype of statistics."""
        if self.drawn is None:
            return torch.ones(self.extent.queries, dtype=self.dtype, device=self.device)
        return self.drawn.to(self.dtype)

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """The key positions of the observed queries."""
        return self.queries + self.whole.offset

    @Lazy
    def counts(self) -> Int[Tensor, "#B #H n"]:
        """The number of keys that each query may attend to."""

        def counted() -> Tensor:
            if self._some:
                return self.of_all.counts[..., self.rows]
            if self.ranges is not None:
                return self.ranges[1] - self.ranges[0]
            return visible_keys(self.mask, self.extent, self.device)

        return self.once("visible keys", counted)

    @Lazy
    def valid_rows(self) -> Bool[Tensor, "#B #H n"]:
        """The queries that may attend to at least one key."""

        def valid() -> Tensor:
            if self._some:
                return self.of_all.valid_rows[..., self.rows]
            return self.counts > 0 if self.ranges is None else self.ranges[1] > self.ranges[0]

        return self.once("valid rows", valid)

    @Lazy
    def of_all(self) -> View:
        """The same call at all queries, without its tensors."""
        assert isinstance(self.mask, Rows)
        every = object.__new__(View)
        vars(every).update(vars(self), rows=None, drawn=None, extent=self.whole, _once={})
        for name in ("counts", "valid_rows"):
            vars(every).pop(name, None)
        every.let_go()
        every.mask = self.mask.mask
        return every

    @property
    def ranges(self) -> Interval | None:
        """Each query's visible keys as `[low, high)` `[B or 1, 1, n]`; `None` if not contiguous."""
        if "ranges" not in self._once:
            biased = self.mask.biased
            found = None if biased else self.mask.key_ranges(self.extent, self.device)
            self._once["ranges"] = found
        return self._once["ranges"]

    def once(self, about: Hashable, make: Callable[[], Tensor], free: bool = True) -> Tensor:
        """Return the result of `make`, computed once for the call.

        A small result is shared by all equal calls if the mask holds no tensors, or only its own,
        and `about` holds none (`free`).
        """
        found = self._once.get(about)
        if found is not None:
            return found
        known = self._shared if free else None
        found = None if known is None else known.get(about)
        if found is None:
            with nullcontext() if known is None else torch.inference_mode(False):  # graphs keep it
                found = make()
            if known is not None and found.numel() <= SMALL:
                known[about] = found
        if known is not None:
            found = found.clone()  # the caller's own copy
        self._once[about] = found
        return found

    @property
    def _shared(self) -> dict[Hashable, Tensor] | None:
        """Tensors shared by equal calls, which depend only on the sizes and the mask."""
        if self.mask.free:
            return None if self.prepared is None else self.prepared.tensors
        if self.rows is not None or not self.mask.fixed or traced():
            return None
        return self.mask.known.setdefault((self.extent, self.device), {})

    @property
    def _some(self) -> bool:
        """True if only some queries are observed and results for all are shared by equal calls."""
        return isinstance(self.mask, Rows) and (self.prepared is not None or self.mask.mask.fixed)

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros for sums, `[B · H, *shape]`, in the dtype of statistics."""
        return self.call.q.detach().new_zeros(self.extent.batch * self.extent.heads, *shape)

    def by_head(self, sums: Tensor) -> Tensor:
        """Return sums `[B · H, …]` as `[B, H, …]`."""
        return sums.unflatten(0, (self.extent.batch, self.extent.heads))


_TENSORS = "original", "call", "constant", "scored", "scored_constant"
"""The fields of a view that require the call's tensors."""


class _Gone(Mask):
    """The mask of a call whose tensors were released: nothing more can be computed from it."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        raise AssertionError("the mask of the call was released")


SMALL = 1 << 12
"""The largest size of a tensor that is kept or copied for later."""


_COPIED = (Padding, Prefix, Documents, Dense, Bias, And, Or)


def _copied(mask: Mask) -> Mask | None:
    """Return the mask with copied tensors; `None` if they are large or its class is unknown."""
    if mask.free:
        return mask
    if type(mask) not in _COPIED or sum(x.numel() for x in mask.tensors()) > SMALL:
        return None
    changes: dict[str, Any] = {}
    for one in fields(mask):  # type: ignore[arg-type]
        value = getattr(mask, one.name)
        if isinstance(value, Tensor):
            changes[one.name] = value.detach().clone()
        elif isinstance(value, Mask | tuple):
            parts = [_copied(x) for x in (value if isinstance(value, tuple) else (value,))]
            if None in parts:
                return None
            changes[one.name] = tuple(parts) if isinstance(value, tuple) else parts[0]
    return replace(mask, **changes)  # type: ignore[type-var]


def attended_keys(mask: Mask, extent: Extent, device: torch.device) -> Bool[Tensor, "#B #H S"]:
    """Return True for keys that some query may attend to."""
    found = None if mask.biased else mask.key_ranges(extent, device)
    if found is not None:
        low, high = found
        edges = low.new_zeros(*low.shape[:2], extent.keys + 1)
        edges = edges.scatter_add(2, low, torch.ones_like(low))
        return edges.scatter_add(2, high, -torch.ones_like(low)).cumsum(2)[..., :-1] > 0
    i, j = grid(extent, device)
    seen = torch.zeros(1, 1, extent.keys, dtype=torch.bool, device=device)
    for block in blocks(mask, extent, device):
        allowed = mask.allowed(i[block.rows], j, extent)
        if allowed is None:
            return torch.ones_like(seen)
        seen = seen | allowed[(None,) * (4 - allowed.dim())].any(2)
    return seen


def visible_keys(mask: Mask, extent: Extent, device: torch.device) -> Int[Tensor, "#B #H n"]:
    """Count the keys that each query may attend to."""
    found = None if mask.biased else mask.key_ranges(extent, device)
    if found is not None:
        return found[1] - found[0]
    i, j = grid(extent, device)
    parts = []
    for block in blocks(mask, extent, device):
        allowed = mask.allowed(i[block.rows], j, extent)
        if allowed is None:
            allowed = torch.ones(1, 1, 1, extent.keys, dtype=torch.bool, device=device)
        size = block.rows.stop - block.rows.start
        allowed = allowed[(None,) * (4 - allowed.dim())].expand(-1, -1, size, extent.keys)
        parts.append(allowed.sum(-1))
    return torch.cat(parts, dim=2) if parts else torch.zeros(1, 1, 0, device=device).long()
