"""How far the keys are that a query looks at, on either side, and how far those that it could."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends.blocked import blocks
from ..core.index import grid
from .engine import Engine
from .needs import POSITION, Reduced, Setting
from .results import PASS, VIA, Route
from .score_sweep import Block, RowSums
from .view import View


class _DistanceEitherWay(Reduced):
    """`E|i + S − T − j|` among the keys `[B, H, n]`, so that a sink does not count. No gradient.

    Where nothing ahead is in sight it is the mean distance, so `POSITION` has it; else it takes a
    pass over the scores. 0 in dead rows.
    """

    name = "apart"
    among_keys = True
    via = POSITION

    def route(self, setting: Setting) -> Route:
        return Route(VIA if setting.behind else PASS)

    def make(self, engine: Engine) -> RowSums:
        return RowSums(_Away(engine.view), engine.view.zeros(engine.view.extent.queries))

    def answer(self, route: Route, engine: Engine) -> Tensor | None:
        if route.kind == VIA:
            return None
        view = engine.view
        away = view.by_head(engine.reduced(self).total)
        return torch.where(view.valid_rows, away, 0.0)


DISTANCE_EITHER_WAY = _DistanceEitherWay()


class _Away:
    """`Σ p |i − j|` of a block, with p among the keys."""

    def __init__(self, view: View) -> None:
        self.positions = view.positions

    def __call__(self, block: Block) -> Tensor:
        p = block.p
        j = torch.arange(block.keys.start, block.keys.stop, device=p.device)
        away = (self.positions[block.rows, None] - j).abs().to(p.dtype)
        return torch.linalg.vecdot(p, away)


def even_distance(view: View) -> Float[Tensor, "#B #H n"]:
    """The mean of `|i + S − T − j|` over the keys in sight: what even attention would have.

    0 where there are none, or the query's own alone.
    """
    extent, mask = view.extent, view.mask
    found = None if mask.biased else mask.key_ranges(extent, view.device)
    if found is not None:
        low, high = found
        total = _away_before(high, view.positions) - _away_before(low, view.positions)
    else:
        i, _ = grid(extent, view.device)
        here = view.positions[:, None]
        j = torch.arange(extent.keys, device=view.device)
        parts = []
        for block in blocks(mask, extent, view.device):
            away = (here[block.rows] - j).abs()
            allowed = mask.allowed(i[block.rows], j[None], extent)
            parts.append((away if allowed is None else away * allowed).sum(-1))
        total = torch.cat(parts, dim=-1) if parts else torch.zeros_like(view.counts)
    return total.to(view.dtype) / view.counts.clamp(min=1)


def _away_before(key: Tensor, here: Tensor) -> Tensor:
    """`Σ |here − j|` over keys `j < key`, up to what depends on `here` alone."""
    behind = key * here - key * (key - 1) // 2
    ahead = here * (here + 1) // 2 + (key - 1 - here) * (key - here) // 2
    return torch.where(key <= here + 1, behind, ahead)
