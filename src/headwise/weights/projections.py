"""Where a module projects its queries and keys, in any known layout; and their scaling by head."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor

from .convert import stored
from .detect import Layer, Shape, detect_shapes, find_layers, named_as
from .layout_table import LAYOUTS
from .layout_types import Sizes
from .packing import parts_of, per_head, sizes_of

_OF_QUERIES_OR_KEYS = re.compile(
    r"(^|[._])((q|k|v|qk|kv|qkv)([._]|$|norm|proj)|query|key|value)", re.IGNORECASE
)


@dataclass(frozen=True)
class Projections:
    """The tensors from which one attention layer makes its queries and keys.

    `layer` says by which names, `patterns` how they lie.
    """

    layer: Layer
    sizes: Sizes
    patterns: Mapping[str, tuple[str, str]]

    @property
    def normed(self) -> bool:
        """Whether queries and keys are normalised after the projection."""
        held = (self.patterns[name][0] for name in self.layer.where)
        return any("norm" in parts for parts in held)

    @property
    def names(self) -> dict[str, list[str]]:
        """The state's names of the tensors that hold queries (`q`) and keys (`k`)."""
        return {
            part: [full for name, _, _ in self._held(part) for full in self.layer.where[name]]
            for part in "qk"
        }

    def group_of(self, head: int) -> int:
        """The key/value head that a query head reads."""
        if self.layer.layout.turns:
            return head % self.sizes.num_kv_heads
        return head // (self.sizes.num_heads // self.sizes.num_kv_heads)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What multiplies each tensor, by the state's names: queries by q `[H]`, keys by k `[G]`.

        Each broadcasts to its tensor; tensors that stay as they are are left out.
        """
        for name, held, pattern in dict.fromkeys((*self._held("q"), *self._held("k"))):
            factor = per_head(held, pattern, {"q": q, "k": k}, self.sizes)
            alone = "{n}" in name
            for number, full in enumerate(self.layer.where[name]):
                one = factor[number] if alone else factor
                if bool((one != 1).any()):
                    yield full, one

    def _held(self, part: str) -> Iterator[tuple[str, str, str]]:
        """The form's names that hold a part, each with what it holds and how."""
        for name in self.layer.where:
            held, pattern = self.patterns[name]
            if {f"{part}.weight", f"{part}.bias"} & set(parts_of(held)):
                yield name, held, pattern


def projections_of(tensors: Mapping[str, Tensor], num_heads: int) -> Projections:
    """Find the projections of an attention module by the names and shapes of its tensors.

    Args:
        num_heads: query heads; of layouts whose heads have tensors of their own, any number.

    Raises:
        ValueError: no known layout has them, or they do not fit so many heads.
    """
    layer = _layer_of(tuple((name, tuple(x.shape)) for name, x in tensors.items()))
    if isinstance(layer, str):
        raise ValueError(layer)
    held, patterns = stored(layer, tensors.__getitem__)
    alone = any("{n}" in name for name in layer.where)
    said = f"layout {layer.layout.name!r}"
    return Projections(
        layer, sizes_of(held, patterns, None if alone else num_heads, None, said), patterns
    )


@lru_cache(4096)
def _layer_of(shapes: tuple[tuple[str, Shape], ...]) -> Layer | str:
    """The layer that these tensors are, or why they are none that is known."""
    own = {name: shape for name, shape in shapes if not _beside(name)}
    if not own:
        return "it has no weights of its own"
    try:
        layers = find_layers(LAYOUTS[detect_shapes(own)], own, "")
    except ValueError as error:
        return str(error).removeprefix("detect_layout(…): ")
    whole = [layer for layer in layers if not layer.prefix]
    return whole[0] if whole else "its weights belong to parts of it"


@lru_cache(4096)
def _beside(name: str) -> bool:
    """Whether a tensor has no part in queries and keys: sinks, or one of another module."""
    if name == "sinks":
        return True
    if "." not in name or _OF_QUERIES_OR_KEYS.search(name):
        return False
    known = (n for layout in LAYOUTS.values() for form in layout.forms for n in form.tensors)
    found = (named_as(n).fullmatch(name) for n in known)
    return not any(match and not match["prefix"] for match in found)
