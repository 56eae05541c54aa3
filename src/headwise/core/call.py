"""One attention call, checked: what a backend computes."""

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
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
)
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from .dropout import draw_seed
from .mask_algebra import And, Mask
from .masks import Bias, as_mask
from .modes import forward_derivatives, readable
from .numbers import format_value, real
from .shapes import Extent, extent_of, not_dense, quote, statistics_dtype


class AttendOptions(TypedDict, total=False):
    """The options of a call of attention, which `attend()` describes; others take the same."""

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
    """A dict that begins anew when it is full, so that ever new kinds of calls take no memory.

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
    """Calls that differ only in the numbers in their tensors: checked once, prepared once.

    Backends, kernels and statistics keep here what holds for all of them.
    """

    extent: Extent
    mask: Mask
    scale: float
    softcap: float | None
    backends: dict[tuple[str, bool, bool], Any] = field(default_factory=dict)
    """The `Backend`, by the name given, whether a graph is kept, and whether there are sinks."""
    terms: Any = None
    """The mask as the native kernel's `Terms`, where they hold no tensor."""
    structs: BoundedCache[Hashable, Any] | None = field(default_factory=BoundedCache)
    """Structs of the native CPU kernel to copy, by the strides of q, k and v; `None` for masks of
    which the kernel reads tensors."""
    fused: dict[bool, bool] = field(default_factory=dict)
    """Whether PyTorch's kernel makes the output of `Native` on CUDA, by whether a graph is kept."""
    tile: Any = None
    """The one `Tile` of calls that PyTorch's kernels take without a bias."""
    statistics: dict[torch.dtype, PreparedCall] = field(default_factory=dict)
    """The call without its values, in a dtype that statistics are read in."""
    plans: BoundedCache[Hashable, Any] = field(default_factory=BoundedCache)
    """Backends and plans of `observe()`, by statistics and options."""
    tensors: BoundedCache[Hashable, Tensor] = field(default_factory=BoundedCache)
    """Small tensors that depend on the sizes and the mask alone."""


PREPARED: BoundedCache[tuple[object, ...], PreparedCall] = BoundedCache()
"""Calls that came before, by their signature."""

_PLAIN = frozenset({Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({float, int, type(None)})


def unfollowed() -> bool:
    """Return False under a compiler, a trace, a mode, a transform or a forward derivative."""
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
    """Return all that the checks of a call look at; `None` where they look at numbers or odd
    tensors, and under a compiler, a trace, a mode, a transform or a forward derivative.
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

    Nobody changes one; `with_()` makes another. (To forbid it would double the time to make one.)
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
    """`None` where what is right for this call need not be so for the next one like it."""
    seed: Tensor | None = None
    """Of its dropout; `None` until it is drawn."""

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
        """Check the parts of a call; raise ValueError for those that do not fit."""
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
                fault = f"q is on {q.device}, and the mask holds a tensor without numbers, on meta"
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
        """Return what a copy or a pickle takes along: numbers, without graph and preparation."""
        tensors = {name: x.detach() for name, x in vars(self).items() if isinstance(x, Tensor)}
        return vars(self) | tensors | {"mask": _detached(self.mask), "prepared": None}

    @property
    def needs_grad(self) -> bool:
        """True if autograd will come back for any part of the call, or derivatives go along."""
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
        """Return the call with other parts."""
        return replace(self, **{"prepared": None} | changes)  # type: ignore[arg-type]


def _detached(mask: Mask) -> Mask:
    """Return the mask without the graphs of its tensors; one of a user's own class as it is."""
    if not any(x.requires_grad for x in mask.tensors()):
        return mask
    if isinstance(mask, And):
        return And(tuple(map(_detached, mask.parts)))
    return Bias(mask.values.detach()) if isinstance(mask, Bias) else mask


@cache
def keep_forks_going() -> None:
    """Make processes that are forked from now on compute on one thread.

    A fork has none of the threads of PyTorch's pool, and its first call would wait for them for
    ever. PyTorch's `DataLoader` does the same for its own workers; `os.fork` and
    `multiprocessing.Process` do not.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))


def fault_of_numbers(
    scale: object, softcap: object, dropout: object, dtype: torch.dtype
) -> str | None:
    """Return what is wrong with a call's numbers, in words.

    They are used in the dtype of statistics: what is beyond its range, or so small that it is 0
    there, would be another number to one backend than to the next.
    """
    kind = statistics_dtype(dtype)
    least, largest = torch.finfo(kind).tiny, torch.finfo(kind).max
    if scale is not None:
        found = real(scale)
        if found is None and isinstance(scale, Tensor) and scale.requires_grad:
            return "scale has a gradient and must be a plain number; multiply q by it instead"
        if found is None or not -largest <= found <= largest:
            return f"scale must be a finite number of {kind} and is {format_value(scale)}"
    if softcap is not None:
        found = real(softcap)
        if found is None or not least <= found <= largest:
            given = format_value(softcap)
            return f"softcap must be above 0 and finite in {kind}, or None, and is {given}"
    found = real(dropout)
    if found is None or not 0.0 <= found < 1.0:
        return f"dropout must be at least 0 and below 1 and is {format_value(dropout)}"
    return None


def _fault_of_sinks(sinks: object, q: Tensor) -> str | None:
    """Return what is wrong with a call's sinks, in words."""
    want = f"one logit per query head, a floating-point tensor [{q.shape[1]}] on {q.device}"
    if not isinstance(sinks, Tensor):
        return f"sinks is a {type(sinks).__name__} and must be {want}"
    if fault := not_dense(sinks):
        return f"sinks {fault}"
    if sinks.shape != q.shape[1:2] or not sinks.is_floating_point() or sinks.device != q.device:
        given = f"{sinks.dtype} {list(sinks.shape)} on {sinks.device}"
        return f"sinks is {given} and must be {want}"
    if sinks.device.type == "cpu" and readable(sinks):  # elsewhere the call would have to wait
        logits = sinks.detach().to(statistics_dtype(q.dtype))
        if not bool((logits < torch.inf).all()):
            head = int((~(logits < torch.inf)).nonzero()[0])
            return (
                f"sinks holds {float(logits[head])} for head {head}; a sink is a finite logit of "
                f"{logits.dtype}, or -inf for none"
            )
    return None


def check_scores(
    call: Call, lse: Tensor, function: str = "attend", queries: Tensor | None = None
) -> None:
    """Raise ValueError where scores of finite q and k are no finite numbers.

    Their softmax would be none either: a row of P that is NaN, or a mean of the wrong keys. What is
    NaN or infinite in q or k itself goes on into the rows that it reaches. The log-sum-exp of all
    queries, or of these, shows it; it is read on the CPU only, as other devices would have to wait.
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
            f"(batch row {b}, head {h}) are no finite numbers of {lse.dtype}; scale "
            f"({call.scale:.3g}) times q·k, and what the mask adds to it, must be."
        )


def _may_attend(call: Call, queries: Tensor) -> Tensor:
    """Return True for those of these queries that may attend to some key, `[B or 1, H or 1, n]`."""
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
    """Return output and LSE with one more outcome that has no value, from those of the keys.

    `lse' = log(exp(lse) + exp(sink))` and `out' = out · exp(lse − lse')`; dead rows stay dead.
    """
    dead = lse == -torch.inf
    base, sink = lse.masked_fill(dead, 0.0), sinks.to(lse.dtype)[:, None]
    total = torch.logaddexp(base, sink).masked_fill(dead, -torch.inf)
    return (out * torch.sigmoid(base - sink)[..., None]).to(out.dtype), total
