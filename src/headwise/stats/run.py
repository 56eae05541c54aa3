"""Run a plan (the call itself, extra calls, passes over the scores, each once) into a `Record`.

Nothing here holds the T×T matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ..backends import Backend, Call, Native, RowStatistics, choose
from ..core.call import check_scores
from ..core.modes import no_graph, readable
from . import identities
from .blocks import Accumulator, RowFigure, ScoreBlock, Scores, near, sweep
from .plan import Need, Plan, Route
from .record import Record
from .sampling import ALL_FROM
from .view import Lazy, View


def run(work: Work) -> Record:
    """Answer every need of a plan, after the call has been made.

    Raises:
        ValueError: a need does not fit the call.
    """
    steps, every = work.plan.steps, work.every
    answers = _answers(work, steps)
    if every is not None:
        with no_graph():
            known = [step for step in steps if step[0].available(step[1], every, work)]
            every = Record(every.view, _answers(every, known), lse=every.lse)
    lse = None if work.whole_lse is None else work.lse
    parts = answers, work.whole_out, work.whole_lse, lse, every
    return Record(work.view, *parts, direct=work.plan.direct)


def _answers(work: Work, steps: Iterable[tuple[Need, Route, str | None]]) -> dict[Need, Any]:
    """Answer each need: directly by a field of a one-pass backend, or by its route."""
    given, view = work.given, work.view
    if not (view.keeps_mask or view.keep_mask()):  # the mask may change before a metric is read
        _ = view.valid_rows
        for need, _, field in steps:
            if field:
                need.resolve(view)
    return {
        need: getattr(given, field) if field else need.answer(route, work)
        for need, route, field in steps
    }


class Work:
    """One call whose needs are being answered. Costs are on top of the forward pass.

    Args:
        view: the call, restricted to the observed queries.
        keeps_graph: autograd needs a graph of the call.
        output: whether the call computes its output; or the output, if it is precomputed.
        projection: the weight of the output projection, or a function that returns it.
        strict: raise an error if scores of finite q and k are not finite.
        known_lse: the log-sum-exp of all queries, from the kernel that computed the output.
    """

    chosen: Backend
    """The backend of the call."""
    plan: Plan
    given: RowStatistics | None = None
    """The log-sum-exp and fields of the observed queries."""
    every: Work | None = None
    """The same call at all queries, if queries are sampled and the log-sum-exp of all is known."""
    whole_out: Tensor | None = None
    whole_lse: Tensor | None = None
    """The log-sum-exp of all queries if the call computes its output, else of the observed ones."""
    _mean_key: Tensor

    def __init__(
        self,
        view: View,
        keeps_graph: bool,
        output: bool | Float[Tensor, "B H T Dv"] = True,
        projection: Float[Tensor, "O HDv"] | Callable[[], Tensor | None] | None = None,
        strict: bool = True,
        known_lse: Float[Tensor, "B H T"] | None = None,
    ) -> None:
        self.known_lse = known_lse
        self.view, self.keeps_graph, self.output = view, keeps_graph, output is True
        self.precomputed = output if isinstance(output, Tensor) else None
        self.projection, self.strict = projection, strict
        self._reduced: dict[Need, Any] = {}
        self._rows: dict[Need, Tensor] = {}

    # ── the call itself ─────────────────────────────────────────────────────────────────────────

    def make_call(self, plan: Plan) -> None:
        """Run the call for a plan: its output, log-sum-exp and fields.

        Raises:
            ValueError: with `strict`, scores of finite q and k are not finite.
        """
        view, whole, self.plan = self.view, None, plan
        masses = view.drawn is not None and plan.masses
        known = plan.scores and self.knows_lse(plan.routes)
        if masses and not self.output and not known and self.few and readable(view.original.q):
            self.look_at_every_query()
        if self.output:
            whole = self._with_output()
        elif not plan.scores:
            return
        elif known and isinstance(self.chosen, Native):
            self._from_known_lse(self.chosen)
        elif plan.direct and isinstance(self.chosen, Native):
            self.given = self.chosen.statistics(view.original, plan.fields)
        elif self.every is not None and self.every.given is not None and not view.gradients:
            assert view.rows is not None
            self.given = self.every.given.at(view.rows)
        elif isinstance(self.backend, Native):
            self.given = self.backend.statistics(view.scored, plan.fields)
        if self.given is not None and self.given.lse is not None:
            vars(self)["lse"] = self.given.lse  # in place of the lazy one
        lse = self.lse if whole is None else whole.lse
        assert lse is not None
        if self.strict:
            check_scores(view.original, lse, "observe", view.queries if whole is None else None)
        self.whole_lse = lse if view.gradients else lse.detach()
        if plan.far is not None and not self.near:
            self.plan = plan.far

    def _with_output(self) -> RowStatistics:
        view, chosen = self.view, self.chosen
        whole, some = self._with_sample() or (None, None)
        if whole is None and isinstance(chosen, Native):
            whole = chosen.observe(view.original, self.plan.fields, view.gradients)
        elif whole is None:
            whole = RowStatistics(*chosen.run(view.original, view.gradients))
        self.whole_out = whole.out
        as_is = view.gradients or not self.keeps_graph
        kept = whole if as_is else whole.map(Tensor.detach)
        self.given = some or (kept if view.rows is None else kept.at(view.rows))
        if view.drawn is not None:
            self.every = self._at_every_query(kept.map(Tensor.detach))
        return whole

    def knows_lse(self, needs: Iterable[Need]) -> bool:
        """Return True if these needs can be answered from an LSE given by the caller.

        It is the model's own LSE, which for padded queries may differ from that of the call.
        """
        if self.known_lse is None or self.output or self.view.gradients or self.keeps_graph:
            return False
        own = self.view.mask.free or all(need.name != "lse" for need in needs)
        return own and isinstance(self.chosen, Native)

    def _from_known_lse(self, chosen: Native) -> None:
        view, fields, lse = self.view, self.plan.fields, self.known_lse
        if view.rows is None:
            self.given = chosen.statistics(view.original, fields, lse)
            return
        found = chosen.sampled(view.original, fields, view.rows, view.drawn is not None, lse)
        if found is None:
            self.given = chosen.statistics(view.scored, fields)
            return
        whole, self.given = found
        if view.drawn is not None:
            self.every = self._at_every_query(whole)

    def _with_sample(self) -> tuple[RowStatistics, RowStatistics] | None:
        """Return statistics of all queries and of the sample, if the sample takes its own call."""
        view, chosen = self.view, self.chosen
        if view.rows is None or view.gradients or not isinstance(chosen, Native):
            return None
        return chosen.sampled(view.original, self.plan.fields, view.rows, view.drawn is not None)

    def look_at_every_query(self) -> None:
        """Compute the log-sum-exp and fields of all queries of a call whose queries are sampled."""
        with no_graph():
            every = self._at_every_query(None)
            if isinstance(every.backend, Native):
                every.given = every.backend.statistics(every.view.scored, self.plan.fields)
            else:
                tensors = {name: getattr(self.view.original, name).detach() for name in "qkv"}
                call = self.view.original.with_(**tensors, dropout=0.0)
                every.lse = every.chosen.run(call)[1]  # type: ignore[misc]  # in place of the lazy one
            lse: Tensor = every.lse  # type: ignore[assignment]
            if lse.device.type != "cpu" or not bool(lse.isnan().any()):  # others would wait
                self.every = every

    def _at_every_query(self, given: RowStatistics | None) -> Work:
        """Return the same call at all queries without gradients, with the statistics `given`."""
        every = Work(View(self.view.original, None, False), False, False)
        every.chosen, every.plan, every.given = self.chosen, self.plan, given
        return every

    @property
    def few(self) -> bool:
        """Return True if there are so few queries that one pass over all of them costs little."""
        return self.view.whole.queries <= ALL_FROM * self.view.extent.queries

    @property
    def out(self) -> Float[Tensor, "B H n Dv"]:
        """The heads' outputs.

        Raises:
            ValueError: the call was observed without its output.
        """
        out = self.whole_out if self.precomputed is None else self.precomputed
        if out is None:
            raise ValueError(
                "a statistic of the heads' outputs, such as OutputNorm(), requires output=True, "
                "got output=False"
            )
        return self.view.rows_of(out)

    @Lazy
    def backend(self) -> Backend:
        """The backend of extra calls: these are in float32, which not every backend supports."""
        view, chosen = self.view, self.chosen
        alike = view.rows is None and view.dtype is view.original.q.dtype
        return choose(view.call) if not alike and chosen.refuse(view.call) else chosen

    @Lazy
    def lse(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores and sink; −inf if the query has no visible key."""
        if self.given is not None and self.given.lse is not None:
            return self.given.lse
        return identities.lse_with_sink(self.lse_of_keys, self.view.sinks)

    @Lazy
    def near(self) -> bool:
        """Return True if `exp(s − lse)` is known to be accurate in every row."""
        return near(self.lse)

    # ── extra calls ─────────────────────────────────────────────────────────────────────────────

    def call(self, call: Call) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp of an extra call."""
        return self.backend.run(call, self.view.gradients)

    @Lazy
    def lse_of_keys(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores, without its sink."""
        if nonlinear(self.view.original):
            return self.call(self.view.call)[1]
        return self.lse_of_moved_keys

    @Lazy
    def lse_of_moved_keys(self) -> Float[Tensor, "B H n"]:
        """The same, from the call on the keys minus their mean."""
        call, (_, lse) = self.view.call, self.keys_seen
        mean = self._mean_key.repeat_interleave(self.view.extent.group, 1)
        return lse + call.scale * torch.einsum("bhtd,bhd->bht", call.q, mean)

    @Lazy
    def keys_seen(self) -> tuple[Tensor, Tensor]:
        """`P (K − mean)` and the log-sum-exp of scores against the keys minus their mean.

        If positions are needed too, they are appended as columns, padded to 8 for the kernels.
        """
        view, call = self.view, self.view.call
        self._mean_key = identities.mean_key(call.k)
        keys = call.k - self._mean_key[:, :, None]
        # 0 · NaN is NaN, even in rows with weight 0 on the key; other rows get NaN from its score.
        values = keys.masked_fill(keys.isnan(), 0.0)
        if self.plan.together:
            columns = self.position_columns.expand(view.extent.batch, view.extent.kv_heads, -1, -1)
            values = torch.cat([values, pad(columns, (0, 6))], dim=-1)
        return self.call(call.with_(k=keys, v=values, prepared=call.prepared))

    @property
    def position_columns(self) -> Float[Tensor, "1 1 S 2"]:
        """The positions of the keys, as digits."""
        view = self.view
        keys = torch.arange(view.extent.keys, device=view.device)
        return identities.digits(keys, view.positions, view.dtype)[None, None]

    def mean_among_keys(self, columns: Float[Tensor, "#B #G S C"]) -> tuple[Tensor, Tensor]:
        """Return `P @ columns` over keys only, head_dim columns per call, and the keys' LSE."""
        call, extent = self.view.call, self.view.extent
        wide = columns.to(call.q.dtype).expand(extent.batch, extent.kv_heads, -1, -1)
        split = wide.split(call.q.shape[-1], dim=-1)
        outs, lses = zip(*(self.call(call.with_(v=x.contiguous())) for x in split), strict=True)
        return torch.cat(outs, dim=-1), lses[0]

    def left(self, of_keys: Float[Tensor, "B H n"]) -> Float[Tensor, "B H n"]:
        """Return the total weight on the keys of each row, from their LSE."""
        assert self.view.sinks is not None
        if not self.near:
            return self.row_figures([lambda block: block.p.sum(-1)])[0]
        return identities.left_to_keys(of_keys, self.view.sinks)

    def lse_of(self, call: Call) -> Float[Tensor, "B H n"]:
        """Return the log-sum-exp of an extra call without sinks."""
        backend = choose(call) if self.backend.refuse(call) else self.backend
        if not isinstance(backend, Native):
            return backend.run(call, self.view.gradients)[1]
        found = backend.statistics(call, ()).lse
        assert found is not None
        return found

    # ── passes over the scores ──────────────────────────────────────────────────────────────────

    @property
    def one_pass(self) -> tuple[Native, Call, Tensor]:
        """A one-pass backend, the call in the form it reads, and the LSE; without gradients."""
        assert isinstance(self.backend, Native)
        return self.backend, self.view.scored_constant, self.lse.detach()

    @Lazy
    def scores(self) -> Scores:
        return Scores(self.view.call, self.view.gradients, self.view.sinks)

    def row_figures(self, figures: list[RowFigure]) -> list[Tensor]:
        """Return sums over the keys `[B, H, n]` of renormalized whole rows."""
        return self.scores.row_figures(figures)

    def by_rows(self, need: Need) -> Float[Tensor, "B H n"]:
        """Return the answer to a need from whole rows, computed together with the plan's others."""
        if need not in self._rows:
            wanted = self.plan.rows if need in self.plan.rows else (need,)
            found = self.row_figures([one.row_figure(self) for one in wanted])
            self._rows |= dict(zip(wanted, found, strict=True))
        return self._rows[need]

    def by_head(self, sums: Tensor) -> Tensor:
        """Return sums `[B · H, …]` as `[B, H, …]`."""
        return self.view.by_head(sums)

    def reduced(self, need: Need) -> Any:
        """Return the accumulator of a need, after the pass that answers all such needs."""
        if need not in self._reduced:
            view = self.view
            separate = need.among_keys and view.sinks is not None
            alike = (n for n in self.plan.reduced if n.among_keys == separate or view.sinks is None)
            made: Mapping[Need, Accumulator] = {n: n.accumulator(self) for n in alike}
            lse, sinks = (self.lse_of_keys, None) if separate else (self.lse, view.sinks)
            with no_graph():
                sinks = None if sinks is None else sinks.detach()
                sweep(view.constant, lse.detach(), sinks, [*made.values()])
            self._reduced |= made
        return self._reduced[need]


def nonlinear(call: Call) -> str:
    """Return why a call's scores are not linear in the keys; empty if they are."""
    if call.softcap is not None:
        return "softcap is not linear in the scores"
    return "the scores include a bias" if call.mask.biased else ""


def rows_of_p(view: View, queries: Tensor) -> ScoreBlock:
    """Return whole rows of P `[B · H, t, S]`; `queries` `[t]` indexes the observed queries."""
    sinks = None if view.sinks is None else view.sinks.detach()
    every = slice(0, view.extent.keys)
    return Scores(view.constant, sinks=sinks).rows(slice(0, len(queries)), every, queries)
