"""What a weight layout is made of: sizes, rules about them, the tensors of a layer, a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sizes:
    """The sizes of one attention layer's weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    embed_dim: int
    key_width: int
    value_width: int
    out_width: int

    def heads_of(self, part: str) -> int:
        """Heads of `q`, `k`, `v` or `out`."""
        return self.num_kv_heads if part in ("k", "v") else self.num_heads

    def dim_of(self, part: str) -> int:
        """Width of one head of `q`, `k`, `v` or `out`."""
        return self.value_dim if part in ("v", "out") else self.head_dim

    def input_of(self, part: str) -> int:
        """Width of what `q`, `k` or `v` is projected from."""
        return {"q": self.embed_dim, "k": self.key_width, "v": self.value_width}[part]


Rule = Callable[[Sizes], str | None]
"""What a layout cannot hold of these sizes, in words; None where it can."""


def equal_heads(s: Sizes) -> str | None:
    """As many key/value heads as query heads."""
    if s.num_kv_heads == s.num_heads:
        return None
    return f"grouped heads (num_kv_heads={s.num_kv_heads} for num_heads={s.num_heads})"


def equal_heads_or_one(s: Sizes) -> str | None:
    """One key/value head, or as many as query heads."""
    return None if s.num_kv_heads == 1 else equal_heads(s)


def heads_fill_width(s: Sizes) -> str | None:
    """The heads together are as wide as the input."""
    if s.num_heads * s.head_dim == s.embed_dim:
        return None
    return f"{s.num_heads} heads of width {s.head_dim} on an input of width {s.embed_dim}"


def heads_as_wide_as_input(s: Sizes) -> str | None:
    """Every single head is as wide as the input."""
    if s.head_dim == s.embed_dim:
        return None
    return f"heads of width {s.head_dim}, which is not the input's {s.embed_dim}"


def values_as_wide(s: Sizes) -> str | None:
    """Value heads have the width of query and key heads."""
    if s.value_dim == s.head_dim:
        return None
    return f"value heads of width {s.value_dim} beside keys of {s.head_dim}"


def one_input(s: Sizes) -> str | None:
    """q, k and v read inputs of one width."""
    if s.embed_dim == s.key_width == s.value_width:
        return None
    return (
        f"inputs of several widths (q {s.embed_dim}, k {s.key_width}, v {s.value_width}), "
        f"as cross-attention may have"
    )


def one_context(s: Sizes) -> str | None:
    """k and v read inputs of one width."""
    if s.key_width == s.value_width:
        return None
    return f"keys from an input of width {s.key_width} and values from one of {s.value_width}"


def keeps_width(s: Sizes) -> str | None:
    """The output is as wide as the input."""
    if s.out_width == s.embed_dim:
        return None
    return f"an output of width {s.out_width} for an input of width {s.embed_dim}"


def out_as_wide_as_heads(s: Sizes) -> str | None:
    """The output is as wide as all heads together."""
    if s.out_width == s.num_heads * s.value_dim:
        return None
    return f"an output of width {s.out_width} from heads of {s.num_heads * s.value_dim} together"


PLAIN = (equal_heads, values_as_wide, one_input, heads_fill_width, keeps_width)
"""The rules of an ordinary layer: one width everywhere, no grouped heads."""
FREE_HEADS = (values_as_wide, one_input, keeps_width)
"""The rules of today's decoders: grouped heads, and heads of any width."""

ADDING_ONE = (
    "multiply by 1 + weight; add 1 to these weights, and give the layer without what is beside it "
    "(config.json too)"
)
NORMED_VALUES = (
    "come with a norm of the values, which has no weight and for which no layout has a place; "
    "these layers cannot be converted"
)
WITHOUT_WEIGHTS = (
    "have no weights, so that no name shows them; add q_norm.weight and k_norm.weight of ones to "
    "the layers that have them, and give these without config.json"
)
"""What norms of queries and keys do in models where they are not RMS norms times the weight."""

Tensors = dict[str, tuple[str, str]]


@dataclass(frozen=True)
class Form:
    """The tensors of one attention layer: `name: (parts, pattern)`.

    `optional` are groups of names that are there all together or not at all. `rules` say which
    sizes the implementation can have. A form with a `home` is written where the layer's name in the
    model ends in that, and only there.
    """

    tensors: Tensors
    rules: tuple[Rule, ...] = PLAIN
    optional: tuple[tuple[str, ...], ...] = ()
    home: str | None = None


@dataclass(frozen=True)
class Layout:
    """One row: a name, what it is, its forms, and what surrounds it in a whole model.

    Attributes:
        forms: the first that fits is written; any of them is read.
        rope: the order in which a head's rotated features lie: `half` (first halves of all pairs,
            then second halves), `interleaved` (pair by pair), or None where nothing rotates them.
        turns: whether query heads take their key/value heads in turn (head h reads `h % G`), as if
            keys and values were repeated as a whole; else neighbours share one (`h // (H // G)`).
        masks: names of masks and other buffers that are no weights; they are left out.
        beside: starts of names that live among the layer's own and belong to something else.
        home: the usual last part of the layer's name in a model.
        lists: weights are nested lists of numbers, not tensors.
        model: names of a whole model's other tensors by their role, each with its orientation
            (`i o` or `o i` for matrices, else empty); they are renamed and turned where source
            and target both have them.
        other_norms: of models that have these names, and norms that are not only RMS norms of q
            and k times the weight: what stands beside the layer there, and what the norms do. The
            first that is there counts.
        partial: of models that have these names and may rotate a part of each head alone: what
            stands beside the layer there, empty for any model, and which models those are.
        twin: another layout of the same names and shapes, in which they mean something else where
            there are as many key/value heads as query heads; and what tells the two apart.
    """

    name: str
    what: str
    forms: tuple[Form, ...]
    rope: str | None = None
    turns: bool = False
    masks: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    home: str | None = None
    lists: bool = False
    model: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    other_norms: Mapping[str, str] = field(default_factory=dict)
    partial: Mapping[str, str] = field(default_factory=dict)
    twin: tuple[str, str] | None = None

    def holds(self, part: str) -> bool:
        """Return True if one of the layout's tensors can be this part, such as `q_norm.eps`."""
        return any(part == held for form in self.forms for held, _ in form.tensors.values())
