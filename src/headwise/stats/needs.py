"""What statistics need of a call, as data: each need, its routes, and its answer by each of them.

A need is a request. `plan()` takes a route for each of a call's needs, `execute()` has the engine
answer them. Needs that are equal are one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.shapes import Extent
from . import identities
from .engine import Engine
from .max_logit import largest_score
from .results import CALL, KERNEL, KERNEL_PASS, OUTPUT, PASS, ROWS, Route
from .score_sweep import Accumulator, Ahead, Block, Columns, RowSums, Spread, entropy_of
from .scores import RowBlock, near
from .view import View

UNREADABLE = "where numbers cannot be read, it may not depend on them"


@dataclass(frozen=True)
class Setting:
    """What routes depend on; no number in a tensor is among it.

    Args:
        extent: the sizes, with as many queries as are looked at.
        dim: the head dimension.
        output: whether the call is made with its output.
        kernel: whether a one-pass backend makes the call.
        kernel_pass: whether one makes the passes over the scores.
        nonlinear: what keeps the scores from being linear in the keys; empty if they are.
        gradients: whether figures are to have gradients.
        sinks: whether there are learned sinks.
        behind: whether keys in sight are ranges with none ahead of their query; only looked into
            where a need asks.
        readable: whether the numbers in the call's tensors can be read; else routes are taken that
            do not depend on them.
        whole: whether all queries are looked at.
    """

    extent: Extent
    dim: int
    output: bool
    kernel: bool
    kernel_pass: bool
    nonlinear: str
    gradients: bool
    sinks: bool
    behind: bool
    readable: bool
    whole: bool


class Need(ABC):
    """A figure of a call that statistics read.

    `name` is what it is called in routes, `kernel` the field of a one-pass backend that holds it.
    """

    name: str
    kernel: str | None = None
    via: Need | None = None
    """The need whose answer serves where the route is `VIA`."""
    passes: bool = False
    """Whether a one-pass backend answers it by a pass of its own."""
    scores: bool = True
    """Whether it reads scores, or their log-sum-exp: else no call is made for its sake."""
    mass: bool = False
    """Whether it is a mass on chosen keys, of which few queries may hold most."""
    vectors: bool = False
    """Whether it reads the queries and keys themselves, which scores do not tell."""

    @abstractmethod
    def route(self, setting: Setting) -> Route:
        """The way to the figure in such a call."""

    def told(self, route: Route, engine: Engine) -> Route:
        """The route as `explain()` tells it, where that depends on numbers."""
        return route

    def prepare(self, route: Route, engine: Engine) -> None:  # noqa: B027
        """Let the figure wait for a pass that others may share, if it is to."""

    @abstractmethod
    def answer(self, route: Route, engine: Engine) -> Any:
        """The figure."""

    def at_hand(self, route: Route, every: Engine, drawn: Engine) -> bool:
        """Whether the figure of all queries costs next to nothing, where their LSE is at hand.

        They may be few beside those `drawn`, or have a pass behind them that gave fields too
        (`every.given`).
        """
        return route.kind == KERNEL and every.given is not None


# ── of the call itself ──────────────────────────────────────────────────────────────────────────


class _LogSumExp(Need):
    """The log-sum-exp of each query's scores and sink, `[B, H, n]`."""

    name = "lse"

    def route(self, setting: Setting) -> Route:
        if setting.output:
            return Route(KERNEL)
        return Route("one more call", "there is no output to take it from")

    def answer(self, route: Route, engine: Engine) -> Tensor:
        return engine.lse

    def at_hand(self, route: Route, every: Engine, drawn: Engine) -> bool:
        return True


class _SinkMass(Need):
    """The mass on the learned sink, `exp(sink − lse)`; 0 in dead rows and without sinks."""

    name = "sink"

    def route(self, setting: Setting) -> Route:
        return Route("from the log-sum-exp")

    def answer(self, route: Route, engine: Engine) -> Tensor:
        if engine.view.sinks is None:
            return torch.zeros_like(engine.lse)
        if not engine.near:
            return engine.of_rows("sink", _sink_of)
        return torch.exp(identities.log_sink(engine.lse, engine.view.sinks))

    def at_hand(self, route: Route, every: Engine, drawn: Engine) -> bool:
        return every.near


class _Output(Need):
    """The heads' outputs `[B, H, n, Dv]`, and the weight of the output projection or `None`."""

    name = "output"

    def route(self, setting: Setting) -> Route:
        return Route(OUTPUT)

    def answer(self, route: Route, engine: Engine) -> tuple[Tensor, Tensor | None]:
        return engine.out, engine.projection


LOG_SUM_EXP, SINK_MASS, HEAD_OUTPUT = _LogSumExp(), _SinkMass(), _Output()


# ── from the kernel, an extra call or a pass, whichever is cheapest ──────────────────────────────


class _Entropy(Need):
    """`−Σ_j p_ij log p_ij` of keys and sink, `[B, H, n]`.

    By an extra call with the keys as values, where scores are linear in them; else from blocks.
    """

    name, kernel = "entropy", "entropy"
    among_keys = False

    def route(self, setting: Setting) -> Route:
        if setting.kernel:
            return Route(KERNEL)
        if setting.nonlinear:
            return Route(ROWS, f"{setting.nonlinear}, and a gradient is wanted")
        if not setting.readable:
            return Route(ROWS, UNREADABLE)
        return Route(CALL)

    def make(self, engine: Engine) -> Accumulator:
        return RowSums(entropy_of, engine.view.zeros(engine.view.extent.queries))

    def prepare(self, route: Route, engine: Engine) -> None:
        if route.kind == ROWS:
            engine.rows.wait(self.name, _entropy_of_rows)

    def answer(self, route: Route, engine: Engine) -> Tensor:
        if route.kind == KERNEL:
            return engine.field("entropy")
        view, entropy = engine.view, None
        if route.kind == CALL:
            entropy = self._by_identity(engine)
        elif route.kind == PASS and (view.sinks is None or engine.near):
            entropy = view.by_head(engine.reduced(self).total)
            if view.sinks is not None:
                log_p = (view.sinks[:, None] - engine.lse).clamp(-identities.LARGE, 0.0)
                entropy = entropy - torch.exp(log_p) * log_p
        if entropy is None:
            entropy = engine.of_rows(self.name, _entropy_of_rows)
        return torch.where(view.valid_rows, entropy.clamp(min=0.0), 0.0)

    @staticmethod
    def _by_identity(engine: Engine) -> Tensor | None:
        """The entropy by an extra call; `None` where it would be a difference of large numbers."""
        seen, lse = engine.keys_seen
        call = engine.view.call
        entropy = identities.entropy(lse, call.q, seen[..., : call.q.shape[-1]], call.scale)
        dead = lse == -torch.inf
        if not near(lse, call.prepared is not None):
            return None
        if not bool((entropy.isfinite() | dead).all()):
            return None
        if engine.view.asked.sinks is None:
            return entropy
        sinks = engine.view.sinks
        assert sinks is not None
        return identities.with_sink(entropy, engine.lse_of_moved_keys, sinks)


class _Position(Need):
    """`E[j − position of i]` `[B, H, n]`, 0 in dead rows: attention with positions as values.

    What a sink takes adds 0.
    """

    name, kernel = "position", "ahead"
    among_keys = False

    def route(self, setting: Setting) -> Route:
        return Route(KERNEL if setting.kernel else CALL)

    def make(self, engine: Engine) -> Accumulator:
        view = engine.view
        return RowSums(Ahead(view.positions), view.zeros(view.extent.queries))

    def answer(self, route: Route, engine: Engine) -> Tensor:
        if route.kind == KERNEL:
            return engine.field("ahead")
        view = engine.view
        if route.kind == PASS:
            return torch.where(view.valid_rows, view.by_head(engine.reduced(self).total), 0.0)
        if engine.positions_too:
            width = view.call.q.shape[-1]
            columns, of_keys = engine.keys_seen[0][..., width : width + 2], engine.lse_of_moved_keys
        else:
            columns, of_keys = engine.mean_among_keys(engine.position_columns)
        ahead = identities.ahead(columns, view.positions)
        if view.sinks is not None:
            ahead = engine.left(of_keys) * ahead
        return torch.where(view.valid_rows, ahead, 0.0)


class _MaxLogit(Need):
    """The largest score of each head `[B, H]`; −inf where no query sees a key. No gradient."""

    name, kernel = "max_logit", "max"

    def route(self, setting: Setting) -> Route:
        if setting.kernel:
            return Route(KERNEL)
        return Route(ROWS, "those whose log-sum-exp can still win")

    def answer(self, route: Route, engine: Engine) -> Tensor:
        if route.kind == KERNEL:
            # No score is above the log-sum-exp, which is no number where scores are none.
            return torch.minimum(engine.field("max").detach(), engine.lse.detach()).amax(-1)
        return largest_score(engine.scores, engine.view.constant, engine.lse)


ENTROPY, POSITION, MAX_LOGIT = _Entropy(), _Position(), _MaxLogit()


# ── from a pass over the scores ─────────────────────────────────────────────────────────────────


class Reduced(Need):
    """What a pass over the scores sums up: `make` gives the accumulator. No gradient.

    With `among_keys`, probabilities are those among the keys alone, as if there were no sink.
    """

    among_keys: bool = False

    @abstractmethod
    def make(self, engine: Engine) -> Any:
        """What takes in every block of P, before the pass."""

    def route(self, setting: Setting) -> Route:
        return Route(PASS)

    def answer(self, route: Route, engine: Engine) -> Any:
        return engine.reduced(self)


@dataclass(frozen=True)
class RowSum(Reduced):
    """A sum over keys of anything made of P, `[B, H, n]`: `figure(block)` `[heads, t]`, summed.

    `block.p` and `block.log_p` are `[heads, t, s]` at the queries `block.rows` and the keys
    `block.keys`.
    """

    name: str
    figure: Callable[[Block], Tensor]

    def make(self, engine: Engine) -> RowSums:
        return RowSums(self.figure, engine.view.zeros(engine.view.extent.queries))

    def answer(self, route: Route, engine: Engine) -> Tensor:
        return engine.view.by_head(engine.reduced(self).total)


class _PositionSpread(Reduced):
    """The standard deviation of the position of the key, in tokens, `[B, H, n]`; 0 in dead rows.

    Among the keys: what a sink takes has no position.
    """

    name = "spread"
    among_keys = True

    def make(self, engine: Engine) -> Spread:
        return Spread(engine.view.zeros(engine.view.extent.queries))

    def answer(self, route: Route, engine: Engine) -> Tensor:
        deviation = engine.reduced(self).deviation
        return engine.view.by_head(deviation.to(engine.view.dtype))


POSITION_SPREAD = _PositionSpread()


@dataclass(frozen=True)
class ReceivedFrom(Reduced):
    """`Σ_i p_ij` `[B, H, S]`, what every key receives, from the queries from `first` on.

    `last` counts them from the end; `None` for all.
    """

    last: int | None
    name = "received"
    passes = True

    def route(self, setting: Setting) -> Route:
        return Route(KERNEL_PASS if setting.kernel_pass else PASS)

    def _counts(self, engine: Engine) -> Tensor:
        """What each query counts: 0 before the first, else 1, or as many as it stands for."""
        view = engine.view
        first = 0 if self.last is None else view.whole.queries - self.last
        return (view.queries >= first) * view.weights.float()

    def make(self, engine: Engine) -> Columns:
        return Columns(engine.view.zeros(engine.view.extent.keys), self._counts(engine))

    def answer(self, route: Route, engine: Engine) -> Tensor:
        if route.kind == PASS:
            return engine.view.by_head(engine.reduced(self).total)
        return engine.received(self._counts(engine))


@dataclass(frozen=True)
class BlockSums(Need):
    """Sums of P over each of n blocks of queries and each of keys: `[B, H, n, n]`."""

    blocks: int
    name = "map"
    passes = True

    def of(self, length: int, device: torch.device) -> Tensor:
        """The block of each position; blocks differ by at most one position in size."""
        return torch.arange(length, device=device) * self.blocks // max(length, self.blocks)

    def of_queries(self, view: View) -> Tensor:
        """The block of each query that is looked at."""
        return self.of(view.whole.queries, view.device)[view.queries]

    def route(self, setting: Setting) -> Route:
        if setting.kernel_pass:
            return Route(KERNEL_PASS)
        calls = -(-self.blocks // setting.dim)
        return Route(CALL) if calls == 1 else Route(f"identity: {calls} more calls")

    def answer(self, route: Route, engine: Engine) -> Tensor:
        view = engine.view
        of_query, of_key = self.of_queries(view), self.of(view.extent.keys, view.device)
        if route.kind == KERNEL_PASS:
            return engine.block_map(of_query, of_key, self.blocks)
        # (`one_hot` reads the numbers that it is given, and a trace has none.)
        one_hot = (of_key[:, None] == torch.arange(self.blocks, device=view.device)).to(view.dtype)
        seen = torch.where(view.valid_rows[..., None], engine.mean_of(one_hot[None, None]), 0.0)
        if view.drawn is not None:
            seen = seen * view.weights[:, None]
        sums = view.zeros(self.blocks, self.blocks).index_add_(1, of_query, seen.flatten(0, 1))
        return view.by_head(sums)


def _entropy_of_rows(block: RowBlock) -> Tensor:
    """`−Σ p log p`, the sink's among them."""
    entropy = -(block.p * block.log_p).sum(-1)
    if block.log_sink is None:
        return entropy
    return entropy - torch.exp(block.log_sink) * block.log_sink


def _sink_of(block: RowBlock) -> Tensor:
    assert block.log_sink is not None
    return torch.exp(block.log_sink)
