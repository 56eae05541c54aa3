"""The address of a head: `(2, 9)`, `"L2H9"`, `("layers.2.attn", 9)` or `"layers.2.attn:9"`.

The number of a layer is the index of its module among those that attend, in the order of their
first calls. Modules that are left out have no number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ..core.numbers import as_int

Layer = str | int
"""A layer by the qualified name of its module, a pattern of such names, or its number."""

HeadAddress = str | tuple[Layer, int]

_NUMBERED = re.compile(r"L(\d+)")
_ADDRESS = re.compile(r"L(?P<number>\d+)H(?P<head>\d+)|(?P<name>.*):(?P<its>\d+)", re.DOTALL)
_COMPILED = re.compile(r"(^|\.)_orig_mod(?=\.|$)")
"""The part that `torch.compile` puts into the names of modules."""


def as_written(name: str) -> str:
    """Return a qualified name, or a pattern of names, without the parts added by `torch.compile`.

    >>> as_written("_orig_mod.layers.0._orig_mod.attn"), as_written("_orig_mod")
    ('layers.0.attn', '')
    """
    return _COMPILED.sub("", name).removeprefix(".")


def head_label(layer: int, head: int) -> str:
    """Return the printed address of a head.

    >>> head_label(2, 9)
    'L2H9'
    """
    return f"L{layer}H{head}"


def parse_layer(layer: object) -> Layer:
    """Return the number of a layer, or the given name or pattern of names.

    Raises:
        ValueError: `layer` is neither a name nor a non-negative integer.

    >>> parse_layer("L2"), parse_layer(2), parse_layer("layers.*.attn")
    (2, 2, 'layers.*.attn')
    """
    if isinstance(layer, str):
        numbered = _NUMBERED.fullmatch(layer)
        return int(numbered[1]) if numbered else as_written(layer)
    number = as_int(layer)
    if number is None or number < 0:
        raise ValueError(
            f"layer {layer!r:.80}: give its number from 0, such as 2 or 'L2', or the name of its "
            f"module, such as 'layers.2.attn'"
        )
    return number


def is_head(address: str) -> bool:
    """Return True for the address of a head, such as `"L2H9"` or `"layers.2.attn:9"`."""
    return _ADDRESS.fullmatch(address) is not None


def parse_head(address: object) -> tuple[Layer, int]:
    """Return the layer and the number of a head.

    Raises:
        ValueError: `address` is not an address.

    >>> parse_head("L2H9"), parse_head((2, 9)), parse_head("layers.2.attn:9")
    ((2, 9), (2, 9), ('layers.2.attn', 9))
    """
    if isinstance(address, str) and (found := _ADDRESS.fullmatch(address)):
        if found["head"] is not None:
            return int(found["number"]), int(found["head"])
        return parse_layer(found["name"]), int(found["its"])
    if isinstance(address, tuple | list) and len(address) == 2:
        head = as_int(address[1])
        if head is not None and head >= 0:
            return parse_layer(address[0]), head
    raise ValueError(
        f"head {address!r:.80}: give its layer and number from 0, such as (2, 9), 'L2H9', "
        f"('layers.2.attn', 9) or 'layers.2.attn:9'"
    )


def is_layer(layer: Layer, name: str, number: int | None) -> bool:
    """Return True if `layer` refers to the module of this name and layer number."""
    return layer == number if isinstance(layer, int) else fnmatchcase(name, layer)


def joined_numbers(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    """Merge the layer numbers of two results; a number already used by another layer is replaced.

    >>> joined_numbers({"a": 0, "b": 1}, {"c": 0, "b": 1, "d": 2})
    {'a': 0, 'b': 1, 'c': 2, 'd': 3}
    """
    found = dict(one)
    for name, number in other.items():
        taken = number in found.values()
        found.setdefault(name, max(found.values()) + 1 if taken else number)
    return found


def module_of(layer: object, numbers: Mapping[str, int]) -> Any:
    """Return the name of the module with a layer number; return anything else unchanged.

    >>> module_of("L1", {"low": 0, "high": 1}), module_of("low", {"low": 0, "high": 1})
    ('high', 'low')
    """
    if isinstance(layer, str):
        layer = parse_layer(layer)
    if as_int(layer) is None:
        return layer
    return next((name for name, number in numbers.items() if number == layer), f"L{layer}")
