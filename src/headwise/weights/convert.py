"""Weights of attention from any known layout to any other, exactly.

Every layout is read into the same parts (`packing`) and written from them. Numbers only change
places, so a way there and back is exact to the bit. Two things that say nothing are added where a
target wants them, and left out where it has no place for them: a bias of zeros, and an output
projection that is the identity. Anything else that a target cannot hold is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layout_table import LAYOUTS, Form, Layout, Sizes
from .packing import (
    Parts,
    axes_of,
    parts_of,
    regroup,
    reorder,
    shape_of,
    sizes_of,
    unpack,
    with_bias,
    write,
)

__all__ = [
    "Layer",
    "convert",
    "convert_layer",
    "converted",
    "detect_layout",
    "find_layers",
    "renamed",
]

Shape = tuple[int, ...]

# A converted layer keeps the neighbours that it had, so every layout knows those of all.
BESIDE = tuple(start for layout in LAYOUTS.values() for start in layout.beside)


def convert(
    state: Mapping[str, Any],
    *,
    source: str | None = None,
    target: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    bias: bool | None = None,
) -> dict[str, Any]:
    """The same attention under another implementation's names, shapes and orders.

    Args:
        state: the weights of one layer, or of a whole model: names to tensors (NumPy and JAX arrays
            and nested lists are taken too). Of a model, every attention layer is converted
            where it stands; other tensors go through as they are, under their own names
            (renamed where source and target are of one family: `gpt2` and `nanogpt`, `llama` and
            `llama_meta`).
        source: the layout of `state`; default: what `detect_layout` finds.
        target: the layout to write. The known ones are the rows of
            `headwise.weights.layout_table.LAYOUTS`.
        num_heads: query heads; needed where the shapes do not say.
        num_kv_heads: key/value heads; the shapes nearly always say.
        bias: for targets that can do with and without: True writes zeros where the source has
            no biases, False leaves out those that are all zeros; default: as the source has them.

    Returns:
        Names to new tensors of the same dtype, for `load_state_dict`; nested lists of numbers
        for `microgpt`. Mask buffers, which are no weights, are left out.

    Raises:
        ValueError: an unknown layout (the known ones are listed); missing or extra names; shapes
            that do not fit the head count; or something the target cannot hold, such as a bias it
            has no place for, grouped heads, or another output width.

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
    _check_state(state, "convert")
    if source is None:
        source = detect_layout(state)
    wanted = Wanted(source, target, num_heads, num_kv_heads, bias)
    asked = str(wanted)
    tensors = {name: _tensor(name, value, asked) for name, value in state.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layers = find_layers(wanted.old, shapes, asked)
    out: dict[str, Tensor] = {}
    for _, name, tensor in converted(shapes, tensors.__getitem__, layers, wanted):
        if name in out:
            raise ValueError(f"{asked}: the state holds {name!r} already")
        out[name] = tensor
    if wanted.new.lists:
        return {name: tensor.tolist() for name, tensor in out.items()}
    return dict(out)


def converted(
    names: Iterable[str], load: Callable[[str], Tensor], layers: Iterable[Layer], wanted: Wanted
) -> Iterator[tuple[str, str, Tensor]]:
    """Every tensor of the converted state, one layer at a time: (name it came from, name, tensor).

    `names` are those of the whole state, in order; `load` gives the tensor of one. A layer's
    tensors come where its first name stood.
    """
    begins, inside = {}, set()
    for layer in layers:
        begins[layer.first] = layer
        inside |= layer.names
    for source in names:
        if source in begins:
            for name, tensor in convert_layer(begins[source], load, wanted).items():
                yield source, name, tensor
        elif source not in inside:
            name, turned = renamed(source, wanted.old, wanted.new)
            tensor = load(source)
            yield source, name, tensor.T.contiguous() if turned else tensor


def detect_layout(state: Mapping[str, Any]) -> str:
    """The name of the layout in which a layer's or a model's attention is stored.

    Args:
        state: names to tensors, arrays or nested lists.

    Raises:
        ValueError: no known layout has these names and shapes; the known ones are listed.

    >>> import torch, headwise as hw
    >>> hw.detect_layout(torch.nn.MultiheadAttention(12, 3).state_dict())
    'torch'
    """
    _check_state(state, "detect_layout")
    shapes = {
        name: tuple(_tensor(name, value, "detect_layout(…)").shape) for name, value in state.items()
    }
    return detect_shapes(shapes)


def detect_shapes(shapes: Mapping[str, Shape]) -> str:
    """As `detect_layout`, from names and shapes alone."""
    best: tuple[int, str] | None = None
    nearly: list[str] = []
    for layout in LAYOUTS.values():
        try:
            layers = find_layers(layout, shapes, "")
        except ValueError as error:
            nearly.append(str(error).removeprefix(": "))
            continue
        at_home = any(
            layout.home is not None and layer.prefix.rstrip("./").endswith(layout.home)
            for layer in layers
        )
        score = 2 * sum(len(layer.names) for layer in layers) + at_home
        if best is None or score > best[0]:
            best = score, layout.name
    # A layout that only has no place for something is nearer than one that misses something.
    for sign in ("no place for", "do not fit together", "misses"):
        for fault in nearly if best is None else ():
            if sign in fault:
                raise ValueError(f"detect_layout(…): no known layout fits; nearest: {fault}")
    if best is None:
        raise ValueError(
            f"detect_layout(…): none of the known layouts has the names {_some(shapes)}; "
            f"known are {', '.join(LAYOUTS)}"
        )
    return best[1]


@dataclass(frozen=True)
class Wanted:
    """What a caller asked for; it quotes the call in errors.

    Raises:
        ValueError: an unknown layout, or a head count below 1.
    """

    source: str
    target: str
    num_heads: int | None = None
    num_kv_heads: int | None = None
    bias: bool | None = None

    def __post_init__(self) -> None:
        for name in (self.source, self.target):
            if name not in LAYOUTS:
                raise ValueError(f"{self}: no layout {name!r}; known are {', '.join(LAYOUTS)}")
        for name in ("num_heads", "num_kv_heads"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{self}: {name} must be a whole number of at least 1")

    @property
    def old(self) -> Layout:
        """The source's layout."""
        return LAYOUTS[self.source]

    @property
    def new(self) -> Layout:
        """The target's layout."""
        return LAYOUTS[self.target]

    def __str__(self) -> str:
        shown = f"source={self.source!r}, target={self.target!r}"
        for name in ("num_heads", "num_kv_heads"):
            if getattr(self, name) is not None:
                shown += f", {name}={getattr(self, name)}"
        return f"convert({shown})"


@dataclass(frozen=True)
class Layer:
    """Where one attention layer's tensors are in a state.

    Attributes:
        prefix: what its names begin with; empty where the state is one layer's.
        form: the form its layout has there.
        where: the state's names for each of the form's tensors, one a head where heads have
            tensors of their own.
        names: all names that belong to it, masks too.
        first: the first of them in the state.
    """

    layout: Layout
    prefix: str
    form: Form
    where: Mapping[str, tuple[str, ...]]
    names: frozenset[str]
    first: str


def find_layers(layout: Layout, shapes: Mapping[str, Shape], asked: str) -> list[Layer]:
    """Every attention layer of a layout in a state.

    Raises:
        ValueError: there is none, or one has missing names, names that do not belong to it, or
            shapes that contradict each other.
    """
    prefixes: dict[str, None] = {}
    for form in layout.forms:
        for name, (parts, _) in form.tensors.items():
            if parts.endswith(".weight") and not parts.startswith("out") and "norm" not in parts:
                pattern = named_as(name)
                found = (pattern.fullmatch(other) for other in shapes)
                prefixes |= {match["prefix"]: None for match in found if match}
    if not prefixes:
        wanted = [name for name in layout.forms[0].tensors if name.endswith(("weight", "kernel"))]
        raise ValueError(
            f"{asked}: no layer of layout {layout.name!r}: the names are {_some(shapes)}, and it "
            f"has {_some(wanted or layout.forms[0].tensors)}{_looks_like(layout, shapes, asked)}"
        )
    return [_layer(layout, prefix, shapes, asked) for prefix in prefixes]


def _layer(layout: Layout, prefix: str, shapes: Mapping[str, Shape], asked: str) -> Layer:
    """The layer at a prefix: in the form that fits its names best."""
    mine = {name.removeprefix(prefix): name for name in shapes if name.startswith(prefix)}
    attempts = [_match(form, mine) for form in layout.forms]
    form, where, missing = min(attempts, key=lambda attempt: len(attempt[2]) - len(attempt[1]))
    at = f" under {prefix!r}" if prefix else ""
    if missing:
        hint = _looks_like(layout, shapes, asked)
        raise ValueError(
            f"{asked}: layout {layout.name!r} misses {_some(missing)}{at}; there are "
            f"{_some(mine)}{hint}"
        )
    names = {name for group in where.values() for name in group}
    masks = [named_as(mask) for mask in layout.masks]
    extra = []
    for short, name in mine.items():
        if any((match := mask.fullmatch(short)) and not match["prefix"] for mask in masks):
            names.add(name)
        elif name not in names and not short.startswith(BESIDE):
            extra.append(name)
    if extra:
        reason = (
            "; a bias of only some of q, k and v does not say whose it is: "
            "build the layer with all three"
            if any(name.endswith("some_bias") for name in extra)
            else _looks_like(layout, shapes, asked)
        )
        raise ValueError(f"{asked}: layout {layout.name!r} has no place for {_some(extra)}{reason}")
    for name, group in where.items():
        if "{n}" in name and (gap := _gap(name, prefix, group)):
            raise ValueError(
                f"{asked}: layout {layout.name!r} numbers its heads from 0; here {gap}"
            )
    layer = Layer(
        layout, prefix, form, where, frozenset(names), next(n for n in shapes if n in names)
    )
    _agree(layer, shapes, asked)
    return layer


def _match(
    form: Form, mine: Mapping[str, str]
) -> tuple[Form, dict[str, tuple[str, ...]], list[str]]:
    """Which of the state's names are the form's tensors, and which of those are missing."""
    where: dict[str, tuple[str, ...]] = {}
    for name in form.tensors:
        pattern, found = named_as(name), []
        for short, full in mine.items():
            match = pattern.fullmatch(short)
            if match and not match["prefix"]:
                found.append((int(match["n"]) if "{n}" in name else 0, full))
        if found:
            where[name] = tuple(full for _, full in sorted(found))
    heads = max((len(group) for group in where.values()), default=1)
    missing = []
    for name in form.tensors:
        optional = [group for group in form.optional if name in group]
        wanted = not optional or any(other in where for other in optional[0])
        if wanted and len(where.get(name, ())) < (heads if "{n}" in name else 1):
            missing.append(name)
    return form, where, missing


def _gap(name: str, prefix: str, group: tuple[str, ...]) -> str | None:
    """What is wrong with the numbers of heads that have tensors of their own, in words."""
    numbers = [int(named_as(name).fullmatch(full.removeprefix(prefix))["n"]) for full in group]  # type: ignore[index]
    if numbers == list(range(len(numbers))):
        return None
    return f"{name} has the numbers {', '.join(map(str, numbers))}"


@cache
def named_as(name: str) -> re.Pattern[str]:
    """A pattern of the names that a form's tensor has in states; `.` and `/` both part names."""
    text = (
        re.escape(name).replace(r"\{n\}", r"(?P<n>\d+)").replace("/", r"\.").replace(r"\.", "[./]")
    )
    return re.compile(rf"(?P<prefix>(?:.*[./])?){text}")


def _agree(layer: Layer, shapes: Mapping[str, Shape], asked: str) -> None:
    """Axes that mean the same have the same length, whatever the head count is."""
    lengths: dict[tuple[str, ...], tuple[int, str]] = {}
    for name, (parts, pattern) in layer.form.tensors.items():
        if name not in layer.where:
            continue
        axes = axes_of(pattern)
        for full in layer.where[name]:
            shape = shapes[full]
            if len(shape) != len(axes):
                raise ValueError(
                    f"{asked}: {full} has shape {list(shape)}, and layout {layer.layout.name!r} "
                    f"has {len(axes)} axes there, {pattern}"
                )
            for axis, length in zip(axes, shape, strict=True):
                part = "" if axis == ("o",) else parts.split(".")[0]
                known, other = lengths.setdefault((part, *axis), (length, full))
                if known != length:
                    raise ValueError(
                        f"{asked}: {full} {list(shape)} and {other} {list(shapes[other])} do not "
                        f"fit together in layout {layer.layout.name!r}"
                    )


def convert_layer(layer: Layer, load: Callable[[str], Tensor], wanted: Wanted) -> dict[str, Tensor]:
    """One layer in the target's layout; `load` gives the tensor of a state's name.

    Raises:
        ValueError: shapes that do not fit the head count, or something the target cannot hold.
    """
    said = f"{wanted} at {layer.prefix!r}" if layer.prefix else str(wanted)
    parts, sizes = _read(layer, load, wanted, said)
    reorder(parts, wanted.old.rope, wanted.new.rope, said)
    regroup(parts, sizes, wanted.old.turns, wanted.new.turns)
    if wanted.bias is not None:
        parts = with_bias(parts, sizes, wanted.bias)
    prefix, _ = renamed(layer.prefix, wanted.old, wanted.new)
    written = write(parts, sizes, wanted.new, _origins(layer), prefix, said)
    return {prefix + name: tensor for name, tensor in written}


def _origins(layer: Layer) -> dict[str, str]:
    """The state's name for each part, the first head's where each has its own."""
    return {
        part: layer.where[name][0]
        for name, (held, _) in layer.form.tensors.items()
        if name in layer.where
        for part in parts_of(held)
    }


def stored(
    layer: Layer, load: Callable[[str], Tensor]
) -> tuple[dict[str, Tensor], dict[str, tuple[str, str]]]:
    """The layer's tensors, and the parts and pattern of each; those of single heads are stacked."""
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
    layer: Layer, load: Callable[[str], Tensor], wanted: Wanted, said: str
) -> tuple[Parts, Sizes]:
    """The layer's parts, and their sizes."""
    tensors, patterns = stored(layer, load)
    sizes = sizes_of(tensors, patterns, wanted.num_heads, wanted.num_kv_heads, said)
    found: Parts = {}
    for name, tensor in tensors.items():
        parts, pattern = patterns[name]
        expected = shape_of(parts, pattern, sizes)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{said}: {name} has shape {list(tensor.shape)}, and {sizes.num_heads} heads with "
                f"{sizes.num_kv_heads} key/value heads of width {sizes.head_dim} make it "
                f"{list(expected)}"
            )
        found |= unpack(parts, pattern, tensor, sizes)
    return found, sizes


def renamed(name: str, old: Layout, new: Layout) -> tuple[str, bool]:
    """What another layout of the same family calls a model's tensor; and whether it is turned.

    >>> from headwise.weights.layout_table import LAYOUTS
    >>> renamed("model.layers.3.mlp.up_proj.weight", LAYOUTS["llama"], LAYOUTS["llama_meta"])
    ('layers.3.feed_forward.w3.weight', False)
    """
    for role in old.model.keys() & new.model.keys():
        (template, before), (wanted, after) = old.model[role], new.model[role]
        pattern = re.escape(template).replace(r"\{layer\}", r"(?P<layer>\d+)")
        match = re.fullmatch(pattern.replace(r"\{any\}", "(?P<any>.*)"), name)
        if match:
            return wanted.format(**match.groupdict()), before != after
    return name, False


def _check_state(state: object, function: str) -> None:
    kind = type(state).__name__
    if not isinstance(state, Mapping):
        hint = "; give its .state_dict()" if hasattr(state, "state_dict") else ""
        raise ValueError(f"{function}({kind}): a mapping from names to tensors was expected{hint}")
    if not state:
        raise ValueError(f"{function}(…): the state is empty")
    for name in state:
        if not isinstance(name, str):
            raise ValueError(f"{function}(…): {name!r} is no name of a tensor; names are text")


def _tensor(name: str, value: Any, asked: str) -> Tensor:
    """A tensor from what a state may hold; a copy unless it is one already."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{asked}: {name} is {value.layout}; only dense tensors are converted")
        return value
    if isinstance(value, list | tuple):
        try:
            return torch.tensor(_numbers(value), dtype=torch.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{asked}: {name} is no matrix of numbers") from None
    if hasattr(value, "__array__"):
        array = np.array(value)
        if array.dtype.name == "bfloat16":  # which NumPy itself does not know
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    raise ValueError(f"{asked}: {name} is a {type(value).__name__}, and no tensor or array")


def _numbers(value: Any) -> Any:
    """Nested lists of plain numbers; what has `data`, as a scalar autograd's values, gives that."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(getattr(value, "data", value))


def _some(names: Iterable[str], most: int = 6) -> str:
    """A few of many names."""
    names = list(names)
    shown = ", ".join(names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def _looks_like(layout: Layout, shapes: Mapping[str, Shape], asked: str) -> str:
    """A hint at another layout; empty where there is none, and while detecting."""
    if not asked:
        return ""
    try:
        found = detect_shapes(shapes)
    except ValueError:
        return ""
    return f"; it looks like {found!r}" if found != layout.name else ""
