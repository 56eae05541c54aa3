"""`Map`: P averaged over blocks, by attention with each key's one-hot block as its value."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.numbers import check_whole
from ..core.reference import Definition
from .plan import CALL, KERNEL_PASS, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


@dataclass(frozen=True)
class Map(Statistic):
    """P averaged over blocks: `[B, H, n, n]`, the attention of query blocks to key blocks.

    Entry `[a, b]` is the total attention weight on the keys of block `b`, averaged over the valid
    queries of block `a`. Rows sum to 1 minus the weight of a learned sink (0 if no query is valid).
    With one block per token it is P itself. It takes one extra call per D blocks.

    Raises:
        ValueError: `blocks` is less than 1.
    """

    blocks: int = 64
    names = ("map",)

    def __post_init__(self) -> None:
        check_whole(self, "blocks", 1)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return {"map": _BlockSums(self.blocks)}

    def metric(self, record: Record) -> dict[str, Reading]:
        extent, view = record.extent, record.view
        valid = record.valid_rows.expand(extent.batch, extent.heads, extent.queries)
        of_query = self.of(view.whole.queries, view.device)[view.queries]
        count = self._valid(valid * view.weights, of_query)
        total = record[_BlockSums(self.blocks)]
        return {"map": Reading(total / count.clamp(min=1), over=count)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        e, device, n = full.extent, full.weights.device, self.blocks
        of_key, of_query = (self.of(size, device) for size in (e.keys, e.queries))
        total = full.weights.new_zeros(e.batch, e.heads, n, e.keys).index_add(
            2, of_query, full.weights
        )
        total = total.new_zeros(e.batch, e.heads, n, n).index_add(3, of_key, total)
        valid = full.allowed.any(-1).to(total.dtype)
        return {"map": total / self._valid(valid, of_query).clamp(min=1)}

    def of(self, length: int, device: torch.device) -> Tensor:
        """Return the block of each position; blocks differ by at most one position in size."""
        return torch.arange(length, device=device) * self.blocks // max(length, self.blocks)

    def _valid(self, valid: Tensor, of_query: Tensor) -> Tensor:
        """Return the number of valid queries of each block, `[B, H, n, 1]`, from `[B, H, T]`."""
        count = valid.new_zeros(*valid.shape[:2], self.blocks)
        return count.index_add_(2, of_query, valid)[..., None]


@dataclass(frozen=True)
class _BlockSums(Need):
    """Sums of P over each pair of a query block and a key block: `[B, H, n, n]`."""

    blocks: int
    name = "map"
    passes = True

    def route(self, setting: Setting) -> Route:
        if setting.kernel_pass:
            return Route(KERNEL_PASS)
        calls = -(-self.blocks // setting.dim)
        return Route(CALL) if calls == 1 else Route(f"identity: {calls} more calls")

    def answer(self, route: Route, work: Work) -> Tensor:
        view, of = work.view, Map(self.blocks).of
        of_query = of(view.whole.queries, view.device)[view.queries]
        of_key = of(view.extent.keys, view.device)
        if route.kind == KERNEL_PASS:
            backend, call, lse = work.one_pass
            return backend.block_map(call, lse, of_query, of_key, self.blocks, view.drawn)
        # (`one_hot` reads the values of its argument, which a trace does not have.)
        one_hot = (of_key[:, None] == torch.arange(self.blocks, device=view.device)).to(view.dtype)
        mean, of_keys = work.mean_among_keys(one_hot[None, None])
        mean = mean if view.sinks is None else mean * work.left(of_keys)[..., None]
        mean = torch.where(view.valid_rows[..., None], mean, 0.0)
        if view.drawn is not None:
            mean = mean * view.weights[:, None]
        sums = view.zeros(self.blocks, self.blocks).index_add_(1, of_query, mean.flatten(0, 1))
        return view.by_head(sums)
