"""Find attention layers in a state, and their layout."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._text import and_more
from .layout_table import LAYOUTS
from .layout_types import LayerForm, Layout
from .packing import axes_of

Shape = tuple[int, ...]

_NORM = re.compile(
    r"((pre_|post_|input_|self_attn_)?(layer_?norm|ln)_?\d*|(pre_|post_|input_|self_attn_)norm_?\d*"
    r"|norm_?\d+)[./](weight|bias)",
    re.IGNORECASE,
)
"""Names of norms next to a layer that do not apply to its queries and keys. A plain `norm` may be
between its heads and its output projection, as with `scale_norm` in timm."""

# A converted layer keeps the names next to it, so each layout ignores those of all layouts.
BESIDE = tuple(start for layout in LAYOUTS.values() for start in layout.ignored)


def detect_layout(state: Mapping[str, Any]) -> str:
    """Return the name of the layout of the attention layers in a state.

    Args:
        state: names to tensors, arrays or nested lists.

    Raises:
        ValueError: no known layout has these names and shapes (the message lists the layouts); the
            layout is ambiguous, as between nanoGPT and GPTBigCode; or layers have several layouts.

    >>> import torch, headwise as hw
    >>> hw.detect_layout(torch.nn.MultiheadAttention(12, 3).state_dict())
    'torch'
    """
    check_state(state, "detect_layout")
    tensors = {name: tensor_of(name, value, "detect_layout(…)") for name, value in state.items()}
    return detect_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()})


def detect_shapes(shapes: Mapping[str, Shape], expected: str | None = None) -> str:
    """Detect the single layout of a state from names and shapes alone.

    `expected` chooses between two layouts with the same names and shapes.
    """
    starts: dict[str, str] = {}
    for layer in detect_layers(shapes, expected):
        starts.setdefault(layer.layout.name, layer.prefix)
    if len(starts) > 1:
        some = ", ".join(f"{name!r} at {prefix!r}" for name, prefix in starts.items())
        raise ValueError(
            f"detect_layout(…): the state has layers of {len(starts)} layouts, {some}; convert() "
            f"detects the layout of each layer if no source is given"
        )
    return next(iter(starts))


def detect_layers(shapes: Mapping[str, Shape], expected: str | None = None) -> list[LayerTensors]:
    """Find the attention layers of a state, each in its layout, by names and shapes alone.

    Layouts claim layers in order of the number of names they match, most first. Layers whose
    names differ only in numbers have the same layout. `expected` is as in `detect_shapes`.

    Raises:
        ValueError: there is no layer, or a layer that no layout fits.
    """
    kinds = {name: _by_kind(layout, shapes) for name, layout in LAYOUTS.items()}
    found: list[LayerTensors] = []
    taken: set[str] = set()
    while best := _largest(kinds, taken, shapes, expected):
        found += best
        taken |= {name for layer in best for name in layer.names}
    chosen = {layer.layout.name for layer in found}
    near: list[str] = []  # faults of layers of a kind in which other layers fit
    faults: list[str] = []
    for layout, groups in kinds.items():
        for group in groups.values():
            some = any(isinstance(layer, LayerTensors) for layer in group.values())
            for name, layer in group.items():
                if isinstance(layer, LayerTensors) or name in taken:
                    continue
                fault = str(layer).removeprefix(": ")
                if some:
                    near.append(fault)
                elif layout in chosen or not found or "has an adapter" in fault:
                    faults.append(fault)
    # An unexpected name is closer to a match than a missing name.
    signs = (
        "norms of q and k",
        "has an adapter",
        "does not contain",
        "do not fit together",
        "misses",
    )
    for fault in (one for some in (near, faults) for sign in signs for one in some if sign in one):
        raise ValueError(f"detect_layout(…): no known layout fits; nearest: {fault}")
    if not found:
        raise ValueError(
            f"detect_layout(…): none of the known layouts has the names {_some(shapes)}; "
            f"layouts: {', '.join(LAYOUTS)}"
        )
    return found


_Kinds = dict[str, dict[str, "LayerTensors | ValueError"]]
"""The layers of a layout, or their errors, by prefix with "#" for numbers, then by name."""


def _by_kind(layout: Layout, shapes: Mapping[str, Shape]) -> _Kinds:
    kinds: _Kinds = {}
    for name, prefix, layer in _attempts(layout, shapes, ""):
        kinds.setdefault(re.sub(r"\d+", "#", prefix), {})[name] = layer
    return kinds


def _largest(
    kinds: Mapping[str, _Kinds], taken: set[str], shapes: Mapping[str, Shape], expected: str | None
) -> list[LayerTensors]:
    """Return the unclaimed layers of the layout with the most names; empty if no layout fits."""
    best, chosen = (0, ""), []
    for layout in LAYOUTS.values():
        layers: list[LayerTensors] = []
        for group in kinds[layout.name].values():
            fitting = [one for one in group.values() if isinstance(one, LayerTensors)]
            if len(fitting) == len(group) and not any(one.names & taken for one in fitting):
                layers += fitting
        if not layers:
            continue
        at_home = any(
            re.split("[./]", layer.prefix.rstrip("./"))[-1] == layout.home for layer in layers
        )
        score = 2 * sum(len(layer.names) for layer in layers) + at_home
        twin = layout.twin is not None and best == (score, layout.twin[0])
        if twin and _resolve_twin(layout, layers, shapes, expected) != layout.name:
            continue
        if twin or score > best[0]:
            best, chosen = (score, layout.name), layers
    return chosen


def _resolve_twin(
    layout: Layout,
    layers: Iterable[LayerTensors],
    shapes: Mapping[str, Shape],
    expected: str | None,
) -> str:
    """Return this layout or its twin, which has the same names.

    Raises:
        ValueError: the layout is ambiguous.
    """
    assert layout.twin is not None
    other, why = layout.twin
    if expected in (layout.name, other):
        return expected
    for layer in layers:
        held = {
            parts: group[0]
            for n, group in layer.where.items()
            for parts, _ in [layer.form.tensors[n]]
        }
        packed, out = held["qkv.weight"], held["out.weight"]
        if shapes[packed][0] == 3 * shapes[out][1]:
            raise ValueError(
                f"detect_layout(…): {packed} {list(shapes[packed])} may have layout {other!r} or "
                f"{layout.name!r}: names and shapes are the same, but the rows of {why}; pass "
                f"source={other!r} or source={layout.name!r} (--from)"
            )
    return layout.name


@dataclass(frozen=True)
class LayerTensors:
    """The tensors of one attention layer in a state.

    Attributes:
        prefix: the common start of its names; empty for the state of one layer.
        form: the form of its layout.
        where: the names in the state for each tensor of the form, one per head if heads have
            their own tensors.
        names: all names of the layer, including masks.
        first: the first of these names in the state.
        near: the names in the layout's `partial` that are next to the layer.
    """

    layout: Layout
    prefix: str
    form: LayerForm
    where: Mapping[str, tuple[str, ...]]
    names: frozenset[str]
    first: str
    near: frozenset[str] = frozenset()

    @property
    def partial(self) -> str | None:
        """Models with these names, and names next to them, that may rotate part of each head."""
        return next(
            (models for name, models in self.layout.partial.items() if name in self.near), None
        )


def find_layers(layout: Layout, shapes: Mapping[str, Shape], call: str) -> list[LayerTensors]:
    """Find every attention layer of a layout in a state.

    Raises:
        ValueError: there is no layer, or a layer has missing or extra names or inconsistent shapes.
    """
    layers = []
    for _, _, layer in _attempts(layout, shapes, call):
        if isinstance(layer, ValueError):
            raise layer
        layers.append(layer)
    if not layers:
        expected = [name for name in layout.forms[0].tensors if name.endswith(("weight", "kernel"))]
        raise ValueError(
            f"{call}: no layer of layout {layout.name!r}: the names are {_some(shapes)}, but it "
            f"has {_some(expected or layout.forms[0].tensors)}{_looks_like(layout, shapes, call)}"
        )
    return layers


def _attempts(
    layout: Layout, shapes: Mapping[str, Shape], call: str
) -> Iterator[tuple[str, str, LayerTensors | ValueError]]:
    """Yield a name and the prefix of every layer, and the layer or the reason why it does not fit.

    A projection inside a PEFT adapter is such a reason and is reported first.
    """
    prefixes: dict[str, str] = {}
    adapters: dict[str, str] = {}
    plain = {layout.plain(name): name for name in shapes}
    names = _Names(plain, sorted(plain), {name: number for number, name in enumerate(plain)})
    bare = [(name.replace(".base_layer.", "."), full) for name, full in plain.items()]
    for form in layout.forms:
        for name, (parts, _) in form.tensors.items():
            if not parts.endswith(".weight") or parts.startswith("out") or "norm" in parts:
                continue
            pattern, end = named_as(name), re.split(r"[./]|\{n\}", name)[-2:]
            ends = ".".join(end), "/".join(end)  # a quick test before matching the pattern
            for other, full in bare:
                if other.endswith(ends) and (match := pattern.fullmatch(other)):
                    found = adapters if ".base_layer." in full else prefixes
                    found.setdefault(match["prefix"], full)
    for prefix, name in adapters.items():
        yield (
            name,
            prefix,
            ValueError(
                f"{call}: {name} is only a part of a projection of layout {layout.name!r}: it has "
                f"an adapter; merge it first (PEFT's merge_and_unload())"
            ),
        )
    for prefix, name in prefixes.items():
        if prefix not in adapters:
            try:
                yield name, prefix, _layer(layout, prefix, names, shapes, call)
            except ValueError as error:
                yield name, prefix, error


class _Names(NamedTuple):
    """The stored names of a state by alias-free name, those names sorted, and their positions."""

    plain: Mapping[str, str]
    ordered: list[str]
    order: Mapping[str, int]

    def under(self, prefix: str) -> dict[str, str]:
        """Return the stored names under a prefix, keyed by the rest of the name, in order."""
        start = bisect_left(self.ordered, prefix)
        inside = takewhile(lambda name: name.startswith(prefix), islice(self.ordered, start, None))
        listed = sorted(inside, key=self.order.__getitem__)
        return {name.removeprefix(prefix): self.plain[name] for name in listed}


def _layer(
    layout: Layout, prefix: str, names_of: _Names, shapes: Mapping[str, Shape], call: str
) -> LayerTensors:
    """Return the layer at a prefix, in the form that fits its names best."""
    names_here = names_of.under(prefix)
    attempts = [_match(form, names_here) for form in layout.forms]
    form, where, missing = min(attempts, key=lambda attempt: len(attempt[2]) - len(attempt[1]))
    at = f" under {prefix!r}" if prefix else ""
    if missing:
        hint = _looks_like(layout, shapes, call)
        raise ValueError(
            f"{call}: layout {layout.name!r} misses {_some(missing)}{at}; there are "
            f"{_some(names_here)}{hint}"
        )
    names = {name for group in where.values() for name in group}
    masks = [named_as(mask) for mask in layout.masks]
    extra = []
    for short, name in names_here.items():
        if any((match := mask.fullmatch(short)) and not match["prefix"] for mask in masks):
            names.add(name)
        elif name not in names and not short.startswith(BESIDE) and not _NORM.fullmatch(short):
            extra.append(name)
    if extra:
        reason = (
            "; a bias of only some of q, k and v is ambiguous: build the layer with all three"
            if any(name.endswith("some_bias") for name in extra)
            else _looks_like(layout, shapes, call)
        )
        raise ValueError(f"{call}: layout {layout.name!r} does not contain {_some(extra)}{reason}")
    for name, group in where.items():
        if "{n}" in name and (gap := _gap(name, prefix, group)):
            raise ValueError(f"{call}: layout {layout.name!r} numbers its heads from 0; here {gap}")
    parent = "".join(prefix.rstrip("./").rpartition(".")[:2])
    for name, why in layout.other_norms.items():
        if "q_norm.weight" in where and parent + name in shapes:
            raise ValueError(
                f"{call}: the norms of q and k{at} are not those of layout {layout.name!r}: {why}"
            )
    near = {name for name in layout.partial if not name or parent + name in shapes}
    first = next(name for name in names_here.values() if name in names)
    layer = LayerTensors(layout, prefix, form, where, frozenset(names), first, frozenset(near))
    _agree(layer, shapes, call)
    return layer


def _match(
    form: LayerForm, names_here: Mapping[str, str]
) -> tuple[LayerForm, dict[str, tuple[str, ...]], list[str]]:
    """Match the names of a state to the tensors of a form; also return the missing ones."""
    where: dict[str, tuple[str, ...]] = {}
    for name in form.tensors:
        pattern, matches = named_as(name), []
        for short, full in names_here.items():
            match = pattern.fullmatch(short)
            if match and not match["prefix"]:
                matches.append((int(match["n"]) if "{n}" in name else 0, full))
        if matches:
            where[name] = tuple(full for _, full in sorted(matches))
    heads = max((len(group) for group in where.values()), default=1)
    missing = []
    for name in form.tensors:
        optional = [group for group in form.optional if name in group]
        expected = not optional or any(other in where for other in optional[0])
        if expected and len(where.get(name, ())) < (heads if "{n}" in name else 1):
            missing.append(name)
    return form, where, missing


def _gap(name: str, prefix: str, group: tuple[str, ...]) -> str | None:
    """Describe a gap in the numbers of heads that have tensors of their own."""
    numbers = [int(named_as(name).fullmatch(full.removeprefix(prefix))["n"]) for full in group]  # type: ignore[index]
    if numbers == list(range(len(numbers))):
        return None
    return f"{name} has the numbers {', '.join(map(str, numbers))}"


@cache
def named_as(name: str) -> re.Pattern[str]:
    """Return a pattern for the names of a tensor in states, with `.` or `/` as separators."""
    text = (
        re.escape(name).replace(r"\{n\}", r"(?P<n>\d+)").replace("/", r"\.").replace(r"\.", "[./]")
    )
    return re.compile(rf"(?P<prefix>(?:.*[./])?){text}")


def _agree(layer: LayerTensors, shapes: Mapping[str, Shape], call: str) -> None:
    """Raise ValueError if axes with the same meaning have different lengths."""
    lengths: dict[tuple[str, ...], tuple[int, str]] = {}
    for name, (parts, pattern) in layer.form.tensors.items():
        if name not in layer.where:
            continue
        axes = axes_of(pattern)
        for full in layer.where[name]:
            shape = shapes[full]
            if len(shape) != len(axes):
                raise ValueError(
                    f"{call}: {full} has shape {list(shape)}, but layout {layer.layout.name!r} "
                    f"has {len(axes)} axes there, {pattern}"
                )
            for axis, length in zip(axes, shape, strict=True):
                part = "" if axis == ("o",) else parts.split(".")[0]
                known, other = lengths.setdefault((part, *axis), (length, full))
                if known != length:
                    raise ValueError(
                        f"{call}: {full} {list(shape)} and {other} {list(shapes[other])} do not "
                        f"fit together in layout {layer.layout.name!r}"
                    )


def check_state(state: object, function: str) -> None:
    kind = type(state).__name__
    if not isinstance(state, Mapping):
        hint = "; pass its .state_dict()" if hasattr(state, "state_dict") else ""
        raise ValueError(f"{function}({kind}): state must map names to tensors{hint}")
    if not state:
        raise ValueError(f"{function}(…): the state is empty")
    for name in state:
        if not isinstance(name, str):
            raise ValueError(f"{function}(…): names of tensors must be str, got {name!r}")


def tensor_of(name: str, value: Any, call: str) -> Tensor:
    """Return a value of a state as a tensor; a copy unless it is one already."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise ValueError(f"{call}: {name} must be a dense tensor, got {value.layout}")
        return value
    if isinstance(value, list | tuple):
        try:
            return torch.tensor(_numbers(value), dtype=torch.float64)
        except (TypeError, ValueError):
            raise ValueError(f"{call}: {name} must be a matrix of numbers") from None
    if hasattr(value, "__array__"):
        array = np.array(value)
        if array.dtype.name == "bfloat16":  # a dtype that NumPy lacks
            return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array)
    raise ValueError(f"{call}: {name} must be a tensor or an array, got {type(value).__name__}")


def _numbers(value: Any) -> Any:
    """Return nested lists of plain numbers; use the attribute `data` of scalars that have one."""
    if isinstance(value, list | tuple):
        return [_numbers(item) for item in value]
    return float(getattr(value, "data", value))


def _some(names: Iterable[str]) -> str:
    """Return the first six names."""
    return and_more(list(names), 6) or "none"


def _looks_like(layout: Layout, shapes: Mapping[str, Shape], call: str) -> str:
    """Return a hint about another layout; empty if there is none, or during detection."""
    if not call:
        return ""
    try:
        matches = detect_shapes(shapes)
    except ValueError:
        return ""
    return f"; it looks like {matches!r}" if matches != layout.name else ""
