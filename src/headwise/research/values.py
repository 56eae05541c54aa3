"""`HeadValues`: a tensor per head, by its address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .._tables import HeadTable
from ..capture.head_address import HeadAddress, Layer, is_head, module_of, parse_head


class HeadValues(HeadTable):
    """A tensor per head: `values["L2H9"]` `[B, …]`, or per layer, `values["L2"]` `[B, H, …]`.

    Any address of heads and layers is accepted. `table()` has one number for each head.

    Attributes:
        metric: the name of the column in `table()`.
        numbers: the numbers of the layers, by the names of their modules.
    """

    def __init__(
        self,
        metric: str,
        tensors: Mapping[str, Tensor],
        numbers: Mapping[str, int],
        number: Callable[[Tensor], Tensor],
    ) -> None:
        self.metric, self.numbers = metric, dict(numbers)
        self._tensors, self._number = dict(tensors), number

    def __repr__(self) -> str:
        return f"<HeadValues: {self.metric} of {len(self._tensors)} modules>"

    @property
    def modules(self) -> tuple[str, ...]:
        """The qualified names of the modules, in the order of their first calls."""
        return tuple(self._tensors)

    def __getitem__(self, address: HeadAddress | Layer) -> Tensor:
        """Return the tensor of a head `[B, …]`, or of all heads of a layer `[B, H, …]`.

        Raises:
            KeyError: the head or layer does not exist; the message lists those that exist.
        """
        module, head = address, None
        if address not in self._tensors and (isinstance(address, tuple) or is_head(str(address))):
            module, head = parse_head(address)
        name = module_of(module, self.numbers)
        if name not in self._tensors:
            raise KeyError(f"{address!r}: no such layer; there are: {', '.join(self._tensors)}")
        tensor = self._tensors[name]
        if head is None:
            return tensor
        if head >= tensor.shape[1]:
            raise KeyError(f"{address!r}: {name!r} has the heads 0 to {tensor.shape[1] - 1}")
        return tensor[:, head]

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head: `layer`, `head`, `module` and the metric."""
        return [
            {"layer": self.numbers[name], "head": head, "module": name, self.metric: value}
            for name, tensor in self._tensors.items()
            for head, value in enumerate(self._number(tensor).tolist())
        ]


def joined(names: Iterable[str], tensors: Iterable[Tensor], quoted: str) -> dict[str, Tensor]:
    """Return one tensor per module: those of its calls, concatenated along the batch axis.

    Raises:
        ValueError: the calls of a module have different shapes.
    """
    each: dict[str, list[Tensor]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        each.setdefault(name, []).append(tensor)
    for name, calls in each.items():
        if len({x.shape[1:] for x in calls}) > 1:
            shapes = ", ".join(str(list(x.shape)) for x in calls[:4])
            raise ValueError(f"{quoted}: {name!r} is called with different shapes: {shapes}.")
    return {name: torch.cat(calls) for name, calls in each.items()}
