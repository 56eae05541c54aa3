"""The textbook definition of attention: the reference against which faster code is tested.

It builds the T×T matrix in at least float32 and returns scores, weights and log-sum-exp along with
the output. The order of operations is scale, softcap, bias, mask, softmax, dropout, values. A
learned sink is one more logit in each row's softmax, for an outcome without a value.

Source: Vaswani et al. 2017, equation 1; softcap: Gemma 2 (2024), §2; grouped heads: Ainslie et al.
2023; learned sinks: GPT-OSS (2025), after Miller 2023.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from .dropout import draw_seed, drop
from .index import grid
from .mask_algebra import Mask
from .masks import as_mask
from .shapes import Extent, extent_of, statistics_dtype


@dataclass(frozen=True)
class Definition:
    """The results of the definition, including intermediate ones.

    `logits` are the scores that enter the softmax, −inf where not allowed. `weights` are the
    probabilities before dropout. Rows without a visible key have weights 0 and `lse` −inf. With
    learned sinks, `lse` includes the sink's logit, and each row of `weights` sums to 1 − `sink`.
    `q` and `k` are the arguments.
    """

    out: Float[Tensor, "B H T Dv"]
    weights: Float[Tensor, "B H T S"]
    logits: Float[Tensor, "B H T S"]
    lse: Float[Tensor, "B H T"]
    allowed: Bool[Tensor, "B H T S"]
    extent: Extent
    q: Float[Tensor, "B H T D"]
    k: Float[Tensor, "B G S D"]
    sink: Float[Tensor, "B H T"] | None = None


def attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
    seed: Tensor | None = None,
) -> Definition:
    """Compute attention by its definition, with all intermediate results.

    Arguments are those of `headwise.attend()`; `seed`, int64 `[]`, is the seed of dropout. Default:
    a new seed. A sink gets part of the weight of each row that may attend to a key; other rows stay
    dead. The output is in v's dtype, everything else in float32 (float64 if q is float64).

    Raises:
        ValueError: shapes or the mask do not fit.

    >>> q = k = v = torch.eye(2).view(1, 1, 2, 2)
    >>> attention(q, k, v, scale=0.0).weights[0, 0].tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    >>> attention(q, k, v, scale=0.0, sinks=torch.tensor([2.0]).log()).weights[0, 0].tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    extent = extent_of(q, k, v, "attention")
    mask = as_mask(mask)
    mask.check(extent)
    i, j = grid(extent, q.device)
    if dropout and seed is None:
        seed = draw_seed(q.device)
    options = {"scale": scale, "softcap": softcap, "dropout": dropout, "seed": seed}
    return rows(q, k, v, mask, extent, i, j, sinks=sinks, **options)


def rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    extent: Extent,
    i: Tensor,
    j: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
) -> Definition:
    """Compute the definition for the queries `i` `[t, 1]` and keys `j` `[1, s]` in q, k and v.

    With all queries and keys, this is attention itself; blocks of rows need less memory at a time.
    Dropout requires consecutive indices and a seed.
    """
    dtype = statistics_dtype(q.dtype)
    keys = k.to(dtype).repeat_interleave(extent.group, dim=1)
    scores = (q.to(dtype) @ keys.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    logits, allowed = finish_scores(scores, mask, extent, i, j, softcap=softcap)
    valid = allowed.any(-1, keepdim=True)
    # A row without keys has no softmax: use a finite placeholder and zero it afterwards, so that
    # neither its value nor its gradient is ever 0/0.
    entering = logits.masked_fill(~valid, 0.0)
    if sinks is not None:
        sink_logits = sinks.to(dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        entering = torch.cat([entering, sink_logits], dim=-1)
    outcomes = torch.softmax(entering, dim=-1)
    weights = torch.where(allowed, outcomes[..., : logits.shape[-1]], 0.0)
    sink = None if sinks is None else torch.where(valid[..., 0], outcomes[..., -1], 0.0)
    # The gradient of PyTorch's logsumexp is exp(s − lse), which is inaccurate for a large lse.
    top = entering.detach().amax(-1, keepdim=True) if entering.shape[-1] else 0.0
    lse = (top + (entering - top).exp().sum(-1, keepdim=True).log())[..., 0]
    lse = torch.where(valid[..., 0], lse, -torch.inf)
    kept = weights
    if dropout:
        assert seed is not None
        kept = drop(weights, dropout, seed, i, j)
    values = v.to(dtype).repeat_interleave(extent.group, dim=1)
    out = (kept @ values).to(v.dtype)
    return Definition(out, weights, logits, lse, allowed, extent, q, k, sink)


def finish_scores(
    scores: Tensor, mask: Mask, extent: Extent, i: Tensor, j: Tensor, *, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Apply softcap, bias and mask, in this order, to scaled scores at the pairs (i, j).

    Return the scores that enter the softmax, −inf where not allowed, and the allowed pairs.
    """
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = mask.bias(i, j, extent)
    if bias is not None:
        scores = scores + bias.to(scores.dtype)
    allowed = mask.allowed(i, j, extent)
    if allowed is None:
        return scores, torch.ones_like(scores, dtype=torch.bool)
    allowed = allowed.expand(scores.shape)
    return scores.masked_fill(~allowed, -torch.inf), allowed
