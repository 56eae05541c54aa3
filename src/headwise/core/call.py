"""One checked attention call, the input of a backend."""

from __future__ import annotations

import math
import os
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypedDict, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, strided
from torch._C import _are_functorch_transforms_active, _get_tracing_state, _len_torch_dispatch_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .dropout import draw_seed
from .mask_algebra import And, Mask
from .masks import Bias, as_mask
from .modes import forward_derivatives, readable
from .numbers import format_value, real
from .shapes import Extent, extent_of, not_dense, quote, statistics_dtype


class AttendOptions(TypedDict, total=False):
    """The options of an attention call, as described by `attend()`; other functions share them."""

    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    sinks: Float[Tensor, " H"] | None
    first_query: int | None


OPTIONS = tuple(AttendOptions.__annotations__)

K = TypeVar("K")
V = TypeVar("V")


class BoundedCache(dict[K, V]):
    """A dict that is cleared when it is full, which bounds its memory.

    >>> cache = BoundedCache(2)
    >>> for size in (1, 2, 3):
    ...     cache[size] = size**2
    >>> cache
    {3: 9}
    """

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(key, value)


@dataclass(eq=False)
class PreparedCall:
    """Calls that differ only in the values of their tensors: checked once, prepared once.

    Backends, kernels and statistics cache results here that are valid for all of these calls.
    """

    extent: Extent
    mask: Mask
    scale: float
    softcap: float | None
    backends: dict[tuple[str, bool, bool], Any] = field(default_factory=dict)
    """The `Backend`, by requested name, whether a graph is kept, and whether there are sinks."""
    terms: Any = None
    """The mask as the native kernel's `Terms`, if they hold no tensor."""
    structs: BoundedCache[Hashable, Any] | None = field(default_factory=BoundedCache)
    """Structs of the native CPU kernel to copy, by the strides of q, k and v; `None` for masks
    whose tensors the kernel reads."""
    fused: dict[bool, bool] = field(default_factory=dict)
    """True if PyTorch's kernel computes the output of `Native` on CUDA, by whether a graph is kept.
    """
    tile: Any = None
    """The one `Tile` of calls that PyTorch's kernels accept without a bias."""
    statistics: dict[torch.dtype, PreparedCall] = field(default_factory=dict)
    """The calls without their values, by the dtype of their statistics."""
    plans: BoundedCache[Hashable, Any] = field(default_factory=BoundedCache)
    """Backends and plans of `observe()`, by statistics and options."""
    tensors: BoundedCache[Hashable, Tensor] = field(default_factory=BoundedCache)
    """Small tensors that depend only on the sizes and the mask."""


PREPARED: BoundedCache[tuple[object, ...], PreparedCall] = BoundedCache()
"""Earlier calls, by their signature."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({float, int, type(None)})


def unfollowed() -> bool:
    """Return True unless a compiler, trace, mode, transform or forward derivative is active."""
    if is_compiling() or _are_functorch_transforms_active() or _len_torch_dispatch_stack() > 0:
        return False
    return _get_tracing_state() is None and forward_ad._current_level < 0


def _signature(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    first_query: int | None,
) -> tuple[object, ...] | None:
    """Return a key of everything that the checks of a call depend on.

    `None` if the checks depend on values or on unusual tensors, and under a compiler, a trace, a
    mode, a transform or a forward derivative.
    """
    if not unfollowed():
        return None
    if not (_PLAIN.issuperset((type(q), type(k), type(v))) and q.layout is strided):
        return None
    if q.is_meta or torch._is_functional_tensor(q):  # pyright: ignore[reportPrivateImportUsage]
        return None
    if not (k.layout is v.layout is strided) or q.is_nested or k.is_nested or v.is_nested:
        return None
    if not _NUMBERS.issuperset((type(scale), type(softcap), type(dropout), type(first_query))):
        return None
    if mask is not None and not (isinstance(mask, Mask) and mask.free):
        return None
    kinds = q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    return (q.shape, k.shape, v.shape, *kinds, mask, scale, softcap, dropout, first_query)


@dataclass(eq=False)
class Call:
    """A checked attention call: everything a backend needs to know, and nothing else.

    It is immutable by convention (a frozen dataclass would double the time to create one);
    `with_()` returns a changed copy.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    extent: Extent
    sinks: Tensor | None = None
    prepared: PreparedCall | None = None
    """`None` if results for this call may not be reused for similar calls."""
    seed: Tensor | None = None
    """The seed of dropout; `None` until it is drawn."""

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        dropout: float = 0.0,
        sinks: Tensor | None = None,
        first_query: int | None = None,
        function: str = "attend",
    ) -> Call:
        """Check the arguments of a call; raise ValueError for those that do not fit."""
        signature = _signature(q, k, v, mask, scale, softcap, dropout, first_query)
        known = None if signature is None else PREPARED.get(signature)
        if known is not None:
            extent, mask, factor, softcap = known.extent, known.mask, known.scale, known.softcap
        else:
            if not is_compiling():
                keep_forks_going()
            extent = extent_of(q, k, v, function, first_query)
            mask = as_mask(mask)
            mask.check(extent)
            fault = fault_of_numbers(scale, softcap, dropout, q.dtype)
            if not (fault or q.is_meta) and any(x.is_meta for x in mask.tensors()):
                fault = f"q is on {q.device}, but the mask holds a tensor on meta, without values"
            if fault:
                raise ValueError(f"{quote(q, k, v, function)}: {fault}.")
            factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
            softcap = None if softcap is None else float(softcap)
            if signature is not None:
                known = PREPARED[signature] = PreparedCall(extent, mask, factor, softcap)
        if sinks is not None and (fault := _fault_of_sinks(sinks, q)):
            raise ValueError(f"{quote(q, k, v, function)}: {fault}.")
        return cls(q, k, v, mask, factor, softcap, float(dropout), extent, sinks, known)

    def __getstate__(self) -> dict[str, object]:
        """Return the state for copies and pickles: the values, without graph and preparation."""
        tensors = {name: x.detach() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return vars(self) | tensors | {"mask": _detached(self.mask), "prepared": None}

    @property
    def needs_grad(self) -> bool:
        """True if autograd needs a graph of the call, or forward derivatives are computed."""
        if self.prepared is None and forward_derivatives():
            return True
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        if self.sinks is not None and self.sinks.requires_grad:
            return True
        return not self.mask.free and any(x.requires_grad for x in self.mask.tensors())

    def drawn(self) -> Call:
        """Return the call with a dropout seed, one draw from PyTorch's generator for its device."""
        return replace(self, seed=draw_seed(self.q.device))

    def with_(self, **changes: object) -> Call:
        """Return a copy of the call with some attributes changed."""
        return replace(self, **{"prepared": None} | changes)  # type: ignore[arg-type]


def _detached(mask: Mask) -> Mask:
    """Return the mask with detached tensors; masks of custom classes are returned unchanged."""
    if not any(x.requires_grad for x in mask.tensors()):
        return mask
    if isinstance(mask, And):
        return And(tuple(map(_detached, mask.parts)))
    return Bias(mask.values.detach()) if isinstance(mask, Bias) else mask


@cache
def keep_forks_going() -> None:
    """Make processes that are forked from now on compute on one thread.

    A fork has none of the threads of PyTorch's pool, and its first call would wait for them
    forever. PyTorch's `DataLoader` does the same for its own workers; `os.fork` and
    `multiprocessing.Process` do not.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def fault_of_numbers(
    scale: object, softcap: object, dropout: object, dtype: torch.dtype
) -> str | None:
    """Return a description of what is wrong with a call's numbers.

    They are used in the dtype of statistics: a number that overflows or underflows in it would
    differ between backends.
    """
    kind = statistics_dtype(dtype)
    least, largest = torch.finfo(kind).tiny, torch.finfo(kind).max
    if scale is not None:
        found = real(scale)
        if found is None and isinstance(scale, Tensor) and scale.requires_grad:
            return "scale has a gradient and must be a plain number; multiply q by it instead"
        if found is None or not -largest <= found <= largest:
            return f"scale must be a finite number of {kind}, got {format_value(scale)}"
    if softcap is not None:
        found = real(softcap)
        if found is None or not least <= found <= largest:
            given = format_value(softcap)
            return f"softcap must be above 0 and finite in {kind}, or None, got {given}"
    found = real(dropout)
    if found is None or not 0.0 <= found < 1.0:
        return f"dropout must be at least 0 and below 1, got {format_value(dropout)}"
    return None


def _fault_of_sinks(sinks: object, q: Tensor) -> str | None:
    """Return a description of what is wrong with a call's sinks."""
    want = f"one logit per query head, a floating-point tensor [{q.shape[1]}] on {q.device}"
    if not isinstance(sinks, Tensor):
        return f"sinks must be {want}, got a {type(sinks).__name__}"
    if fault := not_dense(sinks):
        return f"sinks {fault}"
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        given = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        return f"sinks must be {want}, got {given}"
    if sinks.device.type == "cpu" and readable(sinks):  # other devices would have to synchronize
        logits = sinks.detach().to(statistics_dtype(q.dtype))
        if not bool((logits < torch.inf).all()):
            head = int((~(logits < torch.inf)).nonzero()[0])
            return (
                f"sinks must be finite logits of {logits.dtype}, or -inf for no sink, "
                f"got {float(logits[head])} for head {head}"
            )
    return None


def check_scores(
    call: Call, lse: Tensor, function: str = "attend", queries: Tensor | None = None
) -> None:
    """Raise ValueError if scores of finite q and k are not finite.

    Their softmax would be wrong: a row of NaN, or a mean of the wrong keys. NaN and infinity in q
    or k itself propagate to the rows that they affect. The check uses the log-sum-exp of all
    queries, or of `queries`, and runs on the CPU only, as other devices would have to synchronize.
    """
    lse = lse.detach()
    if lse.device.type != "cpu" or (call.prepared is None and not readable(lse)):
        return
    if math.isfinite(float(lse.sum())):
        return
    if queries is None:
        queries = torch.arange(call.extent.queries, device=lse.device)
    lost, dead = lse.isnan() | (lse == torch.inf), lse == -torch.inf
    place = dead.any(1).any(0).nonzero()[:, 0]
    if len(place):
        lost[:, :, place] |= dead[:, :, place] & _may_attend(call, queries[place])
    if not bool(lost.any()):
        return
    own = ~torch.isfinite(call.q.detach()[:, :, queries]).all(-1)
    of_keys = ~torch.isfinite(call.k.detach()).flatten(2).all(-1)
    lost &= ~(own | of_keys.repeat_interleave(call.extent.group, 1)[..., None])
    if bool(lost.any()):
        b, h, t = lost.nonzero()[0].tolist()
        raise ValueError(
            f"{quote(call.q, call.k, call.v, function)}: the scores of query {int(queries[t])} "
            f"(batch row {b}, head {h}) are not finite in {lse.dtype}; scale "
            f"({call.scale:.3g}) times q·k, plus the mask's bias, must be finite."
        )


def _may_attend(call: Call, queries: Tensor) -> Tensor:
    """Return True for each of these queries that may attend to a key, `[B or 1, H or 1, n]`."""
    mask, extent = call.mask, call.extent
    step = max(1, (1 << 22) // max(1, extent.batch * extent.heads * extent.keys))
    j = torch.arange(extent.keys, device=queries.device)[None]
    found = []
    for some in queries.split(step):
        allowed = mask.allowed(some[:, None], j, extent)
        if allowed is None:
            allowed = torch.ones_like(j, dtype=torch.bool)
        allowed = allowed[(None,) * (4 - allowed.dim())]
        found.append(allowed.expand(-1, -1, len(some), extent.keys).any(-1))
    return torch.cat(found, dim=2)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and LSE with a learned sink, from those of the keys alone.

    `lse' = log(exp(lse) + exp(sink))` and `out' = out · exp(lse − lse')`; dead rows stay dead.
    """
    dead = lse == -torch.inf
    base, sink = lse.masked_fill(dead, 0.0), sinks.to(lse.dtype)[:, None]
    total = torch.logaddexp(base, sink).masked_fill(dead, -torch.inf)
    return (out * torch.sigmoid(base - sink)[..., None]).to(out.dtype), total
