"""Statistics of every head in one call: `observe()` and `explain()`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .._tables import HeadTable
from ..backends import Call, Choice, OnePass, choose, consider, measured
from ..core.mask_algebra import Mask
from ..core.modes import batched, readable
from ..core.shapes import as_given, quote
from ..core.unknown import refuse_unknown
from .base import Statistic, all_needs, check_statistics, needs_of
from .detached import without_graph
from .engine import Engine, nonlinear
from .entries import entries
from .execute import Pass, execute
from .needs import Need, Setting
from .plan import Plan, plan
from .results import VIA, Reading, of_some, table_rows
from .sampling import draw
from .view import View


def observe(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *statistics: Statistic,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
    first_query: int | None = None,
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool | Float[Tensor, "B H T Dv"] = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
    **unknown: object,
) -> Seen:
    """`attend()`, and exact statistics of every head, without the T×T matrix.

    The output is bit for bit what `attend()` gives. Statistics describe the probabilities before
    dropout and are computed in float32 at least. With learned sinks, `lse` and entropies are those
    of keys and sink together; masses, distances, maps, top keys and what keys receive count keys
    only, and so sum to what the sink leaves.

    Args:
        statistics: such as `Entropy()`, `MaxLogit()`, `Mass(First(1))`; the rest as `attend()`.
        queries: look at so many queries, or at those of a list, in ascending order
            (`seen.queries`); default: at all. A number is drawn: up to four first and two last
            ones, and one from each of as many equal stretches of the rest. The output is whole all
            the same.
        seed: of the draw.
        output: False leaves the attention output out, for calls of which only the statistics are
            wanted; of sampled queries that costs a fraction of a call. A tensor is the output
            itself, where somebody has computed it already.
        gradients: LSE, entropy, distance and masses can be differentiated in q, k and sinks where
            these require it, and so stand in a loss; False detaches them.
        projection: weight of the output projection `[O, H · Dv]`, for `OutputNorm`.

    Returns:
        A `Seen`: `seen.out`, `seen.lse`, and `seen[name]` for each statistic.

    Raises:
        ValueError: as `attend()`; a statistic asked for twice, or that does not fit the call.
        TypeError: as `attend()`.

    >>> from headwise.core.masks import Causal
    >>> from headwise.stats.per_query import Entropy
    >>> q = k = v = torch.zeros(1, 2, 4, 8)
    >>> seen = observe(q, k, v, Entropy(), mask=Causal())
    >>> seen["entropy"][0, 0].exp()  # equal scores: query i sees i + 1 keys alike
    tensor([1., 2., 3., 4.])
    """
    if unknown:
        refuse_unknown("observe(q, k, v", observe, unknown)
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
        function="observe",
    )
    if call.kind is None and batched(q, k, v, sinks, *call.mask.tensors()):
        raise ValueError(
            f"{quote(q, k, v, 'observe')} runs inside torch.func.vmap, and statistics are read of "
            f"a whole batch at once; observe outside of it, the calls side by side as batch rows."
        )
    sample = None if queries is None else draw(queries, call.extent.queries, seed, q.device)
    made = output if isinstance(output, Tensor) else None
    if output is True:
        call = call.drawn()
    keeps_graph = call.needs_grad
    with as_given(q.device) if torch._C._is_any_autocast_enabled() else nullcontext():
        engine = Engine(
            call,
            choose(call, backend, keeps_graph),
            keeps_graph,
            rows=None if sample is None else sample.rows,
            drawn=None if sample is None else sample.weights,
            gradients=gradients,
            output=output is True,
            made=made,
            projection=projection,
        )
        found = execute(_planned(engine, statistics, "observe"), engine)
        with nullcontext() if engine.view.gradients else torch.no_grad():
            readings = Readings(found, statistics)
    return Seen(
        found,
        readings,
        output=found.out if made is None else made,
        lost=keeps_graph and not engine.view.gradients,
    )


def _planned(engine: Engine, statistics: tuple[Statistic, ...], function: str) -> Plan:
    """The plan of a call; it is known where a call of the same kind was planned before.

    Raises:
        ValueError: what was given for a statistic is none.
    """
    view, kind = engine.view, engine.view.asked.kind
    if kind is None or not all(map(_is_free, statistics)):
        return _plan(engine, statistics, function)
    some = None if view.rows is None else len(view.rows)
    about = (engine.chosen, engine.output, view.gradients, some, view.asked.sinks is None)
    known = kind.known.get((statistics, *about))
    if known is None:
        known = kind.known[statistics, *about] = _plan(engine, statistics, function)
    return known


def _plan(engine: Engine, statistics: tuple[Statistic, ...], function: str) -> Plan:
    check_statistics(statistics, function)
    needs = all_needs(statistics)
    return plan(_setting_of(engine, needs), needs)


def _is_free(statistic: Statistic) -> bool:
    """Whether a statistic holds no tensors and says so itself: equal ones then need the same."""
    return "free" in vars(type(statistic)) and statistic.free  # type: ignore[attr-defined]


def _setting_of(engine: Engine, needs: Sequence[Need]) -> Setting:
    """What the routes of a call's needs depend on."""
    view = engine.view
    call = view.asked
    by_call = engine.chosen if engine.output else engine.backend
    passes = any(need.passes for need in needs)
    return Setting(
        extent=view.extent,
        dim=call.q.shape[-1],
        output=engine.output,
        kernel=isinstance(by_call, OnePass),
        kernel_pass=passes and isinstance(engine.backend, OnePass),
        nonlinear=nonlinear(call),
        gradients=view.gradients,
        sinks=call.sinks is not None,
        behind=any(need.via is not None for need in needs) and _only_behind(view),
        compiling=torch.compiler.is_compiling(),
        whole=view.rows is None,
    )


def _only_behind(view: View) -> bool:
    """Whether each query sees a range of keys that ends before those ahead of it, and no sink."""
    if view.asked.sinks is not None or view.mask.looks_ahead(view.extent):
        return False
    found = view.mask.key_ranges(view.extent, view.device)
    if found is None or view.mask.free or not readable(view.asked.q):
        return found is not None
    return bool((found[1] <= view.positions + 1).all())  # whatever mask it may be


class Readings(Mapping[str, Reading]):
    """What statistics make of a pass, by name.

    Those that are formulas on its figures are worked out when somebody asks, the others at once;
    all at once where a graph is kept, or where the mask's tensors may have changed by then.
    """

    def __init__(self, found: Pass, statistics: Sequence[Statistic]) -> None:
        self._found, self._statistics = found, statistics
        self._parts: list[dict[str, Reading] | None] = [None] * len(statistics)
        self._owner: dict[str, int] = {}
        view = found.view
        whole = view.gradients or torch.compiler.is_compiling() or not view.mask.free
        for number, statistic in enumerate(statistics):
            for name in statistic.names:
                if name in self._owner:
                    raise ValueError(f"observe(…): the statistic {name!r} was asked for twice.")
                self._owner[name] = number
            if whole or not getattr(statistic, "formula", False):
                self._part(number)

    def _part(self, number: int) -> dict[str, Reading]:
        """The readings of one statistic."""
        part = self._parts[number]
        if part is None:
            statistic = self._statistics[number]
            part = statistic.read(self._found)
            needs = needs_of(statistic).values()
            of_some_queries = not needs or any(need.scores for need in needs)
            if self._found.view.rows is not None and of_some_queries:
                every = self._of_every_query(statistic)
                drawn = self._found.view.drawn
                part = {name: of_some(x, every.get(name), drawn) for name, x in part.items()}
            self._parts[number] = part
        return part

    def _of_every_query(self, statistic: Statistic) -> dict[str, Reading]:
        """The readings of all queries, where drawn ones are looked at and those are at hand."""
        every, needs = self._found.every, needs_of(statistic).values()
        if every is None or not needs or not all(need in every.answers for need in needs):
            return {}
        with torch.no_grad():
            return statistic.read(every)

    def __getitem__(self, name: str) -> Reading:
        if name not in self._owner:  # such as the contribution, where a projection is known
            self._owner |= {x: n for n in range(len(self._parts)) for x in self._part(n)}
        return self._part(self._owner[name])[name]

    def values_of(self, name: str) -> Tensor | None:
        """A figure's values, where they are the answer to a need as it stands."""
        number = self._owner.get(name)
        statistic = None if number is None else self._statistics[number]
        if name not in getattr(statistic, "as_found", ()):
            return None
        need = statistic.needs[name]  # type: ignore[union-attr]
        every = self._found.every
        return None if every and need in every.answers else self._found.answers[need]

    @property
    def known(self) -> tuple[str, ...]:
        """The names that were asked for; none is worked out."""
        return tuple(self._owner)

    def __repr__(self) -> str:
        return f"<Readings: {', '.join(self.known)}>"

    def __iter__(self) -> Iterator[str]:
        for number in range(len(self._parts)):
            yield from self._part(number)

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True, eq=False, repr=False)
class Seen(HeadTable):
    """What one call gave: the output, its log-sum-exp, and every statistic asked for.

    `seen[name]` is `[B, H, T]` per query, `[B, H, S]` per key, or `[B, H, …]` per head; of sampled
    queries, n of them stand in place of T. The first and the last of drawn queries stand for
    themselves, the others for more (`seen.reading(name).weights`), so that a plain mean over n is
    none over T; what is per key or head, and `table()`, weighs them. `lse` is that of all queries
    where the output was computed with it, else of those looked at.
    """

    found: Pass = field(repr=False)
    readings: Readings = field(repr=False)
    output: Float[Tensor, "B H T Dv"] | None = None
    lost: bool = False
    """Whether statistics could have had a gradient, and were asked for without."""

    def __repr__(self) -> str:
        e = self.found.extent
        sizes = f"batch {e.batch}, {e.heads} heads, {e.queries} queries, {e.keys} keys"
        return f"<Seen: {sizes}; {', '.join(('lse', *self.readings.known))}>"

    @property
    def lse(self) -> Float[Tensor, "B H _"]:
        """The log-sum-exp of each query's scores and sink; −inf where it may attend to nothing."""
        with self._as_given():
            return self.found.lse

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """The attention output.

        Raises:
            ValueError: it was observed with `output=False`.
        """
        if self.output is None:
            raise ValueError("seen.out: observed with output=False, so there is no output")
        return self.output

    def _as_given(self) -> AbstractContextManager[object]:
        """What is worked out later is so without autocast too."""
        if torch._C._is_any_autocast_enabled():
            return as_given(self.found.view.device)
        return nullcontext()

    @property
    def rows(self) -> Tensor:
        """Which of the queries looked at may attend to anything; broadcasts to `[B, H, n]`."""
        return self.found.valid_rows

    @property
    def queries(self) -> Int[Tensor, " n"]:
        """The numbers of the queries looked at, in order."""
        return self.found.view.queries

    def weights(
        self,
        heads: int | Sequence[int] | slice | None = None,
        queries: int | Sequence[int] | slice | None = None,
        keys: int | Sequence[int] | slice | None = None,
    ) -> Float[Tensor, "B h t s"]:
        """Exactly these entries of P, from q, k and the log-sum-exp: O(D) an entry.

        Args:
            heads, queries, keys: numbers or slices; default all. Of sampled queries, their places
                in `seen.queries`.

        Raises:
            ValueError: a number that there is not.

        >>> import headwise as hw
        >>> q = k = v = torch.randn(1, 2, 300, 8)
        >>> seen = hw.observe(q, k, v, mask=hw.Causal())
        >>> seen.weights(heads=[1], queries=[299]).sum().round(decimals=4)
        tensor(1.)
        """
        with torch.no_grad(), as_given(self.found.view.device):
            return entries(self.found.view, self.found.of_rows, heads, queries, keys)

    def __getitem__(self, name: str) -> Tensor:
        values = self.readings.values_of(name)
        return without_graph(self.reading(name).values if values is None else values, self.lost)

    def reading(self, name: str) -> Reading:
        """A statistic with the rows that count in its mean.

        Raises:
            KeyError: a name that was not asked for; the message lists those that were.
        """
        if name == "lse" and name not in self.readings:
            with self._as_given():
                some = self.found.view.rows is not None
                return Reading(self.found.of_rows, self.rows, sampled=some)
        if name not in self.readings:
            known = ", ".join(["lse", *self.readings])
            raise KeyError(f"{name!r} was not observed; there are: {known}")
        return self.readings[name]

    @property
    def names(self) -> tuple[str, ...]:
        """The statistics at hand."""
        return tuple(self.readings)

    def table(self) -> list[dict[str, float | int]]:
        """A row per head: the mean over batch and valid queries; of `max_logit` the maximum.

        Where queries were drawn, a mean is that of all where it costs next to nothing: of figures
        of the kernel's own pass, of masses on single keys beside the log-sum-exp of all queries,
        and of every mass where all are at most 16 times the drawn ones. Of others, `<name>_se` is
        the standard error. The largest of some queries' logits is `max_logit_sampled`: the true one
        may be higher. A mass whose pattern has no target on some rows is averaged over the others,
        and `<name>_coverage` is their share.
        """
        readings = {name: [reading] for name, reading in self.readings.items()}
        rows = table_rows(readings, self.found.extent.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]


@dataclass(frozen=True)
class Explanation:
    """Who would serve a call, and why the others would not; how statistics would be read.

    `measured` says what was measured of the native kernel in calls like this one, and on which CPU;
    `"auto"` takes it only where it was the fastest. `statistics` says by name by which road each
    comes: `"identity: one more call"`, `"a pass over the scores"`, …, and where there is a choice,
    why.
    """

    chosen: str
    choices: tuple[Choice, ...]
    statistics: dict[str, str] = field(default_factory=dict)
    measured: str = ""

    def __str__(self) -> str:
        lines = []
        for choice in self.choices:
            verdict = "; ".join(choice.reasons) or "can serve this call"
            if choice.name == "native" and self.measured:
                verdict += f", {self.measured}"
            arrow = "→" if choice.name == self.chosen else " "
            lines.append(f"{arrow} {choice.name:8} {verdict}")
        wide = max((len(name) for name in self.statistics), default=0)
        lines += [f"  {name:{wide}}  {way}" for name, way in self.statistics.items()]
        return "\n".join(lines)


def explain(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *statistics: Statistic,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Float[Tensor, " H"] | None = None,
    first_query: int | None = None,
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
    **unknown: object,
) -> Explanation:
    """Every backend with its reasons for refusing the call, and the one that is taken.

    With statistics, also how `observe()` would read each of them; arguments are as there. Nothing
    is computed.

    Raises:
        ValueError: as `observe()`.

    >>> q = k = v = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    >>> print(explain(q, k, v, softcap=30.0))
      native   ...
      sdpa     softcap is not linear in the scores
    → blocked  can serve this call
      eager    can serve this call
    >>> from headwise.stats.per_head import MaxLogit
    >>> from headwise.stats.per_query import Entropy
    >>> for name, way in explain(q, k, v, Entropy(), MaxLogit(), softcap=30.0).statistics.items():
    ...     print(f"{name}: {way}")
    entropy: a pass over the scores: softcap is not linear in the scores
    entropy_share: a pass over the scores: softcap is not linear in the scores
    max_logit: rows of scores: those whose log-sum-exp can still win
    """
    if unknown:
        refuse_unknown("explain(q, k, v", explain, unknown)
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
        function="explain",
    )
    chosen, choices = choose(call, backend), tuple(consider(call))
    sample = None if queries is None else draw(queries, call.extent.queries, seed, q.device)
    engine = Engine(
        call,
        chosen,
        call.needs_grad,
        rows=None if sample is None else sample.rows,
        drawn=None if sample is None else sample.weights,
        gradients=gradients,
        output=output,
        projection=projection,
    )
    routes = _planned(engine, statistics, "explain").routes
    said: dict[str, str] = {}
    for statistic in statistics:
        said |= dict.fromkeys(statistic.names, "as the statistic itself reads it")
        for name, need in needs_of(statistic).items():
            route = routes[need]
            if route.kind == VIA and need.via is not None:
                route = routes[need.via]
            said[name] = str(need.told(route, engine))
    native = next(choice for choice in choices if choice.name == "native")
    return Explanation(chosen.name, choices, said, "" if native.reasons else measured(call))
