"""The largest norms of q and k, and the heads whose scores they keep under a limit.

`|scale · q_i·k_j| ≤ |scale| · max ‖q‖ · max ‖k‖`: O(T·D) in place of O(T²·D). Both describe all
queries of a call, also where only some are looked at: a maximum over a sample decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends import OnePass, choose
from ..core.call import Call
from ..core.index import grid
from ..core.modes import no_graph, readable
from .engine import Engine
from .needs import MAX_LOGIT, Need, Setting
from .results import KERNEL, ROWS, Route
from .view import View, keys_in_sight, visible_keys


class _LargestNorm(Need):
    """The largest ‖q_i‖ or ‖k_j‖ of each head `[B, H]`; 0 where none counts. No gradient.

    Of queries that may attend to something and keys that one of them may attend to.
    """

    scores, vectors = False, True

    def __init__(self, of: str) -> None:
        self.name, self.of = {"q": "query_norm", "k": "key_norm"}[of], of

    def route(self, setting: Setting) -> Route:
        return Route(f"from {self.of} alone")

    def answer(self, route: Route, engine: Engine) -> Float[Tensor, "B H"]:
        return self.exactly(engine.view).to(engine.view.dtype)

    def exactly(self, view: View) -> Float[Tensor, "B H"]:
        """The same in float64, where no square of a float32 is too large."""
        asked, extent = view.asked, view.whole
        x = asked.q if self.of == "q" else asked.k
        norms = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float64)
        if self.of == "k":
            norms = norms.repeat_interleave(extent.group, dim=1)
            mask = asked.mask
            find = partial(keys_in_sight, mask, extent, view.device)
            counts = view.once("keys in sight", find, mask.free)
        elif view.rows is None:
            counts = view.valid_rows
        else:
            counts = visible_keys(asked.mask, extent, view.device) > 0
        if norms.shape[-1] == 0:
            return norms.new_zeros(norms.shape[:2])
        return torch.where(counts, norms, 0.0).amax(-1)


QUERY_NORM, KEY_NORM = _LargestNorm("q"), _LargestNorm("k")


@dataclass(frozen=True)
class MaxLogitAbove(Need):
    """The largest score of each head where it is above a limit, else −inf: `[B, H]`. No gradient.

    Heads that their norms keep under the limit have no score computed.
    """

    limit: float
    name = "max_logit"
    kernel = "max"
    scores = False

    def route(self, setting: Setting) -> Route:
        if setting.kernel and setting.output and setting.whole:
            return Route(KERNEL)
        return Route("norms", "and scores of the heads that these do not keep under the limit")

    def answer(self, route: Route, engine: Engine) -> Float[Tensor, "B H"]:
        if route.kind == KERNEL:
            return above(MAX_LOGIT.answer(route, engine), self.limit)
        view = engine.view
        call = view.asked.with_(sinks=None, dropout=0.0)
        sizes = view.whole.batch, view.whole.heads
        largest = torch.full(sizes, -torch.inf, dtype=view.dtype, device=view.device)
        heads = self._in_question(view) if readable(view.asked.q) else None
        if heads is None:
            return above(_largest_scores(call, engine), self.limit)
        if len(heads):
            largest[:, heads] = _largest_scores(_with_heads(call, heads), engine)
        return above(largest, self.limit)

    def _in_question(self, view: View) -> Tensor | None:
        """The heads that may have a score above the limit; `None` for all."""
        call = view.asked
        if call.mask.biased:  # what is added to the scores is not in the bound
            return None
        bound = abs(call.scale) * QUERY_NORM.exactly(view) * KEY_NORM.exactly(view)
        # Scores are sums of D products, rounded.
        room = 1 + (call.q.shape[-1] + 4) * torch.finfo(view.dtype).eps
        asks = (~(bound * room <= self.limit)).any(0)  # NaN asks too
        if asks.all() or (asks.any() and _by_head(call)):
            return None
        return asks.nonzero()[:, 0]


def above(largest: Tensor, limit: float) -> Tensor:
    """What is not above the limit becomes −inf; NaN stays."""
    return largest.masked_fill(largest <= limit, -torch.inf)


def _by_head(call: Call) -> bool:
    """Whether the mask is another one for each head."""
    i, j = grid(call.extent, call.q.device, slice(0, 1))
    allowed = call.mask.allowed(i, j, call.extent)
    return allowed is not None and allowed.dim() == 4 and allowed.shape[1] > 1


def _with_heads(call: Call, heads: Tensor) -> Call:
    """The call with some of its query heads, each with keys of its own."""
    extent, of_keys = call.extent, heads // call.extent.group
    return call.with_(
        q=call.q[:, heads],
        k=call.k[:, of_keys],
        v=call.v[:, of_keys],
        extent=replace(extent, heads=len(heads), kv_heads=len(heads)),
    )


def _largest_scores(call: Call, engine: Engine) -> Float[Tensor, "B H"]:
    """`MaxLogit` of another call with the backend of this one, where that serves it."""
    chosen = choose(call) if engine.chosen.refuse(call) else engine.chosen
    other = Engine(
        call, chosen, engine.keeps_graph, gradients=False, output=False, strict=engine.strict
    )
    one_pass = isinstance(other.backend, OnePass)
    other.fields = ("max",) if one_pass else ()
    _ = other.lse_of_call
    with no_graph():
        return MAX_LOGIT.answer(Route(KERNEL if one_pass else ROWS), other)
