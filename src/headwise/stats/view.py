"""A call as its statistics read it: in their dtype, at the queries that are looked at."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..backends.blocked import blocks
from ..core.call import Call
from ..core.index import grid
from ..core.mask_algebra import Mask, Rows
from ..core.shapes import Extent, statistics_dtype
from .lazy import Lazy


class View:
    """A call without its values, of which `rows` are looked at; all queries, if that is `None`.

    `n` stands for their number. Without `gradients` it leaves nothing in the call's own graph.
    """

    def __init__(self, asked: Call, rows: Int[Tensor, " n"] | None, gradients: bool) -> None:
        self.asked, self.rows, self.gradients = asked, rows, gradients
        self.whole = asked.extent
        self.extent = self.whole if rows is None else replace(self.whole, queries=len(rows))
        self.mask: Mask = asked.mask if rows is None else Rows(asked.mask, rows, self.whole)
        self.device = asked.q.device

    @Lazy
    def call(self) -> Call:
        """The call among the keys alone, in the dtype of statistics.

        No statistic reads the values; keys stand in for them where a kernel wants some.
        """
        q, k = (x if self.gradients else x.detach() for x in (self.asked.q, self.asked.k))
        if self.rows is not None:
            q = q[:, :, self.rows]
        q, k = q.to(self.dtype), k.to(self.dtype)
        return self.asked.with_(
            q=q, k=k, v=k, mask=self.mask, extent=self.extent, dropout=0.0, sinks=None
        )

    @Lazy
    def constant(self) -> Call:
        """The same without gradients."""
        return self.call.with_(**{name: getattr(self.call, name).detach() for name in "qkv"})

    @Lazy
    def sinks(self) -> Tensor | None:
        """The call's learned sinks, in the dtype of statistics."""
        sinks = self.asked.sinks
        if sinks is None:
            return None
        return (sinks if self.gradients else sinks.detach()).to(self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of statistics."""
        return statistics_dtype(self.asked.q.dtype)

    def of(self, figure: Tensor) -> Tensor:
        """Of a figure of all queries `[B, H, T, …]`, those that are looked at."""
        if not self.gradients:
            figure = figure.detach()
        return figure if self.rows is None else figure[:, :, self.rows]

    @Lazy
    def queries(self) -> Int[Tensor, " n"]:
        """The numbers of the queries that are looked at."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.extent.queries, device=self.device)

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """Where those queries stand among the keys."""
        return self.queries + self.whole.offset

    @Lazy
    def counts(self) -> Int[Tensor, "#B #H n"]:
        """How many keys each query may attend to."""
        return visible_keys(self.mask, self.extent, self.device)

    @Lazy
    def valid_rows(self) -> Bool[Tensor, "#B #H n"]:
        """Queries that may attend to something."""
        return self.counts > 0

    def zeros(self, *shape: int) -> Tensor:
        """Room for sums, `[B · H, *shape]`, in the dtype of statistics."""
        return self.call.q.detach().new_zeros(self.extent.batch * self.extent.heads, *shape)

    def by_head(self, sums: Tensor) -> Tensor:
        """Sums `[B · H, …]` as `[B, H, …]`."""
        return sums.unflatten(0, (self.extent.batch, self.extent.heads))


def visible_keys(mask: Mask, extent: Extent, device: torch.device) -> Int[Tensor, "#B #H n"]:
    """Count the keys that each query may attend to."""
    i, j = grid(extent, device)
    if not mask.biased:  # a bias may forbid keys inside a range
        found = mask.interval(i, extent)
        if found is not None:
            every_row = torch.zeros(1, 1, extent.queries, 1, dtype=i.dtype, device=i.device)
            low, high, _ = torch.broadcast_tensors(*found, every_row)
            return (high - low).clamp(min=0)[..., 0]
    parts = []
    for block in blocks(mask, extent, device):
        allowed = mask.allowed(i[block.rows], j, extent)
        if allowed is None:
            allowed = torch.ones(1, 1, 1, extent.keys, dtype=torch.bool, device=device)
        size = block.rows.stop - block.rows.start
        allowed = allowed[(None,) * (4 - allowed.dim())].expand(-1, -1, size, extent.keys)
        parts.append(allowed.sum(-1))
    return torch.cat(parts, dim=2) if parts else torch.zeros(1, 1, 0, device=device).long()
