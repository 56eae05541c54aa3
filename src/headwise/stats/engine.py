"""The work behind statistics: the call itself, extra calls, a pass over the scores, whole rows.

Each is done once, when it is first asked for. Nothing here holds the T×T matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..backends import Backend, Call, Figures, OnePass, choose
from ..core.call import check_scores
from ..core.modes import no_graph
from . import identities
from .lazy import Lazy
from .sampling import ALL_FROM, Sample
from .score_sweep import Accumulator, sweep, tiles, whole_rows
from .scores import RowBlock, RowFigures, Scores, near
from .view import View


@runtime_checkable
class Reducer(Protocol):
    """A need that a pass over the scores answers."""

    @property
    def among_keys(self) -> bool:
        """Whether probabilities are those among the keys alone, as if there were no sink."""
        ...

    def make(self, engine: Engine) -> Accumulator:
        """What takes in every block of P."""
        ...


class Engine:
    """Run what a plan asks for. Costs are on top of the forward.

    Args:
        asked: the call.
        chosen: its backend.
        keeps_graph: whether autograd will come back for the call.
        rows: the queries to look at; all, if that is `None`.
        gradients: whether figures keep a graph, where the call does.
        drawn: of queries that were drawn, how many each stands for.
        output: whether the call is made with its output.
        made: that output, where somebody else has made it.
        projection: weight of the output projection.
        strict: whether scores of finite q and k that are not finite raise an error.
    """

    fields: tuple[str, ...] = ()
    """Figures that a one-pass backend is to give with the call (`Figures`)."""
    reducers: tuple[Reducer, ...] = ()
    """Needs that a pass over the scores answers."""
    positions_too: bool = False
    """Whether positions are read by the same extra call as entropy."""
    every: Engine | None = None
    """The same call at all queries, of which some are drawn, where their log-sum-exp is at hand."""

    def __init__(
        self,
        asked: Call,
        chosen: Backend,
        keeps_graph: bool,
        *,
        sample: Sample | None = None,
        gradients: bool = True,
        output: bool = True,
        made: Float[Tensor, "B H T Dv"] | None = None,
        projection: Float[Tensor, "O HDv"] | None = None,
        strict: bool = True,
    ) -> None:
        self.keeps_graph, self.strict = keeps_graph, strict
        rows, drawn = (None, None) if sample is None else (sample.rows, sample.weights)
        self.view = View(asked, rows, gradients and keeps_graph, drawn)
        self.chosen, self.output = chosen, output
        self.made, self.projection = made, projection
        self._backend: Backend | None = None
        self._mean_key: Tensor | None = None
        self._keys_seen: tuple[Tensor, Tensor] | None = None
        self._reduced: dict[Reducer, Any] = {}
        self.given: Figures | None = None
        self._lse_of_call: Tensor | None = None
        self.whole_out: Tensor | None = None

    # ── the call itself ─────────────────────────────────────────────────────────────────────────

    def run(self) -> Figures | None:
        """Make the call: its output, log-sum-exp and fields; `None` if it has no output."""
        asked, chosen, view = self.view.asked, self.chosen, self.view
        if not self.output:
            if self.every is not None and self.every.given is not None and not view.gradients:
                self.given = self.every.given.map(view.of)
            elif isinstance(self.backend, OnePass):
                self.given = self.backend.figures(view.scored, self.fields)
            return None
        if isinstance(chosen, OnePass):
            whole = chosen.observe(asked, self.fields, view.gradients)
        else:
            whole = Figures(*chosen.run(asked, view.gradients))
        as_is = view.rows is None and (view.gradients or not self.keeps_graph)
        self.given = whole if as_is else whole.map(view.of)
        assert self.given.lse is not None
        self.lse = self.given.lse  # type: ignore[misc]  # in place of the lazy one
        if view.drawn is not None:
            self.every = self._at_every_query(whole.map(Tensor.detach))
        return whole

    def look_at_every_query(self) -> None:
        """Take the log-sum-exp of all queries, of which some are drawn, and fields with it."""
        with no_graph():
            every = self._at_every_query(None)
            if isinstance(every.backend, OnePass):
                every.run()
            else:
                tensors = {name: getattr(self.view.asked, name).detach() for name in "qkv"}
                call = self.view.asked.with_(**tensors, dropout=0.0)
                every.lse = every.chosen.run(call)[1]  # type: ignore[misc]
            lse: Tensor = every.lse  # type: ignore[assignment]
            if not bool(lse.isnan().any()):
                self.every = every

    def _at_every_query(self, given: Figures | None) -> Engine:
        """The same call at all queries without gradients, of which so much is known."""
        every = Engine(self.view.asked, self.chosen, False, gradients=False, output=False)
        every.fields, every.given = self.fields, given
        return every

    @property
    def few(self) -> bool:
        """Whether there are so few queries in all that one pass over all of them costs little."""
        return self.view.whole.queries <= ALL_FROM * self.view.extent.queries

    def field(self, name: str) -> Float[Tensor, "B H n"]:
        """A figure of the kernel's own pass."""
        return getattr(self.given, name)

    @property
    def out(self) -> Float[Tensor, "B H n Dv"]:
        """The heads' outputs.

        Raises:
            ValueError: the call was observed without its output.
        """
        if self.made is not None:
            return self.view.of(self.made)
        if self.given is None or self.given.out is None:
            raise ValueError(
                "a statistic of the heads' outputs, such as OutputNorm(), was asked for with "
                "output=False; observe with output=True"
            )
        return self.given.out

    @property
    def backend(self) -> Backend:
        """What serves the statistics' own calls: they are in float32, not for every backend."""
        if self._backend is None:
            view, chosen = self.view, self.chosen
            alike = view.rows is None and view.dtype is view.asked.q.dtype
            if not alike and chosen.refuse(view.call):
                chosen = choose(view.call)
            self._backend = chosen
        return self._backend

    @property
    def lse_of_call(self) -> Float[Tensor, "B H _"]:
        """Make the call: its log-sum-exp, of all queries where it has an output.

        Raises:
            ValueError: scores of finite q and k are no finite numbers, with `strict`.
        """
        if self._lse_of_call is not None:
            return self._lse_of_call
        view, whole = self.view, self.run()
        with nullcontext() if view.gradients else no_graph():
            lse = self.lse if whole is None else whole.lse
            assert lse is not None
            if self.strict:
                check_scores(view.asked, lse, "observe", view.queries if whole is None else None)
            self.whole_out = None if whole is None else whole.out
            self._lse_of_call = lse if view.gradients else lse.detach()
        return self._lse_of_call

    @Lazy
    def lse(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores and sink; −inf where it may attend to nothing."""
        if self.given is not None and self.given.lse is not None:
            return self.given.lse
        return identities.lse_with_sink(self.lse_of_keys, self.view.sinks)

    @Lazy
    def near(self) -> bool:
        """Whether `exp(s − lse)` keeps its digits in every row; while compiling nobody knows."""
        return near(self.lse)

    # ── extra calls ─────────────────────────────────────────────────────────────────────────────

    def call(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of an extra call."""
        return self.backend.run(call, self.view.gradients)

    @Lazy
    def lse_of_keys(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores alone, without its sink."""
        if nonlinear(self.view.asked):
            return self.call(self.view.call)[1]
        return self.lse_of_moved_keys

    @Lazy
    def lse_of_moved_keys(self) -> Float[Tensor, "B H n"]:
        """The same, from the call on the keys less their mean."""
        call, (_, lse) = self.view.call, self.keys_seen
        assert self._mean_key is not None
        mean = self._mean_key.repeat_interleave(self.view.extent.group, 1)
        return lse + call.scale * torch.einsum("bhtd,bhd->bht", call.q, mean)

    @property
    def keys_seen(self) -> tuple[Tensor, Tensor]:
        """`P (K − mean)` and the log-sum-exp of scores against the keys less their mean.

        Where the positions are wanted too, they are more columns: 8, as kernels like it.
        """
        if self._keys_seen is not None:
            return self._keys_seen
        view, call = self.view, self.view.call
        self._mean_key = identities.mean_key(call.k)
        keys = call.k - self._mean_key[:, :, None]
        # 0 · NaN is NaN, also in rows that give the key nothing; those that do get it by its score.
        values = keys.masked_fill(keys.isnan(), 0.0)
        if self.positions_too:
            columns = self.position_columns.expand(view.extent.batch, view.extent.kv_heads, -1, -1)
            values = torch.cat([values, pad(columns, (0, 6))], dim=-1)
        moved = Call(
            call.q,
            keys,
            values,
            call.mask,
            call.scale,
            call.softcap,
            0.0,
            call.extent,
            prepared=call.prepared,
        )
        self._keys_seen = self.call(moved)
        return self._keys_seen

    @property
    def position_columns(self) -> Float[Tensor, "1 1 S 2"]:
        """The positions of the keys, as digits."""
        view = self.view
        keys = torch.arange(view.extent.keys, device=view.device)
        return identities.digits(keys, view.positions, view.dtype)[None, None]

    def mean_among_keys(self, columns: Float[Tensor, "#B #G S C"]) -> tuple[Tensor, Tensor]:
        """`P @ columns` among the keys alone, head_dim columns to a call; and the LSE of these."""
        call, extent = self.view.call, self.view.extent
        wide = columns.to(call.q.dtype).expand(extent.batch, extent.kv_heads, -1, -1)
        split = wide.split(call.q.shape[-1], dim=-1)
        outs, lses = zip(*(self.call(call.with_(v=x.contiguous())) for x in split), strict=True)
        return torch.cat(outs, dim=-1), lses[0]

    def mean_of(self, columns: Float[Tensor, "#B #G S C"]) -> Float[Tensor, "B H n C"]:
        """`P @ columns`: attention with these columns as values."""
        mean, of_keys = self.mean_among_keys(columns)
        return mean if self.view.sinks is None else mean * self.left(of_keys)[..., None]

    def left(self, of_keys: Float[Tensor, "B H n"]) -> Float[Tensor, "B H n"]:
        """The share of each row that its sink leaves to the keys, from the LSE of these alone."""
        assert self.view.sinks is not None
        if not self.near:
            return self.of_rows("left", lambda block: block.p.sum(-1))
        return identities.left_to_keys(of_keys, self.view.sinks)

    def lse_of(self, call: Call) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of an extra call without sinks."""
        backend = choose(call) if self.backend.refuse(call) else self.backend
        if not isinstance(backend, OnePass):
            return backend.run(call, self.view.gradients)[1]
        found = backend.figures(call, ()).lse
        assert found is not None
        return found

    # ── a one-pass backend's passes over the scores ─────────────────────────────────────────────

    def received(self, weight: Float[Tensor, " n"]) -> Float[Tensor, "B H S"]:
        """`Σ_i weight_i p_ij`: what every key receives, from queries that count so much."""
        assert isinstance(self.backend, OnePass)
        return self.backend.received(self.view.scored_constant, self.lse.detach(), weight)

    def block_map(
        self, of_query: Int[Tensor, " n"], of_key: Int[Tensor, " S"], blocks: int
    ) -> Float[Tensor, "B H m m"]:
        """Sums of P over each block of queries and of keys, by the block of each."""
        assert isinstance(self.backend, OnePass)
        lse, weights = self.lse.detach(), self.view.drawn
        call = self.view.scored_constant
        return self.backend.block_map(call, lse, of_query, of_key, blocks, weights)

    # ── whole rows, and single scores ───────────────────────────────────────────────────────────

    @Lazy
    def scores(self) -> Scores:
        return Scores(self.view.call, self.view.gradients, self.view.sinks)

    @Lazy
    def rows(self) -> RowFigures:
        """Figures of whole rows, which wait for one pass."""
        return RowFigures(self.scores)

    def of_rows(self, name: str, figure: Callable[[RowBlock], Tensor]) -> Float[Tensor, "B H n"]:
        """A figure of whole rows, and with it all others that wait."""
        self.rows.wait(name, figure)
        return self.rows.read(name)

    # ── a pass over the scores ──────────────────────────────────────────────────────────────────

    def reduced(self, need: Reducer) -> Any:
        """The accumulator of a need, after the pass that answers all of its kind."""
        if need not in self._reduced:
            apart = need.among_keys and self.view.sinks is not None
            alike = (r for r in self.reducers if r.among_keys == apart or self.view.sinks is None)
            made: Mapping[Reducer, Any] = {r: r.make(self) for r in alike}
            view = self.view
            lse, sinks = (self.lse_of_keys, None) if apart else (self.lse, view.sinks)
            with no_graph():
                if near(lse):
                    found = tiles(view.constant, lse.detach())
                else:
                    found = whole_rows(Scores(view.constant, False, sinks))
                sweep(found, list(made.values()))
            self._reduced |= made
        return self._reduced[need]


def nonlinear(call: Call) -> str:
    """Say what keeps a call's scores from being linear in the keys; empty if they are."""
    if call.softcap is not None:
        return "softcap is not linear in the scores"
    return "the scores carry a bias" if call.mask.biased else ""


def rows_of_p(
    view: View, queries: Int[Tensor, " t"]
) -> tuple[Float[Tensor, "B H t S"], Float[Tensor, "B H t"] | None]:
    """Make whole rows of P, and what the sink takes of them; `queries` counts those looked at."""
    call, sinks = view.constant, view.sinks
    scores = Scores(call, False, None if sinks is None else sinks.detach())
    q, every = call.q[:, :, queries], slice(0, view.extent.keys)
    block = scores.row_block(q, queries[:, None], slice(0, len(queries)), every)
    return block.p, None if block.log_sink is None else torch.exp(block.log_sink)
