"""The projections of queries and keys in any known layout, and their scaling by head."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .convert import stored_tensors
from .detect import LayerTensors, Shape, detect_layers, named_as
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
        queries, keys: the names of the tensors that project queries, and of those for keys.
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
        """Yield a factor per tensor; together they multiply queries by q `[H]` and keys by k `[G]`.

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
        """Return the names of the tensors that hold a part."""
        held = {f"{part}.weight", f"{part}.bias"}
        return [name for name in self.layer.where if held & set(parts_of(self.patterns[name][0]))]


class _Latent(QueryKeyProjections):
    """The projections of multi-head latent attention, whose heads' keys come from one latent.

    A head's key has a part of its own, from `kv_b_proj`, and a rotated part that all heads share;
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


class _Joint(QueryKeyProjections):
    """The projections of two streams whose heads attend together (Flux, SD3)."""

    def __init__(self, streams: Sequence[QueryKeyProjections]) -> None:
        self.streams = streams
        self.num_heads, self.num_kv_heads = streams[0].num_heads, streams[0].num_kv_heads
        self.own = frozenset(name for one in streams for name in one.own)
        self.queries = tuple(name for one in streams for name in one.queries)
        self.keys = tuple(name for one in streams for name in one.keys)
        self.normed = any(one.normed for one in streams)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        for one in self.streams:
            yield from one.factors(q, k)


class _Adapted(QueryKeyProjections):
    """Projections, some of them with PEFT adapters, such as `base + B A` in LoRA.

    The rows of base and B and the magnitude of DoRA are scaled. The factors of IA3 are unchanged.
    """

    def __init__(self, bare: QueryKeyProjections, tensors: Mapping[str, Tensor]) -> None:
        self.bare = bare
        self.num_heads, self.num_kv_heads = bare.num_heads, bare.num_kv_heads
        self.normed = bare.normed
        self.more: dict[str, list[tuple[str, int]]] = {}
        self.base = {name.replace(".base_layer.", "."): name for name in tensors}
        for name, x in tensors.items():
            projection, kind = _adapter_of(name)
            if kind in ("lora_B", "lora_magnitude_vector"):
                self.more.setdefault(f"{projection}.weight", []).append((name, x.dim()))
            elif kind not in (None, "lora_A", "ia3_l") and _OF_QUERIES_OR_KEYS.search(projection):
                raise ValueError(f"PEFT adapters of the kind {kind!r} ({name}) cannot be scaled")
        self.own = frozenset(self.base[name] for name in bare.own)
        self.queries, self.keys = self._all(bare.queries), self._all(bare.keys)

    def group_of(self, head: int) -> int:
        return self.bare.group_of(head)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        for name, factor in self.bare.factors(q, k):
            yield self.base[name], factor
            for more, axes in self.more.get(name, ()):
                yield more, factor.flatten()[:, None] if axes == 2 else factor.flatten()

    def _all(self, names: tuple[str, ...]) -> tuple[str, ...]:
        more = [one for name in names for one, _ in self.more.get(name, ())]
        return (*(self.base[name] for name in names), *more)


def _adapter_of(name: str) -> tuple[str, str | None]:
    """Return the projection that an adapter's tensor belongs to, and the kind of the tensor.

    >>> _adapter_of("q_proj.lora_B.default.weight"), _adapter_of("q_proj.weight")
    (('q_proj', 'lora_B'), ('q_proj.weight', None))
    """
    found = re.fullmatch(
        r"(.+)\.((?:lora|ia3|vera|hada|lokr|boft|oft|hra|fourierft)_\w+)\..+", name
    )
    return (found[1], found[2]) if found else (name, None)


def projections_of(
    tensors: Mapping[str, Tensor], num_heads: int, kind: type | None = None
) -> QueryKeyProjections:
    """Find the projections of an attention module by the names and shapes of its tensors.

    Args:
        num_heads: the number of query heads; any number for layouts with tensors of single heads.
        kind: the class of the module; it decides between layouts with the same names and shapes.

    Raises:
        ValueError: no known layout fits, or the layout does not fit num_heads.
    """
    if {"kv_a_proj_with_mqa.weight", "kv_b_proj.weight"} <= tensors.keys():
        return _Latent(tensors, num_heads)
    if any(".base_layer." in name for name in tensors):
        bare = {
            name.replace(".base_layer.", "."): x
            for name, x in tensors.items()
            if _adapter_of(name)[1] is None
        }
        return _Adapted(projections_of(bare, num_heads, kind), tensors)
    shapes = tuple((name, tuple(x.shape)) for name, x in tensors.items())
    layers = _layers_of(shapes, _meant(kind))
    if isinstance(layers, str):
        raise ValueError(layers)
    streams = []
    for layer in layers:
        held, patterns = stored_tensors(layer, tensors.__getitem__)
        alone = any("{n}" in name for name in layer.where)
        call = f"layout {layer.layout.name!r}"
        sizes = sizes_of(held, patterns, None if alone else num_heads, None, call)
        streams.append(_OfLayout(layer, sizes, patterns))
    return streams[0] if len(streams) == 1 else _Joint(streams)


@lru_cache(4096)
def _layers_of(
    shapes: tuple[tuple[str, Shape], ...], expected: str | None
) -> list[LayerTensors] | str:
    """Return the layer with these tensors, once per stream, or the reason if none fits."""
    own = {name: shape for name, shape in shapes if not _beside(name)}
    if not own:
        return "it has no own weights"
    try:
        layers = detect_layers(own, expected)
    except ValueError as error:
        return str(error).removeprefix("detect_layout(…): ")
    whole = [layer for layer in layers if not layer.prefix]
    if not whole:
        return "its weights belong to its submodules"
    added = {name.split(".")[0] + "." for name in whole[0].layout.aliases}
    return whole[:1] + [layer for layer in layers if layer.prefix in added]


def _meant(kind: type | None) -> str | None:
    """Return the layout of a module type whose names fit two layouts."""
    if kind is None:
        return None
    return "gpt_bigcode" if any("GPTBigCode" in one.__name__ for one in kind.__mro__) else "nanogpt"


@lru_cache(4096)
def _beside(name: str) -> bool:
    """Return True if a tensor has no part in queries and keys: sinks, or another module's."""
    if name == "sinks":
        return True
    if "." not in name or _OF_QUERIES_OR_KEYS.search(name):
        return False
    known = (n for layout in LAYOUTS.values() for form in layout.forms for n in form.tensors)
    matches = (named_as(n).fullmatch(name) for n in known)
    return not any(match and not match["prefix"] for match in matches)
