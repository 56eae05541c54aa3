"""Context parallelism: each rank has some positions of the sequence, and attends from them.

Keys and values are gathered; queries, outputs and statistics stay where they are. Under a causal
mask later queries see more keys, so that each rank has two pieces: the r-th from the start and the
r-th from the end, whose work adds up to the same on all ranks (Dubey et al. 2024, Llama 3, §3.3.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..attend import attend as attend_here
from ..core.mask_algebra import And, Mask, Or, Rows
from ..core.masks import ALiBi, Causal, Documents, Everything, Padding, Prefix, Window, as_mask
from ..core.shapes import Extent
from ..layers.attention import MultiHeadAttention
from ..layers.kv_cache import KVCache


def positions(length: int, mesh: DeviceMesh) -> Int[Tensor, " T/R"]:
    """The positions of a sequence that this rank has, in the order in which it has them.

    Args:
        length: of the whole sequence, a multiple of twice the number of ranks.
        mesh: the ranks, one axis.

    Raises:
        ValueError: a length that does not divide so.
    """
    device = mesh.device_type if mesh.device_type != "cpu" else None
    return torch.cat([torch.arange(*piece, device=device) for piece in _pieces(length, mesh)])


def shard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's positions of a sequence that every rank has, along `dim`.

    Raises:
        ValueError: a length that is no multiple of twice the number of ranks.
    """
    return torch.cat([x.narrow(dim, a, b - a) for a, b in _pieces(x.shape[dim], mesh)], dim)


def unshard(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """The whole sequence on every rank, in its order, from each rank's positions along `dim`.

    Differentiable: gradients of the ranks are added up, and each has those of its positions.
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
    """`hw.attend` on a sequence that lies over ranks: each gives and gets its own positions.

    Args:
        q, k, v: those of `positions(T, mesh)`, as `shard(x, mesh, dim=2)` gives them.
        mesh: the ranks, one axis.
        mask: of the whole sequence.
        keywords: as of `hw.attend`.

    Raises:
        ValueError: as `hw.attend`; a length that is no multiple of two.
    """
    keys, values = _gathered(k, v, mesh)
    parts = _parts(q, keys, as_mask(mask), mesh)
    found = [
        attend_here(part, keys, values, mask=own, first_query=first, **keywords)
        for part, own, first in parts
    ]
    return torch.cat(found, 2)


def _pieces(length: int, mesh: DeviceMesh) -> list[tuple[int, int]]:
    """Where this rank's two pieces of a sequence begin and end."""
    ranks, rank = mesh.size(), mesh.get_local_rank()
    if length % (2 * ranks):
        raise ValueError(
            f"a sequence of {length} over {ranks} ranks: each has two pieces of one length; pad it "
            f"to a multiple of {2 * ranks}, and give mask=Padding(lengths)."
        )
    size = length // (2 * ranks)
    return [(n * size, (n + 1) * size) for n in (rank, 2 * ranks - 1 - rank)]


def _gathered(k: Tensor, v: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """All keys and values, in order; of one width in one collective."""
    if k.shape[-1] != v.shape[-1] or k.dtype != v.dtype:
        return unshard(k, mesh, 2), unshard(v, mesh, 2)
    heads = k.shape[1]
    both = unshard(torch.cat([k, v], 1), mesh, 2)
    return both[:, :heads], both[:, heads:]


_BY_POSITION = (Everything, Causal, Window, Padding, Documents, Prefix, ALiBi)
"""Masks that reckon from positions and keys alone, and so fit any part of the queries."""


def _parts(q: Tensor, keys: Tensor, mask: Mask, mesh: DeviceMesh) -> list[tuple[Tensor, Mask, int]]:
    """This rank's two pieces of queries, each with its mask and the position of its first."""
    length = q.shape[2] * mesh.size()
    whole = Extent(len(q), q.shape[1], keys.shape[1], length, length)
    mask.check(whole)
    pieces = _pieces(length, mesh)
    found = []
    for part, (start, stop) in zip(q.chunk(2, 2), pieces, strict=True):
        rows = torch.arange(start, stop, device=q.device)
        own = mask if _by_position(mask) else Rows(mask, rows, replace(whole, first_query=0))
        found.append((part, own, start))
    return found


def _by_position(mask: Mask) -> bool:
    if isinstance(mask, And | Or):
        return all(map(_by_position, mask.parts))
    return type(mask) in _BY_POSITION


# ── layers ──────────────────────────────────────────────────────────────────────────────────────


def context_plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """The styles by which `parallelize_module` has a model attend over ranks' positions.

    The model is then given each rank's part, `hw.parallel.shard(ids, mesh)`, and gives that part's
    outputs; whatever depends on positions wants `hw.parallel.positions(T, mesh)`, such as
    `GPT(…, positions=…)`. Masks are those of the whole sequence. Gradients of weights are those of
    a rank's own positions: DDP and FSDP add them up over the same ranks.

    Returns:
        By module name; of a layer itself, its style.

    Raises:
        ValueError: the model has no layer of headwise's.
    """
    if isinstance(model, MultiHeadAttention):
        return ContextParallel()
    layers = [n for n, m in model.named_modules() if isinstance(m, MultiHeadAttention)]
    if not layers:
        raise ValueError(f"context_plan({type(model).__name__}): it has no hw.MultiHeadAttention.")
    return {name: ContextParallel() for name in layers}


class ContextParallel(ParallelStyle):
    """A `MultiHeadAttention` attends from this rank's positions to all; its input lies over ranks.

    Raises, when it is applied:
        ValueError: a module that is none; rotary positions that depend on the length.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        said = f"ContextParallel()({type(module).__name__})"
        if not isinstance(module, MultiHeadAttention) or isinstance(module, PositionsOverRanks):
            raise ValueError(f"{said}: give an hw.MultiHeadAttention that has whole sequences.")
        if device_mesh.ndim != 1:
            raise ValueError(f'{said}: the mesh has several axes; give one, as mesh["cp"].')
        if module.rope is not None and module.rope.depends_on_length:
            raise ValueError(f"{said}: its rotary positions depend on the length of the text.")
        name = f"Context{type(module).__name__}"
        module.__class__ = type(name, (PositionsOverRanks, type(module)), {})
        module.positions_mesh = device_mesh  # type: ignore[assignment]
        return module


class PositionsOverRanks(MultiHeadAttention):
    """A `MultiHeadAttention` that attends from this rank's positions."""

    positions_mesh: DeviceMesh

    def _check_call(self, x: Tensor, context: Tensor | None, cache: KVCache | None) -> None:
        super()._check_call(x, context, cache)
        given = "a context" if context is not None else "a cache" if cache is not None else None
        if given is not None:
            raise ValueError(
                f"{type(self).__name__}({self.extra_repr()})(x {list(x.shape)}): {given} cannot be "
                f"given where positions lie over ranks; this layer attends within one sequence."
            )

    def _place(
        self, q: Tensor, k: Tensor, v: Tensor, cache: KVCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.rope is None:
            return q, k, v
        first = [start for start, _ in _pieces(self._length(q), self.positions_mesh)]
        q, k = (
            torch.cat([self.rope(x, at) for x, at in zip(t.chunk(2, 2), first, strict=True)], 2)
            for t in (q, k)
        )
        return q, k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None,
        first_query: int | None = None,
    ) -> Tensor:
        mesh = self.positions_mesh
        keys, values = _gathered(k, v, mesh)
        own = super()._attend
        parts = _parts(q, keys, as_mask(mask), mesh)
        return torch.cat([own(part, keys, values, some, at) for part, some, at in parts], 2)

    def _length(self, q: Tensor) -> int:
        return q.shape[2] * self.positions_mesh.size()
