"""Single entries of P, from q, k and the log-sum-exp: O(D) per entry."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.numbers import as_int, format_value, whole_numbers
from ..core.reference import finish_scores
from .blocks import near, probability
from .record import Record
from .run import rows_of_p
from .view import View

Which = int | Sequence[int] | Tensor | slice | None
"""A selection of heads, queries or keys: one, several, or all."""


def entries(
    record: Record,
    heads: Which = None,
    queries: Which = None,
    keys: Which = None,
    changed: bool = False,
) -> Float[Tensor, "B h t s"]:
    """Return the selected entries of P, `exp(s_ij − lse_i)`; `queries` indexes observed queries.

    If tensors of the call may have `changed`, the log-sum-exp of whole rows is checked first.

    Raises:
        ValueError: an index is not a whole number or is out of range; tensors have changed.
    """
    view, lse = record.view, record.lse
    assert lse is not None
    e, device = view.extent, view.device
    h, i, j = (
        torch.arange(size, device=device)[_index(wanted, size, name)]
        for wanted, size, name in (
            (heads, e.heads, "heads"),
            (queries, e.queries, "queries"),
            (keys, e.keys, "keys"),
        )
    )
    if changed:
        _must_hold(view, lse, h, i)
    if not near(lse):
        return view.by_head(rows_of_p(view, i).p)[:, h][..., j]
    return probability(_scores(view, h, i, j), lse.detach()[:, h][:, :, i, None])


def _scores(view: View, h: Tensor, i: Tensor, j: Tensor) -> Float[Tensor, "B h t s"]:
    """Return the scores of these heads, queries and keys, −∞ at masked pairs."""
    e, call = view.extent, view.constant
    q = call.q[:, h][:, :, i]
    k = call.k[:, h // e.group][:, :, j]
    scores = q @ k.mT * call.scale
    place = (i[None, None, :, None], j[None, None, None, :])
    by_head = bool(call.mask.tensors()) or call.mask.biased
    if by_head:  # a mask may differ between heads, so it is applied to all of them
        full = scores.new_zeros(e.batch, e.heads, *scores.shape[2:])
        full[:, h] = scores
        scores = full
    scores, _ = finish_scores(scores, call.mask, e, *place, softcap=call.softcap)
    return scores[:, h] if by_head else scores


def _must_hold(view: View, lse: Float[Tensor, "B H n"], h: Tensor, i: Tensor) -> None:
    """Raise ValueError if the log-sum-exp of these rows differs from the recorded one."""
    every = torch.arange(view.extent.keys, device=view.device)
    for some in i.split(_ROWS):
        now = _scores(view, h, some, every).logsumexp(-1)
        if view.sinks is not None:
            sinks = view.sinks.detach()[h, None]
            now = torch.logaddexp(now, sinks).where(now > -torch.inf, now)
        before = lse.detach()[:, h][:, :, some]
        if not torch.allclose(now, before, rtol=_CLOSE, atol=_CLOSE, equal_nan=True):
            raise ValueError(
                "seen.weights(…): q, k, the mask or the sinks were changed in place after they "
                "were observed, and weights are computed from them; read the weights first, or "
                "observe a copy, such as k.clone()."
            )


_ROWS = 64
"""The number of queries whose scores are computed at once."""

_CLOSE = 1e-3
"""The largest difference allowed between log-sum-exps of the same scores."""


def _index(wanted: Which, size: int, name: str) -> slice | list[int]:
    if wanted is None or isinstance(wanted, slice):
        return slice(None) if wanted is None else wanted
    one = as_int(wanted)
    numbers = whole_numbers(wanted) if one is None else [one]
    if numbers is None:
        raise ValueError(
            f"weights({name}={format_value(wanted)}): give a whole number, several in "
            f"a list, or a slice."
        )
    for number in numbers:
        if not -size <= number < size:
            raise ValueError(f"weights({name}={number}): there are {size} {name}")
    return numbers
