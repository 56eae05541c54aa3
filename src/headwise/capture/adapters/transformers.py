"""Capture the attention of transformers: eager, sdpa, flash, flex, and any registered function.

Models of transformers get their attention function from `AttentionInterface`. While a model is
watched, the returned function is wrapped; nothing is registered, so the model keeps its
implementation and the masks that `AttentionMaskInterface` builds for it.

A call is read from the arguments of the function (q, the keys and values of each group, mask and
options), not from the functions that it calls: `sdpa` repeats keys for each query head and packs
the heads of a single query into another axis, a flash kernel exposes nothing, and sinks are sliced
off a softmax. If a function does not compute softmax attention of its arguments, the PyTorch
functions inside it are captured instead; if there are none, the call is left out.

A mask does not show which queries of a decoder are padding in cross-attention; they count there. If
a cache has dropped keys, the first key is the first remaining one. `generate()` compiles models
with static caches on some devices: pass `disable_compile=True`.

The meaning of the arguments is known for `sdpa`, `flash` and `flex`. Any other function, such as
`eager`, is tried once on its own arguments, without dropout, with values that distinguish the keys:
a meaning is accepted if it gives the function's output. If several do, the next call on which they
differ is tried as well.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.call import BoundedCache
from ...core.index import grid
from ...core.mask_algebra import Mask
from ...core.masks import Causal, Dense, Documents, Everything, Window
from ...core.reference import rows
from ...core.shapes import Extent, extent_of, no_autocast
from ..call import AttentionCall
from ..known import CHANGED, forget
from ..mask_import import Result, as_mask, reach, resolve_padding, without_padding
from ..private_torch import LogSumExp, replace_all
from ..register import causal_by, headwise_attention, served_call, special, textbook
from ..serve import SERVED, AcceleratedCall, accelerators, note
from ..session import SILENCE, CaptureSession, RefcountedPatch
from .flex import allowed_by
from .sdpa import of_all_heads, with_lse

Function = Callable[..., tuple[Any, ...]]
_PROJECTIONS = ("o_proj", "out_proj", "c_proj", "o", "dense")
"""Names of the output projection in attention modules."""


def attention_functions(net: CaptureSession) -> AbstractContextManager[None]:
    """Capture calls through transformers' interface; do nothing if it is not loaded."""
    loaded = hasattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface")
    return _INTERFACE.activate(net) if loaded else nullcontext()


class _Cache(threading.local):
    """The keys that a cache last returned in this thread, and the position of the first one."""

    keys: Tensor | None = None
    first = 0


_LAST_UPDATE = _Cache()
_POSSIBLE: dict[tuple[object, ...], list[str]] = {}
"""The possible meanings of the arguments of a function."""


def _wrap() -> Callable[[], None]:
    """Patch the interface to return captured functions; return a function that undoes it."""
    interface: Any = sys.modules["transformers.modeling_utils"].AttentionInterface
    cache: Any = sys.modules["transformers.cache_utils"].Cache
    item, get, update = interface.__getitem__, interface.get_interface, cache.update

    def get_interface(self: Any, implementation: str, default: Function) -> Function:
        return _captured(get(self, implementation, default))

    def getitem(self: Any, implementation: str) -> Function:
        return _captured(item(self, implementation))

    def updated(self: Any, keys: Tensor, values: Tensor, layer_idx: int, *a: Any, **b: Any) -> Any:
        result = update(self, keys, values, layer_idx, *a, **b)
        if _INTERFACE.everyone and getattr(self.layers[layer_idx], "is_sliding", False):
            dropped = int(self.get_seq_length(layer_idx)) - result[0].shape[2]
            _LAST_UPDATE.keys, _LAST_UPDATE.first = result[0], max(dropped, 0)
        return result

    undo = replace_all(
        (interface, "__getitem__", getitem),
        (interface, "get_interface", get_interface),
        (cache, "update", updated),
    )

    def restore() -> None:
        undo()
        _POSSIBLE.clear()
        _captured.cache_clear()

    return restore


_INTERFACE = RefcountedPatch(_wrap)


@cache
def _captured(function: Function) -> Function:
    known = isinstance(function, partial) and function.func is _attend
    return function if known else partial(_attend, function)


def _attend(
    function: Function,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *rest: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """Run a call of the interface and report it."""
    nets = [net for net in _INTERFACE.everyone if net.captures(module)]
    tensors = (query, key, value, attention_mask)
    # A paged cache holds the keys itself; other shapes do not occur.
    if not nets or rest or query.dim() != 4 or options.get("cache") is not None:
        _follow_in_full(nets, module)
        return function(module, *tensors, *rest, **options)
    net = nets[-1]
    cached, _LAST_UPDATE.keys = _LAST_UPDATE.keys, None
    behind = 0 if cached is None or cached is key else _behind(cached, key)
    given = InterfaceCall(net, function, module, tensors, options, behind)
    with SILENCE:  # it silences all sessions of this thread
        meaning = given.meaning()
        if meaning is not None:
            first = _LAST_UPDATE.first if cached is key or behind else 0
            return _emit(nets, given, meaning, first)
    _follow_in_full(nets, module)
    if not net.in_full:
        return function(module, *tensors, **options)
    count = len(net.noticed)
    result = function(module, *tensors, **options)
    if len(net.noticed) == count:
        net.leave_out(
            net.names.stack[-1],
            f"{given.named} does not return softmax(scale · q·k + mask) · v of its arguments, and "
            f"no known attention function was called inside it",
        )
    return result


def _follow_in_full(nets: Sequence[CaptureSession], module: nn.Module) -> None:
    """In sessions that skip a call's inner functions, leave it out if only these report it."""
    for net in nets:
        if not net.in_full:
            forget(net.names.model)
            net.names.left_out[net.names.names[id(module)]] = CHANGED


def _behind(cached: Tensor, key: Tensor) -> int:
    """Return the number of keys that a model has appended to those of its cache."""
    if key.dtype != cached.dtype or key.shape[2] <= cached.shape[2]:
        return 0
    behind = key.shape[2] - cached.shape[2]
    return behind if torch.equal(key[:, :, :-behind], cached) else 0


def _emit(
    nets: Sequence[CaptureSession], given: InterfaceCall, meaning: Meaning, first: int
) -> tuple[Any, ...]:
    """Report a call to every session; inner ones receive the output of outer ones."""
    served = given.served() if SERVED.everyone or given.kind == "headwise" else None
    module, q, k, v, result = given.module, given.q, given.k, given.v, None
    if meaning.keys != given.keys:
        k, v = k[:, :, : meaning.keys], v[:, :, : meaning.keys]
    lse = None
    if served is None:
        result, lse = given.run()
        original: Any = partial(given.heads_of, result)
        dtype = result[0].dtype  # to which the function has cast all of them under autocast
    else:
        original, dtype = served.out, served.call.q.dtype
    if not q.dtype is k.dtype is v.dtype is dtype:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    out, projected_by = original, partial(projection_of, module, q.shape[1] * v.shape[3])
    for net in nets:
        name = net.names.names.get(id(module))
        named = net.names.current if name is None else name
        call = AttentionCall(
            *(named, given.named, q, k, v, out, meaning.keywords, projected_by),
            first_key=first,
            behind=meaning.behind,
        )
        if lse is not None:
            call.lse = lse.of(call.heads, call.queries)
        if served is not None and not isinstance(out, Tensor):
            call = served.attached_to(call)
        new = net.emit(call, module=None if name is None else module)
        if new is not None or served is not None:
            out = call.out if new is None else new
    if result is None:
        return out.transpose(1, 2).contiguous(), None
    if out is original:
        return result
    return out.transpose(1, 2).reshape(result[0].shape).contiguous(), *result[1:]


def projection_of(module: nn.Module, width: int) -> Tensor | None:
    """Return the weight `[O, H · Dv]` of a module's output projection, if it has one."""
    for name in _PROJECTIONS:
        layer = module._modules.get(name)
        weight = getattr(layer, "weight", None)
        if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
            continue
        weight = weight.T if type(layer).__name__ == "Conv1D" else weight
        if weight.shape[1] == width:
            return weight
    return None


# ── the meaning of arguments ────────────────────────────────────────────────────────────────────

_KNOWN = {
    "sdpa_attention_forward": "sdpa",
    "flash_attention_forward": "flash",
    "flex_attention_forward": "flex",
}
"""Functions of transformers whose arguments have a known meaning."""


class Meaning(NamedTuple):
    """A call in headwise's terms: the number of keys, and the keywords of `observe()`."""

    keys: int
    keywords: dict[str, Any]
    behind: int


_MEANINGS: BoundedCache[tuple[object, ...], Meaning] = BoundedCache()
"""Meanings of `sdpa` calls without tensors other than q, k, v, by causality, lengths and scale."""


@cache
def _name_and_kind(function: Function) -> tuple[str, str | None]:
    """Return the name of a function, and its kind if it is one of `_KNOWN`."""
    named = getattr(function, "__name__", type(function).__name__)
    own = getattr(function, "__module__", "").startswith("transformers.integrations.")
    return named, _KNOWN.get(named) if own else None


class InterfaceCall:
    """The arguments of a function of the interface: q `[B, H, T, D]`, k and v `[B, G, S, D]`.

    The last `behind` keys, after those of a cache, have no position.
    """

    def __init__(
        self,
        net: CaptureSession,
        function: Function,
        module: nn.Module,
        given: tuple[Tensor, Tensor, Tensor, Any],
        options: dict[str, Any],
        behind: int = 0,
    ) -> None:
        self.net, self.function, self.module = net, function, module
        self.given, self.options, self.behind = given, options, behind
        q, k, v, self.mask = given
        sizes, of_keys = q.shape, k.shape
        if sizes[0] != of_keys[0]:  # a single row of queries may serve the whole batch
            q, k, v = (x.expand(max(len(q), len(k)), -1, -1, -1) for x in (q, k, v))
            sizes, of_keys = q.shape, k.shape
        if of_keys[1] != v.shape[1]:
            k, v = of_all_heads(k, v, sizes[1])
            of_keys = k.shape
        self.q, self.k, self.v = q, k, v
        self.batch, self.heads, self.queries, _ = sizes
        _, self.groups, self.keys, _ = of_keys
        self.causal = causal_by(module, options)  # queries see no later keys
        self.named, self.kind = _name_and_kind(function)
        if function is headwise_attention:
            plain = textbook(type(module), special(options))
            self.kind = "headwise" if plain else None

    def run(self) -> tuple[Any, LogSumExp | None]:
        """Call the function; for `sdpa` on a GPU, also return the log-sum-exp of its kernel."""
        call = partial(self.function, self.module, *self.given, **self.options)
        return with_lse(self.q, call) if self.kind == "sdpa" else (call(), None)

    def heads_of(self, result: tuple[Any, ...]) -> Tensor:
        """Return the heads' outputs `[B, H, T, Dv]` from the result of the function."""
        out = result[0]  # [B, T, H, Dv], or the heads side by side
        return out.reshape(*out.shape[:2], self.heads, -1).transpose(1, 2)

    def served(self) -> AcceleratedCall | None:
        """Return the accelerated call, if the function is headwise's or accelerated."""
        accelerated = self.kind == "sdpa" and accelerators() and not special(self.options)
        if self.kind != "headwise" and not accelerated:
            return None
        found = served_call(self.module, *self.given, self.options)
        if isinstance(found, str):  # the function itself reports the reason
            return None
        note(self.named, found)
        return found

    def meaning(self) -> Meaning | None:
        """Return the meaning of the arguments; `None` if the function computes something else."""
        options = self.options
        if self.kind == "sdpa" and self.mask is None and options.get("position_bias") is None:
            place = self.causal, self.queries, self.keys, options.get("scaling")
            found = _MEANINGS.get(place)
            if found is None:
                found = _MEANINGS[place] = next(self.meanings())[1]
            return found
        if self.kind is not None:
            return next(self.meanings())[1]
        meanings, mask = dict(self.meanings()), self.mask
        queries, keys = self.queries, self.keys
        form = (type(mask), getattr(mask, "ndim", 0), queries == 1, queries < keys, queries > keys)
        place = (self.function, type(self.module), self.causal, *form)
        known = _POSSIBLE.get(place)
        possible = {name: meanings[name] for name in known or () if name in meanings}
        if known is None or (known and not possible) or not _agree(list(possible.values())):
            _POSSIBLE[place] = known = self._fitting(possible or meanings)
        return next((meanings[name] for name in known if name in meanings), None)

    def _fitting(self, meanings: dict[str, Meaning]) -> list[str]:
        """Return the meanings that agree with the function's output on a few rows, likeliest first.

        The values distinguish the keys and the heads.
        """
        q, k, v, mask = self.given
        size = (v.shape[1], v.shape[2], v.shape[3])
        head, key, wave = (torch.arange(n, device=v.device) for n in size)
        angle = (key[:, None] + 0.5) * wave * (torch.pi / v.shape[2]) + head[:, None, None]
        distinct = angle.cos().to(v.dtype).repeat(len(v), 1, 1, 1)
        still = {"dropout": 0.0} if "dropout" in self.options else {}
        with torch.no_grad():
            result = self.function(self.module, q, k, distinct, mask, **(self.options | still))
            out, distinct = self.heads_of(result), distinct.expand(len(self.k), -1, -1, -1)
            with no_autocast(self.q.device):
                return [
                    name
                    for name, meaning in meanings.items()
                    if _gives(self.q, self.k, distinct, meaning, out)
                ]

    def meanings(self) -> Iterator[tuple[str, Meaning]]:
        """Yield possible meanings, likeliest first; only one if the function is known."""
        options = self.options
        known = {} if self.kind == "sdpa" else options
        bias = None if self.kind == "flash" else options.get("position_bias")
        for name, keys, mask, behind in self._masks():
            if bias is not None:
                mask = _both(mask, self._once(bias, keys, self._of_table)[1])
            keywords = {"mask": mask, "scale": options.get("scaling")}
            keywords |= {"softcap": known.get("softcap"), "sinks": known.get("s_aux")}
            yield name, Meaning(keys, keywords, behind)

    def _masks(self) -> Iterator[tuple[str, int, Mask, int]]:
        """Yield each meaning's name, its number of keys, its mask, and the number of keys after
        the sequence. Padded queries see no key."""
        mask, keys, queries = self.mask, self.keys, self.queries
        if isinstance(mask, Tensor) and mask.dim() != 2:
            yield "mask", *self._once(mask, keys, self._of_mask)
            return
        if mask is not None and not isinstance(mask, Tensor):
            written_out = allowed_by(self.net, mask, self._extent(keys))
            yield "mask", *self._once(written_out, keys, self._of_mask)
            return
        real: Mask = Everything()
        if mask is not None:  # a static cache is empty after the keys that the mask covers
            keys, real = self._once(mask, min(keys, mask.shape[1]), self._of_keys)
        from_start = self.causal and 1 < queries < keys
        if self.kind in ("flash", None):
            yield "band", keys, _both(_both(real, self._packed(keys)), self._band(keys)), 0
        if self.kind in ("sdpa", "headwise") and not from_start:
            yield "end", keys, _both(real, Causal() if self.causal else Everything()), 0
        if self.kind in ("sdpa", "headwise", None) and from_start:
            yield "start", queries, Causal(), 0
        if self.kind in ("flex", None):
            yield "mask", keys, real, 0

    def _once(self, given: Tensor, keys: int, find: Callable[[Tensor, int], Result]) -> Result:
        """Return the cached result for a tensor, which all layers usually share."""
        place = ("transformers", find.__name__, self._extent(keys), self.own, self.behind)
        return self.net.masks.of(given, place, lambda: find(given, keys))

    def _of_table(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        return keys, as_mask(given[..., :keys], self._extent(keys))

    def _of_mask(self, given: Tensor, keys: int) -> tuple[int, Mask, int]:
        """Convert a mask `[B, H, T, S]`."""

        def find(sizes: Extent) -> Mask:
            return as_mask(given[..., : sizes.keys], sizes)

        extent = self._extent(keys)
        mask, keys, behind = resolve_padding(find, extent, self.q.device, self.own, self.behind)
        return keys, mask, behind

    def _of_keys(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        """Return the number of keys and a mask of the real ones, and of real queries if `own`."""
        device, queries, given = self.q.device, self.queries, given[:, None, None].bool()
        keys, mask = self._of_table(given, keys)
        if not self.own:
            return keys, mask
        if queries < keys:
            filled = max(reach(mask, self._extent(keys), device), queries)
            keys, mask = self._of_table(given, filled)
        return keys, without_padding(mask, self._extent(keys), device)

    def _band(self, keys: int) -> Mask:
        """Return the mask of a kernel with options for causality and a window."""
        window, extent = self.options.get("sliding_window"), self._extent(keys)
        if window is None or keys <= window:
            return Causal() if self.causal and extent.queries > 1 else Everything()
        if self.causal:
            return Window(window)
        i, j = grid(extent, self.q.device)
        return Dense((i + extent.offset - j).abs() < window)

    def _packed(self, keys: int) -> Mask:
        """Return the mask of packed texts, which a flash kernel gets as offsets or positions."""
        ends, places = (self.options.get(name) for name in ("cu_seq_lens_q", "position_ids"))
        batch = self.batch
        if self.kind != "flash" or self.mask is not None or self.queries != keys:
            return Everything()
        at = torch.arange(batch * keys, device=self.q.device)
        if ends is not None:
            return Documents(torch.bucketize(at, ends[1:], right=True).view(batch, keys))
        if places is None or places.shape != (1, keys) or batch > 1:
            return Everything()
        if bool((places[0] == at + places.min()).all()):
            return Everything()
        return Documents((places == places.min()).cumsum(1))

    def _extent(self, keys: int) -> Extent:
        return Extent(self.batch, self.heads, self.groups, self.queries, keys)

    @property
    def own(self) -> bool:
        """True for self-attention, whose queries are at the end of the keys."""
        same = self.causal or self.queries == self.keys
        return same and not self.net.names.crosses_in(self.module)


def _agree(meanings: list[Meaning]) -> bool:
    """Return True if all these meanings are equal in this call."""
    forms = [(one.keys, one.keywords["mask"]) for one in meanings]
    return all(form == forms[0] for form in forms)


def _both(one: Mask, other: Mask) -> Mask:
    if isinstance(one, Everything):
        return other
    return one if isinstance(other, Everything) else one & other


def _gives(q: Tensor, k: Tensor, v: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Return True if the meaning gives a few rows of the output, to low precision.

    Rows that are not finite are inconclusive, as some functions set them to 0.
    """
    q, k, v = (x.to(out.dtype) for x in (q, k[:, :, : meaning.keys], v[:, :, : meaning.keys]))
    extent = extent_of(q, k, v)
    if (*q.shape[:3], v.shape[3]) != out.shape:
        return False
    i, j = grid(extent, q.device)
    picked = torch.tensor(sorted({0, extent.queries // 2, extent.queries - 1}), device=q.device)
    scores = dict(meaning.keywords)
    some = (q[:, :, picked], k, v, scores.pop("mask"), extent, i[picked], j)
    expected = rows(*some, **scores)
    valid = expected.allowed.any(-1, keepdim=True)
    close = 1e-2 if torch.finfo(out.dtype).eps < 1e-4 else 1e-1
    compared = [x.double().where(valid, 0.0) for x in (expected.out, out[:, :, picked])]
    return torch.allclose(*compared, rtol=0.0, atol=close, equal_nan=True)  # of values up to 1
