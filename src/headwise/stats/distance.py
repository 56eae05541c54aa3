"""`Distance`: the mean, the absolute mean and the spread of each query's attention distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends.blocked import blocks
from ..core.index import grid
from ..core.reference import Definition
from . import identities
from .blocks import RowFigure, ScoreBlock, ahead_of
from .plan import CALL, KERNEL, PASS, VIA, Need, OfPass, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic
from .view import View

_ABSOLUTE = ("distance_absolute", "distance_share")


@dataclass(frozen=True)
class Distance(Statistic):
    """The mean distance that each query looks back, in tokens: `[B, H, T]`, `E[i + S − T − j]`.

    Negative if a query attends mostly to later positions. `E[j]` is attention with the key's
    position as the value. Weight on a learned sink adds nothing to the distance.

    Args:
        spread: also compute `distance_spread`, the standard deviation of the key's position among
            the keys, by a pass over the scores (no gradient).
        absolute: also compute `distance_absolute`, `E|i + S − T − j|` among the keys, ahead and
            behind, and `distance_share`, its ratio to the value for uniform attention over the
            visible keys (above 1: farther than uniform), for queries that see more than their own
            position. If keys ahead are visible, this takes a pass over the scores (no gradient).

    Source: Dosovitskiy et al. 2020, §4.5 (mean attention distance).
    """

    spread: bool = False
    absolute: bool = False
    free = deferred = True

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.needs)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        needs: dict[str, Need] = {"distance": POSITION}
        if self.spread:
            needs["distance_spread"] = _SPREAD
        if self.absolute:
            needs |= dict.fromkeys(_ABSOLUTE, _EITHER_WAY)
        return needs

    def metric(self, record: Record) -> dict[str, Reading]:
        valid, ahead = record.valid_rows, record[POSITION]
        readings = {"distance": Reading(-ahead, valid)}
        if self.spread:
            readings["distance_spread"] = Reading(record[_SPREAD], valid)
        if self.absolute:
            away, uniform = record[_EITHER_WAY]
            away = -ahead.detach() if away is None else away
            far = uniform > 0
            share = torch.where(far, away / torch.where(far, uniform, 1.0), 0.0)
            readings["distance_absolute"] = Reading(away, valid)
            readings["distance_share"] = Reading(share, far)
        return readings

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        back = i - torch.arange(extent.keys, device=device)
        metrics = {"distance": (full.weights * back).sum(-1)}
        valid = full.allowed.any(-1, keepdim=True)
        among = torch.softmax(full.logits.masked_fill(~valid, 0.0), dim=-1) * valid
        if self.spread:
            mean = (among * back).sum(-1, keepdim=True)
            metrics["distance_spread"] = (among * (back - mean).square()).sum(-1).sqrt()
        if self.absolute:
            away = (among * back.abs()).sum(-1)
            total, count = (full.allowed * back.abs()).sum(-1), full.allowed.sum(-1)
            far = torch.where(total > 0, total, 1)
            metrics["distance_absolute"] = away
            metrics["distance_share"] = torch.where(total > 0, away * count / far, 0.0)
        return metrics


class _Position(Need):
    """`E[j − position of i]` `[B, H, n]`, 0 in dead rows: attention with positions as values.

    Weight on a sink adds 0.
    """

    name, kernel = "position", "ahead"
    flexible = True

    def route(self, setting: Setting) -> Route:
        return Route(KERNEL if setting.kernel else CALL)

    def row_figure(self, work: Work) -> RowFigure:
        return ahead_of(work.view.positions)

    def answer(self, route: Route, work: Work) -> Tensor:
        view = work.view
        if route.kind == PASS:
            ahead = work.by_head(work.reduced(self).total)
            return torch.where(view.valid_rows, ahead, 0.0)
        if work.plan.together:
            width = view.call.q.shape[-1]
            columns, of_keys = work.keys_seen[0][..., width : width + 2], work.lse_of_moved_keys
        else:
            columns, of_keys = work.mean_among_keys(work.position_columns)
        ahead = identities.ahead(columns, view.positions)
        if view.sinks is not None:
            ahead = work.left(of_keys) * ahead
        return torch.where(view.valid_rows, ahead, 0.0)


POSITION = _Position()


class _EitherWay(OfPass):
    """`E|i + S − T − j|` among the keys `[B, H, n]`, without the sink and 0 in dead rows; and its
    value for uniform attention. No gradient.

    If no key ahead is visible, the first equals the mean distance, which `POSITION` holds, and is
    `None` here; otherwise it takes a pass over the scores.
    """

    name = "apart"
    among_keys = True
    via = POSITION

    def route(self, setting: Setting) -> Route:
        return Route(VIA if setting.behind else PASS)

    def row_figure(self, work: Work) -> RowFigure:
        positions = work.view.positions

        def away(block: ScoreBlock) -> Tensor:
            j = torch.arange(block.keys.start, block.keys.stop, device=block.p.device)
            far = (positions[block.rows, None] - j).abs().to(block.p.dtype)
            return torch.linalg.vecdot(block.p, far)

        return away

    def answer(self, route: Route, work: Work) -> tuple[Tensor | None, Tensor]:
        uniform = _uniform_distance(work.view)
        if route.kind == VIA:
            return None, uniform
        return torch.where(work.view.valid_rows, super().answer(route, work), 0.0), uniform


_EITHER_WAY = _EitherWay()


def _uniform_distance(view: View) -> Float[Tensor, "#B #H n"]:
    """Return the mean of `|i + S − T − j|` over the visible keys: the value for uniform attention.

    0 if a query sees no key, or only its own position.
    """
    extent, mask = view.extent, view.mask
    found = None if mask.biased else mask.key_ranges(extent, view.device)
    if found is not None:
        low, high = found
        total = _away_before(high, view.positions) - _away_before(low, view.positions)
    else:
        i, j = grid(extent, view.device)
        parts = []
        for block in blocks(mask, extent, view.device):
            away = (view.positions[block.rows, None] - j).abs()
            allowed = mask.allowed(i[block.rows], j, extent)
            parts.append((away if allowed is None else away * allowed).sum(-1))
        total = torch.cat(parts, dim=-1) if parts else torch.zeros_like(view.counts)
    return total.to(view.dtype) / view.counts.clamp(min=1)


def _away_before(key: Tensor, here: Tensor) -> Tensor:
    """Return `Σ |here − j|` over keys `j < key`, up to a term that depends only on `here`."""
    behind = key * here - key * (key - 1) // 2
    ahead = here * (here + 1) // 2 + (key - 1 - here) * (key - here) // 2
    return torch.where(key <= here + 1, behind, ahead)


class _Spread(OfPass):
    """The standard deviation of the position of the key, in tokens, `[B, H, n]`; 0 in dead rows.

    It covers the keys only: a sink has no position.
    """

    name = "spread"
    among_keys = True

    def accumulator(self, work: Work) -> _Variance:
        return _Variance(work.view.zeros(work.view.extent.queries))

    def answer(self, route: Route, work: Work) -> Tensor:
        variance = work.reduced(self).variance.clamp(min=0)
        return work.by_head(variance.sqrt().to(work.view.dtype))


_SPREAD = _Spread()


class _Variance:
    """Running weight, mean and variance of key positions (Chan et al. 1979); p sums to 1 over keys.

    The blocks of a row can have very different weights, so all sums are in float64.
    """

    def __init__(self, zeros: Tensor) -> None:
        self.weight, self.mean, self.variance = (
            torch.zeros_like(zeros, dtype=torch.float64) for _ in "wmv"
        )

    def add(self, block: ScoreBlock) -> None:
        p, tiny = block.p, torch.finfo(block.p.dtype).tiny
        step = torch.arange(p.shape[-1], dtype=p.dtype, device=p.device)
        weight = p.sum(-1)
        mean = (p @ step) / weight.clamp(min=tiny)
        squares = ((step - mean[..., None]).square_() * p).sum(-1).double()
        place = block.heads, block.rows
        before, new = self.weight[place], weight.double()
        total = before + new
        share = new / total.clamp(min=tiny)
        shift = mean.double() + block.keys.start - self.mean[place]
        joined = before * self.variance[place] + squares + before * share * shift.square()
        self.variance[place] = joined / total.clamp(min=tiny)
        self.mean[place] += shift * share
        self.weight[place] = total
