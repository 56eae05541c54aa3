"""The projections of queries and keys in any known layout, and their scaling by head."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import lru_cache

import torch
from torch import Tensor

from .convert import stored_tensors
from .detect import LayerTensors, Shape, detect_shapes, find_layers, named_as
from .layout_table import LAYOUTS
from .layout_types import LayerSizes
from .packing import parts_of, per_head, sizes_of

_OF_QUERIES_OR_KEYS = re.compile(
    r"(^|[._])((q|k|v|qk|kv|qkv)([._]|$|norm|proj)|query|key|value)", re.IGNORECASE
)


class QueryKeyProjections(ABC):
    """The tensors of one attention layer that project queries and keys, by their names.

    Attributes:
        own: the names of all tensors of the layer.
        queries, keys: the names of the tensors with queries, and with keys.
        num_heads, num_kv_heads: the numbers of their heads.
    """

    own: frozenset[str]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    num_heads: int
    num_kv_heads: int
    normed: bool = False
    """True if queries and keys are normalized after the projection."""

    def group_of(self, head: int) -> int:
        """Return the key/value head that a query head reads."""
        return head // (self.num_heads // self.num_kv_heads)

    @abstractmethod
    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield a factor for each tensor that multiplies queries by q `[H]` and keys by k `[G]`.

        Each factor broadcasts to its tensor.
        """


class _OfLayout(QueryKeyProjections):
    """The projections of a layer in a known layout."""

    def __init__(
        self, layer: LayerTensors, sizes: LayerSizes, patterns: Mapping[str, tuple[str, str]]
    ) -> None:
        self.layer, self.sizes, self.patterns = layer, sizes, patterns
        self.own = layer.names
        self.num_heads, self.num_kv_heads = sizes.num_heads, sizes.num_kv_heads
        self.queries, self.keys = (
            tuple(full for name in self._holding(part) for full in layer.where[name])
            for part in "qk"
        )
        self.normed = any("norm" in held for held, _ in patterns.values())

    def group_of(self, head: int) -> int:
        return head % self.num_kv_heads if self.layer.layout.turns else super().group_of(head)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name in dict.fromkeys((*self._holding("q"), *self._holding("k"))):
            factor = per_head(*self.patterns[name], {"q": q, "k": k}, self.sizes)
            for number, full in enumerate(self.layer.where[name]):
                yield full, factor[number] if "{n}" in name else factor

    def _holding(self, part: str) -> list[str]:
        """Return the names of the tensors with a part."""
        held = {f"{part}.weight", f"{part}.bias"}
        return [name for name in self.layer.where if held & set(parts_of(self.patterns[name][0]))]


class _Latent(QueryKeyProjections):
    """The projections of multi-head latent attention, whose keys come from a latent of all heads.

    The key of a head has its own part, from `kv_b_proj`, and a rotated part that all heads share;
    the queries of that part take both factors (Kimi K2 2025). Source: DeepSeek-V2 2024, §2.1.
    """

    def __init__(self, tensors: Mapping[str, Tensor], num_heads: int) -> None:
        start = next(name for name in ("q_b_proj", "q_proj") if f"{name}.weight" in tensors)
        latent, keys = tensors["kv_a_proj_with_mqa.weight"], tensors["kv_b_proj.weight"]
        rows, self.rotated = tensors[f"{start}.weight"].shape[0], len(latent) - keys.shape[1]
        width, self.both = rows // num_heads, len(keys) // num_heads
        self.alone = width - self.rotated
        if rows % num_heads or len(keys) % num_heads or not 0 < self.alone <= self.both:
            raise ValueError(f"latent attention of these shapes does not have {num_heads} heads")
        self.num_heads = self.num_kv_heads = num_heads
        self.own = frozenset(tensors)
        self.queries = tuple(n for n in (f"{start}.weight", f"{start}.bias") if n in tensors)
        self.keys = ("kv_b_proj.weight",)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        both = q * k  # the query takes the factor of a shared key
        parts = q[:, None].expand(-1, self.alone), both[:, None].expand(-1, self.rotated)
        of_queries = torch.cat(parts, 1).flatten()
        for name in self.queries:
            yield name, of_queries[:, None] if name.endswith("weight") else of_queries
        of_values = torch.ones(self.num_heads, self.both - self.alone).to(k)
        of_keys = torch.cat([k[:, None].expand(-1, self.alone), of_values], 1).flatten()
        yield self.keys[0], of_keys[:, None]


def projections_of(
    tensors: Mapping[str, Tensor], num_heads: int, kind: type | None = None
) -> QueryKeyProjections:
    """Find the projections of an attention module by the names and shapes of its tensors.

    Args:
        num_heads: the number of query heads; any number for layouts with tensors of single heads.
        kind: the class of the module; it decides between layouts with the same names and shapes.

    Raises:
        ValueError: no known layout fits, or it does not fit so many heads.
    """
    if {"kv_a_proj_with_mqa.weight", "kv_b_proj.weight"} <= tensors.keys():
        return _Latent(tensors, num_heads)
    shapes = tuple((name, tuple(x.shape)) for name, x in tensors.items())
    layer = _layer_of(shapes, _meant(kind))
    if isinstance(layer, str):
        raise ValueError(layer)
    held, patterns = stored_tensors(layer, tensors.__getitem__)
    alone = any("{n}" in name for name in layer.where)
    call = f"layout {layer.layout.name!r}"
    sizes = sizes_of(held, patterns, None if alone else num_heads, None, call)
    return _OfLayout(layer, sizes, patterns)


@lru_cache(4096)
def _layer_of(shapes: tuple[tuple[str, Shape], ...], expected: str | None) -> LayerTensors | str:
    """Return the layer with these tensors, or the reason why there is none."""
    own = {name: shape for name, shape in shapes if not _beside(name)}
    if not own:
        return "it has no weights of its own"
    try:
        layers = find_layers(LAYOUTS[detect_shapes(own, expected)], own, "")
    except ValueError as error:
        return str(error).removeprefix("detect_layout(…): ")
    whole = [layer for layer in layers if not layer.prefix]
    return whole[0] if whole else "its weights belong to parts of it"


def _meant(kind: type | None) -> str | None:
    """Return the layout of a type of module whose names fit two layouts."""
    if kind is None:
        return None
    return "gpt_bigcode" if any("GPTBigCode" in one.__name__ for one in kind.__mro__) else "nanogpt"


@lru_cache(4096)
def _beside(name: str) -> bool:
    """Return True if a tensor has no part in queries and keys: sinks, or one of another module."""
    if name == "sinks":
        return True
    if "." not in name or _OF_QUERIES_OR_KEYS.search(name):
        return False
    known = (n for layout in LAYOUTS.values() for form in layout.forms for n in form.tensors)
    matches = (named_as(n).fullmatch(name) for n in known)
    return not any(match and not match["prefix"] for match in matches)
