"""Sizes in a config of `transformers`, held against the weights before a model is built."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from ..weights.safetensors_file import MOST, FolderError

SPARE_PARTS = 1000
"""So many layers, experts and labels may have no tensor of their own (shared or left out)."""

SPARE_NUMBERS = 2**28
"""So many numbers may be built that are not stored: masks, tables of angles, poolers."""

PACKED = 16
"""How many weights a stored number may hold where they are quantized."""

LONGEST_SIDE = 2**14
"""In pixels, of an image that a processor makes."""

_PARTS = re.compile(r"(^|_)(layers?|depths?|blocks|stages|experts)$")
_LABELS = "num_labels"


def check_counts(config: dict[str, Any], tensors: int, numbers: int, where: str) -> None:
    """Compare counts in a config with the tensors that are stored, and the numbers in them.

    Configs make a list entry of each layer and label while they are read.

    Raises:
        FolderError: more layers, experts or labels than the weights can have.
    """
    for key, value in _integers(config):
        held = tensors if _PARTS.search(key) else numbers if key == _LABELS else None
        if held is not None and value > held + SPARE_PARTS:
            what = "tensors" if _PARTS.search(key) else "numbers"
            raise FolderError(f"{where}: {key}={value:,}, and the weights hold {held:,} {what}")


def _integers(config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Every whole number in nested dicts and lists, with the key that it stands under."""
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        key, value = left.pop()
        if isinstance(value, dict):
            left += value.items()
        elif isinstance(value, list):
            left += [(key, one) for one in value]
        elif isinstance(value, int):
            yield key, value


def check_sides(processor: Any, where: str) -> None:
    """Look at the size of the images that an image processor makes.

    Raises:
        FolderError: one that no model reads.
    """
    for name in ("size", "crop_size"):
        sides = dict(getattr(processor, name, None) or {})
        for side in ("height", "width", "shortest_edge"):
            if (sides.get(side) or 0) > LONGEST_SIDE:
                raise FolderError(
                    f"{where}: its image processor makes images of {sides[side]:,} pixels a side, "
                    f"and {LONGEST_SIDE:,} is the most that is read"
                )


@contextmanager
def no_larger(numbers: int, where: str, *, packed: bool = False) -> Iterator[None]:
    """Stop the building of a model that is far larger than its weights, while it takes no memory.

    `transformers` builds on the meta device and allocates afterwards.

    Raises:
        FolderError: it is.
    """
    most = numbers * MOST * (PACKED if packed else 1) + SPARE_NUMBERS
    thread, built = threading.get_ident(), 0

    def count(module: nn.Module, name: str, value: Tensor | None) -> None:
        nonlocal built
        if value is None or not value.is_meta or threading.get_ident() != thread:
            return
        built += value.numel()
        if built > most:
            raise FolderError(
                f"{where}: its sizes call for over {most:,} weights, and the files hold {numbers:,}"
            )

    with (
        hooks.register_module_parameter_registration_hook(count),
        hooks.register_module_buffer_registration_hook(count),
    ):
        yield
