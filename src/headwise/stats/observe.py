"""Statistics of every head in one call: `observe()` and `explain()`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..backends import Call, Choice, check_scores, choose, consider
from ..core.mask_algebra import Mask
from ..core.modes import batched
from ..core.shapes import as_given, quote
from .evidence import Evidence, Statistic
from .results import Figure, Reading, Way, summarise
from .sampling import Sample, draw, standard_error


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
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool | Float[Tensor, "B H T Dv"] = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
) -> Seen:
    """`attend()`, and exact statistics of every head, without the T×T matrix.

    The output is bit for bit what `attend()` gives. Statistics describe the probabilities before
    dropout and are computed in float32 at least. With learned sinks, `lse` and entropies are those
    of keys and sink together; masses, distances, maps, top keys and what keys receive count keys
    only, and so sum to what the sink leaves.

    Args:
        statistics: such as `Entropy()`, `MaxLogit()`, `Mass(First(1))`; the rest as `attend()`.
        queries: look at so many queries, drawn one from each of as many equal stretches, or at
            those of a list, in ascending order (`seen.queries`); default: at all. The output is
            whole all the same.
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

    >>> from headwise.core.masks import Causal
    >>> from headwise.stats.per_query import Entropy
    >>> q = k = v = torch.zeros(1, 2, 4, 8)
    >>> seen = observe(q, k, v, Entropy(), mask=Causal())
    >>> seen["entropy"][0, 0].exp()  # equal scores: query i sees i + 1 keys alike
    tensor([1., 2., 3., 4.])
    """
    check_statistics(statistics, "observe")
    call = Call.of(
        *(q, k, v),
        mask=mask,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        sinks=sinks,
        function="observe",
    )
    if batched(q, k, v, sinks, *call.mask.tensors()):
        raise ValueError(
            f"{quote(q, k, v, 'observe')} runs inside torch.func.vmap, and statistics are read of "
            f"a whole batch at once; observe outside of it, the calls side by side as batch rows."
        )
    sample = None if queries is None else draw(queries, call.extent.queries, seed, q.device)
    chosen = choose(call, backend)
    gradients = gradients and call.needs_grad
    made = output if isinstance(output, Tensor) else None
    readings: dict[str, Reading] = {}
    with as_given(q.device):
        evidence = Evidence(
            *(call, chosen),
            output=output is True,
            made=made,
            rows=None if sample is None else sample.rows,
            gradients=gradients,
            projection=projection,
        )
        evidence.prepare(statistics)
        out, lse = evidence.run() or (None, None)
    with as_given(q.device), nullcontext() if gradients else torch.no_grad():
        if lse is not None:
            check_scores(call, lse, "observe")
        else:
            lse = evidence.lse
            check_scores(call, lse, "observe", evidence.queries)
        for statistic in statistics:
            for name, reading in statistic.read(evidence).items():
                if name in readings:
                    raise ValueError(f"observe(…): the statistic {name!r} was asked for twice.")
                if sample is not None and sample.drawn:
                    reading = _with_error(reading, sample)
                readings[name] = reading
        if not gradients:
            lse = lse.detach()
    return Seen(lse, evidence, readings, output=out if made is None else made)


_STATISTICS: set[type] = set()
"""Types that were found to be statistics: looking a protocol through takes its time."""


def check_statistics(statistics: Sequence[object], function: str) -> None:
    """Raise ValueError for what is no statistic, quoting `function`."""
    for statistic in statistics:
        kind = type(statistic)
        if kind in _STATISTICS:
            continue
        if isinstance(statistic, Statistic) and not isinstance(statistic, type):
            _STATISTICS.add(kind)
        else:
            made = f"{statistic.__name__}()" if isinstance(statistic, type) else "Entropy()"
            raise ValueError(f"{function}(…, {statistic!r}): not a statistic; did you mean {made}?")


def _with_error(reading: Reading, sample: Sample) -> Reading:
    """A reading of drawn queries, with the standard error of its means."""
    if reading.rows is None or reading.values.dim() != 3:
        return reading
    rows = reading.rows.expand(reading.values.shape)
    return replace(reading, error=standard_error(reading.values.detach(), rows, sample.of))


@dataclass(frozen=True, eq=False)
class Seen:
    """What one call gave: the output, its log-sum-exp, and every statistic asked for.

    `seen[name]` is `[B, H, T]` per query, `[B, H, S]` per key, or `[B, H, …]` per head; of sampled
    queries, n of them stand in place of T. `lse` is that of all queries where the output was
    computed with it, else of those looked at.
    """

    lse: Float[Tensor, "B H _"]
    evidence: Evidence = field(repr=False)
    readings: dict[str, Reading] = field(repr=False)
    output: Float[Tensor, "B H T Dv"] | None = None

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """The attention output.

        Raises:
            ValueError: it was observed with `output=False`.
        """
        if self.output is None:
            raise ValueError("seen.out: observed with output=False, so there is no output")
        return self.output

    @property
    def rows(self) -> Tensor:
        """Which of the queries looked at may attend to anything; broadcasts to `[B, H, n]`."""
        return self.evidence.alive

    @property
    def queries(self) -> Int[Tensor, " n"]:
        """The numbers of the queries looked at, in order."""
        return self.evidence.queries

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
        with torch.no_grad(), as_given(self.lse.device):
            return self.evidence.weights(heads, queries, keys)

    def __getitem__(self, name: str) -> Tensor:
        return self.reading(name).values

    def reading(self, name: str) -> Reading:
        """A statistic with the rows that count in its mean.

        Raises:
            KeyError: a name that was not asked for; the message lists those that were.
        """
        if name == "lse" and name not in self.readings:
            return Reading(self.evidence.lse, self.rows)
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

        Where queries were drawn, `<name>_se` is the standard error of that mean. A mass whose
        pattern has no target on some rows is averaged over the others, and `<name>_coverage` is
        their share.
        """
        readings = {name: [reading] for name, reading in self.readings.items()}
        rows = table_rows(readings, self.evidence.extent.heads)
        return [{"head": h, **row} for h, row in enumerate(rows)]


def table_rows(
    readings: dict[str, list[Reading]], heads: int, texts: bool = False
) -> list[dict[str, float]]:
    """The figures of each head over calls; statistics that are maps are left out.

    With `texts`, standard errors are those over texts, each a batch row of a call.
    """
    return figure_rows({name: summarise(calls, texts) for name, calls in readings.items()}, heads)


def figure_rows(figures: dict[str, Figure | None], heads: int) -> list[dict[str, float]]:
    """A row per head, with a column per figure, its standard error and its coverage."""
    rows: list[dict[str, float]] = [{} for _ in range(heads)]
    for name, figure in figures.items():
        if figure is None:
            continue
        for row, mean in zip(rows, figure.mean.tolist(), strict=True):
            row[name] = mean
        if figure.error is not None:
            for row, error in zip(rows, figure.error.tolist(), strict=True):
                row[f"{name}_se"] = error
        if figure.coverage is not None:
            for row, share in zip(rows, figure.coverage.tolist(), strict=True):
                row[f"{name}_coverage"] = share
    return rows


@dataclass(frozen=True)
class Explanation:
    """Who would serve a call, and why the others would not; how statistics would be read.

    `statistics` says by name by which road each comes: `"identity: one more call"`, `"a pass over
    the scores"`, …, and where there is a choice, why.
    """

    chosen: str
    choices: tuple[Choice, ...]
    statistics: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = []
        for choice in self.choices:
            verdict = "; ".join(choice.reasons) or "can serve this call"
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
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
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
    >>> from headwise.stats.per_query import Entropy, MaxLogit
    >>> for name, way in explain(q, k, v, Entropy(), MaxLogit(), softcap=30.0).statistics.items():
    ...     print(f"{name}: {way}")
    entropy: a pass over the scores: softcap is not linear in the scores
    entropy_share: a pass over the scores: softcap is not linear in the scores
    max_logit: rows of scores: those whose log-sum-exp can still win
    """
    check_statistics(statistics, "explain")
    call = Call.of(
        *(q, k, v),
        mask=mask,
        scale=scale,
        softcap=softcap,
        dropout=dropout,
        sinks=sinks,
        function="explain",
    )
    chosen, choices = choose(call, backend), tuple(consider(call))
    if not statistics:
        return Explanation(chosen.name, choices)
    sample = None if queries is None else draw(queries, call.extent.queries, seed, q.device)
    evidence = Evidence(
        *(call, chosen),
        output=output,
        rows=None if sample is None else sample.rows,
        gradients=gradients and call.needs_grad,
        projection=projection,
    )
    evidence.prepare(statistics)
    ways: dict[str, Way] = {}
    for statistic in statistics:
        own = dict.fromkeys(statistic.names, Way("as the statistic itself reads it"))
        say = getattr(statistic, "ways", None)
        ways |= own if say is None else say(evidence)
    return Explanation(chosen.name, choices, {name: str(way) for name, way in ways.items()})
