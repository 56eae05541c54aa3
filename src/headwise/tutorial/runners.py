"""The rungs of the ladder, each ready to run on the same weights.

The weights are four matrices in the layout `functional`; `convert` gives every rung its own. There
are no biases: the scalar rung has none, so where a class always has them they are 0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

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
    """Parse sizes such as `1x16x16x4`, several in one text separated by commas; each once.

    Raises:
        ValueError: a text that is no size, or a width that the heads do not divide.

    >>> [str(size) for size in parse_sizes(["1x16x16x4,2×64×32×4"])]
    ['1x16x16x4', '2x64x32x4']
    """
    sizes: dict[Size, None] = {}
    for text in (part.strip() for whole in texts for part in whole.split(",")):
        numbers = re.fullmatch(r"(\d+)[x×](\d+)[x×](\d+)[x×](\d+)", text)
        if numbers is None or 0 in map(int, numbers.groups()):
            raise ValueError(
                f"--sizes {text}: give batch x length x width x heads, whole numbers of at least "
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


@runtime_checkable
class Runner(Protocol):
    """A rung with its weights, ready to run."""

    parameters: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, without gradients."""
        ...

    def step(self, x: Tensor, pull: Tensor) -> Tensor:
        """Run forward, and backward from `pull` to weights and input; return x's gradient."""
        ...

    def multiply_adds(self, x: Tensor) -> int | None:
        """Return the multiply-adds of one forward pass; None if they are not counted."""
        ...

    def peak_bytes(self, x: Tensor, pull: Tensor) -> int:
        """Return the memory that a step adds at most: activations, temporaries and gradients."""
        ...


class Torch:
    """A module of PyTorch, as it is or compiled."""

    def __init__(self, module: nn.Module, compile: bool) -> None:
        self.parameters = sum(weight.numel() for weight in module.parameters())
        self._module = module
        self._call: Callable[[Tensor], Tensor] = (
            torch.compile(module, fullgraph=True, dynamic=False) if compile else module
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self._call(x)

    def step(self, x: Tensor, pull: Tensor) -> Tensor:
        self._module.zero_grad(set_to_none=True)
        leaf = x.detach().requires_grad_()
        self._call(leaf).backward(pull)
        assert leaf.grad is not None
        return leaf.grad

    def multiply_adds(self, x: Tensor) -> int | None:
        # With gradients, so that PyTorch's own layer takes no shortcut that the counter misses.
        return timing.multiply_adds(lambda: self._module(x))

    def peak_bytes(self, x: Tensor, pull: Tensor) -> int:
        self._module.zero_grad(set_to_none=True)
        return timing.peak_bytes(lambda: self.step(x, pull), x.device.type)


class Flex(Torch):
    """FlexAttention: compiled in any case, and unseen by the counter."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, compile=False)

    def multiply_adds(self, x: Tensor) -> int | None:
        return None


class Scalars:
    """The rung of single numbers."""

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
    return torch.tensor(numbers, dtype=torch.float64)  # as Python's numbers are


class WithOutput(nn.Module):
    """The wrapper of `per_head`, which only joins its heads, and the output projection it lacks."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, heads = size.width, size.heads
        self.attention = per_head.MultiHeadedAttentionWrapper(
            width, width // heads, size.length, 0.0, heads
        )
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.attention(x))


class FirstOutput(nn.Module):
    """Of a rung that also gives its weights, the output."""

    def __init__(self, module: functional.MultiHead, size: Size) -> None:
        super().__init__()
        self.module = module
        self.register_buffer("mask", torch.ones(size.length, size.length).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, mask=self.get_buffer("mask"))[0]


class Causally(nn.Module):
    """headwise's own layer under its causal mask."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=Causal())


def _per_head(size: Size, state: State) -> nn.Module:
    heads = {**state, "W_o.weight": torch.eye(size.width)}
    layer = WithOutput(size)
    layer.attention.load_state_dict(_converted(heads, "per_head", size))
    layer.out_proj.load_state_dict({"weight": state["W_o.weight"]})
    return layer


def _split(size: Size, state: State) -> nn.Module:
    layer = split.MultiHeadAttn(size.width, size.width, size.length, 0.0, size.heads)
    return _loaded(layer, "split", size, state)


def _functional(size: Size, state: State) -> nn.Module:
    layer = functional.MultiHead(size.width, size.heads)
    layer.load_state_dict(state)
    return FirstOutput(layer, size)


def _fused(size: Size, state: State) -> nn.Module:
    config: Any = SimpleNamespace(n_embd=size.width, n_head=size.heads)
    return _loaded(fused.GPT2MultiHeadAttention(config), "gpt2", size, state)


def _packed(kind: type[nn.Module], size: Size, state: State) -> nn.Module:
    return _loaded(kind(size.width, size.heads, bias=False), "headwise", size, state)


def _torch(weights: bool, size: Size, state: State) -> nn.Module:
    layer = variants.TorchAttention(size.width, size.heads, bias=False, weights=weights)
    return _loaded(layer, "torch", size, state)


def _headwise(size: Size, state: State) -> nn.Module:
    return Causally(_packed(MultiHeadAttention, size, state))


def _loaded(layer: nn.Module, layout: str, size: Size, state: State) -> nn.Module:
    layer.load_state_dict(_converted(state, layout, size))
    return layer


def _converted(state: State, target: str, size: Size) -> dict[str, Any]:
    return convert(state, source="functional", target=target, num_heads=size.heads)


@dataclass(frozen=True)
class Rung:
    """A name, where it is written, how it is built, and what to know about its row."""

    name: str
    where: str
    build: Callable[[Size, State], nn.Module] | None = None
    note: str = ""


FLEX = "FlexAttention"
RUNGS = (
    Rung(
        "scalar",
        "systems/scalar.py",
        note="in double precision; memory is that of Python's objects",
    ),
    Rung(
        "per head",
        "systems/per_head.py",
        _per_head,
        "with an output projection put after it",
    ),
    Rung("split", "systems/split.py", _split),
    Rung("functional", "systems/functional.py", _functional, "returns its weights too"),
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
    """Return random matrices in the layout `functional`, as large as nn.Linear's."""
    bound = size.width**-0.5
    return {
        f"W_{part}.weight": torch.empty(size.width, size.width).uniform_(
            -bound, bound, generator=generator
        )
        for part in "qkvo"
    }


def runner(rung: Rung, size: Size, state: State, device: str, compile: bool) -> Runner:
    """Return a rung with these weights on a device, compiled if requested."""
    if rung.build is None:
        return Scalars(_converted(state, "microgpt", size), size.heads)
    module = rung.build(size, state).to(device)
    return Flex(module) if rung.name == FLEX else Torch(module, compile)
