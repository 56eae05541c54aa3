"""`attend()`: multi-head attention on queries, keys and values."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from .backends import Call, check_scores, choose
from .core.mask_algebra import Mask
from .core.observers import observers
from .core.shapes import no_autocast
from .core.unknown import Unknown, refuse_unknown

_AS_IS = nullcontext()


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
    first_query: int | None = None,
    backend: str = "auto",
    **unknown: Unknown,
) -> Float[Tensor, "B H T Dv"]:
    """Compute multi-head attention on queries, keys and values that are already split into heads.

    Args:
        q: queries `[B, H, T, D]`, any floating dtype; query head `h` reads key/value head
            `h // (H // G)`.
        k: keys `[B, G, S, D]`.
        v: values `[B, G, S, Dv]`; their width may differ from D.
        mask: a headwise mask, such as `Causal() & Window(128)`. `None` allows every pair.
        scale: factor of the scores. Default: `D**-0.5`.
        softcap: a value `c` replaces each score by `c · tanh(score / c)`, before any bias.
        dropout: probability of dropping a weight, rounded to 1/65536; give 0 outside training. The
            dropped weights depend on a seed that each call draws from PyTorch's default generator
            and are the same on every backend, except `"sdpa"` on CUDA, whose kernels use their own
            random numbers.
        sinks: learned sinks `[H]`: one more logit per head in the softmax of every row that may
            attend to a key. Weight on a sink contributes nothing to the output.
        first_query: the key position of query 0, used by masks. Default: S − T, so that the last
            query is at the last key. Set it for part of a sequence.
        backend: `"auto"`, `"native"`, `"sdpa"`, `"blocked"` or `"eager"`. A named backend never
            falls back to another.

    Returns:
        The output `[B, H, T, Dv]` in q's dtype; 0 for queries without a visible key. Differentiable
        in q, k, v and sinks (and in a `Bias`).

    Raises:
        ValueError: shapes, dtypes, masks or numbers are invalid, or the named backend cannot run
            the call.
        TypeError: an unknown argument, such as PyTorch's `is_causal`; the message names the
            equivalent.

    >>> from headwise.core.masks import Causal
    >>> q = torch.randn(2, 12, 7, 64)
    >>> k = v = torch.randn(2, 4, 7, 64)
    >>> attend(q, k, v, mask=Causal()).shape
    torch.Size([2, 12, 7, 64])

    Source: Vaswani et al. 2017, §3.2; grouped heads: Ainslie et al. 2023; sinks: GPT-OSS 2025.
    """
    if unknown:
        refuse_unknown("attend(q, k, v", attend, unknown)
    call = Call.of(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        sinks=sinks,
        first_query=first_query,
    )
    if not torch.compiler.is_compiling() and observers:
        return observers[0](call, backend, partial(_output, call, backend))
    return _output(call, backend)


def _output(call: Call, backend: str) -> Tensor:
    """Compute the output of a checked call."""
    with no_autocast(call.q.device) if torch._C._is_any_autocast_enabled() else _AS_IS:
        out, lse = choose(call, backend).output(call.drawn() if call.dropout else call)
    if lse is not None:
        check_scores(call, lse)
    return out
