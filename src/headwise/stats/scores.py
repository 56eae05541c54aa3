"""Scores of some queries and keys at a time: what statistics that need single ones are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends import Call
from ..backends.blocked import SCORES_AT_A_TIME, blocks, computed_again
from ..core.index import grid
from ..core.modes import readable, traced
from ..core.reference import finish_scores
from ..core.shapes import Extent

NEAR = 2.0**-14
"""The last place that a log-sum-exp may have for probabilities to be read from it."""

LITTLE = -1e30
"""The logarithm of no probability at all; finite, so that 0 · log 0 is 0."""

GRAPH_BLOCKS = 32
"""How many blocks a compiled graph may hold, one after another."""


def near(figure: Tensor, sure: bool = False) -> bool:
    """Whether logarithms of all rows are so small that differences from them keep their digits.

    A log-sum-exp of 10⁹ in float32 is right to 32: `exp(s − lse)` may then be off by any factor,
    as in a row whose scores are all −10⁹, and the row must be normalised anew (`Scores.rows`).
    While compiling, nothing is known of values; `sure` says that they can be read.
    """
    if not sure and not readable(figure):
        return False
    if not figure.numel():
        return True
    figure = figure.detach()
    limit = NEAR / torch.finfo(figure.dtype).eps
    low, high = torch.stack(torch.aminmax(figure)).tolist()
    if low == -torch.inf:  # rows that may attend to nothing
        low = figure.masked_fill(figure == -torch.inf, 0.0).amin().item()
    return -limit <= low and high <= limit


@dataclass(frozen=True)
class RowBlock:
    """Probabilities of whole rows, those of the queries `rows`: they sum to 1 over keys and sink.

    `log_p` and `allowed` are `[B, H, t, s]` at the keys `keys`, beyond which no query of the block
    may attend. Where a pair may not attend `log_p` is `LITTLE`. The sink's is `[B, H, t]`.
    """

    rows: slice
    keys: slice
    log_p: Tensor
    allowed: Tensor
    log_sink: Tensor | None = None

    @property
    def p(self) -> Tensor:
        return torch.exp(self.log_p)


@dataclass(frozen=True)
class Scores:
    """The scores of a call that is in the statistics' dtype, and its learned sinks."""

    call: Call
    gradients: bool
    sinks: Tensor | None = None

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

    def row_block(self, q: Tensor, i: Tensor, rows: slice, keys: slice) -> RowBlock:
        """Rows of probabilities, from the softmax of their scores: right however large these are.

        `q` are the queries `i` `[t, 1]`, which the block calls `rows`.
        """
        _, j = grid(self.extent, self.device, keys=keys)
        logits, allowed = self.logits(q, self.call.k[:, :, keys], i, j)
        # A row without keys has no softmax: it gets a harmless one, of which nothing is left.
        entering = logits.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
        if self.sinks is not None:
            sink = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            entering = torch.cat([entering, sink], dim=-1)
        least = torch.finfo(entering.dtype).min  # −inf times 0 would be no number
        log_p = torch.log_softmax(entering, dim=-1).clamp(min=least)
        if self.sinks is None:
            return RowBlock(rows, keys, log_p.masked_fill(~allowed, LITTLE), allowed)
        log_sink = log_p[..., -1].masked_fill(~allowed.any(-1), LITTLE)
        log_p = log_p[..., :-1].masked_fill(~allowed, LITTLE)
        return RowBlock(rows, keys, log_p, allowed, log_sink)

    def rows(self, cut: Any) -> RowBlock:
        """The probabilities of one block of queries."""
        i, _ = grid(self.extent, self.device, cut.rows)
        return self.row_block(self.call.q[:, :, cut.rows], i, cut.rows, cut.keys)

    def blocks(self, scores: int) -> Iterator[Any]:
        """The call's queries in blocks of so many scores; of a graph, in a bounded number."""
        e = self.extent
        if traced():
            scores = max(scores, -(-e.batch * e.heads * e.queries * e.keys // GRAPH_BLOCKS))
        return blocks(self.call.mask, e, self.device, scores)

    def in_blocks(
        self, of: Callable[[Any], tuple[Tensor, ...]], scores: int, dtypes: Sequence[torch.dtype]
    ) -> tuple[Any, ...]:
        """Figures `[B, H, t]` of blocks of rows, joined.

        For a gradient a block is computed again in the backward pass, so that no T×T matrix is
        kept. Without, results go where room was made beforehand: small ones left between the
        passing large ones would keep the heap from closing up.
        """
        e, cut = self.extent, self.blocks(scores)
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


class RowFigures:
    """Figures `[B, H, n]` of whole rows: one pass for all that wait when one of them is read."""

    def __init__(self, scores: Scores) -> None:
        self.scores = scores
        self._waiting: dict[str, tuple[Callable[[RowBlock], Tensor], torch.dtype]] = {}
        self._done: dict[str, Tensor] = {}

    def wait(
        self,
        name: str,
        figure: Callable[[RowBlock], Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Let a figure of each block of rows be taken in the next pass."""
        if name not in self._done:
            self._waiting.setdefault(name, (figure, dtype or self.scores.call.q.dtype))

    def known(self, name: str | None) -> str:
        """The name, or one that no other figure has."""
        return f"figure {len(self._done)}" if name is None else name

    def read(self, name: str) -> Tensor:
        """The figure of that name, after the pass that it waited for."""
        if name not in self._done:
            waiting, self._waiting = self._waiting, {}
            figures, dtypes = zip(*waiting.values(), strict=True)

            def of(cut: Any) -> tuple[Tensor, ...]:
                block = self.scores.rows(cut)
                return tuple(figure(block) for figure in figures)

            found = self.scores.in_blocks(of, SCORES_AT_A_TIME, dtypes)
            self._done |= dict(zip(waiting, found, strict=True))
        return self._done[name]


def probability(logits: Tensor, lse: Tensor) -> Tensor:
    """`exp(s − lse)`, 0 in dead rows."""
    dead = lse == -torch.inf
    return torch.exp(logits - lse.masked_fill(dead, 0.0)).masked_fill(dead, 0.0)


def grouped_scores(q: Tensor, k: Tensor, extent: Extent) -> Tensor:
    """`q kᵀ` `[B, H, t, s]` without repeating the keys of a group."""
    rows = q.unflatten(1, (extent.kv_heads, extent.group)).flatten(2, 3)
    return (rows @ k.mT).unflatten(2, (extent.group, q.shape[2])).flatten(1, 2)
