"""What can be known of a call's probabilities without the T×T matrix.

`Evidence` answers a few exact questions about `P = softmax(scores)`: its log-sum-exp, `E[s]`,
`P @ columns`, single entries, the largest score. Each is one more attention call or a few rows of
scores (docs of each method); statistics are formulas on these answers. Where an identity is not
linear in the scores (softcap, bias), the answer comes from blocks of rows instead, in O(T) memory.

With learned sinks, P is over keys and sink, and its rows hold the keys' part. The calls made here
are among the keys alone; `_left` is the share of a row that the sink leaves to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

from ..backends import Backend, Call, Figures, OnePass, choose
from ..backends.blocked import SCORES_AT_A_TIME, SCORES_IN_CACHE, blocks
from ..core.index import grid
from ..core.mask_algebra import Mask, Rows
from ..core.reference import Definition, finish_scores
from ..core.shapes import Extent, statistics_dtype
from .lazy import Lazy
from .pattern_mass import Masses, Runs
from .results import CALL, KERNEL, KERNEL_PASS, PAIRS, PASS, ROWS, Reading, Way
from .score_sweep import (
    Accumulator,
    Ahead,
    Block,
    Columns,
    RowSums,
    Spread,
    entropy_of,
    sweep,
    tiles,
    whole_rows,
)
from .scores import RowBlock, RowFigures, Scores, near, probability

KERNEL_FIGURES = {
    "entropy": "entropy",
    "position": "ahead",
    "max_logit": "max",
    "first": "first",
    "previous": "previous",
    "self": "self",
}
"""The figures that can be wished for, and what one-pass backends call them."""
LARGE = 1e30
"""Farther apart no two logits are; finite, so that 0 times it is 0."""


@runtime_checkable
class Pattern(Protocol):
    """Which keys a head that follows the pattern looks at."""

    @property
    def name(self) -> str: ...

    def runs(self, extent: Extent, device: torch.device) -> Runs: ...

    def keys(self, extent: Extent, device: torch.device) -> Tensor:
        """The pattern as a boolean matrix `[B or 1, T, S]`, for the definition."""
        ...


@runtime_checkable
class Statistic(Protocol):
    """A statistic: its names, its reading from evidence, and its definition on P.

    It may also have `prepare(evidence)`, called before anything is read, to `wish` for figures and
    `gather` sums; `ways(evidence)`, which says by name how it will be read, for `explain()`; and
    `reads_output = True` where it reads the heads' outputs, which `watch()` else leaves alone.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        """The exact figure, from identities."""
        ...

    def define(self, full: Definition) -> dict[str, Tensor]:
        """The same from the whole matrix, as the textbook would."""
        ...


class Evidence:
    """What is known of one call, or of some of its queries. Costs are on top of the forward.

    Every answer is for the queries `rows` (all, if that is `None`); `n` stands for their number.
    With `gradients`, `lse`, `entropy`, `mean_of`, `mass` and `sink` can be differentiated in q, k
    and the sinks.
    """

    def __init__(
        self,
        call: Call,
        backend: Backend,
        *,
        output: bool = True,
        rows: Int[Tensor, " n"] | None = None,
        gradients: bool = False,
        projection: Float[Tensor, "O HDv"] | None = None,
        made: Float[Tensor, "B H T Dv"] | None = None,
    ) -> None:
        self.whole, self.rows, self.gradients = call.extent, rows, gradients
        self.projection, self._made = projection, made
        self.output, self._asked, self._chosen = output, call, backend
        q, k, sinks, mask, extent = call.q, call.k, call.sinks, call.mask, call.extent
        if not gradients:  # first of all: what follows must leave nothing in the call's own graph
            q, k, sinks = q.detach(), k.detach(), None if sinks is None else sinks.detach()
        if rows is not None:
            mask, extent = Rows(mask, rows, extent), replace(extent, queries=len(rows))
            q = q[:, :, rows]
        dtype = statistics_dtype(q.dtype)
        q, k = q.to(dtype), k.to(dtype)
        sinks = None if sinks is None else sinks.to(dtype)
        # No statistic reads the values; keys stand in for them where a kernel wants some.
        self.call = call.with_(q=q, k=k, v=k, mask=mask, extent=extent, dropout=0.0, sinks=None)
        self.sinks = sinks
        # The statistics' own calls are in float32; not every backend serves that.
        self.backend = choose(self.call) if backend.refuse(self.call) else backend
        self.extent = extent
        self.scores = Scores(self.call, gradients, sinks)
        self._of_rows = RowFigures(self.scores)
        self._given: Figures | None = None
        self._waiting: dict[str, Callable[[], Accumulator]] = {}
        self._waiting_for_keys: dict[str, Callable[[], Accumulator]] = {}
        self._done: dict[str, Accumulator] = {}
        self._wished: set[str] = set()
        self._ways: dict[str, Way] = {}
        self._both = False

    def run(self) -> tuple[Tensor, Tensor] | None:
        """Make the call itself: its output and log-sum-exp; `None` if it was to have no output.

        A one-pass backend gives the figures that were wished for with it, without the output too.
        """
        chosen, asked = self._chosen, self._asked
        figures = [name for name, way in self._ways.items() if way.road == KERNEL]
        kernels = [KERNEL_FIGURES[name] for name in figures]
        if self.output and isinstance(chosen, OnePass):
            whole = chosen.observe(asked, kernels, self.gradients)
        elif self.output:
            whole = Figures(*chosen.run(asked, self.gradients))
        elif isinstance(self.backend, OnePass) and kernels:
            self._given = self.backend.figures(self.call.with_(sinks=self.sinks), kernels)
            return None
        else:
            return None
        self._given = whole.map(self._looked_at)
        assert whole.out is not None
        assert whole.lse is not None
        return whole.out, whole.lse

    def _looked_at(self, figure: Tensor) -> Tensor:
        """Of a figure of all queries, those that are looked at, in the dtype of statistics."""
        if not self.gradients:
            figure = figure.detach()
        return figure if self.rows is None else figure[:, :, self.rows]

    def _figure(self, name: str) -> Tensor:
        """A figure of the kernel's own pass, `[B, H, n]`."""
        if self._given is None:
            self.run()
        assert self._given is not None
        figure = getattr(self._given, KERNEL_FIGURES[name])
        return figure.to(self.call.q.dtype)

    @property
    def _masses(self) -> Masses:
        # Kept, it would close a cycle, and all tensors would live on until that is collected.
        return Masses(self.scores, lambda: self.lse, self._of_rows)

    @Lazy
    def near(self) -> bool:
        """Whether `exp(s − lse)` keeps its digits in every row; while compiling nobody knows."""
        return near(self.lse)

    @property
    def device(self) -> torch.device:
        return self.call.q.device

    @property
    def linear(self) -> bool:
        """Whether scores are linear in the keys: no softcap and no bias."""
        return not self._bent

    @property
    def _bent(self) -> str:
        """What keeps scores from being linear in the keys, in words."""
        if self.call.softcap is not None:
            return "softcap is not linear in the scores"
        return "the scores carry a bias" if self.call.mask.biased else ""

    @Lazy
    def queries(self) -> Int[Tensor, " n"]:
        """The numbers of the queries that are looked at."""
        if self.rows is not None:
            return self.rows
        return torch.arange(self.extent.queries, device=self.device)

    @property
    def positions(self) -> Int[Tensor, " n"]:
        """Where those queries stand among the keys."""
        return self.queries + self.whole.offset

    @property
    def out(self) -> Float[Tensor, "B H n Dv"]:
        """The heads' outputs.

        Raises:
            ValueError: the call was observed without its output.
        """
        if self._made is not None:
            return self._looked_at(self._made)
        if self._given is None or self._given.out is None:
            raise ValueError(
                "a statistic of the heads' outputs, such as OutputNorm(), was asked for with "
                "output=False; observe with output=True"
            )
        return self._given.out

    @Lazy
    def lse(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores and sink; −inf where it may attend to nothing."""
        if self._given is not None and self._given.lse is not None:
            return self._given.lse.to(self.call.q.dtype)
        if isinstance(self.backend, OnePass):
            found = self.backend.figures(self.call.with_(sinks=self.sinks), ()).lse
            assert found is not None
            return found
        of_keys = self.lse_of_keys
        if self.sinks is None:
            return of_keys
        dead = of_keys == -torch.inf
        both = torch.logaddexp(of_keys.masked_fill(dead, 0.0), self.sinks[:, None])
        return both.masked_fill(dead, -torch.inf)

    @Lazy
    def lse_of_keys(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of each query's scores alone, without its sink."""
        return self._lse_of_keys if self.linear else self._run(self.call)[1]

    @Lazy
    def _lse_of_keys(self) -> Float[Tensor, "B H n"]:
        """The log-sum-exp of the scores alone, from the call on the keys less their mean."""
        mean = self._mean_key.repeat_interleave(self.extent.group, 1)
        moved = torch.einsum("bhtd,bhd->bht", self.call.q, mean)
        return self._keys_seen[1] + self.call.scale * moved

    @Lazy
    def sink(self) -> Float[Tensor, "B H n"]:
        """The mass on the learned sink, `exp(sink − lse)`; 0 in dead rows and without sinks."""
        if self.sinks is None:
            return torch.zeros_like(self.lse)
        if not self.near:
            return self._figure_of_rows("sink", _sink_of)
        log_p = self.sinks[:, None] - self.lse.masked_fill(self.lse == -torch.inf, torch.inf)
        return torch.exp(log_p.clamp(max=0.0))

    def _left(self, of_keys: Tensor) -> Tensor:
        """The share of each row that its sink leaves to the keys, from the LSE of these alone."""
        assert self.sinks is not None
        if not self.near:
            return self._figure_of_rows("left", lambda block: block.p.sum(-1))
        return torch.sigmoid(of_keys.masked_fill(of_keys == -torch.inf, 0.0) - self.sinks[:, None])

    def _with_sink(self, entropy: Tensor, of_keys: Tensor) -> Tensor:
        """The entropy of keys and sink together, from that among the keys alone and their LSE.

        `left · H + h(left)`, with h the entropy of choosing between the two.
        """
        if self.sinks is None:
            return entropy
        dead = of_keys == -torch.inf
        ahead = of_keys.masked_fill(dead, 0.0) - self.sinks[:, None]
        ahead = ahead.clamp(-LARGE, LARGE)  # a sink of −inf is none, and 0 · inf is no number
        left, taken = torch.sigmoid(ahead), torch.sigmoid(-ahead)
        choice = left * logsigmoid(ahead) + taken * logsigmoid(-ahead)
        return left * entropy.masked_fill(dead, 0.0) - choice

    @Lazy
    def counts(self) -> Int[Tensor, "#B #H n"]:
        """How many keys each query may attend to, `n_i`."""
        extent = self.extent
        i, j = grid(extent, self.device)
        if not self.call.mask.biased:  # a bias may forbid keys inside a range
            found = self.call.mask.interval(i, extent)
            if found is not None:
                every_row = torch.zeros(1, 1, extent.queries, 1, dtype=i.dtype, device=i.device)
                low, high, _ = torch.broadcast_tensors(*found, every_row)
                return (high - low).clamp(min=0)[..., 0]
        parts = []
        for block in blocks(self.call.mask, extent, self.device):
            allowed = self.call.mask.allowed(i[block.rows], j, extent)
            if allowed is None:
                allowed = torch.ones(1, 1, 1, extent.keys, dtype=torch.bool, device=self.device)
            size = block.rows.stop - block.rows.start
            allowed = allowed[(None,) * (4 - allowed.dim())].expand(-1, -1, size, extent.keys)
            parts.append(allowed.sum(-1))
        return torch.cat(parts, dim=2) if parts else torch.zeros(1, 1, 0, device=self.device).long()

    @Lazy
    def alive(self) -> Bool[Tensor, "#B #H n"]:
        """Queries that may attend to something."""
        return self.counts > 0

    # ── who reads what ──────────────────────────────────────────────────────────────────────────

    def prepare(self, statistics: Sequence[Statistic]) -> None:
        """Let statistics say what they will ask for, and settle who answers."""
        for statistic in statistics:
            if (prepare := getattr(statistic, "prepare", None)) is not None:
                prepare(self)
        self._settle()

    def wish(self, figure: str) -> None:
        """Announce that a figure will be read: `entropy`, `position`, `max_logit`, or the mass
        `first`, `previous` or `self`.

        A one-pass backend has each of them from its own pass. Elsewhere entropy and position are
        one more call each; both together are one, a little wider. Beside a pass over the scores
        that is made anyhow, both come from that; of few queries too, for whom a call would pad and
        copy all keys.
        """
        self._wished.add(figure)

    def way(self, figure: str) -> Way:
        """How `lse` or a figure that can be wished for is read in this call."""
        if figure == "lse":
            if self.output:
                return Way(KERNEL)
            return Way("one more call", "there is no output to take it from")
        if figure not in self._ways:
            self.wish(figure)
            self._settle()
        return self._ways[figure]

    def _settle(self) -> None:
        """Decide who answers the wishes; every figure is decided once."""
        wished, self._wished = self._wished - self._ways.keys(), set()
        if self._by_kernel and self._given is None:
            self._ways |= dict.fromkeys(wished, Way(KERNEL))
            return
        for figure in wished - {"entropy", "position"}:
            by_rows = Way(ROWS, "those whose log-sum-exp can still win")
            self._ways[figure] = by_rows if figure == "max_logit" else Way(PAIRS)
        wished &= {"entropy", "position"}
        why = "" if self.gradients else self._why_pass(wished)
        for figure in sorted(wished):
            bent = self._bent if figure == "entropy" else ""
            if why:
                self._ways[figure] = Way(PASS, bent or why)
                self.gather(figure, self._sums_of(figure))
            elif bent:
                self._ways[figure] = Way(ROWS, f"{bent}, and a gradient is wanted")
            elif figure == "entropy" and torch.compiler.is_compiling():
                self._ways[figure] = Way(ROWS, "compiled, it may not depend on what was found")
            else:
                self._ways[figure] = Way(CALL)
            if self._ways[figure].road == ROWS:
                self._of_rows.wait("entropy", _entropy_of_rows)
        if {self._ways[figure].road for figure in wished} == {CALL} and len(wished) == 2:
            self._both = self.linear
            for figure in wished if self._both else ():
                self._ways[figure] = Way(CALL, "the same for entropy and distance")

    @property
    def _by_kernel(self) -> bool:
        """Whether a one-pass backend makes the call."""
        return isinstance(self._chosen if self.output else self.backend, OnePass)

    def _why_pass(self, wished: set[str]) -> str:
        """Why the wishes are answered from a pass over the scores; empty if they are not."""
        if self._waiting:
            return f"it is made for {next(iter(self._waiting))} anyhow"
        if self._bent and "entropy" in wished:
            return "it is made for entropy anyhow"
        if self.output and self.extent.queries * 8 <= self.extent.keys:
            return "of few queries it costs less than a call, which pads and copies all keys"
        return ""

    def _sums_of(self, figure: str) -> Callable[[], Accumulator]:
        sums = entropy_of if figure == "entropy" else Ahead(self.positions)
        return lambda: RowSums(sums, self.zeros(self.extent.queries))

    # ── one pass for several figures ────────────────────────────────────────────────────────────

    def gather(self, name: str, make: Callable[[], Accumulator], among_keys: bool = False) -> None:
        """Let the accumulator that `make()` gives see every block of P in the next pass.

        `gathered` gives it back then. Nothing is made before that. With `among_keys` the
        probabilities are those among the keys alone, as if there were no sink.
        """
        if name not in self._done:
            apart = among_keys and self.sinks is not None
            (self._waiting_for_keys if apart else self._waiting).setdefault(name, make)

    def gathered(self, name: str) -> Any:
        """The accumulator of that name, after the pass that it waited for."""
        self._settle()
        if name in self._waiting:
            waiting, self._waiting = self._waiting, {}
            self._sweep(waiting, self.lse, self.sinks)
        elif name in self._waiting_for_keys:
            waiting, self._waiting_for_keys = self._waiting_for_keys, {}
            self._sweep(waiting, self.lse_of_keys, None)
        return self._done[name]

    def _sweep(
        self, waiting: dict[str, Callable[[], Accumulator]], lse: Tensor, sinks: Tensor | None
    ) -> None:
        """Make one pass over the scores for all that wait."""
        made = {name: make() for name, make in waiting.items()}
        with torch.no_grad():
            if near(lse):
                found = tiles(self._constant, lse.detach())
            else:
                found = whole_rows(Scores(self._constant, False, sinks))
            sweep(found, list(made.values()))
        self._done |= made

    def zeros(self, *shape: int) -> Tensor:
        """Room for sums, `[B · H, *shape]`, in the dtype of the statistics."""
        return self.call.q.detach().new_zeros(self.extent.batch * self.extent.heads, *shape)

    def by_head(self, sums: Tensor) -> Tensor:
        """Sums `[B · H, …]` as `[B, H, …]`."""
        return sums.unflatten(0, (self.extent.batch, self.extent.heads))

    def per_query(self, name: str, figure: Callable[[Block], Tensor]) -> Float[Tensor, "B H n"]:
        """A sum over keys of anything made of P: `figure(block)` `[heads, t]`, summed over blocks.

        `block.p` and `block.log_p` are `[heads, t, s]` at the queries `block.rows` and the keys
        `block.keys`. Without gradient.
        """
        self.gather(name, lambda: RowSums(figure, self.zeros(self.extent.queries)))
        return self.by_head(self.gathered(name).total)

    def _figure_of_rows(self, name: str, figure: Callable[[RowBlock], Tensor]) -> Tensor:
        """A figure of whole rows, and with it all others that wait."""
        self._of_rows.wait(name, figure)
        return self._of_rows.read(name)

    @Lazy
    def _constant(self) -> Call:
        return self.call.with_(**{name: getattr(self.call, name).detach() for name in "qkv"})

    # ── identities ──────────────────────────────────────────────────────────────────────────────

    def _run(self, call: Call) -> tuple[Tensor, Tensor]:
        return self.backend.run(call, self.gradients)

    @Lazy
    def _mean_key(self) -> Tensor:
        """The mean of the keys that are numbers: what is none must reach nobody but who sees it.

        0 where there is none, or one so large that keys less it might be infinite.
        """
        mean = self.call.k.nanmean(2)
        return mean.where(mean.abs() <= LARGE, 0.0)

    @Lazy
    def _keys_seen(self) -> tuple[Tensor, Tensor]:
        """`P (K − mean)` and the log-sum-exp of scores against the keys less their mean.

        Where the positions are wanted too, they are more columns: 8, as kernels like it.
        """
        self._settle()
        keys = self.call.k - self._mean_key[:, :, None]
        # 0 · NaN is NaN, also in rows that give the key nothing; those that do get it by its score.
        values = keys.masked_fill(keys.isnan(), 0.0)
        if self._both:
            e = self.extent
            columns = self._position_columns.expand(e.batch, e.kv_heads, -1, -1)
            values = torch.cat([values, torch.nn.functional.pad(columns, (0, 6))], dim=-1)
        return self._run(self.call.with_(k=keys, v=values))

    @property
    def _position_columns(self) -> Tensor:
        """Positions of the keys as `_digits`, `[1, 1, S, 2]`."""
        return self._digits(torch.arange(self.extent.keys, device=self.device))[None, None]

    def _digits(self, positions: Tensor) -> Tensor:
        """Positions `[n]` as digits to the base 4096, `[n, 2]`, counted from the middle query.

        No digit is over 2^24 for any length below 2^36, so each is exact in float32; and of few
        queries, far into a text, both are small.
        """
        here = positions - (self.positions[len(self.positions) // 2] if len(self.positions) else 0)
        high = torch.div(here, 4096, rounding_mode="trunc")  # 0 on both sides of that query
        return torch.stack([here - 4096 * high, high], dim=-1).to(self.call.q.dtype)

    @Lazy
    def entropy(self) -> Float[Tensor, "B H n"]:
        """`−Σ_j p_ij log p_ij = lse_i − E[s]`, with `E[s] = scale · q_i·(P K)_i`; and the sink's.

        One attention call with the keys as values. All keys are moved by their mean first: that
        changes no probability, and keeps both sides of the difference small. With softcap or a bias
        the scores are not linear in the keys, and blocks of scores are summed.
        """
        road = self.way("entropy").road
        if road == KERNEL:
            return self._figure("entropy")
        entropy = None
        if road == CALL:
            entropy = self._entropy_by_identity()
        elif road == PASS and self.sinks is None:
            entropy = self.by_head(self.gathered("entropy").total)
        elif road == PASS and self.sinks is not None and self.near:
            log_p = (self.sinks[:, None] - self.lse).clamp(-LARGE, 0.0)
            entropy = self.by_head(self.gathered("entropy").total) - torch.exp(log_p) * log_p
        if entropy is None:
            entropy = self._figure_of_rows("entropy", _entropy_of_rows)
        return torch.where(self.alive, entropy.clamp(min=0.0), 0.0)

    def _entropy_by_identity(self) -> Tensor | None:
        """The entropy by one more call; `None` where it would be a difference of large numbers."""
        seen, lse = self._keys_seen
        mean = torch.einsum("bhtd,bhtd->bht", self.call.q, seen[..., : self.call.q.shape[-1]])
        entropy = lse - mean * self.call.scale
        dead = lse == -torch.inf
        if not near(lse) or not bool((entropy.isfinite() | dead).all()):
            return None
        return self._with_sink(entropy, self._lse_of_keys)

    @Lazy
    def position(self) -> Float[Tensor, "B H n"]:
        """`E[j − position of i]`: how far ahead each query looks on average; 0 in dead rows.

        Attention with the key's position as the value. What a sink takes adds 0.
        """
        road = self.way("position").road
        if road == KERNEL:
            return self._figure("position")
        if road == PASS:
            return torch.where(self.alive, self.by_head(self.gathered("position").total), 0.0)
        width = self.call.q.shape[-1]
        if self._both:
            columns, of_keys = self._keys_seen[0][..., width : width + 2], self._lse_of_keys
        else:
            columns, of_keys = self._mean_among_keys(self._position_columns)
        low, high = (columns - self._digits(self.positions)).unbind(-1)
        ahead = low + 4096 * high
        if self.sinks is not None:
            ahead = self._left(of_keys) * ahead
        return torch.where(self.alive, ahead, 0.0)

    @Lazy
    def spread(self) -> Float[Tensor, "B H n"]:
        """Standard deviation of the position of the key, in tokens; 0 in dead rows. No gradient.

        Among the keys: what a sink takes has no position.
        """
        self.gather_spread()
        return self.by_head(self.gathered("spread").deviation.to(self.lse.dtype))

    def gather_spread(self) -> None:
        """Announce that `spread` will be read."""
        make = lambda: Spread(self.zeros(self.extent.queries))  # noqa: E731
        self.gather("spread", make, among_keys=True)

    def weights(
        self,
        heads: int | Sequence[int] | slice | None = None,
        queries: int | Sequence[int] | slice | None = None,
        keys: int | Sequence[int] | slice | None = None,
    ) -> Float[Tensor, "B h t s"]:
        """Exactly these entries of P; of sampled queries, `queries` counts among them.

        `exp(s_ij − lse_i)`: O(D) an entry.
        """
        e, device = self.extent, self.device
        h, i, j = (
            torch.arange(size, device=device)[_index(wanted, size, name)]
            for wanted, size, name in (
                (heads, e.heads, "heads"),
                (queries, e.queries, "queries"),
                (keys, e.keys, "keys"),
            )
        )
        if not self.near:
            return self.rows_of(i)[0][:, h][..., j]
        call = self._constant
        q = call.q[:, h][:, :, i]
        k = call.k[:, h // e.group][:, :, j]
        scores = q @ k.mT * call.scale
        place = (i[None, None, :, None], j[None, None, None, :])
        if self.call.mask.tensors() or self.call.mask.biased:
            # A mask may differ by head; it is asked for all of them.
            full = scores.new_zeros(e.batch, e.heads, *scores.shape[2:])
            full[:, h] = scores
            scores, _ = finish_scores(full, call.mask, e, *place, softcap=call.softcap)
            scores = scores[:, h]
        else:
            scores, _ = finish_scores(scores, call.mask, e, *place, softcap=call.softcap)
        return probability(scores, self.lse.detach()[:, h][:, :, i, None])

    def rows_of(
        self, queries: Int[Tensor, " t"]
    ) -> tuple[Float[Tensor, "B H t S"], Float[Tensor, "B H t"] | None]:
        """Whole rows of P, and what the sink takes of them; of sampled queries, by their places."""
        scores = Scores(self._constant, False, None if self.sinks is None else self.sinks.detach())
        q, every = self._constant.q[:, :, queries], slice(0, self.extent.keys)
        block = scores.row_block(q, queries[:, None], slice(0, len(queries)), every)
        return block.p, None if block.log_sink is None else torch.exp(block.log_sink)

    def mean_of(self, columns: Float[Tensor, "#B #G S C"]) -> Float[Tensor, "B H n C"]:
        """`P @ columns`: attention with these columns as values, head_dim of them to a call."""
        mean, of_keys = self._mean_among_keys(columns)
        return mean if self.sinks is None else mean * self._left(of_keys)[..., None]

    def way_of_mean(self, columns: int) -> Way:
        """How `mean_of` so many columns is read."""
        calls = -(-columns // self._columns_to_a_call)
        return Way(CALL) if calls == 1 else Way(f"identity: {calls} more calls")

    @property
    def _columns_to_a_call(self) -> int:
        return self.call.q.shape[-1]

    def _mean_among_keys(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """The same among the keys alone, and their log-sum-exp."""
        call, extent = self.call, self.extent
        wide = columns.to(call.q.dtype).expand(extent.batch, extent.kv_heads, -1, -1)
        split = wide.split(self._columns_to_a_call, dim=-1)
        outs, lses = zip(*(self._run(call.with_(v=x.contiguous())) for x in split), strict=True)
        return torch.cat(outs, dim=-1), lses[0]

    def mass_of(
        self, mask: Mask, name: str | None = None
    ) -> tuple[Float[Tensor, "B H n"], Int[Tensor, "#B #H n"]]:
        """`Σ_j p_ij` over the keys that a mask allows as well, and how many those are.

        `name` is that under which it was announced, if it was.

        `exp(lse restricted − lse)`: one call, of which only the log-sum-exp is read.
        """
        chosen = self._within(mask)
        call = self.call.with_(mask=self.call.mask & chosen)
        if not self.near:
            name = self._of_rows.known(name)
            self._wait_for_mask(chosen, name)
            return self._of_rows.read(f"{name}: mass"), Evidence(call, self.backend).counts
        backend = choose(call) if self.backend.refuse(call) else self.backend
        if isinstance(backend, OnePass):
            restricted = backend.figures(call, ()).lse
            assert restricted is not None
        else:
            restricted = backend.run(call, self.gradients)[1]
        inside = Evidence(call, backend)
        some = torch.isfinite(restricted) & torch.isfinite(self.lse)
        base = torch.where(some, self.lse, 0.0)
        share = torch.exp(torch.where(some, restricted, 0.0) - base)
        return torch.where(some, share, 0.0), inside.counts

    def _within(self, mask: Mask) -> Mask:
        """A mask that chooses keys, for the queries that are looked at.

        Raises:
            ValueError: it does not fit the call, or adds to the scores.
        """
        mask.check(self.whole)
        if mask.biased:
            raise ValueError(f"Mass({mask!r}): a mask that adds to the scores chooses no keys")
        return mask if self.rows is None else Rows(mask, self.rows, self.whole)

    def _wait_for_mask(self, mask: Mask, name: str) -> None:
        """Let the mass within a mask be taken from the next pass over whole rows."""

        def mass(block: RowBlock) -> Tensor:
            allowed = mask.allowed(
                *grid(self.extent, self.device, block.rows, block.keys), self.extent
            )
            return (block.p if allowed is None else torch.where(allowed, block.p, 0.0)).sum(-1)

        self._of_rows.wait(f"{name}: mass", mass)

    @Lazy
    def max_logit(self) -> Float[Tensor, "B H"]:
        """The largest score of each head, exactly; −inf where no query sees a key.

        `lse_i − log n_i ≤ max_j s_ij ≤ lse_i`: the rows with the largest LSE come first, and then
        only blocks with a row whose LSE can still win. A few rows on peaked heads, all on flat.
        """
        call, extent = self._constant, self.extent
        if self.way("max_logit").road == KERNEL:
            return self._figure("max_logit").detach().amax(-1)
        if not (extent.batch and extent.queries and extent.keys):
            return self.lse.new_full((extent.batch, extent.heads), -torch.inf)
        if torch.compiler.is_compiling():  # which rows can win depends on their scores
            every = [self._largest_in(block) for block in self.scores.blocks(SCORES_AT_A_TIME)]
            return torch.stack(every).amax(0)
        known = self._above_the_largest()
        row = max(1, extent.batch * extent.heads * extent.keys)
        count = min(extent.queries, max(1, min(16, SCORES_AT_A_TIME // row)))
        i = known.topk(count, dim=-1).indices
        q = call.q.gather(2, i[..., None].expand(-1, -1, -1, call.q.shape[-1]))
        j = torch.arange(extent.keys, device=self.device).view(1, 1, 1, -1)
        best = self.scores.logits(q, call.k, i[..., None], j)[0].amax((-1, -2))
        if (left := int((known > best[..., None]).sum(-1).max())) == 0:
            return best
        if left * 4 <= extent.queries:  # those rows alone, each head's own
            rows = known.topk(left, dim=-1).indices
            for i in rows.split(max(1, SCORES_AT_A_TIME // row), dim=-1):
                q = call.q.gather(2, i[..., None].expand(-1, -1, -1, call.q.shape[-1]))
                best = torch.maximum(
                    best, self.scores.logits(q, call.k, i[..., None], j)[0].amax((-1, -2))
                )
            return best
        for block in blocks(call.mask, extent, self.device, SCORES_IN_CACHE):
            if bool((known[:, :, block.rows].amax(-1) <= best).all()):
                continue
            best = torch.maximum(best, self._largest_in(block))
        return best

    def _largest_in(self, block: Any) -> Float[Tensor, "B H"]:
        """The largest score of a block of rows."""
        if block.keys.stop == block.keys.start:
            return self.lse.new_full((self.extent.batch, self.extent.heads), -torch.inf)
        i, j = grid(self.extent, self.device, block.rows, block.keys)
        q, k = self._constant.q[:, :, block.rows], self._constant.k[:, :, block.keys]
        return self.scores.logits(q, k, i, j)[0].amax((-1, -2))

    def _above_the_largest(self) -> Float[Tensor, "B H n"]:
        """A number that no score of the row exceeds: the LSE of its keys, −inf in dead rows."""
        lse = self.lse.detach()
        # Rounding of the LSE itself must not shut out the winner.
        dead = lse == -torch.inf
        bound = (lse + 1e-5 * (1 + lse.abs())).masked_fill(dead, -torch.inf)
        if self.sinks is None:
            return bound
        taken = self.sinks.detach()[:, None] - bound.masked_fill(dead, torch.inf)
        return bound + torch.log(-torch.expm1(taken))

    def received(self, weight: Tensor) -> Float[Tensor, "B H S"]:
        """`Σ_i weight_i p_ij`: what every key receives, from queries that count so much `[n]`."""
        if isinstance(self.backend, OnePass):
            call = self._constant.with_(sinks=self.sinks)
            return self.backend.received(call, self.lse.detach(), weight)
        self._gather_received(weight)
        return self.by_head(self.gathered("received").total)

    def gather_received(self, weight: Tensor) -> None:
        """Announce that `received` will be read, in a pass over the scores where it takes one."""
        if not isinstance(self.backend, OnePass):
            self._gather_received(weight)

    def _gather_received(self, weight: Tensor) -> None:
        self.gather("received", lambda: Columns(self.zeros(self.extent.keys), weight))

    def block_sums(self, of_query: Tensor, of_key: Tensor, blocks: int) -> Float[Tensor, "B H n n"]:
        """Sums of P over each block of queries and of keys; `of_query` `[n]`, `of_key` `[S]`."""
        if isinstance(self.backend, OnePass):
            lse = self.lse.detach()
            call = self._constant.with_(sinks=self.sinks)
            return self.backend.block_map(call, lse, of_query, of_key, blocks)
        one_hot = torch.nn.functional.one_hot(of_key, blocks).to(self.call.q.dtype)
        seen = torch.where(self.alive[..., None], self.mean_of(one_hot[None, None]), 0.0)
        return (
            self.zeros(blocks, blocks)
            .index_add_(1, of_query, seen.flatten(0, 1))
            .unflatten(0, (self.extent.batch, self.extent.heads))
        )

    def way_of_blocks(self, blocks: int) -> Way:
        """How `block_sums` are read."""
        if isinstance(self.backend, OnePass):
            return Way(KERNEL_PASS)
        return self.way_of_mean(blocks)

    @property
    def way_of_received(self) -> Way:
        return Way(KERNEL_PASS if isinstance(self.backend, OnePass) else PASS)

    def runs(self, pattern: Pattern) -> Runs:
        """A pattern's keys for the queries that are looked at."""
        runs = pattern.runs(self.whole, self.device)
        if self.rows is None:
            return runs
        start, stop = runs.start[:, self.rows], runs.stop[:, self.rows]
        omit = None if runs.omit is None else runs.omit[:, self.rows]
        return Runs(runs.order, start, stop, omit)

    def mass(
        self, runs: Runs, name: str | None = None
    ) -> tuple[Float[Tensor, "B H T"], Int[Tensor, "#B #H T"]]:
        """`Σ_j p_ij` over each query's chosen keys, and how many of those it may attend to.

        `p_ij = exp(s_ij − lse_i)` for the chosen pairs alone: O(D) a pair.
        """
        return self._masses.of(runs, name)

    def prepare_mass(self, keys: Pattern | Mask, name: str) -> None:
        """Announce that `mass_of_pattern` or `mass_of` will be read, under this name.

        While compiling, where nobody knows whether the log-sum-exp serves, one pass over whole rows
        then gives all of them.
        """
        figure = getattr(keys, "figure", None)
        if figure is not None:
            self.wish(figure)
        if not torch.compiler.is_compiling():
            return
        if isinstance(keys, Mask):
            self._wait_for_mask(self._within(keys), name)
        elif figure is None or not self._by_kernel:
            self._masses.wait(self.runs(keys), name)

    def mass_of_pattern(self, pattern: Pattern, name: str | None = None) -> tuple[Tensor, Tensor]:
        """`mass` of a pattern's keys; from the kernel's own pass, where it has them."""
        figure = getattr(pattern, "figure", None)
        if figure is None or self.way(figure).road != KERNEL:
            return self.mass(self.runs(pattern), name)
        return self._figure(figure), self._masses.count_of_one_key(self.runs(pattern))

    def way_of_mass(self, pattern: Pattern) -> Way:
        """How the mass on a pattern's keys is read."""
        figure = getattr(pattern, "figure", None)
        if figure is not None and self.way(figure).road == KERNEL:
            return self.way(figure)
        return self._masses.reader_of(self.runs(pattern))[0]


def _entropy_of_rows(block: RowBlock) -> Tensor:
    """`−Σ p log p`, the sink's among them."""
    entropy = -(block.p * block.log_p).sum(-1)
    if block.log_sink is None:
        return entropy
    return entropy - torch.exp(block.log_sink) * block.log_sink


def _sink_of(block: RowBlock) -> Tensor:
    assert block.log_sink is not None
    return torch.exp(block.log_sink)


def _index(wanted: int | Sequence[int] | slice | None, size: int, name: str) -> slice | list[int]:
    if isinstance(wanted, int):
        wanted = [wanted]
    if wanted is None or isinstance(wanted, slice):
        return slice(None) if wanted is None else wanted
    numbers = [int(number) for number in wanted]
    for number in numbers:
        if not -size <= number < size:
            raise ValueError(f"weights({name}={number}): there are {size} {name}")
    return numbers
