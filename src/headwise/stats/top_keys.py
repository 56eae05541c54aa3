"""`TopKeys`: the keys that each query attends to most."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.modes import read_at_once
from ..core.numbers import check_whole
from ..core.reference import Definition
from .blocks import ScoreBlock
from .plan import Need, OfPass, Route
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


@dataclass(frozen=True)
class TopKeys(Statistic):
    """The keys that each query attends to most: `top_keys` and `top_weights`, `[B, H, T, k]`.

    Exact, from a pass over the scores; sorted by weight, with the earlier key first among ties. If
    a query sees fewer than k keys, the remaining entries are key −1 with weight 0. If its weights
    are NaN, all entries are key −1 with weight NaN. No gradient.

    Args:
        k: the number of keys, at least 1.
    """

    k: int = 5
    names = ("top_keys", "top_weights")

    def __post_init__(self) -> None:
        check_whole(self, "k", 1)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return dict.fromkeys(self.names, _LargestWeights(self.k))

    def metric(self, record: Record) -> dict[str, Reading]:
        top = record[_LargestWeights(self.k)]
        return {n: Reading(x, record.valid_rows) for n, x in zip(self.names, top, strict=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        order = full.logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        weights = full.weights.gather(-1, order)
        seen = full.allowed.gather(-1, order)
        keys = torch.where(seen & ~weights.isnan(), order, -1)
        short = self.k - order.shape[-1]
        return {
            "top_keys": torch.nn.functional.pad(keys, (0, short), value=-1),
            "top_weights": torch.nn.functional.pad(torch.where(seen, weights, 0.0), (0, short)),
        }


@dataclass(frozen=True)
class _LargestWeights(OfPass):
    """The k largest entries of each row of P."""

    k: int
    name = "top"

    def accumulator(self, work: Work) -> _Top:
        return _Top(work.view.zeros(work.view.extent.queries, self.k))

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor]:
        top = work.reduced(self)
        return work.by_head(top.keys), work.by_head(top.weights)


class _Top:
    """The top keys found so far for every query."""

    def __init__(self, weights: Tensor) -> None:
        self.keys, self.weights = torch.full_like(weights, -1, dtype=torch.long), weights
        self.logs = torch.full_like(weights, -math.inf)

    def add(self, block: ScoreBlock) -> None:
        place, k = (block.heads, block.rows), self.keys.shape[-1]
        logs = block.log_p
        if block.hidden is not None:
            logs = logs.masked_fill(block.hidden, -math.inf)
        logs, index = _largest(logs, min(k, logs.shape[-1]))
        keys = torch.where(logs > -math.inf, index + block.keys.start, -1)
        logs = torch.cat([self.logs[place], logs], dim=-1)
        keys = torch.cat([self.keys[place], keys], dim=-1)
        best = logs.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        self.logs[place] = logs.gather(-1, best)
        self.keys[place] = keys.gather(-1, best)
        self.weights[place] = self.logs[place].exp()


def _largest(logs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of the last axis and their indices; ties keep the earlier."""
    if read_at_once(logs):
        found, index = logs.topk(k, dim=-1)  # its order among ties is arbitrary
        least = found[..., -1:]
        if not bool((((logs >= least).sum(-1, keepdim=True) > k) & (least > -math.inf)).any()):
            index = index.sort(dim=-1).values
            return logs.gather(-1, index), index
    found, index = logs.sort(dim=-1, descending=True, stable=True)
    return found[..., :k], index[..., :k]
