"""The types of weight layouts: sizes, conditions on sizes, the tensors of a layer, and layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerSizes:
    """The sizes of one attention layer's weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    embed_dim: int
    key_width: int
    value_width: int
    out_width: int

    @property
    def heads_width(self) -> int:
        """The width of the values of all heads together."""
        return self.num_heads * self.value_dim

    def heads_of(self, part: str) -> int:
        """Return the number of heads of `q`, `k`, `v` or `out`."""
        return self.num_kv_heads if part in ("k", "v") else self.num_heads

    def dim_of(self, part: str) -> int:
        """Return the width of one head of `q`, `k`, `v` or `out`."""
        return self.value_dim if part in ("v", "out") else self.head_dim

    def input_of(self, part: str) -> int:
        """Return the width of the input of the projection to `q`, `k` or `v`."""
        return {"q": self.embed_dim, "k": self.key_width, "v": self.value_width}[part]


@dataclass(frozen=True)
class SizeRule:
    """A condition on the sizes of a layer, and a phrase for sizes that violate it."""

    holds: Callable[[LayerSizes], bool]
    phrase: str

    def refusal(self, sizes: LayerSizes) -> str | None:
        """Return the phrase with these sizes filled in; `None` if the condition holds."""
        return None if self.holds(sizes) else self.phrase.format(s=sizes)


_GROUPED = "grouped heads (num_kv_heads={s.num_kv_heads} for num_heads={s.num_heads})"

EQUAL_HEADS = SizeRule(lambda s: s.num_kv_heads == s.num_heads, _GROUPED)
EQUAL_HEADS_OR_ONE = SizeRule(lambda s: s.num_kv_heads in (1, s.num_heads), _GROUPED)
HEADS_FILL_WIDTH = SizeRule(
    lambda s: s.num_heads * s.head_dim == s.embed_dim,
    "{s.num_heads} heads of width {s.head_dim} on an input of width {s.embed_dim}",
)
HEADS_AS_WIDE_AS_INPUT = SizeRule(
    lambda s: s.head_dim == s.embed_dim,
    "heads of width {s.head_dim} instead of the input's {s.embed_dim}",
)
VALUES_AS_WIDE = SizeRule(
    lambda s: s.value_dim == s.head_dim,
    "value heads of width {s.value_dim} with keys of width {s.head_dim}",
)
ONE_INPUT = SizeRule(
    lambda s: s.embed_dim == s.key_width == s.value_width,
    "inputs of several widths (q {s.embed_dim}, k {s.key_width}, v {s.value_width}), "
    "as in cross-attention",
)
ONE_CONTEXT = SizeRule(
    lambda s: s.key_width == s.value_width,
    "keys from an input of width {s.key_width} and values from one of {s.value_width}",
)
KEEPS_WIDTH = SizeRule(
    lambda s: s.out_width == s.embed_dim,
    "an output of width {s.out_width} for an input of width {s.embed_dim}",
)
OUT_AS_WIDE_AS_HEADS = SizeRule(
    lambda s: s.out_width == s.heads_width,
    "an output of width {s.out_width} from heads of {s.heads_width} together",
)

PLAIN = (EQUAL_HEADS, VALUES_AS_WIDE, ONE_INPUT, HEADS_FILL_WIDTH, KEEPS_WIDTH)
"""The rules of an ordinary layer: one width everywhere, no grouped heads."""
FREE_HEADS = (VALUES_AS_WIDE, ONE_INPUT, KEEPS_WIDTH)
"""The rules of current decoders: grouped heads, and heads of any width."""

ADDING_ONE = (
    "multiply by 1 + weight; add 1 to these weights, and pass only the tensors of the layer, "
    "without config.json"
)
NORMED_VALUES = (
    "come with a norm of the values, which has no weight and which no layout supports; "
    "these layers cannot be converted"
)
WITHOUT_WEIGHTS = (
    "have no weights and therefore no names; add q_norm.weight and k_norm.weight of ones to "
    "the layers that have them, and convert these without config.json"
)
"""Descriptions of norms of queries and keys that are not RMS norms times the weight."""

Tensors = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class LayerForm:
    """The tensors of one attention layer: `name: (parts, pattern)`.

    `optional` are groups of names that occur together or not at all. `rules` are the sizes that the
    implementation supports. A form with a `home` is written only if the name of the layer in the
    model ends in it.
    """

    tensors: Tensors
    rules: tuple[SizeRule, ...] = PLAIN
    optional: tuple[tuple[str, ...], ...] = ()
    home: str | None = None


@dataclass(frozen=True)
class Layout:
    """One weight layout: its name, its forms, and the other tensors of a whole model.

    Attributes:
        forms: any of them is read; the first that fits is written.
        rope: the order of the rotated features of a head: `half` (first halves of all pairs, then
            second halves), `interleaved` (pair by pair), or None without rotation.
        turns: True if query head h reads key/value head `h % G`, as if keys and values were
            repeated as a whole; otherwise `h // (H // G)`.
        masks: names of masks and other buffers that are not weights; they are omitted.
        ignored: prefixes of other names within a layer.
        home: the usual last part of the name of the layer in a model.
        lists: weights are nested lists of numbers, not tensors.
        model: the names of other tensors of a model by their role, each with the orientation of
            matrices (`i o` or `o i`); those with a role in both layouts are renamed and transposed.
        other_norms: names beside a layer with q_norm and k_norm, and the reason why its norms are
            not those of the layout; the first match counts.
        partial: names next to a layer (empty for any), and the models with them that may rotate
            only part of each head.
        twin: another layout with the same names and shapes, which differs if the numbers of
            query and key/value heads are equal; and the reason for the ambiguity.
        aliases: names within a layer, in the form of a separate module, and their stored names.
    """

    name: str
    description: str
    forms: tuple[LayerForm, ...]
    rope: str | None = None
    turns: bool = False
    masks: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    home: str | None = None
    lists: bool = False
    model: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    other_norms: Mapping[str, str] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    twin: tuple[str, str] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)

    def plain(self, stored: str) -> str:
        """Return the name of a stored tensor without aliases."""
        return _replaced(stored, {theirs: name for name, theirs in self.aliases.items()})

    def stored(self, plain: str) -> str:
        """Return the stored name of a tensor."""
        return _replaced(plain, self.aliases)

    def holds(self, part: str) -> bool:
        """Return True if a tensor of the layout can hold this part, such as `q_norm.eps`."""
        return any(part == held for form in self.forms for held, _ in form.tensors.values())


def _replaced(name: str, parts: Mapping[str, str]) -> str:
    """Replace the first of these parts that occurs in a dotted name, at its last occurrence.

    >>> _replaced("blocks.0.attn.add_q_proj.bias", {"add_q_proj.": "added.to_q."})
    'blocks.0.attn.added.to_q.bias'
    """
    for old, new in parts.items():
        before, found, after = f".{name}".rpartition(f".{old}")
        if found:
            return f"{before}.{new}{after}"[1:]
    return name
