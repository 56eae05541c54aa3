"""Convert attention weights from any known layout to any other, exactly.

Every layout is read into the same parts (`packing`) and written from them. Values are only moved,
so a round trip is exact. A bias of zeros and an identity output projection have no effect: they are
added if the target needs them and dropped if it cannot store them. Anything else that a target
cannot store raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.numbers import fault_of_eps
from .detect import LayerTensors, Shape, check_state, detect_layers, find_layers, tensor_of
from .folders import CONFIG
from .layout_table import LAYOUTS
from .layout_types import LayerSizes, Layout
from .packing import Parts, parts_of, regroup, reorder, shape_of, sizes_of, unpack, with_bias, write


def convert(
    state: Mapping[str, Any],
    *,
    source: str | None = None,
    target: str | Mapping[str, str],
    num_heads: int | Mapping[str, int] | None = None,
    num_kv_heads: int | None = None,
    bias: bool | None = None,
    rotary_dim: int | None = None,
    qk_norm_eps: float | None = None,
) -> dict[str, Any]:
    """Convert attention weights to the names, shapes and orders of another implementation.

    Args:
        state: tensors by name (or NumPy and JAX arrays, or nested lists) of one layer or of a
            model. In a model every attention layer is converted in place; other tensors are
            copied, and renamed within a family (`gpt2` and `nanogpt`, `llama` and `llama_meta`).
        source: the layout of `state`; by default detected separately for each layer (LLaVA has 2).
        target: the layout to write: a key of `headwise.weights.layout_table.LAYOUTS`; or a mapping
            from parts of names to layouts, such as `{"vision_tower": "bart", "": "llama"}`: the
            longest part in a layer's name applies; layers without a match are not converted.
        num_heads: the number of query heads, if shapes do not determine it; or a similar mapping.
        num_kv_heads: the number of key/value heads, if the shapes do not determine it.
        bias: for targets with optional biases: True adds zeros, False drops biases of zeros;
            by default as in the source.
        rotary_dim: the number of leading features of each head that the model rotates, if source
            and target pair them differently; by default all. Required for names that are also used
            by models with partial rotation (Pythia, StableLM, Nemotron). 0 moves none.
        qk_norm_eps: the eps of the norms of queries and keys. Required for target `headwise`, whose
            state contains it; for other layouts it is `rms_norm_eps` in `config.json`.

    Names do not always determine the rotation: Cohere, Ernie 4.5 and Helium use Llama's names but
    rotate pairs of neighbors. In layout `headwise` they need `RoPE(…, interleaved=True)`, in
    `llama_meta` `rotary_dim=0`. Names do not determine the norms either: the norms of Qwen 3
    multiply by the weight, those of Gemma 3 and Step 3.5 by 1 + weight (add 1 to these weights
    first), and Gemma 3n and Gemma 4 also normalize values, which no layout supports. `convert_file`
    and `headwise convert` read all of this from the `config.json` beside the weights.

    Returns:
        New tensors by name, of the same dtype, for `load_state_dict`; nested lists for `microgpt`.
        Mask buffers are omitted.

    Raises:
        ValueError: an unknown layout; missing or extra names; shapes that do not fit the head
            count; a part that the target cannot store (a bias, grouped heads, a different output
            width); or an ambiguity (nanoGPT or GPTBigCode, partial rotation, the eps of norms).

    >>> import torch, headwise as hw
    >>> theirs = torch.nn.MultiheadAttention(12, num_heads=3, batch_first=True)
    >>> layer = hw.MultiHeadAttention(12, num_heads=3)
    >>> ours = hw.convert(theirs.state_dict(), source="torch", target="headwise", num_heads=3)
    >>> layer.load_state_dict(ours)
    <All keys matched successfully>
    >>> x = torch.randn(2, 5, 12)
    >>> torch.allclose(layer(x), theirs(x, x, x, need_weights=False)[0], atol=1e-6)
    True
    """
    check_state(state, "convert")
    call = f"convert(source={source!r}, target={target!r})"
    tensors = {name: tensor_of(name, value, call) for name, value in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    options = num_kv_heads, bias, rotary_dim, qk_norm_eps
    plan = conversions(shapes, source, target, num_heads, options)
    out: dict[str, Any] = {}
    for _, name, tensor in converted(shapes, tensors.__getitem__, plan):
        if name in out:
            raise ValueError(f"{call}: the state contains {name!r} already")
        out[name] = tensor
    if isinstance(target, str) and LAYOUTS[target].lists:
        return {name: tensor.tolist() for name, tensor in out.items()}
    return out


def conversions(
    shapes: Mapping[str, Shape],
    source: str | None,
    target: str | Mapping[str, str],
    num_heads: int | Mapping[str, int] | None,
    options: tuple[Any, ...] = (),
    expected: str | None = None,
) -> list[tuple[LayerTensors, Conversion]]:
    """Return the attention layers to convert, each with its conversion.

    `expected` chooses between two layouts with the same names and shapes.

    Raises:
        ValueError: no layer is found, `Conversion` raises it, or a part of names matches no layer.
    """
    heads = None if isinstance(num_heads, Mapping) else num_heads
    call = f"convert(source={source!r}, target={target!r})"
    for one in [target] if isinstance(target, str) else target.values():
        # Report its errors before those of the state.
        call = str(Conversion("headwise" if source is None else source, one, heads, *options))
    if source is None:
        layers = detect_layers(shapes, expected)
    else:
        layers = find_layers(LAYOUTS[source], shapes, call)
    for parts in (target, num_heads):
        for part in parts if isinstance(parts, Mapping) else ():
            if not any(part in layer.prefix for layer in layers):
                raise ValueError(f"{call}: no attention layer has {part!r} in its name")
    return [
        (layer, Conversion(layer.layout.name, to, _of_part(num_heads, layer.prefix), *options))
        for layer in layers
        if (to := _of_part(target, layer.prefix)) is not None
    ]


def _of_part(value: Any, prefix: str) -> Any:
    """Return a layer's entry in a mapping from parts of names (or None); else the value itself."""
    if not isinstance(value, Mapping):
        return value
    return value.get(max((part for part in value if part in prefix), key=len, default=None))


def converted(
    names: Iterable[str],
    load: Callable[[str], Tensor],
    plan: Iterable[tuple[LayerTensors, Conversion]],
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield every tensor of the converted state, one layer at a time: (original name, name,
    tensor).

    `names` are the names of the state, in order; `load` returns the tensor of a name. The tensors
    of a layer are yielded where its first name occurs.
    """
    begins, inside = {}, set()
    pairs: dict[str, Conversion] = {}
    for layer, conversion in plan:
        begins[layer.first] = layer, conversion
        inside |= layer.names
        pairs[f"{conversion.source} {conversion.target}"] = conversion
    for source in names:
        if source in begins:
            layer, conversion = begins[source]
            for name, tensor in convert_layer(layer, load, conversion).items():
                yield source, name, tensor
        elif source not in inside:
            name, turned = source, False
            for conversion in pairs.values():
                if name == source:
                    name, turned = renamed(source, conversion.old, conversion.new)
            tensor = load(source)
            yield source, name, tensor.T.contiguous() if turned else tensor


@dataclass(frozen=True)
class Conversion:
    """The options of a conversion; `str()` quotes the call in errors.

    Raises:
        ValueError: an unknown layout, a head count below 1, or an odd number of rotated features.
    """

    source: str
    target: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    bias: bool | None = None
    rotary_dim: int | None = None
    qk_norm_eps: float | None = None
    rotary_share: float | None = None
    """The rotated fraction of the features of a head, an alternative to `rotary_dim`."""

    def __post_init__(self) -> None:
        for name in (self.source, self.target):
            if name not in LAYOUTS:
                raise ValueError(f"{self}: no layout {name!r}; layouts: {', '.join(LAYOUTS)}")
        for name in ("num_heads", "num_kv_heads"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{self}: {name} must be an integer of at least 1")
        turned = self.rotary_dim
        if turned is not None and (type(turned) is not int or turned < 0 or turned % 2):
            raise ValueError(f"{self}: rotary_dim must be an even number of features, or 0")
        if self.qk_norm_eps is not None and (fault := fault_of_eps(self.qk_norm_eps)):
            raise ValueError(f"{self}: {fault}")

    @property
    def old(self) -> Layout:
        """The source's layout."""
        return LAYOUTS[self.source]

    @property
    def new(self) -> Layout:
        """The target's layout."""
        return LAYOUTS[self.target]

    @property
    def moves(self) -> bool:
        """True if source and target pair different features for the rotation."""
        return (self.old.rope or "half") != (self.new.rope or "half")

    def rotated(self, head_dim: int) -> int | None:
        """Return the number of rotated features of a head; `None` if it is unknown."""
        if self.rotary_dim is None and self.rotary_share is not None:
            return int(head_dim * self.rotary_share)
        return self.rotary_dim

    def __str__(self) -> str:
        shown = f"source={self.source!r}, target={self.target!r}"
        for name in ("num_heads", "num_kv_heads", "rotary_dim", "qk_norm_eps"):
            if getattr(self, name) is not None:
                shown += f", {name}={getattr(self, name)}"
        return f"convert({shown})"


def convert_layer(
    layer: LayerTensors, load: Callable[[str], Tensor], conversion: Conversion
) -> dict[str, Tensor]:
    """Return one layer in the target's layout; `load` returns the tensor of a name in the state.

    Raises:
        ValueError: shapes that do not fit the head count; a part that the target cannot store; or
            features that must move although the number of rotated ones is unknown.
    """
    call = f"{conversion} at {layer.prefix!r}" if layer.prefix else str(conversion)
    parts, sizes = _read(layer, load, conversion, call)
    rotated = conversion.rotated(sizes.head_dim)
    if conversion.moves and rotated is None and layer.partial is not None:
        raise ValueError(
            f"{call}: the rotated features of a head move, and models with these names "
            f"may rotate only a part of each head ({layer.partial}); give their number with "
            f"rotary_dim=… (--rotary-dim): {sizes.head_dim} for all of them, 0 to move none"
        )
    parts = _with_eps(parts, conversion, call)
    reorder(parts, conversion.old.rope, conversion.new.rope, rotated, call)
    regroup(parts, sizes, conversion.old.turns, conversion.new.turns)
    if conversion.bias is not None:
        parts = with_bias(parts, sizes, conversion.bias)
    prefix, _ = renamed(layer.prefix, conversion.old, conversion.new)
    written = write(parts, sizes, conversion.new, _origins(layer), prefix, call)
    return {conversion.new.stored(prefix + name): tensor for name, tensor in written}


def _with_eps(parts: Parts, conversion: Conversion, call: str) -> Parts:
    """Add the eps of the norms of q and k if the target stores it; drop it otherwise.

    Raises:
        ValueError: the target stores an eps and neither source nor caller gives one, or they
            differ.
    """
    eps, requested = [f"{part}_norm.eps" for part in "qk"], conversion.qk_norm_eps
    for name in eps:
        if name in parts and requested is not None and float(parts[name]) != requested:
            raise ValueError(
                f"{call}: {name} in the weights is {float(parts[name])}; omit qk_norm_eps"
            )
    if not conversion.new.holds(eps[0]):
        return {name: tensor for name, tensor in parts.items() if name not in eps}
    if "q_norm.weight" not in parts or eps[0] in parts:
        return parts
    if requested is not None:
        return parts | {name: torch.tensor(requested, dtype=torch.float64) for name in eps}
    if conversion.old.holds(eps[0]):  # without eps in the state, the layer keeps its own
        return parts
    raise ValueError(
        f"{call}: the weights do not contain the eps of the norms of q and k; pass "
        f"qk_norm_eps=… (--qk-norm-eps), which is rms_norm_eps in the model's {CONFIG}. The norms "
        f"must be RMS norms times the weight, as in Qwen 3: not times 1 + weight (Gemma 3), and "
        f"without norms of values (Gemma 3n, Gemma 4)"
    )


def _origins(layer: LayerTensors) -> dict[str, str]:
    """Return the name of each part in the state; of per-head tensors, that of the first head."""
    return {
        part: layer.where[name][0]
        for name, (held, _) in layer.form.tensors.items()
        if name in layer.where
        for part in parts_of(held)
    }


def stored_tensors(
    layer: LayerTensors, load: Callable[[str], Tensor]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, str]]]:
    """Return the layer's tensors, and the parts and pattern of each; per-head tensors are
    stacked."""
    tensors: dict[str, Tensor] = {}
    patterns: dict[str, tuple[str, str]] = {}
    for name, group in layer.where.items():
        parts, pattern = layer.form.tensors[name]
        if "{n}" in name:
            tensors[name] = torch.stack([load(full) for full in group])
            pattern = f"n {pattern.replace('(n d)', 'd')}"
        else:
            tensors[name] = load(group[0])
        patterns[name] = parts, pattern
    return tensors, patterns


def _read(
    layer: LayerTensors, load: Callable[[str], Tensor], conversion: Conversion, call: str
) -> tuple[Parts, LayerSizes]:
    """Return the layer's parts, and their sizes."""
    tensors, patterns = stored_tensors(layer, load)
    sizes = sizes_of(tensors, patterns, conversion.num_heads, conversion.num_kv_heads, call)
    unpacked: Parts = {}
    for name, tensor in tensors.items():
        parts, pattern = patterns[name]
        expected = shape_of(parts, pattern, sizes)
        if tuple(tensor.shape) != expected:
            hint = "; norms over all heads (OLMo 2) are not supported" if "norm" in parts else ""
            raise ValueError(
                f"{call}: {name} has shape {list(tensor.shape)}, but {sizes.num_heads} heads with "
                f"{sizes.num_kv_heads} key/value heads of width {sizes.head_dim} make it "
                f"{list(expected)}{hint}"
            )
        unpacked |= unpack(parts, pattern, tensor, sizes)
    return unpacked, sizes


def renamed(name: str, old: Layout, new: Layout) -> tuple[str, bool]:
    """Return the name of a model's tensor in another layout of the same family, and whether it is
    transposed.

    >>> from headwise.weights.layout_table import LAYOUTS
    >>> renamed("model.layers.3.mlp.up_proj.weight", LAYOUTS["llama"], LAYOUTS["llama_meta"])
    ('layers.3.feed_forward.w3.weight', False)
    """
    for role in old.model.keys() & new.model.keys():
        (template, before), (conversion, after) = old.model[role], new.model[role]
        pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)")
        match = re.fullmatch(pattern.replace(r"\{any\}", "(?P<any>.*)"), name)
        if match:
            return conversion.format(**match.groupdict()), before != after
    return name, False
