"""The rungs of the ladder, each ready to run on the same weights.

The weights are four matrices in the layout `functional`; `convert` maps them to the layout of each
rung. The scalar rung has no biases, so biases that a class always has are 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.masks import Causal
from ..layers.attention import MultiHeadAttention
from ..systems import functional, fused, per_head, scalar, split, variants
from ..weights.convert import convert
from . import timing

State = Mapping[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Batch B, length T, width E and heads H of one comparison."""

    batch: int
    length: int
    width: int
    heads: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.length}x{self.width}x{self.heads}"

    @property
    def multiply_adds(self) -> int:
        """The multiply-adds of four projections and two products, as if no key were hidden."""
        return self.batch * self.length * self.width * (4 * self.width + 2 * self.length)


SIZES = (Size(1, 16, 16, 4), Size(4, 256, 256, 8))


def parse_sizes(texts: Sequence[str]) -> list[Size]:
    """Parse sizes such as `1x16x16x4`, comma-separated; duplicates are removed.

    Raises:
        ValueError: a text is not a size, or its width is not a multiple of its heads.

    >>> [str(size) for size in parse_sizes(["1x16x16x4,2×64×32×4"])]
    ['1x16x16x4', '2x64x32x4']
    """
    sizes: dict[Size, None] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        numbers = re.fullmatch(r"(\d+)[x×](\d+)[x×](\d+)[x×](\d+)", text)
        if numbers is None or 0 in map(int, numbers.groups()):
            raise ValueError(
                f"--sizes {text}: must be batch x length x width x heads, integers of at least "
                "1, such as 1x16x16x4"
            )
        size = Size(*map(int, numbers.groups()))
        if size.width % size.heads:
            raise ValueError(
                f"--sizes {text}: the width {size.width} must be a multiple of the "
                f"{size.heads} heads"
            )
        sizes[size] = None
    return list(sizes)


class Torch:
    """Run a PyTorch module, eagerly or compiled.

    Without `counted`, its multiply-adds are None: PyTorch's counter misses compiled kernels.
    """

    def __init__(self, module: nn.Module, compile: bool, counted: bool = True) -> None:
        self.parameters = sum(weight.numel() for weight in module.parameters())
        self._module = module
        self._counted = counted
        self._call: Callable[[Tensor], Tensor] = (
            torch.compile(module, fullgraph=True, dynamic=False) if compile else module
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, without gradients."""
        with torch.no_grad():
            return self._call(x)

    def step(self, x: Tensor, pull: Tensor) -> Tensor:
        """Run forward, and backward from `pull` to weights and input; return the gradient of x."""
        self._module.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        self._call(leaf).backward(pull)
        assert leaf.grad is not None
        return leaf.grad

    def multiply_adds(self, x: Tensor) -> int | None:
        """Return the multiply-adds of one forward pass; None if they are not counted."""
        # With gradients, PyTorch's own layer does not take a fast path that the counter misses.
        return timing.multiply_adds(lambda: self._module(x)) if self._counted else None

    def peak_bytes(self, x: Tensor, pull: Tensor) -> int:
        """Return the peak memory of a step: activations, temporaries and gradients."""
        self._module.zero_grad(set_to_none=True)
        return timing.peak_bytes(lambda: self.step(x, pull), x.device.type)


class Scalars:
    """Run the scalar rung, with the methods of `Torch`."""

    def __init__(self, weights: Mapping[str, list[list[float]]], heads: int) -> None:
        self._weights = {name: scalar.as_values(rows) for name, rows in weights.items()}
        self._heads = heads
        self.parameters = sum(len(rows) * len(rows[0]) for rows in weights.values())

    def forward(self, x: Tensor) -> Tensor:
        _, out = self._run(x)
        return _tensor([[[value.data for value in row] for row in batch] for batch in out])

    def step(self, x: Tensor, pull: Tensor) -> Tensor:
        loss, leaves = self._loss(x, pull)
        loss.backward()
        return _tensor([[[value.grad for value in row] for row in batch] for batch in leaves])

    def multiply_adds(self, x: Tensor) -> int | None:
        count, dot = 0, scalar.dot

        def counted(a: Sequence[scalar.Value], b: Sequence[scalar.Value]) -> scalar.Value:
            nonlocal count
            count += len(a)
            return dot(a, b)

        scalar.dot = counted
        try:
            self._run(x)
        finally:
            scalar.dot = dot
        return count

    def peak_bytes(self, x: Tensor, pull: Tensor) -> int:
        return timing.python_peak_bytes(lambda: self.step(x, pull))

    def _run(self, x: Tensor) -> tuple[list[scalar.Matrix], list[scalar.Matrix]]:
        wq, wk, wv, wo = (self._weights[f"attn_w{part}"] for part in "qkvo")
        leaves = [scalar.as_values(batch) for batch in x.tolist()]
        out: list[scalar.Matrix] = []
        for tokens in leaves:
            keys: scalar.Matrix = []
            values: scalar.Matrix = []
            out.append(
                [scalar.attention(t, wq, wk, wv, wo, keys, values, self._heads) for t in tokens]
            )
        return leaves, out

    def _loss(self, x: Tensor, pull: Tensor) -> tuple[scalar.Value, list[scalar.Matrix]]:
        leaves, out = self._run(x)
        flat = [value for batch in out for row in batch for value in row]
        pulls = [scalar.Value(number) for number in pull.flatten().tolist()]
        return scalar.dot(flat, pulls), leaves


def _tensor(numbers: list[list[list[float]]]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)  # like Python's floats


class Adapted(nn.Module):
    """A layer with a custom call: `call(layer, x)` returns only the output."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _per_head(size: Size, state: State) -> nn.Module:
    width, heads = size.width, size.heads
    attention = per_head.MultiHeadedAttentionWrapper(width, width // heads, size.length, 0.0, heads)
    identity = {**state, "W_o.weight": torch.eye(width)}
    attention.load_state_dict(_converted(identity, "per_head", size))
    out_proj = nn.Linear(width, width, bias=False)
    out_proj.load_state_dict({"weight": state["W_o.weight"]})
    return nn.Sequential(attention, out_proj)


def _split(size: Size, state: State) -> nn.Module:
    layer = split.MultiHeadAttn(size.width, size.width, size.length, 0.0, size.heads)
    return _loaded(layer, "split", size, state)


def _functional(size: Size, state: State) -> nn.Module:
    layer = functional.MultiHead(size.width, size.heads)
    layer.load_state_dict(state)
    mask = torch.ones(size.length, size.length).tril().bool()
    return Adapted(layer, lambda layer, x: layer(x, mask=mask.to(x.device))[0])


def _fused(size: Size, state: State) -> nn.Module:
    config: Any = SimpleNamespace(n_embd=size.width, n_head=size.heads)
    return _loaded(fused.GPT2MultiHeadAttention(config), "gpt2", size, state)


def _packed(kind: type[nn.Module], size: Size, state: State) -> nn.Module:
    return _loaded(kind(size.width, size.heads, bias=False), "headwise", size, state)


def _torch(weights: bool, size: Size, state: State) -> nn.Module:
    layer = variants.TorchAttention(size.width, size.heads, bias=False, weights=weights)
    return _loaded(layer, "torch", size, state)


def _headwise(size: Size, state: State) -> nn.Module:
    layer = _packed(MultiHeadAttention, size, state)
    return Adapted(layer, lambda layer, x: layer(x, mask=Causal()))


def _loaded(layer: nn.Module, layout: str, size: Size, state: State) -> nn.Module:
    layer.load_state_dict(_converted(state, layout, size))
    return layer


def _converted(state: State, target: str, size: Size) -> dict[str, Any]:
    return convert(state, source="functional", target=target, num_heads=size.heads)


@dataclass(frozen=True)
class Rung:
    """A rung: its name, the file or class that defines it, its builder, and a note on its row."""

    name: str
    where: str
    build: Callable[[Size, State], nn.Module] | None = None
    note: str = ""


FLEX = "FlexAttention"
RUNGS = (
    Rung("scalar", "systems/scalar.py", note="in double precision; memory of Python objects"),
    Rung("per head", "systems/per_head.py", _per_head, "with an added output projection"),
    Rung("split", "systems/split.py", _split),
    Rung("functional", "systems/functional.py", _functional, "also returns its weights"),
    Rung("fused, GPT-2", "systems/fused.py", _fused),
    Rung("fused QKV", "systems/variants.py", partial(_packed, variants.FusedQKV)),
    Rung("einsum", "systems/variants.py", partial(_packed, variants.Einsum)),
    Rung("nn.MHA, weights", "nn.MultiheadAttention", partial(_torch, True)),
    Rung("nn.MHA", "nn.MultiheadAttention", partial(_torch, False)),
    Rung("SDPA, mask", "systems/variants.py", partial(_packed, variants.SDPAMask)),
    Rung("SDPA, flag", "systems/variants.py", partial(_packed, variants.SDPAFlag)),
    Rung(FLEX, "systems/variants.py", partial(_packed, variants.FlexAttention)),
    Rung("headwise", "headwise.MultiHeadAttention", _headwise),
)


def weights(size: Size, generator: torch.Generator) -> dict[str, Tensor]:
    """Return random matrices in the layout `functional`, initialized like nn.Linear."""
    bound = size.width**-0.5
    return {
        f"W_{part}.weight": torch.empty(size.width, size.width).uniform_(
            -bound, bound, generator=generator
        )
        for part in "qkvo"
    }


def runner(rung: Rung, size: Size, state: State, device: str, compile: bool) -> Torch | Scalars:
    """Return a rung with these weights on a device, compiled if requested."""
    if rung.build is None:
        return Scalars(_converted(state, "microgpt", size), size.heads)
    module = rung.build(size, state).to(device)
    flex = rung.name == FLEX  # compiles itself
    return Torch(module, compile and not flex, counted=not flex)
