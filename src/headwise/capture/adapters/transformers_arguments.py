"""What the functions of transformers' attention interface make of their arguments.

What `sdpa`, `flash` and `flex` do is known. Any other function, `eager` among them, is tried once
on its own arguments, without dropout: a meaning counts when it gives the function's own output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.index import grid
from ...core.mask_algebra import Mask
from ...core.masks import Causal, Dense, Documents, Everything, Window
from ...core.reference import rows
from ...core.shapes import Extent, as_given, extent_of
from ..mask_import import as_mask, reach, without_padding
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


@dataclass(frozen=True)
class Meaning:
    """A call in headwise's terms: what `observe()` takes beside q."""

    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    softcap: float | None
    sinks: Tensor | None

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of `observe()`."""
        return {name: getattr(self, name) for name in ("mask", "scale", "softcap", "sinks")}


class Given:
    """What a function of the interface was called with: q `[B, H, T, D]`, k and v `[B, G, S, D]`.

    `found` remembers which meaning a function's arguments have.
    """

    def __init__(
        self,
        net: Net,
        found: dict[tuple[object, ...], int | None],
        function: Function,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: dict[str, Any],
    ) -> None:
        self.net, self.found, self.function, self.module = net, found, function, module
        self.mask, self.options, self.given = mask, options, (q, k, v, mask)
        batch = max(len(q), len(k))  # a single row of queries may serve the whole batch
        self.q, self.k, self.v = (x.expand(batch, -1, -1, -1) for x in (q, k, v))
        self.named = getattr(function, "__name__", type(function).__name__)
        places = ("transformers.integrations.", f"{__package__}.")
        own = getattr(function, "__module__", "").startswith(places)
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

    def meaning(self, run: Function) -> Meaning | None:
        """What the arguments mean to the function; `None` if it computes something else."""
        if self.kind is not None:
            return next(self.meanings())
        mask, (queries, keys) = self.mask, (self.q.shape[2], self.k.shape[2])
        form = (type(mask), getattr(mask, "ndim", 0), queries == 1, queries == keys)
        place = (self.function, type(self.module), *form)
        if place in self.found:
            number = self.found[place]
        else:
            number, sure = self._try(run)
            if sure:
                self.found[place] = number
        return None if number is None else list(self.meanings())[number]

    def _try(self, run: Function) -> tuple[int | None, bool]:
        """Return the number of the first meaning that gives the function's output, on a few rows;
        and True if it holds for other calls too, as it may not where numbers are not finite."""
        still = {"dropout": 0.0} if "dropout" in self.options else {}
        with torch.no_grad():
            out = self.heads_of(run(**(self.options | still)))
            sure = all(bool(x.isfinite().all()) for x in (out, self.q, self.k, self.v))
            for number, meaning in enumerate(self.meanings()):
                with as_given(self.q.device):
                    if _gives(self.q, meaning, out):
                        return number, sure
        return None, sure

    def meanings(self) -> Iterator[Meaning]:
        """What the arguments may mean, the likeliest first; one where the function is known."""
        options = self.options
        known = {} if self.kind == "sdpa" else options
        bias = None if self.kind == "flash" else options.get("position_bias")
        for keys, mask in self._masks():
            if bias is not None:
                mask = _both(mask, self._once(bias, keys, self._of_table)[1])
            yield Meaning(
                self.k[:, :, :keys],
                self.v[:, :, :keys],
                mask,
                options.get("scaling"),
                known.get("softcap"),
                known.get("s_aux"),
            )

    def _masks(self) -> Iterator[tuple[int, Mask]]:
        """How many keys count, and who may attend to them; padded queries may to none."""
        mask, keys, queries = self.mask, self.k.shape[2], self.q.shape[2]
        if isinstance(mask, Tensor) and mask.dim() != 2:
            yield self._once(mask, keys, self._of_mask)
            return
        if mask is not None and not isinstance(mask, Tensor):
            written_out = allowed_by(self.net, mask, self._extent(keys))
            yield self._once(written_out, keys, self._of_mask)
            return
        real: Mask = Everything()
        if mask is not None:  # a static cache is empty behind what a mask of the keys covers
            keys, real = self._once(mask, min(keys, mask.shape[1]), self._of_keys)
        from_start = self.causal and 1 < queries < keys
        if self.kind in ("flash", None):
            yield keys, _both(_both(real, self._packed(keys)), self._band(keys))
        if self.kind in ("sdpa", "headwise") and not from_start:
            yield keys, _both(real, Causal() if self.causal else Everything())
        if self.kind in ("sdpa", "headwise", None) and from_start:
            yield queries, Causal()
        if self.kind in ("flex", None):
            yield keys, real

    def _once(
        self, given: Tensor, keys: int, find: Callable[[Tensor, int], tuple[int, Mask]]
    ) -> tuple[int, Mask]:
        """What is found of a tensor, which mostly serves all layers."""
        what = ("transformers", find.__name__, self._extent(keys), self.own)
        return self.net.masks.of(given, what, lambda: find(given, keys))

    def _of_table(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        return keys, as_mask(given[..., :keys], self._extent(keys))

    def _of_mask(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        """A mask `[B, H, T, S]`; a static cache is empty behind the last key that is seen."""
        device = self.q.device
        keys, mask = self._of_table(given, keys)
        if self.own and self.q.shape[2] < keys:
            filled = max(reach(mask, self._extent(keys), device), self.q.shape[2])
            keys, mask = self._of_table(given, filled)
        return keys, without_padding(mask, self._extent(keys), device) if self.own else mask

    def _of_keys(self, given: Tensor, keys: int) -> tuple[int, Mask]:
        """Which keys are real, `[B, S]`; in self-attention so are the queries at their end."""
        return self._of_mask(given[:, None, None, :keys].bool(), keys)

    def _band(self, keys: int) -> Mask:
        """Who may attend, by position, in a kernel that is told so in place of a mask."""
        window, extent = self.options.get("sliding_window"), self._extent(keys)
        if window is None or keys <= window:
            return Causal() if self.causal else Everything()
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
        return same and not self.net.names.crosses


def _both(one: Mask, other: Mask) -> Mask:
    if isinstance(one, Everything):
        return other
    return one if isinstance(other, Everything) else one & other


def _gives(q: Tensor, meaning: Meaning, out: Tensor) -> bool:
    """Return True if the meaning gives a few rows of the output, as well as low precision can.

    Rows that are not finite are not compared: some functions make them 0.
    """
    q, k, v = (x.to(out.dtype) for x in (q, meaning.k, meaning.v))
    extent = extent_of(q, k, v)
    if (*q.shape[:3], v.shape[3]) != out.shape:
        return False
    i, j = grid(extent, q.device)
    picked = torch.tensor(sorted({0, extent.queries // 2, extent.queries - 1}), device=q.device)
    some = (q[:, :, picked], k, v, meaning.mask, extent, i[picked], j)
    wanted = rows(*some, scale=meaning.scale, softcap=meaning.softcap, sinks=meaning.sinks)
    apart = (wanted.out.double() - out[:, :, picked].double()).abs()
    counts = wanted.allowed.any(-1, keepdim=True) & apart.isfinite()
    close = 1e-2 if torch.finfo(out.dtype).eps < 1e-4 else 1e-1
    largest = v.abs().nan_to_num(0.0, 0.0).amax().double()
    return bool(apart.where(counts, 0.0).amax() <= close * largest)
