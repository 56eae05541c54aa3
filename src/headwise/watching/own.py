"""headwise's own layer, which tells of its calls itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from .._axes import extent_of
from ..attend import attend, observe
from ..evidence import Statistic
from ..layer import MultiHeadAttention
from ..masks import as_mask
from ..readings import Reading
from .calls import AttentionCall, Looking
from .foreign import without_padding
from .net import Net


class OwnCall(AttentionCall):
    """A call of `MultiHeadAttention`: output and statistics come from the same pass.

    Unless somebody else has made the output (`made`), or there are padded queries, which the
    statistics leave out and the output does not.
    """

    road = "headwise"

    def __init__(
        self,
        name: str,
        layer: MultiHeadAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keywords: dict[str, Any],
        made: Tensor | None,
    ) -> None:
        self.name, self.layer, self.keywords = name, layer, keywords
        self.q, self.k, self.v = q, k, v
        self.first_key = layer.first_key
        self._out = made

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def out(self) -> Tensor:
        if self._out is None:
            self._out = attend(self.q, self.k, self.v, **self.keywords)
        return self._out

    def observe(self, statistics: Sequence[Statistic], looking: Looking) -> dict[str, Reading]:
        keywords = dict(self.keywords)
        mask = as_mask(keywords["mask"])
        if self.layer.own_positions and looking.padding:
            extent = extent_of(self.q, self.k, self.v, "MultiHeadAttention")
            keywords["mask"] = without_padding(mask, extent, self.q.device)
        if keywords["mask"] is not mask:
            _ = self.out
        seen = observe(
            *(self.q, self.k, self.v, *statistics),
            queries=looking.queries,
            seed=looking.seed,
            gradients=looking.gradients,
            output=True if self._out is None else self._out,
            projection=self.layer.projection,
            **keywords,
        )
        if self._out is None:
            self._out = seen.out
        return seen.readings


@contextmanager
def own_layers(net: Net) -> Iterator[None]:
    """Hear of the calls of the model's `MultiHeadAttention` layers."""
    layers = [m for m in net.names.model.modules() if isinstance(m, MultiHeadAttention)]
    before = {layer: layer.observer for layer in layers}

    def observer(
        layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]
    ) -> Tensor:
        outer = before[layer]
        made = None if outer is None else outer(layer, q, k, v, keywords)
        if net.open:
            name = net.names.name_of(layer) or ""
            call = OwnCall(name, layer, q, k, v, keywords, made)
            new = net.tell(call)
            return call.out if new is None else new
        return attend(q, k, v, **keywords) if made is None else made

    for layer in layers:
        layer.observer = observer
    try:
        yield
    finally:
        for layer, old in before.items():
            layer.observer = old
