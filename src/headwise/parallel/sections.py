"""A fused projection with sections sharded over ranks, stored under the usual checkpoint names."""

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
    """The q, k and v rows of one projection, with each section sharded over ranks separately.

    A contiguous block of rows would mix sections, so each section is a parameter of its own,
    `[rows, in]`, with its heads sharded over ranks. In a `state_dict` they are `weight` and `bias`
    as before, with all rows, so checkpoints fit any number of ranks. Optimizer state is kept
    per section.

    Args:
        linear: the projection; its rows are those of the sections, one after another.
        rows: the number of rows of each section, by its name.
        placements: the placement of each section along its rows: `Shard(0)` or `Replicate()`.
        mesh: the ranks, one axis.
        transposed: True if the weight is `[in, rows]`, as in GPT-2.
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
        for kind, name, axis in self._kinds():
            whole = linear.get_parameter(name)
            parts = whole.detach().split(list(self.rows.values()), axis)
            for section, part in zip(self.rows, parts, strict=True):
                placement = Shard(axis) if placements[section].is_shard() else Replicate()
                parameter = nn.Parameter(part, requires_grad=whole.requires_grad)
                self.register_parameter(f"{section}{kind}", parameter)
                shard_parameter(self, f"{section}{kind}", mesh, placement)
        self.register_state_dict_post_hook(_join)
        self.register_load_state_dict_pre_hook(_split)

    def forward(self, section: str, x: Tensor, rows: slice, bias: Tensor | None = None) -> Tensor:
        """Multiply x by these rows of a section on this rank; return `[..., rows]`.

        `bias` is used if the projection itself has none.
        """

        def part(kind: str, axis: int) -> Tensor:
            here = local_part(self.get_parameter(f"{section}{kind}"))
            if here.shape[axis] < self.rows[section]:  # sharded: all rows on this rank are used
                return here
            return here.narrow(axis, rows.start, rows.stop - rows.start)

        weight = part("", self.axis)
        bias = part("_bias", 0) if self.has_bias else bias
        return F.linear(x, weight.t() if self.axis else weight, bias)

    @property
    def weight(self) -> Tensor:
        """The whole projection's weight, as in a state dict; PyTorch's checkpointing reads it."""
        return _joined([self.get_parameter(name) for name in self.rows], self.axis)

    @property
    def bias(self) -> Tensor | None:
        """The bias of the whole projection."""
        if not self.has_bias:
            return None
        return _joined([self.get_parameter(f"{name}_bias") for name in self.rows], 0)

    def reset_parameters(self) -> None:
        """Initialize as GPT-2's Conv1D does: weights with standard deviation 0.02, biases 0."""
        for name, parameter in self.named_parameters():
            if name.endswith("_bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def _kinds(self) -> list[tuple[str, str, int]]:
        """Return the suffix, the whole tensor's name and the row axis, for weight and bias."""
        return [("", "weight", self.axis), *([("_bias", "bias", 0)] * self.has_bias)]


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Distribute a parameter of a module, if there is one; its values are those of rank 0."""
    if isinstance(x := getattr(module, name, None), nn.Parameter):
        whole = x.detach().contiguous()  # FSDP requires contiguous tensors
        sharded = distribute_tensor(whole, mesh, [placement])
        module.register_parameter(name, nn.Parameter(sharded, requires_grad=x.requires_grad))


def local_part(parameter: Tensor) -> Tensor:
    """Return the part of a parameter on this rank; the gradient flows to the parameter.

    Gradients of a replicated parameter are summed over ranks, each of which uses it for its heads.
    """
    if not isinstance(parameter, DTensor):
        return parameter
    if all(isinstance(placement, Replicate) for placement in parameter.placements):
        here = parameter.redistribute(placements=parameter.placements)
        return here.to_local(grad_placements=[Partial()] * parameter.device_mesh.ndim)
    return parameter.to_local()


def _joined(parts: list[Any], axis: int) -> Tensor:
    """Concatenate sections along their rows; sharded ones become sharded along the other axis."""
    parts = [part.detach() for part in parts]
    if isinstance(parts[0], DTensor):
        other = Shard(1 - axis) if parts[0].dim() > 1 else Replicate()
        placements = [other] * parts[0].device_mesh.ndim
        parts = [part.redistribute(placements=placements) for part in parts]
    return torch.cat(parts, axis)


def _join(module: Sections, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replace the sections in a state dict with the whole weight and bias."""
    for kind, name, axis in module._kinds():
        parts = [state.pop(f"{prefix}{section}{kind}") for section in module.rows]
        state[f"{prefix}{name}"] = _joined(parts, axis)


def _split(module: Sections, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace a whole weight and bias in a state dict with the sections."""
    for kind, name, axis in module._kinds():
        whole = state.pop(f"{prefix}{name}", None)
        if whole is None:  # load_state_dict reports what is missing
            continue
        parts = whole.split(list(module.rows.values()), axis)
        for section, part in zip(module.rows, parts, strict=True):
            own = module.get_parameter(f"{section}{kind}")
            if isinstance(own, DTensor) and not isinstance(part, DTensor):
                where = own.device_mesh, own.placements
                part = distribute_tensor(part.to(own.device), *where, src_data_rank=None)
            state[f"{prefix}{section}{kind}"] = part
