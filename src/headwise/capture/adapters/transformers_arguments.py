"""What the functions of transformers' attention interface make of their arguments.

What `sdpa`, `flash` and `flex` do is known. Any other function, `eager` among them, is tried once
on its own arguments, without dropout, with values that tell the keys apart: a meaning counts when
it gives what the function makes of them. Where several do, the next call on which they differ is
tried as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.index import grid
from ...core.mask_algebra import Mask
from ...core.masks import Causal, Dense, Documents, Everything, Window
from ...core.reference import rows
from ...core.shapes import Extent, as_given, extent_of
from ..mask_import import Found, as_mask, in_place, reach, without_padding
from ..net import Net
from ..serve import Served, accelerators, note
from .flex import allowed_by
from .transformers_implementation import served_call, special, textbook

Function = Callable[..., tuple[Any, ...]]

_KNOWN = {
    "sdpa_attention_forward": "sdpa",
    "flash_attention_forward": "flash",
    "flex_attention_forward": "flex",
    "headwise_attention": "headwise",
}
"""Functions of transformers and of headwise, of which it is known what they make of their
arguments."""

_PLACES = ("transformers.integrations.", f"{__package__}.")
"""The modules of these functions."""


@dataclass(frozen=True)
class Meaning:
    """A call in headwise's terms: what `observe()` takes beside q."""

    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    behind: int

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of `observe()`."""
        scores = {"scale": self.scale, "softcap": self.softcap, "sinks": self.sinks}
        return {"mask": self.mask, **scores}


class Given:
    """What a function of the interface was called with: q `[B, H, T, D]`, k and v `[B, G, S, D]`.

    `found` remembers which meanings a function's arguments may have, by their names. So many keys
    `behind` those of a cache have no position.
    """

    def __init__(
        self,
        net: Net,
        found: dict[tuple[object, ...], list[str]],
        function: Function,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: dict[str, Any],
        behind: int = 0,
    ) -> None:
        self.behind = behind
        self.net, self.found, self.function, self.module = net, found, function, module
        self.mask, self.options, self.given = mask, options, (q, k, v, mask)
        if len(q) != len(k):  # a single row of queries may serve the whole batch
            q, k, v = (x.expand(max(len(q), len(k)), -1, -1, -1) for x in (q, k, v))
        self.q, self.k, self.v = q, k, v
        self.named = getattr(function, "__name__", type(function).__name__)
        own = getattr(function, "__module__", "").startswith(_PLACES)
        self.kind = _KNOWN.get(self.named) if own else None
        if self.kind == "headwise" and not textbook(type(module), special(options)):
            self.kind = None

    def heads_of(self, result: tuple[Any, ...]) -> Tensor:
        """The heads' outputs `[B, H, T, Dv]` in what the function gave."""
        out = result[0]  # [B, T, H, Dv], or the heads side by side
        return out.reshape(*out.shape[:2], self.q.shape[1], -1).transpose(1, 2)

    def served(self) -> Served | None:
        """The call as headwise computes it, where the function is headwise's or accelerated."""
        accelerated = self.kind == "sdpa" and accelerators() and not special(self.options)
        if self.kind != "headwise" and not accelerated:
            return None
        found = served_call(self.module, *self.given, self.options)
        if isinstance(found, str):  # the function itself says why
            return None
        note(self.named, found)
        return found

    def meaning(self) -> Meaning | None:
        """What the arguments mean to the function; `None` if it computes something else."""
        if self.kind is not None:
            return next(self.meanings())[1]
        meanings = dict(self.meanings())
        (queries, keys), mask = (self.q.shape[2], self.k.shape[2]), self.mask
        form = (type(mask), getattr(mask, "ndim", 0), queries == 1, queries < keys, queries > keys)
        place = (self.function, type(self.module), self.causal, *form)
        known = self.found.get(place)
        possible = {name: meanings[name] for name in known or () if name in meanings}
        if known is None or (known and not possible) or not _agree(list(possible.values())):
            self.found[place] = known = self._fitting(possible or meanings)
        return next((meanings[name] for name in known if name in meanings), None)

    def _fitting(self, meanings: dict[str, Meaning]) -> list[str]:
        """The meanings that the function's output allows, the likeliest first: on a few rows, and
        of values that tell apart the keys and the heads."""
        q, k, v, mask = self.given
        size = (v.shape[1], v.shape[2], v.shape[3])
        head, key, wave = (torch.arange(n, device=v.device) for n in size)
        angle = (key[:, None] + 0.5) * wave * (torch.pi / v.shape[2]) + head[:, None, None]
        told = angle.cos().to(v.dtype).repeat(len(v), 1, 1, 1)
        still = {"dropout": 0.0} if "dropout" in self.options else {}
        with torch.no_grad():
            result = self.function(self.module, q, k, told, mask, **(self.options | still))
            out, told = self.heads_of(result), told.expand(len(self.k), -1, -1, -1)
            with as_given(self.q.device):
                return [
                    name
                    for name, meaning in meanings.items()
                    if _gives(self.q, replace(meaning, v=told[:, :, : meaning.k.shape[2]]), out)
                ]

    def meanings(self) -> Iterator[tuple[str, Meaning]]:
        """What the arguments may mean, the likeliest first; one where the function is known."""
        options = self.options
        known = {} if self.kind == "sdpa" else options
        bias = None if self.kind == "flash" else options.get("position_bias")
        for name, keys, mask, behind in self._masks():
            if bias is not None:
                mask = _both(mask, self._once(bias, keys, self._of_table)[1])
            k, v = self.k, self.v
            if keys != k.shape[2]:
                k, v = k[:, :, :keys], v[:, :, :keys]
            yield (
                name,
                Meaning(
                    k,
                    v,
                    mask,
                    options.get("scaling"),
                    known.get("softcap"),
                    known.get("s_aux"),
                    behind,
                ),
            )

    def _masks(self) -> Iterator[tuple[str, int, Mask, int]]:
        """Each meaning's name, how many keys count, who may attend to them, and how many are behind
        the sequence; padded queries may attend to none."""
        mask, keys, queries = self.mask, self.k.shape[2], self.q.shape[2]
        if isinstance(mask, Tensor) and mask.dim() != 2:
            yield "mask", *self._once(mask, keys, self._of_mask)
            return
        if mask is not None and not isinstance(mask, Tensor):
            written_out = allowed_by(self.net, mask, self._extent(keys))
            yield "mask", *self._once(written_out, keys, self._of_mask)
            return
        real: Mask = Everything()
        if mask is not None:  # a static cache is empty behind what a mask of the keys covers
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

    def _once(self, given: Tensor, keys: int, find: Callable[[Tensor, int], Found]) -> Found:
        """What is found of a tensor, which mostly serves all layers."""
        what = ("transformers", find.__name__, self._extent(keys), self.own, self.behind)
        return self.net.masks.of(given, what, lambda: find(given, keys))

    def _of_table(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        return keys, as_mask(given[..., :keys], self._extent(keys))

    def _of_mask(self, given: Tensor, keys: int) -> tuple[int, Mask, int]:
        """A mask `[B, H, T, S]`."""

        def find(sizes: Extent) -> Mask:
            return as_mask(given[..., : sizes.keys], sizes)

        extent = self._extent(keys)
        mask, keys, behind = in_place(find, extent, self.q.device, self.own, self.behind)
        return keys, mask, behind

    def _of_keys(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        """Which keys are real, `[B, S]`; in self-attention so are the queries at their end."""
        device, queries, given = self.q.device, self.q.shape[2], given[:, None, None].bool()
        keys, mask = self._of_table(given, keys)
        if not self.own:
            return keys, mask
        if queries < keys:
            filled = max(reach(mask, self._extent(keys), device), queries)
            keys, mask = self._of_table(given, filled)
        return keys, without_padding(mask, self._extent(keys), device)

    def _band(self, keys: int) -> Mask:
        """Who may attend, by position, in a kernel that is told so in place of a mask."""
        window, extent = self.options.get("sliding_window"), self._extent(keys)
        if window is None or keys <= window:
            return Causal() if self.causal and extent.queries > 1 else Everything()
        if self.causal:
            return Window(window)
        i, j = grid(extent, self.q.device)
        return Dense((i + extent.offset - j).abs() < window)

    def _packed(self, keys: int) -> Mask:
        """Texts side by side in a row, of which a flash kernel is told by their places."""
        ends, places = (self.options.get(name) for name in ("cu_seq_lens_q", "position_ids"))
        batch, queries = len(self.q), self.q.shape[2]
        if self.kind != "flash" or self.mask is not None or queries != keys:
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
        (batch, heads, queries, _), groups = self.q.shape, self.k.shape[1]
        return Extent(batch, heads, groups, queries, keys)

    @property
    def causal(self) -> bool:
        """Whether the module says that its queries look back only."""
        asked = self.options.get("is_causal")
        return getattr(self.module, "is_causal", True) if asked is None else bool(asked)

    @property
    def own(self) -> bool:
        """Whether this is self-attention, whose queries stand at the keys' end."""
        same = self.causal or self.q.shape[2] == self.k.shape[2]
        return same and not self.net.names.crosses_in(self.module)


def _agree(meanings: list[Meaning]) -> bool:
    """Return whether all these are one meaning in this call."""
    forms = [(one.k.shape[2], one.mask) for one in meanings]
    return all(form == forms[0] for form in forms)


def _both(one: Mask, other: Mask) -> Mask:
    if isinstance(one, Everything):
        return other
    return one if isinstance(other, Everything) else one & other


def _gives(q: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Return whether the meaning gives a few rows of the output, as well as low precision can.

    Rows that are not finite tell nothing: some functions make them 0.
    """
    q, k, v = (x.to(out.dtype) for x in (q, meaning.k, meaning.v))
    extent = extent_of(q, k, v)
    if (*q.shape[:3], v.shape[3]) != out.shape:
        return False
    i, j = grid(extent, q.device)
    picked = torch.tensor(sorted({0, extent.queries // 2, extent.queries - 1}), device=q.device)
    some = (q[:, :, picked], k, v, meaning.mask, extent, i[picked], j)
    wanted = rows(*some, scale=meaning.scale, softcap=meaning.softcap, sinks=meaning.sinks)
    alive = wanted.allowed.any(-1, keepdim=True)
    close = 1e-2 if torch.finfo(out.dtype).eps < 1e-4 else 1e-1
    compared = [x.double().where(alive, 0.0) for x in (wanted.out, out[:, :, picked])]
    return torch.allclose(*compared, rtol=0.0, atol=close, equal_nan=True)  # of values up to 1
