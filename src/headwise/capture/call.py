"""One attention call of a model that is being watched, in headwise's own terms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..core.call import Call
from ..core.mask_algebra import Mask
from ..core.masks import as_mask
from ..core.modes import no_graph
from ..core.numbers import whole
from ..core.shapes import extent_of
from ..stats.mass import Mass
from ..stats.observe import observe_call
from ..stats.output_norm import HEAD_OUTPUT
from ..stats.patterns import AmongPositions
from ..stats.record import Reading
from ..stats.statistic import Statistic, Statistics
from .mask_import import reaches_all, with_padding, without_padding
from .parts import Waiting
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
class Looking:
    """How a call is to be looked at; as in `observe()`, and with `padding` left out or counted."""

    queries: int | Sequence[int] | Tensor | None = None
    seed: int = 0
    gradients: bool = False
    padding: bool = True

    @property
    def keywords(self) -> dict[str, Any]:
        """What of it `observe()` takes by the same names."""
        return {"queries": self.queries, "seed": self.seed, "gradients": self.gradients}

    def of_call(self, number: int) -> Looking:
        """The same at a module's call of this number, from 0, with a draw of its own on each rank.

        Draws of the same queries at every call would be wrong in the same way at every call.
        """
        return replace(self, seed=seed_of_call(seed_of_rank(self.seed), number))

    def draws(self, queries: int) -> bool:
        """Whether it draws some of a call's queries."""
        return whole(self.queries) is not None and self.looked_at(queries) < queries

    def looked_at(self, queries: int) -> int:
        """At how many of a call's queries."""
        if self.queries is None:
            return queries
        some = self.queries
        return min(some if isinstance(some, int) else torch.as_tensor(some).numel(), queries)


class AttentionCall(ABC):
    """A call that the model has made: whose it is, what came out, and what can be seen of it.

    Listeners get one of these for every attention call of a model. `name` is the qualified name of
    the module that called, `road` how the call was noticed (the function's name, mostly). `again`
    says that the call is made a second time, in a backward pass that recomputes what was not kept.
    `first_key` is the position of the call's first key, where a cache has dropped keys before it.
    `first_head` is the number of its first head in a layer whose other heads are on other ranks,
    and which has `layer_heads`.
    `waiting` holds what is known of a call that may be a part of its module's attention.
    """

    name: str
    road: str
    again: bool = False
    first_key: int = 0
    first_head: int = 0
    layer_heads: int | None = None
    waiting: Waiting | None = None

    def once_whole(self, keep: Callable[[int], None]) -> None:
        """Call `keep` when it is known that this is all that the module attends: mostly at once.

        It gets the number of queries that there are, over the batch. A call that turns out to be
        a part is left out, and nothing is called.
        """
        if self.waiting is None:
            keep(self.batch * self.queries)
        else:
            self.waiting.once_whole(keep)

    @property
    @abstractmethod
    def batch(self) -> int:
        """How many batch rows there are."""

    @property
    @abstractmethod
    def heads(self) -> int:
        """How many query heads there are."""

    @property
    def all_heads(self) -> int:
        """How many query heads the whole layer has, those on other ranks included."""
        return self.layer_heads or self.heads

    @property
    @abstractmethod
    def queries(self) -> int:
        """How many queries there are, T."""

    @property
    @abstractmethod
    def keys(self) -> int:
        """How many keys there are, S."""

    @property
    @abstractmethod
    def out(self) -> Float[Tensor, "B H T Dv"]:
        """The heads' outputs as the model computed them, before the output projection.

        With their graph, where the model runs with one.
        """

    @abstractmethod
    def observe(self, statistics: Iterable[Statistic], looking: Looking) -> Mapping[str, Reading]:
        """Statistics of the call's heads, by name. The model's own output is not touched.

        Queries that are padding count as such that may attend to nothing, if `looking` says so.
        """


Listener = Callable[[AttentionCall], Tensor | None]
"""What hears of every attention call. It may give `[B, H, T, Dv]` to take the place of `call.out`;
`None` leaves the model's own output as it is, bit for bit."""


@dataclass
class HeadsCall(AttentionCall):
    """A call of which the split heads are known: q `[B, H, T, D]`, k and v `[B, G, S, D]`.

    `made` is the heads' output, or what computes it when somebody asks. `keywords` are those of
    `observe()`: `mask`, `scale`, `softcap`, `sinks`. `projection` is the weight of the output
    projection `[O, H · Dv]` where it is known. In self-attention (`own_positions`) the queries
    stand at the keys' end, so that a key which is padding tells of a query that is. So many keys
    `behind` all others have no position: the queries stand before them, and no pattern of positions
    chooses them. `hidden` is the reason why q and k are placeholders, where only the scores are
    known (the mask holds them).
    """

    name: str
    road: str
    q: Tensor
    k: Tensor
    v: Tensor
    made: Tensor | Callable[[], Tensor]
    keywords: dict[str, Any] = field(default_factory=dict)
    projection: Tensor | None = None
    own_positions: bool = True
    first_key: int = 0
    first_head: int = 0
    behind: int = 0
    hidden: str = ""

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def out(self) -> Float[Tensor, "B H T Dv"]:
        if not isinstance(self.made, Tensor):
            self.made = self.made()
        return self.made

    @property
    def mask(self) -> Mask | None:
        """Who may attend to whom."""
        return self.keywords.get("mask")

    def counted(self, looking: Looking) -> Mask:
        """The mask for statistics: padded queries see nothing, unless they are to count."""
        mask = as_mask(self.mask)
        if not looking.padding:
            return with_padding(mask)
        if not self.own_positions or reaches_all(mask):
            return mask
        first = self.keywords.get("first_query")
        extent = extent_of(self.q, self.k, self.v, self.road, first)
        return without_padding(mask, extent, self.q.device)

    def observe(self, statistics: Iterable[Statistic], looking: Looking) -> Mapping[str, Reading]:
        statistics = Statistics.of(statistics)
        keywords = {**self.keywords, "mask": self.counted(looking)}
        if self.behind:
            keywords["first_query"] = self.keys - self.behind - self.queries
            statistics = Statistics(_among_positions(one, self.behind) for one in statistics)
        backend = keywords.pop("backend", "auto")
        wanted = HEAD_OUTPUT in statistics.needs
        output = self.out if wanted else False  # here, where it has its graph
        with nullcontext() if looking.gradients else no_graph():
            seen = observe_call(
                Call.of(self.q, self.k, self.v, function="observe", **keywords),
                statistics,
                backend=backend,
                output=output,
                projection=self.projection,
                strict=False,
                **looking.keywords,
            )
        if not self.hidden:
            return seen.readings.let_go()
        readings = dict(seen.readings)
        for statistic in statistics:
            for name, need in statistic.needs.items():
                if need.vectors:
                    readings[name] = readings[name].without_values(self.hidden)
        return readings


def _among_positions(statistic: Statistic, behind: int) -> Statistic:
    """Return the same statistic of a call in which so many keys at the end have no position."""
    if not isinstance(statistic, Mass) or not hasattr(statistic.keys, "name"):
        return statistic
    return Mass(AmongPositions(statistic.keys, behind), *statistic.names)
