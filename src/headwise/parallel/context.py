"""Context parallelism: each rank holds some positions of the sequence and attends from them.

Keys and values are gathered; queries, outputs and statistics stay on their rank. Under a causal
mask later queries see more keys, so each rank holds two pieces, the r-th from the start and the
r-th from the end, which balances the work (Dubey et al. 2024, Llama 3, §3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..attend import attend as attend_here
from ..core.mask_algebra import And, Mask, Not, Or, Rows
from ..core.masks import ALiBi, Causal, Documents, Everything, Padding, Prefix, Window, as_mask
from ..core.shapes import Extent
from ..layers.attention import MultiHeadAttention
from ..layers.rope import RoPE


def positions(length: int, mesh: DeviceMesh) -> Int[Tensor, " T/R"]:
    """Return the positions of a sequence that this rank holds, in their order on this rank.

    Args:
        length: the length of the whole sequence, a multiple of twice the number of ranks.
        mesh: a mesh of the ranks with one axis.

    Raises:
        ValueError: the length is not such a multiple.
    """
    device = mesh.device_type if mesh.device_type != "cpu" else None
    return torch.cat([torch.arange(*piece, device=device) for piece in _pieces(length, mesh)])


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return this rank's part, along `dim`, of a sequence that every rank holds.

    Raises:
        ValueError: the length is not a multiple of twice the number of ranks.
    """
    return torch.cat([x.narrow(dim, a, b - a) for a, b in _pieces(x.shape[dim], mesh)], dim)


def unshard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Gather the whole sequence, in its original order, from each rank's part along `dim`.

    Differentiable: gradients are summed over ranks, and each rank receives those of its positions.
    """
    dim %= x.dim()
    parts = DTensor.from_local(x.contiguous(), mesh, [Shard(dim)], run_check=False)
    whole = parts.redistribute(placements=[Replicate()])
    pieces = whole.to_local(grad_placements=[Partial()]).chunk(2 * mesh.size(), dim)
    return torch.cat([*pieces[::2], *reversed(pieces[1::2])], dim)


def attend(
    q: Float[Tensor, "B H T/R D"],
    k: Float[Tensor, "B G T/R D"],
    v: Float[Tensor, "B G T/R Dv"],
    *,
    mesh: DeviceMesh,
    mask: Mask | None = None,
    **keywords: Any,
) -> Float[Tensor, "B H T/R Dv"]:
    """Run `hw.attend` on a sharded sequence: each rank passes and receives its own positions.

    Args:
        q, k, v: this rank's positions, as returned by `shard(x, mesh, dim=2)`.
        mesh: a mesh of the ranks with one axis.
        mask: the mask of the whole sequence.
        keywords: as in `hw.attend`.

    Raises:
        ValueError: for the same reasons as `hw.attend`, or if a length is not a multiple of two.
    """
    keys, values = _gathered(k, v, mesh)
    outputs = [
        attend_here(part, keys, values, mask=own, first_query=first, **keywords)
        for part, own, first in _parts(q, keys, as_mask(mask), mesh)
    ]
    return torch.cat(outputs, 2)


def _pieces(length: int, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Return the start and end of this rank's two pieces of a sequence."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} over {ranks} ranks does not split into two equal pieces per "
            f"rank; pad it to a multiple of {2 * ranks} and give mask=Padding(lengths)."
        )
    size = length // (2 * ranks)
    return [(n * size, (n + 1) * size) for n in (rank, 2 * ranks - 1 - rank)]


def _gathered(k: Tensor, v: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """Gather all keys and values in order, in one collective if they have the same width."""
    if k.shape[-1] != v.shape[-1] or k.dtype != v.dtype:
        return unshard(k, mesh, 2), unshard(v, mesh, 2)
    heads = k.shape[1]
    both = unshard(torch.cat([k, v], 1), mesh, 2)
    return both[:, :heads], both[:, heads:]


_BY_POSITION = (Everything, Causal, Window, Padding, Documents, Prefix, ALiBi)
"""Masks that depend only on positions and keys, and so apply to any part of the queries."""


def _parts(q: Tensor, keys: Tensor, mask: Mask, mesh: DeviceMesh) -> list[tuple[Tensor, Mask, int]]:
    """Return this rank's two pieces of queries, each with its mask and its first position."""
    length = q.shape[2] * mesh.size()
    whole = Extent(len(q), q.shape[1], keys.shape[1], length, length)
    mask.check(whole)
    pieces = _pieces(length, mesh)
    parts = []
    for part, (start, stop) in zip(q.chunk(2, 2), pieces, strict=True):
        rows = torch.arange(start, stop, device=q.device)
        own = mask if _by_position(mask) else Rows(mask, rows, replace(whole, first_query=0))
        parts.append((part, own, start))
    return parts


def _by_position(mask: Mask) -> bool:
    if isinstance(mask, And | Or | Not):
        return all(map(_by_position, mask.parts))
    return type(mask) in _BY_POSITION


# ── layers ──────────────────────────────────────────────────────────────────────────────────────


def context_plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """Return the styles with which `parallelize_module` shards sequences over ranks.

    The model then takes each rank's part, `hw.parallel.shard(ids, mesh)`, and returns the outputs
    of that part. Code that depends on positions, such as `GPT(…, positions=…)`, needs
    `hw.parallel.positions(T, mesh)`. Masks are those of the whole sequence. Gradients of weights
    cover a rank's own positions: DDP and FSDP sum them over the same ranks.

    Returns:
        Styles by module name; for a single layer, its style.

    Raises:
        ValueError: the model has no headwise layer.
    """
    if isinstance(model, MultiHeadAttention):
        return ContextParallel()
    layers = [n for n, m in model.named_modules() if isinstance(m, MultiHeadAttention)]
    if not layers:
        raise ValueError(f"context_plan({type(model).__name__}): it has no hw.MultiHeadAttention.")
    return {name: ContextParallel() for name in layers}


class ContextParallel(ParallelStyle):
    """A style: a `MultiHeadAttention` with sharded input attends from this rank's positions to all.

    Raises, when it is applied:
        ValueError: the module is not a `MultiHeadAttention`, or its rotary positions depend on the
            length.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        call = f"ContextParallel()({type(module).__name__})"
        if not isinstance(module, MultiHeadAttention) or module.sequence_shard is not None:
            raise ValueError(f"{call}: give an hw.MultiHeadAttention that has whole sequences.")
        if device_mesh.ndim != 1:
            raise ValueError(f'{call}: the mesh has several axes; give one, such as mesh["cp"].')
        if module.rope is not None and module.rope.depends_on_length:
            raise ValueError(f"{call}: length-dependent rotary positions are not supported.")
        module.sequence_shard = SequenceShard(device_mesh)
        return module


@dataclass(frozen=True)
class SequenceShard:
    """The positions of a sequence that this rank computes: `layer.sequence_shard`."""

    mesh: DeviceMesh

    def rotate(self, rope: RoPE, x: Float[Tensor, "B H T/R D"]) -> Float[Tensor, "B H T/R D"]:
        """Rotate queries or keys at their positions in the whole sequence."""
        pieces = _pieces(x.shape[2] * self.mesh.size(), self.mesh)
        parts = zip(x.chunk(2, 2), pieces, strict=True)
        return torch.cat([rope(part, first) for part, (first, _) in parts], 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        """Attend from this rank's positions to all."""
        return attend(q, k, v, mesh=self.mesh, **keywords)
