"""The largest score of each head, from the few rows whose log-sum-exp can still win."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE
from ..core.call import Call
from ..core.index import grid
from ..core.modes import readable
from .scores import Scores


def largest_score(scores: Scores, call: Call, lse: Float[Tensor, "B H n"]) -> Float[Tensor, "B H"]:
    """The largest score of each head, exactly; −inf where no query sees a key.

    `lse_i − log n_i ≤ max_j s_ij ≤ lse_i`: the rows with the largest LSE come first, and then
    only blocks with a row whose LSE can still win. A few rows on peaked heads, all on flat.
    `call` is that of the scores without gradients.
    """
    extent, device = scores.extent, scores.device
    if not (extent.batch and extent.queries and extent.keys):
        return lse.new_full((extent.batch, extent.heads), -torch.inf)
    if not readable(lse):  # which rows can win depends on their scores
        every = [_largest_in(scores, call, cut) for cut in scores.blocks(SCORES_AT_A_TIME)]
        return torch.stack(every).amax(0)
    known = _no_score_above(lse.detach(), scores.sinks)
    row = max(1, extent.batch * extent.heads * extent.keys)
    j = torch.arange(extent.keys, device=device).view(1, 1, 1, -1)

    def largest_of(i: Tensor) -> Tensor:
        """The largest score of the queries i `[B, H, m]`, each head's own."""
        q = call.q.gather(2, i[..., None].expand(-1, -1, -1, call.q.shape[-1]))
        return scores.logits(q, call.k, i[..., None], j)[0].amax((-1, -2))

    count = min(extent.queries, max(1, min(16, SCORES_AT_A_TIME // row)))
    best = largest_of(known.topk(count, dim=-1).indices)
    if (left := int((known > best[..., None]).sum(-1).max())) == 0:
        return best
    if left * 4 <= extent.queries:  # those rows alone
        rows = known.topk(left, dim=-1).indices
        for i in rows.split(max(1, SCORES_AT_A_TIME // row), dim=-1):
            best = torch.maximum(best, largest_of(i))
        return best
    for cut in scores.blocks(SCORES_IN_CACHE):
        if bool((known[:, :, cut.rows].amax(-1) > best).any()):
            best = torch.maximum(best, _largest_in(scores, call, cut))
    return best


def _largest_in(scores: Scores, call: Call, cut: Any) -> Float[Tensor, "B H"]:
    """The largest score of a block of rows."""
    if cut.keys.stop == cut.keys.start:
        return call.q.new_full((call.extent.batch, call.extent.heads), -torch.inf)
    i, j = grid(call.extent, call.q.device, cut.rows, cut.keys)
    return scores.logits(call.q[:, :, cut.rows], call.k[:, :, cut.keys], i, j)[0].amax((-1, -2))


def _no_score_above(
    lse: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H n"]:
    """A number that no score of the row exceeds: the LSE of its keys, −inf in dead rows."""
    # Rounding of the LSE itself must not shut out the winner.
    dead = lse == -torch.inf
    bound = (lse + 1e-5 * (1 + lse.abs())).masked_fill(dead, -torch.inf)
    if sinks is None:
        return bound
    taken = sinks.detach()[:, None] - bound.masked_fill(dead, torch.inf)
    return bound + torch.log(-torch.expm1(taken))
