"""`MaxLogit` and `Norms`: the largest score of each head, and the norms that bound it.

Only rows that can contain the largest score, by their log-sum-exp, are searched. The bound
`|scale · q_i·k_j| ≤ |scale| · max ‖q‖ · max ‖k‖` costs O(T·D) instead of O(T²·D). Norms and scores
above a limit always cover all queries of a call, even if `queries=` samples them, since a maximum
over a sample proves nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..backends import Native, choose
from ..backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE
from ..core.call import Call
from ..core.index import grid
from ..core.modes import no_graph, read_at_once, readable
from ..core.numbers import format_value, real
from ..core.reference import Definition
from .blocks import Scores
from .plan import KERNEL, ROWS, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic
from .view import View, attended_keys

ABOVE = "max_logit_above_"
"""The prefix of the name of the largest score above a limit; the limit follows it."""


@dataclass(frozen=True)
class MaxLogit(Statistic):
    """The largest score of each head: `[B, H]`, −inf where no query sees a key.

    The score is the value that enters the softmax: scaled, softcapped, biased. Learned sinks do not
    count. For sampled queries (`queries=`) it is a lower bound, which tables call
    `max_logit_sampled`, unless the kernel computed it for all queries.

    Args:
        above: report only scores above this limit, and −inf otherwise; the metric is then named
            `max_logit_above_…` and covers all queries of the call, even if `queries=` is given.
            Most heads of a healthy model then cost O(T·D), because their bound
            `scale · max ‖q‖ · max ‖k‖` is below the limit.

    >>> import torch, headwise as hw
    >>> k = v = torch.eye(2).view(1, 2, 1, 2) * 12.0  # two heads, one query, one key
    >>> q = k * torch.tensor([1.0, 2.0]).view(2, 1, 1)
    >>> hw.observe(q, k, v, hw.MaxLogit(above=150.0))["max_logit_above_150"].round()
    tensor([[-inf, 204.]])

    Source: Kimi K2 2025 (QK-clip), Dehghani et al. 2023 (logit growth).
    """

    above: float | None = None
    free = deferred = True

    def __post_init__(self) -> None:
        if self.above is None:
            return
        limit = real(self.above)
        if limit is None or not math.isfinite(limit):
            raise ValueError(
                f"MaxLogit(above={format_value(self.above)}): above must be a finite number."
            )
        object.__setattr__(self, "above", limit)

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.above is None:
            return ("max_logit",)
        return (f"{ABOVE}{str(self.above).removesuffix('.0')}",)

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return {self.names[0]: _MAX_LOGIT if self.above is None else _MaxLogitAbove(self.above)}

    def metric(self, record: Record) -> dict[str, Reading]:
        ((name, need),) = self.needs.items()
        largest = record.answers[need]
        if largest.dim() == 3:  # of each query, from the kernel
            largest = _of_rows(largest, record.lse)
            largest = largest if self.above is None else _above(largest, self.above)
        return {name: Reading(largest, largest=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        largest = full.logits.amax((-1, -2))
        return {self.names[0]: largest if self.above is None else _above(largest, self.above)}


class _MaxLogit(Need):
    """The largest score of each head `[B, H]`; −inf where no query sees a key. No gradient.

    If the kernel computes it, the largest score of each query `[B, H, n]`.
    """

    name, kernel = "max_logit", "max"

    def route(self, setting: Setting) -> Route:
        if setting.kernel:
            return Route(KERNEL)
        return Route(ROWS, "only those that can contain the largest score")

    def answer(self, route: Route, work: Work) -> Tensor:
        return _largest_score(work.scores, work.view.constant, work.lse)


_MAX_LOGIT = _MaxLogit()


def _of_rows(largest: Tensor, lse: Tensor | None) -> Float[Tensor, "B H"]:
    """Return the largest score of each head from those of each query, and their log-sum-exp."""
    assert lse is not None
    # No score exceeds the log-sum-exp, which is NaN if a score is NaN.
    return torch.minimum(largest.detach(), lse.detach()).amax(-1)


def _largest_score(scores: Scores, call: Call, lse: Float[Tensor, "B H n"]) -> Float[Tensor, "B H"]:
    """Return the largest score of each head, exactly; −inf where no query sees a key.

    `lse_i − log n_i ≤ max_j s_ij ≤ lse_i`: the rows with the largest LSE come first, and then
    only blocks with a row that can contain a larger score: a few rows for peaked heads, all rows
    for flat ones. `call` is the call of the scores, without gradients.
    """
    extent, device = scores.extent, scores.device
    if not (extent.batch and extent.queries and extent.keys):
        return lse.new_full((extent.batch, extent.heads), -torch.inf)
    if not readable(lse):  # the rows to search depend on their values
        every = [_largest_in(scores, call, cut) for cut in scores.blocks(SCORES_AT_A_TIME)]
        return torch.stack(every).amax(0)
    known = _no_score_above(lse.detach(), scores.sinks)
    row = max(1, extent.batch * extent.heads * extent.keys)
    j = torch.arange(extent.keys, device=device).view(1, 1, 1, -1)

    def largest_of(i: Tensor) -> Tensor:
        """Return the largest score of the queries i `[B, H, m]`, selected per head."""
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
    """Return the largest score of a block of rows."""
    if cut.keys.stop == cut.keys.start:
        return call.q.new_full((call.extent.batch, call.extent.heads), -torch.inf)
    i, j = grid(call.extent, call.q.device, cut.rows, cut.keys)
    return scores.logits(call.q[:, :, cut.rows], call.k[:, :, cut.keys], i, j)[0].amax((-1, -2))


def _no_score_above(
    lse: Float[Tensor, "B H n"], sinks: Float[Tensor, " H"] | None
) -> Float[Tensor, "B H n"]:
    """Return an upper bound on each row's scores: the LSE of its keys, −inf in dead rows."""
    # Rounding of the LSE must not exclude the row with the largest score.
    dead = lse == -torch.inf
    bound = (lse + 1e-5 * (1 + lse.abs())).masked_fill(dead, -torch.inf)
    if sinks is None:
        return bound
    taken = sinks.detach()[:, None] - bound.masked_fill(dead, torch.inf)
    return bound + torch.log(-torch.expm1(taken))


class _Norm(Need):
    """‖q_i‖ or ‖k_j‖ of each head `[B, H, T or S]`, for all queries. No gradient.

    Computed in float64, in which no square of a float32 overflows.
    """

    scores, vectors = False, True

    def __init__(self, of: str) -> None:
        self.name, self.of = {"q": "query_norm", "k": "key_norm"}[of], of

    def route(self, setting: Setting) -> Route:
        return Route(f"from {self.of} alone")

    def answer(self, route: Route, work: Work) -> Float[Tensor, "B H _"]:
        view = work.view
        if not (view.keeps_mask or view.keep_mask()):
            self.counts(view)
        return self.of_each(view)

    def of_each(self, view: View) -> Float[Tensor, "B H _"]:
        """Return the norm of each query or key; keys are repeated for each head of their group."""
        x, group = getattr(view.original, self.of), view.whole.group
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64)
        return norms if self.of == "q" or group == 1 else norms.repeat_interleave(group, dim=1)

    def counts(self, view: View) -> Bool[Tensor, "#B #H _"]:
        """Return the queries that may attend to a key, or the keys that a query may attend to."""
        whole = view if view.rows is None else view.of_all
        if self.of == "q":
            return whole.valid_rows
        find = partial(attended_keys, whole.mask, whole.extent, whole.device)
        return whole.once("attended keys", find)

    def largest(self, norms: Float[Tensor, "B H _"], view: View) -> Float[Tensor, "B H"]:
        """Return the largest counted norm of each head, or 0 if there is none."""
        if norms.shape[-1] == 0:
            return norms.new_zeros(norms.shape[:2])
        return torch.where(self.counts(view), norms, 0.0).amax(-1)


_QUERY_NORM, _KEY_NORM = _Norm("q"), _Norm("k")


@dataclass(frozen=True)
class Norms(Statistic):
    """The largest norm of each head's queries, and of its keys: each `[B, H]`. No gradient.

    `max ‖q_i‖` is over the queries that may attend to a key, and `max ‖k_j‖` over the keys of the
    head's key/value head that some query may attend to; 0 if there are none. Both are of q and k as
    they enter the scores, after rotation and normalization, and cover all queries of the call even
    if `queries=` is given. No score, before softcap and bias, exceeds
    `scale · query_norm · key_norm`.

    Source: the Cauchy–Schwarz inequality; Dehghani et al. 2023 (logit growth).
    """

    names = ("query_norm", "key_norm")
    needs = MappingProxyType({"query_norm": _QUERY_NORM, "key_norm": _KEY_NORM})
    free = deferred = True

    def metric(self, record: Record) -> dict[str, Reading]:
        view, found = record.view, {}
        for name, norm in zip(self.names, (_QUERY_NORM, _KEY_NORM), strict=True):
            largest = norm.largest(record.answers[norm], view).to(view.dtype)
            found[name] = Reading(largest, largest=True)
        return found

    def define(self, full: Definition) -> dict[str, Tensor]:
        k = full.k.repeat_interleave(full.extent.group, dim=1)
        norms = (
            torch.where(full.allowed.any(axis), x.double().norm(dim=-1), 0.0).amax(-1)
            for x, axis in ((full.q, -1), (k, -2))
        )
        return dict(zip(self.names, (x.to(full.weights.dtype) for x in norms), strict=True))


@dataclass(frozen=True)
class _MaxLogitAbove(Need):
    """The largest score of each head if it is above a limit, else −inf: `[B, H]`. No gradient.

    No scores are computed for heads whose norms bound them below the limit.
    """

    limit: float
    name = "max_logit"
    kernel = "max"
    scores = False

    def route(self, setting: Setting) -> Route:
        if setting.kernel and setting.output and setting.whole:
            return Route(KERNEL)
        return Route("norms", "and scores of the heads whose bound exceeds the limit")

    def answer(self, route: Route, work: Work) -> Float[Tensor, "B H"]:
        view = work.view
        call = view.original.with_(sinks=None, dropout=0.0)
        sizes = view.whole.batch, view.whole.heads
        largest = torch.full(sizes, -torch.inf, dtype=view.dtype, device=view.device)
        heads = self._in_question(view) if read_at_once(view.original.q) else None
        if heads is None:
            return _above(_largest_scores(call, work), self.limit)
        if len(heads):
            largest[:, heads] = _largest_scores(_with_heads(call, heads), work)
        return _above(largest, self.limit)

    def _in_question(self, view: View) -> Tensor | None:
        """Return the heads that may have a score above the limit; `None` for all."""
        call = view.original
        if call.mask.biased:  # the bound does not include a bias
            return None
        of_q, of_k = (x.largest(x.of_each(view), view) for x in (_QUERY_NORM, _KEY_NORM))
        bound = abs(call.scale) * of_q * of_k
        # Scores are sums of D products, rounded.
        room = 1 + (call.q.shape[-1] + 4) * torch.finfo(view.dtype).eps
        above = (~(bound * room <= self.limit)).any(0)  # True for NaN, too
        if above.all() or (above.any() and _by_head(call)):
            return None
        return above.nonzero()[:, 0]


def _above(largest: Tensor, limit: float) -> Tensor:
    """Replace values that are not above the limit by −inf, and keep NaN."""
    return largest.masked_fill(largest <= limit, -torch.inf)


def _by_head(call: Call) -> bool:
    """Return True if the mask differs between heads."""
    i, j = grid(call.extent, call.q.device, slice(0, 1))
    allowed = call.mask.allowed(i, j, call.extent)
    return allowed is not None and allowed.dim() == 4 and allowed.shape[1] > 1


def _with_heads(call: Call, heads: Tensor) -> Call:
    """Return the call restricted to some query heads, each with its own keys."""
    extent, of_keys = call.extent, heads // call.extent.group
    return call.with_(
        q=call.q[:, heads],
        k=call.k[:, of_keys],
        v=call.v[:, of_keys],
        extent=replace(extent, heads=len(heads), kv_heads=len(heads)),
    )


def _largest_scores(call: Call, work: Work) -> Float[Tensor, "B H"]:
    """Return `MaxLogit` of another call, using this call's backend if it can run that call."""
    chosen = choose(call) if work.chosen.refuse(call) else work.chosen
    view = View(call, None, False)
    other = Work(view, work.keeps_graph, False, strict=work.strict)
    other.chosen = chosen
    one_pass = isinstance(other.backend, Native)
    fields = ("max",) if one_pass else ()
    other.make_call(
        replace(work.plan, fields=fields, together=False, scores=True, direct=False, far=None)
    )
    with no_graph():
        if one_pass:
            assert other.given is not None
            assert other.given.max is not None
            return _of_rows(other.given.max, other.lse)
        return _largest_score(other.scores, other.view.constant, other.lse)
