"""Tensor parallelism: each rank computes some of a layer's heads.

Source: Shoeybi et al. 2019 (Megatron-LM), §3; grouped heads: Ainslie et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from ..core.mask_algebra import Mask
from ..layers.attention import MultiHeadAttention
from ..models.gpt import MLP, Conv1D, GPT2Attention
from ..weights.projections import Projections
from .projections import SectionsProjections
from .sections import Sections, laid, local


def plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """The styles by which `parallelize_module` lays a model's heads over ranks.

    Every `MultiHeadAttention` gets `HeadParallel`, GPT-2's feed-forward part `ColumnParallel` and
    `RowParallel`; what lies between is the same on every rank. A model computes the same outputs,
    gradients and statistics as on one rank, up to rounding, and its `state_dict` has the same
    names and shapes.

    Returns:
        By module name; of a layer itself, its style.

    Raises:
        ValueError: the model has no layer of headwise's; or has been laid over ranks already.

    >>> import headwise as hw
    >>> from headwise.models.gpt import GPT, GPTConfig
    >>> sizes = {"vocab_size": 11, "n_positions": 7, "n_embd": 6, "n_layer": 1, "n_head": 3}
    >>> for name, style in hw.parallel.plan(GPT(GPTConfig(**sizes))).items():
    ...     print(name, type(style).__name__)
    transformer.h.0.attn HeadParallel
    transformer.h.0.mlp.c_fc ColumnParallel
    transformer.h.0.mlp.c_proj RowParallel

    Then, on every rank: `parallelize_module(model, mesh["tp"], hw.parallel.plan(model))`, before
    `fully_shard` and before the optimizer is made.
    """
    found: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            if isinstance(module, HeadsOverRanks):
                raise ValueError(f"plan({type(model).__name__}): {name!r} lies over ranks already.")
            found[name] = HeadParallel()
        elif isinstance(module, MLP):
            found[f"{name}.c_fc"] = ColumnParallel()
            found[f"{name}.c_proj"] = RowParallel()
    if not found:
        raise ValueError(
            f"plan({type(model).__name__}): it has no hw.MultiHeadAttention; models of "
            f"transformers have plans of their own (tp_plan)."
        )
    return found[""] if isinstance(model, MultiHeadAttention) else found


# ── linear layers ───────────────────────────────────────────────────────────────────────────────


class ColumnParallel(ParallelStyle):
    """The outputs of a Linear, or of GPT-2's Conv1D, over ranks; each computes `[..., O/R]`.

    The input is the same on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divided(module, device_mesh, rows=True)
        _lay(module, device_mesh, "weight", Shard(int(isinstance(module, Conv1D))))
        _lay(module, device_mesh, "bias", Shard(0))
        return _became(module, _Columns, device_mesh)


class RowParallel(ParallelStyle):
    """The inputs of a Linear, or of GPT-2's Conv1D, over ranks; each reads `[..., I/R]`.

    The outputs of all ranks are added up, and the bias once.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _divided(module, device_mesh, rows=False)
        _lay(module, device_mesh, "weight", Shard(int(not isinstance(module, Conv1D))))
        _lay(module, device_mesh, "bias", Replicate())
        return _became(module, _Rows, device_mesh)


class _OverRanks(nn.Module):
    """What a module becomes whose weights lie over ranks; `mesh` has these."""

    mesh: DeviceMesh

    def _weight(self) -> Tensor:
        """This rank's part, `[out, in]`."""
        weight = local(self.get_parameter("weight"))
        return weight.t() if isinstance(self, Conv1D) else weight

    def _bias(self, partial: bool) -> Tensor | None:
        bias = getattr(self, "bias", None)
        return None if bias is None else local(bias, partial)


class _Columns(_OverRanks):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(shared(x, self.mesh), self._weight(), self._bias(partial=True))


class _Rows(_OverRanks):
    def forward(self, x: Tensor) -> Tensor:
        out = summed(F.linear(x, self._weight()), self.mesh)
        bias = self._bias(partial=False)
        return out if bias is None else out + bias


class _SharedNorm(_OverRanks):
    """An RMS norm of each head, with one weight for all of them."""

    def forward(self, x: Tensor) -> Tensor:
        weight = local(self.get_parameter("weight"))
        return F.rms_norm(x, weight.shape, weight, self.eps)  # type: ignore[arg-type]


def shared(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """What every rank has alike, as each uses it for its own part: gradients are added up."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


def summed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum of what the ranks have, on every rank."""
    parts = DTensor.from_local(x, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _divided(module: nn.Module, mesh: DeviceMesh, rows: bool) -> None:
    """Raise ValueError for what is no projection, or does not divide by the ranks."""
    said = f"{'ColumnParallel' if rows else 'RowParallel'}()({module})"
    if not isinstance(module, nn.Linear | Conv1D) or isinstance(module, _OverRanks):
        raise ValueError(f"{said}: give an nn.Linear, or GPT-2's Conv1D, that is on one rank.")
    across = int(isinstance(module, Conv1D)) if rows else int(not isinstance(module, Conv1D))
    if (size := module.weight.shape[across]) % mesh.size():
        raise ValueError(f"{said}: {size} features do not divide by {mesh.size()} ranks.")


def _lay(module: nn.Module, mesh: DeviceMesh, name: str, place: Placement) -> None:
    """Lay a parameter of a module over ranks, if there is one."""
    if isinstance(x := getattr(module, name, None), nn.Parameter):
        module.register_parameter(name, laid(x, mesh, place, x.requires_grad))


def _became(module: nn.Module, kind: type[nn.Module], mesh: DeviceMesh) -> nn.Module:
    """The module with another forward: its class is one that has both as its bases."""
    made = type(f"Parallel{type(module).__name__}", (kind, type(module)), {})
    object.__setattr__(module, "__class__", made)
    object.__setattr__(module, "mesh", mesh)
    return module


# ── attention ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Heads:
    """Which of a layer's query heads are on this rank, and of how many; the same of keys."""

    first: int
    here: int
    all: int
    first_kv: int
    here_kv: int
    all_kv: int

    def size(self, part: str) -> int:
        """How many heads of q, k or v the layer has."""
        return self.all if part == "q" else self.all_kv

    def rows(self, part: str, width: int) -> slice:
        """Where the heads of q, k or v that are here begin and end among the layer's rows."""
        first, here = (self.first, self.here) if part == "q" else (self.first_kv, self.here_kv)
        return slice(first * width, (first + here) * width)


class HeadParallel(ParallelStyle):
    """The heads of a `MultiHeadAttention` over ranks: each rank attends with some of them.

    With fewer key/value heads than ranks, every rank has all of them, and uses the one that its
    query heads read. Tables have the heads' numbers in the whole layer.

    Raises, when it is applied:
        ValueError: heads that do not divide by the ranks; another class of layer.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiHeadAttention) or isinstance(module, HeadsOverRanks):
            raise ValueError(
                f"HeadParallel()({type(module).__name__}): give an hw.MultiHeadAttention that is "
                f"on one rank."
            )
        return _laid_by_heads(module, device_mesh)


class HeadsOverRanks(MultiHeadAttention):
    """A `MultiHeadAttention` of which this rank has some heads."""

    mesh: DeviceMesh
    place: Heads
    fused: dict[str, str]

    @property
    def first_head(self) -> int:
        """The number that this rank's first head has in the whole layer."""
        return self.place.first

    @property
    def all_heads(self) -> int:
        """How many heads the whole layer has."""
        return self.place.all

    def forward(
        self, x: Tensor, context: Tensor | None = None, *more: object, **keywords: Any
    ) -> Tensor:
        other = None if context is None else shared(context, self.mesh)
        return super().forward(shared(x, self.mesh), other, *more, **keywords)

    def _fault_of_sharding(self) -> None:
        return None

    def _project(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        if context is not None and isinstance(self, GPT2Attention):
            raise ValueError("GPT2Attention attends to its own input; it takes no context")
        source = x if context is None else context
        q, k, v = (self._section(part, x if part == "q" else source) for part in "qkv")
        return q, k, v

    def _section(self, part: str, x: Tensor) -> Tensor:
        """This rank's heads of q, k or v, `[B, heads here, T, D]`."""
        sections = self.get_submodule(self.fused[part])
        assert isinstance(sections, Sections)
        rows = self.place.rows(part, self.head_dim)
        return self._heads(sections.section(part, x, rows, self._some_bias(part, rows)))

    def _some_bias(self, part: str, rows: slice) -> Tensor | None:
        """A section's part of `some_bias`, which every rank has whole."""
        parts = [one for one in "qkv" if self.fused[one] == self.fused["k"]]
        biased = [one for one in parts if self.bias["qkv".index(one)]]
        if self.some_bias is None or part not in biased:
            return None
        before = biased[: biased.index(part)]
        first = sum(self.place.size(other) for other in before) * self.head_dim
        return local(self.some_bias)[first + rows.start : first + rows.stop]

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, first_query: int | None = None
    ) -> Tensor:
        if not (self.training and self.dropout):
            return super()._attend(q, k, v, mask, first_query)
        with own_random_numbers(self.place.first, q.device):
            return super()._attend(q, k, v, mask, first_query)

    @property
    def own_sinks(self) -> Tensor | None:
        return None if self.sinks is None else local(self.sinks)

    @property
    def projection(self) -> Tensor:
        return local(super().projection)

    def projections(self) -> Projections:
        """Where the whole layer's queries and keys are made, for `qk_clip_`."""
        place = self.place
        return SectionsProjections(self, self.fused, place.all, place.all_kv)

    def reset_parameters(self) -> None:
        """As the layer that it was, on every rank its part."""
        wide = isinstance(self, GPT2Attention)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith(("bias", "sinks")):
                    nn.init.zeros_(parameter)
                elif name.endswith("norm.weight"):
                    nn.init.ones_(parameter)
                elif wide:
                    nn.init.normal_(parameter, std=0.02)
                else:
                    nn.init.xavier_uniform_(parameter)

    def extra_repr(self) -> str:
        place = self.place
        here = f"heads {place.first} to {place.first + place.here - 1} of {place.all}"
        return f"{super().extra_repr()}, {here}"


def _laid_by_heads(module: MultiHeadAttention, mesh: DeviceMesh) -> MultiHeadAttention:
    """Lay the parameters of a layer over ranks, by heads."""
    place = _heads_of(module, mesh)
    kv = Shard(0) if place.all_kv % mesh.size() == 0 else Replicate()
    placements: dict[str, Placement] = {"q": Shard(0), "k": kv, "v": kv}
    rows = {"q": place.all, "k": place.all_kv, "v": place.all_kv}
    rows = {part: count * module.head_dim for part, count in rows.items()}
    gpt2 = isinstance(module, GPT2Attention)
    names = ("c_attn",) if gpt2 else ("qkv",) if module.kv_dim == module.embed_dim else ("q", "kv")
    fused: dict[str, str] = {}
    for name in names:
        parts = "qkv" if name == "c_attn" else name
        linear = module.get_submodule(name)
        own = {part: rows[part] for part in parts}
        setattr(module, name, Sections(linear, own, placements, mesh, transposed=gpt2))
        fused |= dict.fromkeys(parts, name)
    RowParallel()._apply(module.c_proj if gpt2 else module.out, mesh)
    _lay(module, mesh, "sinks", Shard(0))
    _lay(module, mesh, "some_bias", Replicate())
    for norm in (module.q_norm, module.k_norm):
        if norm is not None:
            _lay(norm, mesh, "weight", Replicate())
            _became(norm, _SharedNorm, mesh)
    over = _became(module, HeadsOverRanks, mesh)
    assert isinstance(over, HeadsOverRanks)
    over.place, over.fused = place, fused
    if gpt2:
        over.register_parameter("some_bias", None)
    over.num_heads, over.num_kv_heads = place.here, place.here_kv
    return over


def _heads_of(module: MultiHeadAttention, mesh: DeviceMesh) -> Heads:
    """Which heads are this rank's.

    Raises:
        ValueError: they do not divide by the ranks; or a layer that keeps its weights elsewhere.
    """
    said = f"HeadParallel()({type(module).__name__}({module.extra_repr()})) on {mesh.size()} ranks"
    if type(module) not in (MultiHeadAttention, GPT2Attention):
        raise ValueError(f"{said}: it is known of hw.MultiHeadAttention and GPT2Attention alone.")
    if mesh.ndim != 1:
        raise ValueError(f'{said}: the mesh has {mesh.ndim} axes; give one of them, as mesh["tp"].')
    ranks, rank = mesh.size(), mesh.get_local_rank()
    heads, groups = module.num_heads, module.num_kv_heads
    if heads % ranks:
        raise ValueError(f"{said}: {heads} heads do not divide by {ranks} ranks.")
    if groups % ranks and ranks % groups:
        raise ValueError(
            f"{said}: {groups} key/value heads neither divide by {ranks} ranks nor the ranks by "
            f"them, so that a rank's query heads would read several in part."
        )
    here, here_kv = heads // ranks, max(1, groups // ranks)
    return Heads(rank * here, here, heads, rank * groups // ranks, here_kv, groups)


@contextmanager
def own_random_numbers(rank: int, device: torch.device) -> Iterator[None]:
    """Numbers that each rank draws for itself; afterwards all go on alike.

    The seed is drawn from the generator of the CPU, which all ranks of a layer have alike.
    """
    seed = int(torch.randint(2**62, ()))
    devices = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed + rank)
        yield
