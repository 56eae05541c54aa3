"""A small model and its training, as the tests of monitors share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw

B, H, T, E = 2, 3, 7, 24
LAYERS = ("blocks.0.own", "blocks.0.fused", "blocks.1.own", "blocks.1.fused")


class Fused(nn.Module):
    """Self-attention by PyTorch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """headwise's own layer and another, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.fused = hw.MultiHeadAttention(E, H), Fused()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.own(x, mask=hw.Causal()))
        return x + self.dropout(self.fused(x))


Wrap = Callable[[nn.Module, Tensor], Tensor]


def plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


class Model(nn.Module):
    """Two blocks, each called by `wrap`, such as a checkpoint."""

    def __init__(self, wrap: Wrap = plainly) -> None:
        super().__init__()
        self.blocks, self.wrap = nn.ModuleList([Block(), Block()]), wrap

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.wrap(block, x)
        return x


def made(wrap: Wrap = plainly) -> tuple[Model, torch.optim.Optimizer]:
    """A model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = Model(wrap)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batch(number: int, rows: int = B, length: int = T) -> Tensor:
    """The inputs of a micro-batch, the same each time."""
    drawn = torch.Generator().manual_seed(1000 + number)
    return torch.randn(rows, length, E, generator=drawn).requires_grad_()


def advance(model: Any, optimizer: torch.optim.Optimizer, number: int, micro: int = 1) -> None:
    """A step of the training, from so many micro-batches."""
    for part in range(micro):
        (model(batch(number * 10 + part)).square().mean() / micro).backward()
    optimizer.step()
    optimizer.zero_grad()


def seen_in(
    model: nn.Module, inputs: list[Tensor], *statistics: hw.Statistic
) -> hw.capture.Watched:
    """What `watch()` sees of the same forwards; random numbers are left as they were."""
    with torch.random.fork_rng(), hw.watch(model, *statistics) as seen:
        for x in inputs:
            model(x)
    return seen


def monitored(
    pair: tuple[Model, torch.optim.Optimizer], numbers: range, **settings: Any
) -> hw.Monitor:
    """A monitor, closed, after the steps of these numbers."""
    with hw.Monitor(*pair, **settings) as monitor:
        for number in numbers:
            advance(*pair, number)
    return monitor
