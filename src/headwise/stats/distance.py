"""How far the keys are that a query looks at, on either side, and how far those that it could."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends.blocked import blocks
from ..core.index import grid
from .evidence import Evidence
from .results import PASS, Way
from .score_sweep import Block, RowSums


def apart(evidence: Evidence) -> Float[Tensor, "B H n"]:
    """`E|i + S − T − j|` among the keys, so that a sink does not count.

    Where nothing ahead is in sight it is the mean distance; else it takes a pass over the scores.
    0 in dead rows. No gradient.
    """
    if backwards(evidence):
        return -evidence.position.detach()
    gather_apart(evidence)
    return torch.where(evidence.alive, evidence.by_head(evidence.gathered("apart").total), 0.0)


def gather_apart(evidence: Evidence) -> None:
    """Announce that `apart` will be read."""
    if not backwards(evidence):
        make = lambda: RowSums(_Apart(evidence), evidence.zeros(evidence.extent.queries))  # noqa: E731
        evidence.gather("apart", make, among_keys=True)


def way_of_apart(evidence: Evidence) -> Way:
    """How `apart` is read."""
    return evidence.way("position") if backwards(evidence) else Way(PASS)


def backwards(evidence: Evidence) -> bool:
    """Whether no query sees a key ahead of it, nor a sink: then |i − j| is i − j on average too.

    While compiling nobody knows.
    """
    if evidence.sinks is not None or torch.compiler.is_compiling():
        return False
    found = evidence.call.mask.interval(grid(evidence.extent, evidence.device)[0], evidence.extent)
    if found is None:
        return False
    return bool((found[1] <= evidence.positions[:, None] + 1).all())


class _Apart:
    """`Σ p |i − j|` of a block, with p among the keys."""

    def __init__(self, evidence: Evidence) -> None:
        self.positions = evidence.positions

    def __call__(self, block: Block) -> Tensor:
        p = block.p
        j = torch.arange(block.keys.start, block.keys.stop, device=p.device)
        away = (self.positions[block.rows, None] - j).abs().to(p.dtype)
        return torch.linalg.vecdot(p, away)


def even_apart(evidence: Evidence) -> Float[Tensor, "#B #H n"]:
    """The mean of `|i + S − T − j|` over the keys in sight: what even attention would have.

    0 where there are none, or the query's own alone.
    """
    extent, device = evidence.extent, evidence.device
    i, _ = grid(extent, device)
    here = evidence.positions[:, None]
    found = None if evidence.call.mask.biased else evidence.call.mask.interval(i, extent)
    if found is not None:  # a bias may forbid keys inside a range
        low, high = found
        total = (_away_before(high.maximum(low), here) - _away_before(low, here))[..., 0]
    else:
        j = torch.arange(extent.keys, device=device)
        parts = []
        for block in blocks(evidence.call.mask, extent, device):
            away = (here[block.rows] - j).abs()
            allowed = evidence.call.mask.allowed(i[block.rows], j[None], extent)
            parts.append((away if allowed is None else away * allowed).sum(-1))
        total = torch.cat(parts, dim=-1) if parts else torch.zeros_like(evidence.counts)
    return total.to(evidence.lse.dtype) / evidence.counts.clamp(min=1)


def _away_before(key: Tensor, here: Tensor) -> Tensor:
    """`Σ |here − j|` over keys `j < key`, up to what depends on `here` alone."""
    behind = key * here - key * (key - 1) // 2
    ahead = here * (here + 1) // 2 + (key - 1 - here) * (key - here) // 2
    return torch.where(key <= here + 1, behind, ahead)
