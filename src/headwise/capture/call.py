"""One attention call of a model that is being watched, in headwise's own terms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.call import Call
from ..core.mask_algebra import Mask
from ..core.masks import as_mask
from ..core.modes import NOTHING, no_graph
from ..core.numbers import as_int
from ..core.shapes import extent_of
from ..stats.mass import Mass
from ..stats.observe import read
from ..stats.patterns import AmongPositions, Pattern
from ..stats.record import Reading
from ..stats.sampling import draw
from ..stats.segments import Segments
from ..stats.statistic import Statistic, Statistics
from .mask_import import reaches_all, with_padding, without_padding
from .parts import PendingCall
from .ranks import rank_of_all


def seed_of_call(seed: int, number: int) -> int:
    """The seed of a module's call of this number, from 0; seeds near each other share none."""
    return seed + 1_000_003 * number


def seed_of_rank(seed: int) -> int:
    """The seed of this rank, of ranks that were given the same one; that of rank 0 is as given.

    PyTorch's generator of the CPU looks at the last 32 bits.
    """
    return seed + 0x9E3779B9 * rank_of_all()


@dataclass(frozen=True)
class ObserveOptions:
    """How a call is to be looked at; as in `observe()`, and with `padding` left out or counted."""

    queries: int | Sequence[int] | Tensor | None = None
    seed: int = 0
    gradients: bool = False
    padding: bool = True

    def of_call(self, number: int) -> ObserveOptions:
        """The same at a module's call of this number, from 0, with a draw of its own on each rank.

        Draws of the same queries at every call would be wrong in the same way at every call.
        """
        return replace(self, seed=seed_of_call(seed_of_rank(self.seed), number))

    def draws(self, queries: int) -> bool:
        """Whether it draws some of a call's queries."""
        return as_int(self.queries) is not None and self.looked_at(queries) < queries

    def looked_at(self, queries: int) -> int:
        """At how many of a call's queries."""
        if self.queries is None:
            return queries
        some = self.queries
        return min(some if isinstance(some, int) else torch.as_tensor(some).numel(), queries)


@dataclass
class OnePass:
    """A checked call of headwise's, of which output and statistics can come from the same pass.

    `run` computes the output alone. `strict` raises an error where scores overflow.
    """

    call: Call
    backend: str
    run: Callable[[], Tensor]
    strict: bool = True

    def is_of(self, k: Tensor, mask: Mask) -> bool:
        """Return True if statistics with these keys and this mask are of the very same call."""
        own = self.call.mask
        if mask is own:
            return True
        if k.shape[2] != self.call.extent.keys or type(mask) is not type(own):
            return False
        if own.free:
            return mask == own
        pairs = list(zip_longest(mask.tensors(), own.tensors()))
        return all(
            a is b or (None not in (a, b) and a.shape == b.shape and torch.equal(a, b))
            for a, b in pairs
        )

    def finish(self, out: Tensor, lse: Tensor | None) -> Tensor:
        """Return what the model goes on with."""
        return out


@dataclass
class AttentionCall:
    """A call that a model has made: q `[B, H, T, D]`, k and v `[B, G, S, D]`, and what came out.

    Listeners get one of these for every attention call of a model.

    Args:
        name: the qualified name of the module that called.
        route: how the call was noticed (the function's name, mostly).
        made: the heads' outputs, or what computes them when somebody asks.
        keywords: those of `observe()`: `mask`, `scale`, `softcap`, `sinks`.
        projected_by: the weight of the output projection `[O, H · Dv]` where it is known, or what
            finds it.
        own_positions: the queries stand at the keys' end, as in self-attention, so that a key
            which is padding tells of a query that is; False also where the mask knows that.
        first_key: the position of the first key, where a cache has dropped keys before it.
        layer: the number of the module among those that attend.
        first_head: the number of the first head in a layer whose other heads are on other ranks.
        layer_heads: how many heads that layer has.
        behind: so many keys behind all others have no position: the queries stand before them, and
            no pattern of positions chooses them.
        hidden: the reason why q and k are placeholders, where only the scores are known (the mask
            holds them).
        again: the call is made a second time, in a backward pass that recomputes what was not kept.
        waiting: what is known of a call that may be a part of its module's attention.
        one_pass: a call of headwise's that nobody has computed yet.
        lse: the log-sum-exp `[B, H, T]` that the model's kernel has written on a GPU.
        values: what finds the values where `v` is a placeholder; it raises ValueError where they
            are not visible.
    """

    name: str
    route: str
    q: Tensor
    k: Tensor
    v: Tensor
    made: Tensor | Callable[[], Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)
    projected_by: Tensor | Callable[[], Tensor | None] | None = None
    own_positions: bool = False
    first_key: int = 0
    layer: int = 0
    first_head: int = 0
    layer_heads: int | None = None
    behind: int = 0
    hidden: str = ""
    again: bool = False
    waiting: PendingCall | None = None
    one_pass: OnePass | None = None
    lse: Tensor | None = None
    values: Callable[[], Tensor] | None = None

    def on_complete(self, keep: Callable[[int], None]) -> None:
        """Call `keep` when it is known that this is all that the module attends: mostly at once.

        It gets the number of queries that there are, over the batch. A call that turns out to be
        a part is left out, and nothing is called.
        """
        if self.waiting is None:
            keep(self.batch * self.queries)
        else:
            self.waiting.on_complete(keep)

    @property
    def batch(self) -> int:
        """Return the number of batch rows."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """Return the number of query heads."""
        return self.q.shape[1]

    @property
    def all_heads(self) -> int:
        """Return the number of query heads of the whole layer, those on other ranks included."""
        return self.layer_heads or self.heads

    @property
    def queries(self) -> int:
        """Return the number of queries, T."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """Return the number of keys, S."""
        return self.k.shape[2]

    @property
    def all_values(self) -> Float[Tensor, "B G S Dv"]:
        """Return the values, also where no statistic reads them and `v` is a placeholder.

        Raises:
            ValueError: they are not visible.
        """
        return self.v if self.values is None else self.values()

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """Return the heads' outputs as the model computed them, before the output projection.

        With their graph, where the model runs with one.
        """
        if not isinstance(self.made, Tensor):
            self.made = self.made()
        return self.made

    @cached_property
    def projection(self) -> Tensor | None:
        """The weight of the output projection `[O, H · Dv]` where it is known."""
        weight = self.projected_by
        return weight() if callable(weight) else weight

    def counted(self, looking: ObserveOptions) -> Mask:
        """Return the mask for statistics: padded queries see nothing, unless they are to count."""
        mask = as_mask(self.keywords.get("mask"))
        if not looking.padding:
            return with_padding(mask)
        if not self.own_positions or reaches_all(mask):
            return mask
        first = self.keywords.get("first_query")
        extent = extent_of(self.q, self.k, self.v, self.route, first)
        return without_padding(mask, extent, self.q.device)

    def observe(
        self, statistics: Iterable[Statistic], looking: ObserveOptions
    ) -> Mapping[str, Reading]:
        """Return statistics of the call's heads, by name. The model's own output is not touched.

        Queries that are padding count as such that may attend to nothing, if `looking` says so.
        """
        if not isinstance(statistics, Statistics):
            statistics = Statistics.of(statistics)
        if self.behind or self.first_key:
            statistics = Statistics(map(self._placed, statistics))
        mask, one, output, sample = self.keywords.get("mask"), self.one_pass, False, None
        if self.own_positions or not looking.padding or not isinstance(mask, Mask):
            mask = self.counted(looking)
        if looking.queries is not None:
            sample = draw(looking.queries, self.queries, looking.seed, self.q.device)
        options = {"projection": lambda: self.projection, "gradients": looking.gradients}
        if self.behind or isinstance(self.made, Tensor):
            one = None
        if one is not None and one.is_of(self.k, mask):
            given = (one.call, statistics, sample, one.backend)
            work, readings = read(*given, strict=one.strict, **options)
            assert work.whole_out is not None
            self.made = one.finish(work.whole_out, work.whole_lse)
            return readings.let_go()
        keywords = {**self.keywords, "mask": mask}
        if self.behind:
            keywords["first_query"] = self.keys - self.behind - self.queries
        backend = keywords.pop("backend", "auto")
        if statistics.of_output:
            output = self.out  # here, with its graph
        with no_graph() if torch.is_grad_enabled() and not looking.gradients else NOTHING:
            call = Call.of(self.q, self.k, self.v, function="observe", **keywords)
            _, readings = read(
                *(call, statistics, sample, backend, output),
                strict=False,
                lse=None if looking.gradients else self.lse,
                **options,
            )
        if not self.hidden:
            return readings.let_go()
        readings = dict(readings)
        for statistic in statistics:
            for name, need in statistic.needs.items():
                if need.vectors:
                    readings[name] = readings[name].without_values(self.hidden)
        return readings

    def _placed(self, statistic: Statistic) -> Statistic:
        """Return the same statistic of keys that have other positions than their places say."""
        if isinstance(statistic, Segments):
            return statistic.among(self.first_key, self.keys - self.behind if self.behind else None)
        if self.behind and isinstance(statistic, Mass) and isinstance(statistic.keys, Pattern):
            return Mass(AmongPositions(statistic.keys, self.behind), *statistic.names)
        return statistic


Listener = Callable[[AttentionCall], Tensor | None]
"""What hears of every attention call. It may give `[B, H, T, Dv]` to take the place of `call.out`;
`None` leaves the model's own output as it is, bit for bit."""
