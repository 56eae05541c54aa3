"""Scores of some queries and keys at a time: what statistics that need single ones are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._axes import Extent
from .backends import Call
from .backends.blocked import blocks, computed_again
from .definition import finish_scores


@dataclass(frozen=True)
class Scores:
    """The scores of a call that is in the statistics' dtype."""

    call: Call
    gradients: bool

    @property
    def extent(self) -> Extent:
        return self.call.extent

    @property
    def device(self) -> torch.device:
        return self.call.q.device

    def logits(self, q: Tensor, k: Tensor, i: Tensor, j: Tensor) -> tuple[Tensor, Tensor]:
        """The scores that enter the softmax at these rows and keys, and where they are allowed."""
        scores = grouped_scores(q, k, self.extent) * self.call.scale
        mask, softcap = self.call.mask, self.call.softcap
        return finish_scores(scores, mask, self.extent, i, j, softcap=softcap)

    def in_blocks(
        self, of: Callable[[Any], tuple[Tensor, ...]], scores: int, dtypes: Sequence[torch.dtype]
    ) -> tuple[Any, ...]:
        """Figures `[B, H, t]` of blocks of rows, joined.

        For a gradient a block is computed again in the backward pass, so that no T×T matrix is
        kept. Without, results go where room was made beforehand: small ones left between the
        passing large ones would keep the heap from closing up.
        """
        e, cut = self.extent, blocks(self.call.mask, self.extent, self.device, scores)
        if self.gradients:
            parts: list[Any] = [computed_again(of, block) for block in cut]
            if parts:
                return tuple(torch.cat(figure, dim=2) for figure in zip(*parts, strict=True))
        shape = (e.batch, e.heads, e.queries)
        whole = tuple(torch.zeros(shape, dtype=dtype, device=self.device) for dtype in dtypes)
        for block in cut:
            for figure, part in zip(whole, of(block), strict=True):
                figure[:, :, block.rows] = part
        return whole


def probability(logits: Tensor, lse: Tensor) -> Tensor:
    """`exp(s − lse)`, 0 in dead rows."""
    dead = lse == -torch.inf
    return torch.exp(logits - lse.masked_fill(dead, 0.0)).masked_fill(dead, 0.0)


def grouped_scores(q: Tensor, k: Tensor, extent: Extent) -> Tensor:
    """`q kᵀ` `[B, H, t, s]` without repeating the keys of a group."""
    rows = q.unflatten(1, (extent.kv_heads, extent.group)).flatten(2, 3)
    return (rows @ k.mT).unflatten(2, (extent.group, q.shape[2])).flatten(1, 2)
