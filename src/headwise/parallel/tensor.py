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
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
)
from torch.distributed.tensor.parallel import ParallelStyle

from ..layers.attention import HeadNorm, MultiHeadAttention
from ..models.gpt import MLP, Conv1D, GPT2Attention
from ..weights.projections import QueryKeyProjections
from .sections import Sections, local_part, shard_parameter


def plan(model: nn.Module) -> ParallelStyle | dict[str, ParallelStyle]:
    """Return the styles with which `parallelize_module` shards a model's heads over ranks.

    Every `MultiHeadAttention` gets `HeadParallel`, GPT-2's feed-forward part `ColumnParallel` and
    `RowParallel`; activations between them are the same on every rank. The model computes the same
    outputs, gradients and statistics as on one rank, up to rounding, and its `state_dict` has the
    same names and shapes.

    Returns:
        Styles by module name; for a single layer, its style.

    Raises:
        ValueError: the model has no headwise layer, or is already sharded.

    >>> import headwise as hw
    >>> from headwise.models.gpt import GPT, GPTConfig
    >>> sizes = {"vocab_size": 11, "n_positions": 7, "n_embd": 6, "n_layer": 1, "n_head": 3}
    >>> for name, style in hw.parallel.plan(GPT(GPTConfig(**sizes))).items():
    ...     print(name, type(style).__name__)
    transformer.h.0.attn HeadParallel
    transformer.h.0.mlp.c_fc ColumnParallel
    transformer.h.0.mlp.c_proj RowParallel

    Then, on every rank: `parallelize_module(model, mesh["tp"], hw.parallel.plan(model))`, before
    `fully_shard` and before the optimizer is created.
    """
    styles: dict[str, ParallelStyle] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadAttention):
            if module.head_shard is not None:
                raise ValueError(f"plan({type(model).__name__}): {name!r} is already sharded.")
            styles[name] = HeadParallel()
        elif isinstance(module, MLP):
            styles[f"{name}.c_fc"] = ColumnParallel()
            styles[f"{name}.c_proj"] = RowParallel()
    if not styles:
        raise ValueError(
            f"plan({type(model).__name__}): it has no hw.MultiHeadAttention; models of "
            f"transformers have their own plans (tp_plan)."
        )
    return styles[""] if isinstance(model, MultiHeadAttention) else styles


# ── linear layers ───────────────────────────────────────────────────────────────────────────────


class _ShardedLinear(ParallelStyle):
    """A Linear, or GPT-2's Conv1D, whose weight is sharded along one of its axes."""

    def __init__(self, outputs: bool) -> None:
        self.outputs = outputs  # True: shard the outputs; False: the inputs

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        call = f"{type(self).__name__}()({module})"
        if not isinstance(module, nn.Linear | Conv1D) or isinstance(module.weight, DTensor):
            raise ValueError(f"{call}: give an nn.Linear, or GPT-2's Conv1D, that is on one rank.")
        axis = int(self.outputs == isinstance(module, Conv1D))
        if (size := module.weight.shape[axis]) % device_mesh.size():
            ranks = device_mesh.size()
            raise ValueError(f"{call}: {size} features do not divide by {ranks} ranks.")
        bias = Shard(0) if self.outputs else Replicate()
        shard_parameter(module, "weight", device_mesh, Shard(axis))
        shard_parameter(module, "bias", device_mesh, bias)
        given = Replicate() if self.outputs else Shard(-1)

        def to_distributed(module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            return DTensor.from_local(inputs[0], mesh, [given], run_check=False)

        def to_local(module: nn.Module, out: Any, mesh: DeviceMesh) -> Tensor:
            return (out if self.outputs else out.redistribute(placements=[Replicate()])).to_local()

        outputs: Any = to_local
        return distribute_module(module, device_mesh, None, to_distributed, outputs)


class ColumnParallel(_ShardedLinear):
    """Shard the outputs of a Linear, or of GPT-2's Conv1D; each rank computes `[..., O/R]`.

    The input is the same on every rank.
    """

    def __init__(self) -> None:
        super().__init__(outputs=True)


class RowParallel(_ShardedLinear):
    """Shard the inputs of a Linear, or of GPT-2's Conv1D; each rank reads `[..., I/R]`.

    The outputs of all ranks are summed, and the bias is added once.
    """

    def __init__(self) -> None:
        super().__init__(outputs=False)


# ── attention ───────────────────────────────────────────────────────────────────────────────────


class HeadParallel(ParallelStyle):
    """Shard the heads of a `MultiHeadAttention`: each rank attends with some of them.

    With fewer key/value heads than ranks, every rank has all of them and uses those that its query
    heads read. Tables number the heads as in the whole layer.

    Raises, when it is applied:
        ValueError: the heads do not divide by the ranks, or the class of the layer is unsupported.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiHeadAttention) or module.head_shard is not None:
            raise ValueError(
                f"HeadParallel()({type(module).__name__}): give an hw.MultiHeadAttention that is "
                f"on one rank."
            )
        _check_heads(module, device_mesh)
        shard = HeadShard.of(module, device_mesh)
        kv = Shard(0) if shard.all_kv_heads % device_mesh.size() == 0 else Replicate()
        placements: dict[str, Placement] = {"q": Shard(0), "k": kv, "v": kv}
        for name in dict.fromkeys(shard.modules.values()):
            rows = {
                part: shard.size(part) * module.head_dim
                for part, owner in shard.modules.items()
                if owner == name
            }
            linear = module.get_submodule(name)
            transposed = isinstance(linear, Conv1D)
            setattr(module, name, Sections(linear, rows, placements, device_mesh, transposed))
        gpt2 = isinstance(module, GPT2Attention)
        RowParallel()._apply(module.c_proj if gpt2 else module.out, device_mesh)
        shard_parameter(module, "sinks", device_mesh, Shard(0))
        shard_parameter(module, "some_bias", device_mesh, Replicate())
        for name in ("q_norm", "k_norm"):
            if (norm := getattr(module, name)) is not None:
                setattr(module, name, _ReplicatedHeadNorm(norm, device_mesh))
        module.head_shard = shard
        module.num_heads, module.num_kv_heads = shard.heads, shard.kv_heads
        return module


@dataclass(frozen=True)
class HeadShard:
    """The heads of a layer that this rank computes: `layer.head_shard`.

    modules: the submodule (`Sections`) that holds each of q, k and v.
    """

    mesh: DeviceMesh
    first: int
    heads: int
    all_heads: int
    first_kv: int
    kv_heads: int
    all_kv_heads: int
    modules: dict[str, str]

    @classmethod
    def of(cls, layer: MultiHeadAttention, mesh: DeviceMesh) -> HeadShard:
        """Return the shard of this rank for a layer that is not yet sharded."""
        ranks, rank = mesh.size(), mesh.get_local_rank()
        heads, kv_heads = layer.num_heads, layer.num_kv_heads
        if isinstance(layer, GPT2Attention):
            modules = dict.fromkeys("qkv", "c_attn")
        elif layer.kv_dim == layer.embed_dim:
            modules = dict.fromkeys("qkv", "qkv")
        else:
            modules = {"q": "q", "k": "kv", "v": "kv"}
        here, here_kv = heads // ranks, max(1, kv_heads // ranks)
        first_kv = rank * kv_heads // ranks
        return cls(mesh, rank * here, here, heads, first_kv, here_kv, kv_heads, modules)

    def size(self, part: str) -> int:
        """Return the number of heads of q, k or v in the whole layer."""
        return self.all_heads if part == "q" else self.all_kv_heads

    def project(
        self, layer: MultiHeadAttention, x: Tensor, context: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute this rank's heads of q, k and v, `[B, heads, T, D]`."""
        if context is not None and isinstance(layer, GPT2Attention):
            raise ValueError("GPT2Attention attends to its own input; it takes no context")
        x = _replicated(x, self.mesh)
        source = x if context is None else _replicated(context, self.mesh)
        q, k, v = (self._part(layer, part, x if part == "q" else source) for part in "qkv")
        return q, k, v

    def weights(self, layer: MultiHeadAttention) -> list[Tensor]:
        """Return the weights of q, k and v, in this order."""
        return [layer.get_parameter(f"{name}.{part}") for part, name in self.modules.items()]

    def _part(self, layer: MultiHeadAttention, part: str, x: Tensor) -> Tensor:
        sections = layer.get_submodule(self.modules[part])
        assert isinstance(sections, Sections)
        first, heads = (self.first, self.heads) if part == "q" else (self.first_kv, self.kv_heads)
        rows = slice(first * layer.head_dim, (first + heads) * layer.head_dim)
        return layer._heads(sections(part, x, rows, self._some_bias(layer, part, rows)))

    def _some_bias(self, layer: MultiHeadAttention, part: str, rows: slice) -> Tensor | None:
        """Return the rows of a section in `some_bias`, which every rank holds in full."""
        if (bias := getattr(layer, "some_bias", None)) is None:
            return None
        fused = [one for one in "qkv" if self.modules[one] == self.modules["k"]]
        biased = [one for one in fused if layer.bias["qkv".index(one)]]
        if part not in biased:
            return None
        before = biased[: biased.index(part)]
        first = sum(self.size(other) for other in before) * layer.head_dim
        return local_part(bias)[first + rows.start : first + rows.stop]

    @contextmanager
    def own_random_numbers(self, device: torch.device) -> Iterator[None]:
        """Use different random numbers on each rank in a `with` block; then all ranks agree again.

        The seed comes from the CPU's generator, which is in the same state on all ranks.
        """
        seed = int(torch.randint(2**62, ()))
        devices = [device.index or 0] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed + self.first)
            yield

    def projections(self, layer: MultiHeadAttention) -> QueryKeyProjections:
        """Return the projections of the whole layer's queries and keys, for `qk_clip_`."""
        return _SectionsProjections(layer, self)

    def __str__(self) -> str:
        return f"heads {self.first} to {self.first + self.heads - 1} of {self.all_heads}"


def _check_heads(layer: MultiHeadAttention, mesh: DeviceMesh) -> None:
    """Raise ValueError if heads do not divide by the ranks or the class is unsupported."""
    call = f"HeadParallel()({type(layer).__name__}({layer.extra_repr()})) on {mesh.size()} ranks"
    if type(layer) not in (MultiHeadAttention, GPT2Attention):
        raise ValueError(f"{call}: only hw.MultiHeadAttention and GPT2Attention can be sharded.")
    if mesh.ndim != 1:
        raise ValueError(f'{call}: the mesh has {mesh.ndim} axes; give one, such as mesh["tp"].')
    ranks, heads, kv_heads = mesh.size(), layer.num_heads, layer.num_kv_heads
    if heads % ranks:
        raise ValueError(f"{call}: {heads} heads do not divide by {ranks} ranks.")
    if kv_heads % ranks and ranks % kv_heads:
        raise ValueError(
            f"{call}: {kv_heads} key/value heads and {ranks} ranks do not divide each other, so "
            f"the query heads of a rank would share key/value heads with other ranks."
        )


def _replicated(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return a tensor that is equal on all ranks; the gradients of the ranks are summed."""
    whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return whole.to_local(grad_placements=[Partial()])


class _ReplicatedHeadNorm(HeadNorm):
    """The norm of each head with one weight for the heads of all ranks."""

    def __init__(self, norm: HeadNorm, mesh: DeviceMesh) -> None:
        super().__init__(len(norm.weight), norm.eps or 0.0, device="meta")
        self.weight = norm.weight
        self.train(norm.training)
        shard_parameter(self, "weight", mesh, Replicate())

    def forward(self, x: Tensor) -> Tensor:
        weight = local_part(self.weight)
        return F.rms_norm(x, weight.shape, weight, self.eps)


class _SectionsProjections(QueryKeyProjections):
    """The projections of a layer whose heads are sharded.

    Factors cover all heads, on every rank; sharded parameters use their part.

    Raises:
        ValueError: only some of q, k and v have a bias.
    """

    def __init__(self, layer: MultiHeadAttention, shard: HeadShard) -> None:
        if getattr(layer, "some_bias", None) is not None:
            raise ValueError("a bias of only some of q, k and v is not supported")
        self.num_heads, self.num_kv_heads = shard.all_heads, shard.all_kv_heads
        self.normed = layer.q_norm is not None
        self.own = frozenset(name for name, _ in layer.named_parameters())
        self._width = layer.head_dim
        self.queries, self.keys = (
            tuple(
                f"{shard.modules[part]}.{part}{kind}"
                for kind in ("", "_bias")
                if f"{shard.modules[part]}.{part}{kind}" in self.own
            )
            for part in "qk"
        )
        self._transposed = isinstance(layer, GPT2Attention)

    def factors(self, q: Tensor, k: Tensor) -> Iterator[tuple[str, Tensor]]:
        for names, gamma in ((self.queries, q), (self.keys, k)):
            rows = gamma.repeat_interleave(self._width)
            for name in names:
                matrix = rows[None] if self._transposed else rows[:, None]
                yield name, rows if name.endswith("_bias") else matrix
