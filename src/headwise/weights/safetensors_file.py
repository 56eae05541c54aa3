"""Tensors in safetensors files: headers are read before any tensor, values are checked after."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from .._text import one_line

LARGEST = 2.0**64
"""No trained weight is as large: float32 cannot hold its square. A flipped bit makes such ones."""

MOST = 4
"""How many times as many weights as there are a config may call for and be read on."""


class FolderError(ValueError):
    """A model folder that cannot be read or written."""


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies, and what the file's header says of it."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def read(self) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def headers(files: Iterable[Path]) -> Iterator[Stored]:
    """Every tensor of some files, none of them read.

    Raises:
        FolderError: a file that is no safetensors file, or damaged.
    """
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    piece = file.get_slice(name)
                    yield Stored(path, name, tuple(piece.get_shape()), piece.get_dtype())
        except (SafetensorError, OSError) as error:
            raise FolderError(
                f"{path}: damaged or truncated ({one_line(error)}); copy or download it again"
            ) from None


def checked(tensor: Tensor, where: str) -> Tensor:
    """The tensor, if its values can be those of a weight.

    Raises:
        FolderError: NaN, infinity, or a value that only a flipped bit makes.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return tensor
    values = tensor.detach()
    values = values if values.dtype.itemsize > 1 else values.float()
    low, high = values.aminmax()
    if float(low) > -LARGEST and float(high) < LARGEST:  # neither holds of NaN
        return tensor
    wrong = ~(values.abs() < LARGEST)
    first = float(values[wrong][0])
    raise FolderError(
        f"{where} holds {first:.3g}, which no weight can be ({int(wrong.sum()):,} of "
        f"{values.numel():,} values): damaged, or its training diverged; copy or download it again"
    )


def check_size(called: int, held: int, where: str) -> None:
    """Compare what a config calls for with what is there, before anything of that size is made.

    Raises:
        FolderError: far more weights than the files hold.
    """
    if called > MOST * held:
        raise FolderError(
            f"{where}: its sizes call for {called:,} weights, and the files hold {held:,}"
        )
