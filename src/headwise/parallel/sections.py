"""A fused projection whose sections lie over ranks, under the names that checkpoints know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)


class Sections(nn.Module):
    """The rows of q, k and v that one projection holds, each over ranks by itself.

    One block of rows to a rank would give it rows of other sections, so that each section is a
    parameter of its own, `[rows, in]` with its heads over the ranks. In a `state_dict` they are
    `weight` and `bias`, as before: whole in their rows, so that checkpoints fit any number of
    ranks. What an optimizer holds is by section.

    Args:
        linear: the projection; its rows are those of the sections, one after another.
        rows: of each section, by its name.
        placements: where each section lies, by its rows' axis: `Shard(0)` or `Replicate()`.
        mesh: the ranks, one axis.
        transposed: its weight is `[in, rows]`, as GPT-2's.
    """

    def __init__(
        self,
        linear: nn.Module,
        rows: Mapping[str, int],
        placements: Mapping[str, Placement],
        mesh: DeviceMesh,
        transposed: bool,
    ) -> None:
        super().__init__()
        self.rows, self.axis = dict(rows), int(transposed)
        self.has_bias = linear.bias is not None
        weight, bias = linear.get_parameter("weight"), linear.bias
        sizes = list(self.rows.values())
        for name, part in zip(self.rows, weight.split(sizes, self.axis), strict=True):
            sharded = isinstance(placements[name], Shard)
            place = Shard(self.axis) if sharded else Replicate()
            self.register_parameter(name, laid(part, mesh, place, weight.requires_grad))
        if isinstance(bias, Tensor):
            for name, part in zip(self.rows, bias.split(sizes), strict=True):
                made = laid(part, mesh, placements[name], bias.requires_grad)
                self.register_parameter(f"{name}_bias", made)
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_part)

    @property
    def weight(self) -> Tensor:
        """The whole projection's weight, its rows on every rank and its other axis over them."""
        return self.joined("", self.axis)

    @property
    def bias(self) -> Tensor | None:
        """The whole projection's bias, on every rank."""
        return self.joined("_bias", 0) if self.has_bias else None

    def joined(self, kind: str, axis: int) -> Tensor:
        """The sections' tensors as one, whole along `axis`; no gradient."""
        parts = [self.get_parameter(f"{name}{kind}").detach() for name in self.rows]
        return joined([p for p in parts if isinstance(p, DTensor)] or parts, axis)

    def section(self, name: str, x: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        """The product with these rows of a section, which are this rank's, `[..., rows]`.

        `bias` is theirs where the projection itself has none.
        """
        weight = _of(rows, local(self.get_parameter(name)), self.rows[name], self.axis)
        if self.has_bias:
            bias = _of(rows, local(self.get_parameter(f"{name}_bias")), self.rows[name], 0)
        return F.linear(x, weight.t() if self.axis else weight, bias)


def _of(rows: slice, x: Tensor, every: int, axis: int) -> Tensor:
    """These rows of a section; a rank that has others not is left as it is."""
    return x if x.shape[axis] < every else x.narrow(axis, rows.start, rows.stop - rows.start)


def laid(x: Tensor, mesh: DeviceMesh, place: Placement, trained: bool) -> nn.Parameter:
    """A tensor over the ranks of a mesh; the numbers are those of its first rank."""
    whole = x.detach().contiguous()  # FSDP takes no other
    return nn.Parameter(distribute_tensor(whole, mesh, [place]), requires_grad=trained)


def local(parameter: Tensor, partial: bool = True) -> Tensor:
    """This rank's part of a parameter, in the graph.

    Of one that every rank has whole, the gradients of the ranks are added up if each rank's is
    `partial`, one of other heads; else they are the same.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if partial and all(isinstance(place, Replicate) for place in parameter.placements):
        here = parameter.redistribute(placements=parameter.placements)
        return here.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return parameter.to_local()


def joined(parts: list[Any], axis: int) -> Tensor:
    """Tensors as one along an axis, over their ranks by another axis where they have one."""
    if isinstance(parts[0], DTensor):
        other = Shard(1 - axis) if parts[0].dim() > 1 else Replicate()
        places = [other] * parts[0].device_mesh.ndim
        parts = [part.redistribute(placements=places) for part in parts]
    return torch.cat(parts, axis)


def _join(module: Sections, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the whole weight and bias in the place of their sections."""
    for kind, name, axis in _kinds(module):
        parts = [state.pop(f"{prefix}{part}{kind}").detach() for part in module.rows]
        state[f"{prefix}{name}"] = joined(parts, axis)


def _part(module: Sections, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Put the sections in the place of a whole weight and bias."""
    for kind, name, axis in _kinds(module):
        whole = state.pop(f"{prefix}{name}", None)
        if whole is None:  # load_state_dict says what is missing
            continue
        for part, piece in zip(
            module.rows, whole.split(list(module.rows.values()), axis), strict=True
        ):
            own = module.get_parameter(f"{part}{kind}")
            if isinstance(own, DTensor) and not isinstance(piece, DTensor):
                piece = distribute_tensor(
                    piece.to(own.device), own.device_mesh, own.placements, src_data_rank=None
                )
            state[f"{prefix}{part}{kind}"] = piece


def _kinds(module: Sections) -> list[tuple[str, str, int]]:
    """What there is: how sections' names end, the whole's name, the axis of rows."""
    biases = [("_bias", "bias", 0)] if module.has_bias else []
    return [("", "weight", module.axis), *biases]
