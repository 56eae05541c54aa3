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
    """Return the seed of a module's n-th call, from 0; nearby seeds have no call seed in common."""
    return seed + 1_000_003 * number


def seed_of_rank(seed: int) -> int:
    """Return the seed of this rank if all ranks were given the same one; rank 0 uses it unchanged.

    PyTorch's CPU generator uses only the last 32 bits.
    """
    return seed + 0x9E3779B9 * rank_of_all()


@dataclass(frozen=True)
class ObserveOptions:
    """Options of `observe()` for each captured call; `padding=False` counts padded queries."""

    queries: int | Sequence[int] | Tensor | None = None
    seed: int = 0
    gradients: bool = False
    padding: bool = True

    def of_call(self, number: int) -> ObserveOptions:
        """Return the options for a module's n-th call, from 0, with a separate seed on each rank.

        If the same queries were sampled at every call, all calls would share the sampling error.
        """
        return replace(self, seed=seed_of_call(seed_of_rank(self.seed), number))

    def draws(self, queries: int) -> bool:
        """Return True if only some of a call's queries are sampled."""
        return as_int(self.queries) is not None and self.looked_at(queries) < queries

    def looked_at(self, queries: int) -> int:
        """Return the number of a call's queries that are observed."""
        if self.queries is None:
            return queries
        some = self.queries
        return min(some if isinstance(some, int) else torch.as_tensor(some).numel(), queries)


@dataclass
class OnePass:
    """A validated call of headwise whose output and statistics can be computed in one pass.

    `run` computes only the output. `strict` raises an error if scores overflow.
    """

    call: Call
    backend: str
    run: Callable[[], Tensor]
    strict: bool = True

    def is_of(self, k: Tensor, mask: Mask) -> bool:
        """Return True if statistics with these keys and this mask belong to this same call."""
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
        """Return the output that the model continues with."""
        return out


@dataclass
class AttentionCall:
    """An attention call of a model: q `[B, H, T, D]`, k and v `[B, G, S, D]`, and the output.

    A listener receives one of these for every attention call of a model.

    Args:
        name: the qualified name of the module that called.
        route: the way the call was captured (usually the name of the function).
        model_out: the heads' outputs, or a function that computes them on first use.
        keywords: those of `observe()`: `mask`, `scale`, `softcap`, `sinks`.
        projected_by: the weight of the output projection `[O, H · Dv]` if it is known, or a
            function that returns it.
        own_positions: the queries are at the end of the keys, as in self-attention, so that a
            padded key implies a padded query; False also if the mask contains that already.
        first_key: the position of the first key, if a cache has dropped keys before it.
        layer: the number of the module among those that attend.
        first_head: the number of the first head in a layer whose other heads are on other ranks.
        layer_heads: the number of heads of that layer on all ranks.
        behind: the number of keys without a position, after all others: the queries come before
            them, and no pattern of positions selects them.
        hidden: the reason why q and k are placeholders, if only the scores are known (the mask
            holds them).
        again: the call is repeated in a backward pass that recomputes activations.
        waiting: the pending call, if this may be only a part of its module's attention.
        one_pass: a call of headwise that is not computed yet.
        lse: the log-sum-exp `[B, H, T]` that the model's kernel has written on a GPU.
        values: a function that returns the values if `v` is a placeholder; it raises ValueError if
            they are not visible.
    """

    name: str
    route: str
    q: Tensor
    k: Tensor
    v: Tensor
    model_out: Tensor | Callable[[], Tensor]
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
        """Call `keep` once the call is known to be complete, usually immediately.

        Its argument is the total number of queries, over the batch. If the call turns out to cover
        only a part of the module's attention, it is left out and `keep` is not called.
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
        """Return the values, even if no statistic reads them and `v` is a placeholder.

        Raises:
            ValueError: they are not visible.
        """
        return self.v if self.values is None else self.values()

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """Return the heads' outputs as the model computed them, before the output projection.

        They have an autograd graph if the model runs with one.
        """
        if not isinstance(self.model_out, Tensor):
            self.model_out = self.model_out()
        return self.model_out

    @cached_property
    def projection(self) -> Tensor | None:
        """The weight of the output projection `[O, H · Dv]`, or None if it is unknown."""
        weight = self.projected_by
        return weight() if callable(weight) else weight

    def counted(self, looking: ObserveOptions) -> Mask:
        """Return the mask for statistics: padded queries see no key, unless they are counted."""
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
        """Return statistics of the call's heads, by name. The model's output does not change.

        With `looking.padding`, padded queries count as queries without a visible key.
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
        if self.behind or isinstance(self.model_out, Tensor):
            one = None
        if one is not None and one.is_of(self.k, mask):
            given = (one.call, statistics, sample, one.backend)
            work, readings = read(*given, strict=one.strict, **options)
            assert work.whole_out is not None
            self.model_out = one.finish(work.whole_out, work.whole_lse)
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
        """Return the same statistic for keys whose positions differ from their indices."""
        if isinstance(statistic, Segments):
            return statistic.among(self.first_key, self.keys - self.behind if self.behind else None)
        if self.behind and isinstance(statistic, Mass) and isinstance(statistic.keys, Pattern):
            return Mass(AmongPositions(statistic.keys, self.behind), *statistic.names)
        return statistic


Listener = Callable[[AttentionCall], Tensor | None]
"""Function that receives every attention call. It may return `[B, H, T, Dv]` to replace `call.out`;
`None` leaves the model's own output unchanged, bit for bit."""
