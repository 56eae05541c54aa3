"""The scaling of heads whose projections lie over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from ..layers.attention import MultiHeadAttention
from ..weights.projections import Projections
from .sections import Sections


class SectionsProjections(Projections):
    """Those of a layer whose heads lie over ranks, by the names that it has them under.

    Factors are of all heads, on every rank: parameters over ranks take their part of them.
    """

    def __init__(
        self,
        layer: MultiHeadAttention,
        fused: Mapping[str, str],
        num_heads: int,
        num_kv_heads: int,
    ) -> None:
        """Of a layer whose `fused` names the `Sections` of q, k and v.

        Raises:
            ValueError: a bias of only some of q, k and v.
        """
        if getattr(layer, "some_bias", None) is not None:
            raise ValueError("a bias of only some of q, k and v has no place in any layout")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self._width = layer.head_dim
        self.normed = layer.q_norm is not None
        self.own = frozenset(name for name, _ in layer.named_parameters())
        sections = {part: layer.get_submodule(name) for part, name in fused.items()}
        self._axis = max(one.axis for one in sections.values() if isinstance(one, Sections))
        names = {}
        for part, module in sections.items():
            assert isinstance(module, Sections)
            found = [f"{fused[part]}.{part}"] + [f"{fused[part]}.{part}_bias"] * module.has_bias
            names[part] = tuple(found)
        self.queries, self.keys = names["q"], names["k"]

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        for names, gamma in ((self.queries, q), (self.keys, k)):
            rows = gamma.repeat_interleave(self._width)
            for name in names:
                wide = rows[None] if self._axis else rows[:, None]
                yield name, rows if name.endswith("_bias") else wide
