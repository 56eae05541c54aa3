"""headwise's own layer, which tells of its calls itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from ..attend import attend, observe
from ..evidence import Statistic
from ..layer import MultiHeadAttention
from ..masks import as_mask
from ..readings import Reading
from .calls import HeadsCall, Looking
from .net import Net


class OwnCall(HeadsCall):
    """A call of `MultiHeadAttention`: output and statistics come from the same pass.

    Unless somebody else has made the output, or there are padded queries, which the statistics
    leave out and the output does not.
    """

    def observe(self, statistics: Sequence[Statistic], looking: Looking) -> dict[str, Reading]:
        if isinstance(self.made, Tensor) or self.counted(looking) is not self.mask:
            return super().observe(statistics, looking)
        seen = observe(
            *(self.q, self.k, self.v, *statistics),
            queries=looking.queries,
            seed=looking.seed,
            gradients=looking.gradients,
            projection=self.projection,
            **self.keywords,
        )
        self.made = seen.out
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
        attending = partial(attend, q, k, v, **keywords)
        made = attending if outer is None else outer(layer, q, k, v, keywords)
        call = OwnCall(
            *(net.names.name_of(layer) or "", "headwise", q, k, v, made),
            keywords={**keywords, "mask": as_mask(keywords["mask"])},
            projection=layer.projection,
            own_positions=layer.own_positions,
            first_key=layer.first_key,
        )
        new = net.tell(call) if net.open else None
        return call.out if new is None else new

    for layer in layers:
        layer.observer = observer
    try:
        yield
    finally:
        for layer, old in before.items():
            layer.observer = old
