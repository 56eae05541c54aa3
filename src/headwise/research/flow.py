"""Attention flow: trace a token back through the layers with `rollout()` and `relevance()`.

Only one token's row of the product of T×T matrices is needed: the row is multiplied by P, layer
by layer from the last. Each takes one pass over blocks of P, computed from queries, keys and LSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..capture.call import AttentionCall, ObserveOptions
from ..capture.modules import Modules, check_model
from ..core.numbers import as_int, format_value, real
from ..core.reference import Definition
from ..stats.blocks import ScoreBlock
from ..stats.plan import KERNEL_PASS, PASS, Need, OfPass, Route, Setting, Work
from ..stats.record import Reading, Record
from ..stats.statistic import Statistic
from .runs import KeptCall, Score, kept_calls


def rollout(
    model: nn.Module,
    inputs: Any,
    token: int | Tensor,
    *,
    residual: float = 0.5,
    modules: Modules = None,
) -> Float[Tensor, "B T"]:
    """Compute the attention rollout of a token: a share for each input token, in O(T) memory.

    This is the token's row of `Â_L ⋯ Â_1`, where `Â` is `residual · I + (1 − residual) · A`
    with rows that sum to 1, and A is the mean of a layer's weights over heads. All layers of one
    run are used, in the order of their calls.

    Args:
        model: any model that `watch()` supports, whose layers attend from all tokens to all tokens.
        inputs: the model's inputs: a dict of keywords (the output of a tokenizer), a tuple or list
            of arguments, or a single argument.
        token: the position of the token, from 0, or from the end if negative; or one for each row
            of the batch, `[B]`. The class token of a ViT is 0.
        residual: the fraction for the residual stream, from 0 to 1.
        modules: use only these, as in `watch()`: the self-attention of encoder and decoder, for
            example, cannot be multiplied.

    Returns:
        Shares that sum to 1, in float32 (float64 for a model in float64).

    Raises:
        ValueError: no attention was captured; layers have different lengths, or a layer has
            more or fewer keys than queries; the token is out of range; `residual` is not in [0, 1].

    >>> from headwise.models import builtin, load
    >>> model, tokenizer = load(builtin())
    >>> ids = torch.tensor([tokenizer.encode("The with statement wraps the block").ids])
    >>> shares = rollout(model, ids, token=-1)
    >>> shares.shape, f"{shares.sum():.3f}"
    (torch.Size([1, 11]), '1.000')

    Source: Abnar & Zuidema 2020, "Quantifying Attention Flow in Transformers", eq. 1.
    """
    share = real(residual)
    if share is None or not 0 <= share <= 1:
        raise ValueError(
            f"rollout(…, residual={format_value(residual)}): give a share from 0 to 1."
        )
    calls = kept_calls("rollout", model, inputs, modules)
    row = _row(calls, token, check_model("rollout", model))
    while calls:
        flow, row = _carry(calls.pop(), row, share)
        row = share * row + (1 - share) * flow
    return row


def relevance(
    model: nn.Module, inputs: Any, token: int | Tensor, score: Score, *, modules: Modules = None
) -> Float[Tensor, "B T"]:
    """Compute the gradient-weighted relevance of each input token to a score, for one token.

    This is the token's row of `(I + Ā_L) ⋯ (I + Ā_1)`, where `Ā` is the mean over heads of
    `max(0, A · ∂score/∂A)`. The T×T gradient is not built: it is `∂score/∂o_i · v_j`.

    Args:
        model, inputs, token, modules: as in `rollout()`. Gradients of parameters do not change, and
            parameters may be frozen.
        score: `score(output)` returns the score to explain, given the output, usually a logit:
            for each row of the batch, `[B]`, or their sum.

    Raises:
        ValueError: as for `rollout()`; the score has the wrong shape or no gradient; values are not
            visible.

    >>> from headwise.models import builtin, load
    >>> model, tokenizer = load(builtin())
    >>> ids = torch.tensor([tokenizer.encode("The with statement wraps the block").ids])
    >>> found = relevance(model, ids, -1, lambda logits: logits[:, -1].amax(-1))
    >>> found.shape, bool((found >= 0).all())
    (torch.Size([1, 11]), True)

    Source: Chefer et al. 2021, "Generic Attention-model Explainability", eq. 5 and 6.
    """
    calls = kept_calls("relevance", model, inputs, modules, score)
    row = _row(calls, token, check_model("relevance", model))
    while calls:
        row = row + _carry(calls.pop(), row, None)[0]
    return row


def _row(calls: Sequence[KeptCall], token: int | Tensor, quoted: str) -> Tensor:
    """Return the row of the identity that belongs to the token, `[B, T]`."""
    sizes = {(one.call.batch, one.call.queries, one.call.keys) for one in calls}
    _, length, keys = next(iter(sizes))
    if len(sizes) > 1 or length != keys:
        each = dict.fromkeys(
            f"{one.call.name!r} {list(one.call.q.shape[:3])} to {one.call.keys} keys"
            for one in calls
        )
        raise ValueError(
            f"{quoted}: layers must attend from the same tokens to the same tokens, and these are "
            f"{', '.join([*each][:4])}; choose some with modules=…"
        )
    return row_of_token(calls[0].call, token, quoted)


def row_of_token(call: AttentionCall, token: int | Tensor, quoted: str) -> Float[Tensor, "B T"]:
    """Return the rows of the identity that belong to a token, or to one for each batch row.

    Raises:
        ValueError: the token is out of range.
    """
    batch, length, q = call.batch, call.queries, call.q
    number = as_int(token)
    places = torch.as_tensor(token if number is None else [number] * batch)
    inside = not places.is_floating_point() and (places >= -length) & (places < length)
    if places.shape != (batch,) or not bool(torch.as_tensor(inside).all()):
        raise ValueError(
            f"{quoted}: token {format_value(token)} must be a position from 0 to {length - 1}, or "
            f"from -1 to {-length}, or a tensor of {batch} of them."
        )
    row = q.new_zeros(batch, length, dtype=torch.promote_types(q.dtype, torch.float32))
    row[torch.arange(batch), places.to(q.device)] = 1
    return row


def carried(one: KeptCall, row: Float[Tensor, "B T"]) -> Float[Tensor, "B H S"]:
    """Return a row times the weights of each head."""
    return one.call.observe([_Carried(row, None)], ObserveOptions())["flow"].values


def _carry(one: KeptCall, row: Tensor, share: float | None) -> tuple[Tensor, Tensor]:
    """Return a row times the mean of a layer's weights over heads, `[B, S]`, and the row itself,
    divided by the row sums of `Â` for rollout."""
    some = row.any(0).nonzero()[:, 0]
    few = len(some) < row.shape[1] // 2
    given = row[:, some] if few else row
    slope = one.slope if one.slope is None or not few else one.slope[:, :, some]
    statistic = _Carried(given, share, slope, one.values)
    looking = ObserveOptions(queries=some if few else None)
    readings = one.call.observe([statistic], looking)
    flow, back = readings["flow"].values.mean(1), readings["row"].values[:, 0]
    return flow, torch.zeros_like(row).index_copy(1, some, back) if few else back


@dataclass(frozen=True, eq=False)
class _Carried(Statistic):
    """`Σ_i r_i p_ij` `[B, H, S]` of a row `[B, n]`, and the row that was carried."""

    row: Tensor
    share: float | None
    slope: Tensor | None = None
    values: Tensor | None = None
    names = ("flow", "row")

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return dict.fromkeys(self.names, _Flow(self))

    def metric(self, record: Record) -> dict[str, Reading]:
        flow, row = next(iter(record.answers.values()))
        return {"flow": Reading(flow, per_key=True), "row": Reading(row[:, None], per_key=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        flow = torch.einsum("bi,bhij->bhj", self.row, full.weights)
        return {"flow": flow, "row": self.row[:, None]}


class _Flow(OfPass):
    """The row after a layer. Two such needs are equal if they belong to the same statistic."""

    name = "flow"

    def __init__(self, of: _Carried) -> None:
        self.of = of
        self.passes = of.slope is None and len(of.row) == 1  # kernel weights have no batch axis

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Flow) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)

    def route(self, setting: Setting) -> Route:
        return Route(KERNEL_PASS if self.passes and setting.kernel_pass else PASS)

    def accumulator(self, work: Work) -> _RowTimesP:
        return _RowTimesP(work, self._row(work), self.of)

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor]:
        if route.kind == KERNEL_PASS:
            (backend, call, lse), row = work.one_pass, self._row(work)
            return backend.received(call, lse, row[0].float()), row
        found = work.reduced(self)
        return work.by_head(found.total), found.row

    def _row(self, work: Work) -> Tensor:
        """Return the row, divided by the row sums of `Â` for rollout, which are below 1 with a sink
        or without a visible key."""
        view, of = work.view, self.of
        row = of.row.to(view.dtype)
        if of.share is None:
            return row
        sums = view.valid_rows.to(view.dtype)
        if view.sinks is not None:
            sums = sums - torch.exp(view.sinks.detach()[:, None] - work.lse.detach()) * sums
        return row / (of.share + (1 - of.share) * sums.mean(1)).clamp(min=1e-30)


class _RowTimesP:
    """Sums of `r_i p_ij`, or of the positive part of `r_i p_ij (slope_i · v_j)`, over queries."""

    def __init__(self, work: Work, row: Tensor, of: _Carried) -> None:
        heads = work.view.extent.heads
        total, self.row = work.view.zeros(work.view.extent.keys), row
        self.total, self.of_heads = total, row.repeat_interleave(heads, 0)
        self.slope = self.values = None
        if of.slope is not None and of.values is not None:
            self.group = heads // of.values.shape[1]
            self.slope = of.slope.to(total.dtype).flatten(0, 1)
            self.values = of.values.to(total.dtype).flatten(0, 1)

    def add(self, block: ScoreBlock) -> None:
        p, row = block.p, self.of_heads[block.heads, None, block.rows]
        if self.slope is not None and self.values is not None:
            heads = torch.arange(block.heads.start, block.heads.stop, device=p.device)
            values = self.values[heads // self.group, block.keys]
            p = (self.slope[block.heads, block.rows] @ values.mT).mul_(p).clamp_(min=0)
        self.total[block.heads, block.keys] += (row @ p)[:, 0]
