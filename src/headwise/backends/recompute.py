"""Compute the native kernel's figures again, in plain PyTorch and in blocks of queries.

The kernel's backward pass is no function that autograd could differentiate. For a second
derivative, the figures are made once more from q, k, v and sinks, by operations that are: those of
the definition, as in `blocked`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.call import Call
from ..core.dropout import STEPS
from ..core.shapes import Extent
from ..kernels.interface import Problem
from .blocked import Block, block_definition, blocks
from .native_masks import OfTerms


def again(problem: Problem) -> list[Tensor]:
    """Output, LSE, entropy, E[j − position] and the masses of the first, previous and own key."""
    q, k, v, sinks, terms, scale, softcap, dropped, seed, _ = problem
    batch, heads, queries, _ = q.shape
    extent = Extent(batch, heads, k.shape[1], queries, k.shape[2])
    mask = OfTerms(terms)
    rate, values = dropped / STEPS, k if v is None else v
    call = Call(q, k, values, mask, scale, softcap or None, rate, extent, sinks, seed=seed)
    run: Callable[[Call, Block], tuple[Tensor, ...]] = _figures
    cut = blocks(mask, extent, q.device)
    parts = [checkpoint(run, call, block, use_reentrant=False) for block in cut]
    return [torch.cat(figure, dim=2) for figure in zip(*parts, strict=True)]  # type: ignore[misc]


def _figures(call: Call, block: Block) -> tuple[Tensor, ...]:
    """The figures of a block's queries, as the textbook would compute them."""
    full = block_definition(call, block, call.dropout)
    p = full.weights
    alive = full.allowed.any(-1)
    entering, outcomes = full.logits.masked_fill(~alive[..., None], 0.0), p
    if full.sink is not None and call.sinks is not None:
        sinks = call.sinks.to(p.dtype).view(1, -1, 1, 1).expand(*p.shape[:3], 1)
        entering = torch.cat([entering, sinks], dim=-1)
        outcomes = torch.cat([p, full.sink[..., None]], dim=-1)
    # Scores may be of any size, and logarithms of weights are not: apart from the largest score
    # they are exact, and so are their gradients.
    top = entering.detach().amax(-1, keepdim=True)
    log_sum = torch.logsumexp(entering - top, dim=-1)
    lse = torch.where(alive, top[..., 0] + log_sum, -torch.inf)
    log_p = (entering - top - log_sum[..., None]).masked_fill(outcomes == 0, 0.0)
    entropy = -(outcomes * log_p).sum(-1)
    assert isinstance(call.mask, OfTerms)
    queries = torch.arange(block.rows.start, block.rows.stop, device=p.device)
    keys = torch.arange(block.keys.start, block.keys.stop, device=p.device)
    away = keys - call.mask.positions(queries)[:, None]
    single = [torch.where(where, p, 0.0).sum(-1) for where in (keys == 0, away == -1, away == 0)]
    return full.out, lse, entropy, (p * away).sum(-1), *single
