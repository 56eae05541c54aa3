"""What the attention calls of one training step's forwards add up to."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from .._text import and_more
from ..capture.bundle import Bundles, together
from ..capture.call import AttentionCall, Looking, seed_of_call
from ..capture.modules import Modules, Names, chosen, why_left_out
from ..capture.net import Net
from ..capture.ranks import rank_of_all
from ..capture.session import catch
from ..stats.max_logit import MaxLogit, Norms
from ..stats.record import TOGETHER, Reading
from ..stats.statistic import Statistic, Statistics
from .figures import kept_of_each
from .step_sums import Span, StepSums
from .wrappers import innermost, plain_name


@runtime_checkable
class Warn(Protocol):
    """Tells of what went wrong, once of each thing that it is `about`."""

    def __call__(self, said: str, about: object = None) -> None: ...


@dataclass(frozen=True)
class Wanted:
    """What is taken of a step.

    statistics: recorded, of `queries` drawn queries of each call; maxima of all queries.
    largest: what else is to be known of the largest scores: all, those above a limit, or nothing.
    """

    statistics: tuple[Statistic, ...]
    queries: int | None
    largest: MaxLogit | None

    @cached_property
    def of_all(self) -> Statistics:
        """What is taken of every query."""
        kept = tuple(s for s in self.statistics if self._whole(s))
        if self.largest is None or any(s == MaxLogit() for s in kept if isinstance(s, MaxLogit)):
            return Statistics.of(kept)
        return Statistics.of((*kept, self.largest))

    @cached_property
    def of_some(self) -> Statistics:
        """What is taken of drawn queries."""
        return Statistics.of(s for s in self.statistics if not self._whole(s))

    @cached_property
    def all_together(self) -> Statistics:
        """The statistics of calls of no more queries than are drawn."""
        return Statistics.of((*self.of_all, *self.of_some))

    def _whole(self, statistic: Statistic) -> bool:
        """Whether every query is looked at: always for maxima, which a sample only bounds."""
        return self.queries is None or isinstance(statistic, MaxLogit | Norms)


class StepCapture:
    """Adds up what the attention calls of a model give, from one optimizer step to the next.

    Counted are forwards that train: of a module in training mode, with gradients on, also inside
    activation checkpointing. What a backward pass computes again is not counted twice.

    Args:
        model: any module.
        warn: told of what is not counted.
        seed: of the drawn queries, with the step and the numbers of the forward and of the call.
        modules: which modules are looked at, as in `watch()`, by names without wrappers.
        begun: called when a forward that counts begins.
    """

    def __init__(
        self,
        model: nn.Module,
        warn: Warn,
        seed: int,
        modules: Modules = None,
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._warn, self._seed = model, warn, seed
        self.modules, self._meant, self._begun = modules, chosen(modules), begun
        self._stack: ExitStack | None = None
        self._net: Net | None = None
        self._forward: Any = None
        self._every = self._graded = False
        self._calls: Counter[str] = Counter()  # of each module in the forward that is running
        self._plain: dict[str, str] = {}  # the modules' names without wrappers
        self.clear()

    def clear(self) -> None:
        """Forget all that was added up, and why nothing else was."""
        self.forwards = 0
        self._sums = StepSums()
        self._pending: list[tuple[str, Mapping[str, Reading], int, int]] = []
        self._numbers = 0  # in the readings that wait
        self._bundles = Bundles()
        self._left_out: dict[str, str] = {}
        self._not_meant: dict[str, None] = {}
        self._other_forwards: dict[str, None] = {}
        self._no_numbers: dict[str, None] = {}
        self._names: Names | None = None  # of the last forwards, which tell why nothing was seen

    # ── open and shut ───────────────────────────────────────────────────────────────────────────

    def open(self, wanted: Wanted, step: int, every: bool = False) -> None:
        """See the model's calls from now on, until `close()`.

        With `every`, all forwards count, not only those that train.
        """
        self._wanted, self._step, self._every = wanted, step, every
        if self._stack is not None:
            return
        self._plain.clear()
        with ExitStack() as stack:
            found = catch(
                *(self.model, self._listen, self._begin, self._elsewhere),
                function="Monitor",
                in_full=False,
                refuse=False,
            )
            self._net = stack.enter_context(found)
            self._stack = stack.pop_all()

    def rest(self) -> None:
        """End a step: see nothing any more, where seeing costs the model's modules something."""
        if self._net is not None and self._net.in_full:
            self.close()

    def close(self) -> None:
        """See nothing any more; what was added up stays."""
        stack, self._stack = self._stack, None
        if stack is None or self._net is None:
            return
        self._left_out = self.left_out
        names, self._net = self._net.names, None
        if names.calls or self._names is None:
            self._names = names
        stack.close()

    @property
    def left_out(self) -> dict[str, str]:
        """The modules that attended and whose calls were not captured, and why."""
        found = {} if self._net is None else self._net.names.left_out
        meant = {name: why for name, why in found.items() if self._is_meant(name, None)}
        return meant | self._left_out

    def _is_meant(self, name: str, layer: int | None) -> bool:
        return self.modules is None or self._meant(self.plain_name(name), layer)

    def plain_name(self, name: str) -> str:
        """Return a module's name without wrappers."""
        found = self._plain.get(name)
        if found is None:
            found = self._plain[name] = plain_name(self.model, name)
        return found

    def _elsewhere(self, model: nn.Module) -> None:
        self._warn(f"{_ELSEWHERE} is not counted")
        self._other_forwards[f"there was only {_ELSEWHERE}"] = None

    def _begin(self) -> None:
        """The model is called anew, with gradients or without."""
        self._graded = torch.is_grad_enabled() or _in_reentrant_checkpoint()

    def _counts(self) -> bool:
        """Whether the forward that is running counts; with its first call, it does so as one."""
        assert self._net is not None
        outermost = self._net.names.stack[0]
        if outermost is self._forward:
            return True
        training = innermost(outermost.module).training
        if not self._every and not (self._graded and training):
            self._other_forwards[_NO_GRADIENTS if training else _EVAL_MODE] = None
            return False
        self._forward = outermost
        self._begun()
        self.forwards += 1
        self._calls.clear()
        return True

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _listen(self, call: AttentionCall) -> None:
        """Add up what a call gives; whatever goes wrong here, the training goes on."""
        if call.again:
            return
        if not self._is_meant(call.name, call.layer):
            self._not_meant[call.name] = None
            return
        if not self._counts():
            return
        name, span = call.name, Span(call.first_head, call.heads, call.all_heads)
        batch, queries = call.batch, call.queries
        try:
            found = self._readings(call, batch, queries)
        except Exception as error:
            self._left_out[name] = str(error)
            return
        self._calls[name] += 1

        def keep(queries: int) -> None:
            try:
                self._keep(name, span, found, queries)
            except Exception as error:
                self._left_out[name] = str(error)

        if call.waiting is None:
            keep(batch * queries)
        else:
            call.once_whole(keep)

    def _readings(
        self, call: AttentionCall, batch: int, every: int
    ) -> list[tuple[Mapping[str, Reading], int, int]]:
        """The readings of a call, with the numbers of queries that were looked at, and of all."""
        wanted = self._wanted
        if wanted.queries is None or every <= wanted.queries:
            looks = ((wanted.all_together, None),)
        else:
            looks = (wanted.of_all, None), (wanted.of_some, wanted.queries)
        found = []
        for statistics, queries in looks:
            if statistics.each:
                looking = _ALL if queries is None else Looking(queries, self._draw(call.name))
                some = every if queries is None else queries
                readings = self._bundles.observe(call, statistics, looking)
                found.append((readings, batch * some, batch * every))
        return found

    def _draw(self, name: str) -> int:
        """A seed of its own for each call of a module in each forward of a step, on each rank."""
        mixed = (self._seed + rank_of_all()) * 1_000_003 + self._step
        mixed = mixed * 1_000_003 + self.forwards
        return seed_of_call(mixed, self._calls[name]) % 2**62

    def _keep(
        self,
        name: str,
        span: Span,
        found: list[tuple[Mapping[str, Reading], int, int]],
        queries: int,
    ) -> None:
        """Keep the readings of a call that has so many queries, to be added up with others."""
        self._sums.know(name, span)
        for readings, some, every in found:
            self._pending.append((name, readings, min(some, queries), min(every, queries)))
            self._numbers += some * span.heads
        if self._numbers > TOGETHER:
            self._add_up()

    @property
    def sums(self) -> StepSums:
        """The sums over the calls."""
        if self._pending:
            self._add_up()
        return self._sums

    def _add_up(self) -> None:
        """Add up what waits, at once."""
        pending, self._pending, self._numbers = self._pending, [], 0
        found: list[tuple[str, list[int], Reading]] = []
        for places, (calls,) in together([[readings] for _, readings, _, _ in pending]):
            names = [pending[place][0] for place in places]
            try:
                for statistic, reading in calls.items():
                    if not reading.unknown:
                        found.append((statistic, places, reading))
                    for name in names if reading.unknown else ():
                        self._sums.leave_out(statistic, name, reading.unknown)
            except Exception as error:
                self._left_out |= dict.fromkeys(names, str(error))
        kept = kept_of_each([reading for _, _, reading in found])
        rounds: list[tuple[int, str, dict[str, Tensor], int, int]] = []
        for (statistic, places, reading), block in zip(found, kept, strict=True):
            if block is None:
                if (said := repr(statistic)) not in self._no_numbers:
                    told = f"{said} is not one number a query or head, and is not recorded"
                    self._warn(told, said)
                    self._no_numbers[said] = None
                continue
            sampled = reading.sampled and reading.whole is None and reading.every is None
            parts = block.chunk(len(places), 1) if len(places) > 1 else [block]
            one: dict[str, Tensor] = {}  # a call of each layer
            for place, part in zip(places, parts, strict=True):
                name, _, some, every = pending[place]
                numbers = some if sampled else every, every
                if not one or name in one or numbers != rounds[-1][3:]:
                    rounds.append((place, statistic, one := {}, *numbers))
                one[name] = part
        rounds.sort(key=itemgetter(0))  # a layer's calls are added up in their order
        for _, statistic, one, some, every in rounds:
            self._sums.add(statistic, one, some, every)

    @property
    def why_nothing(self) -> str:
        """Return why nothing was added up, as a clause."""
        reasons = [] if self.forwards else list(self._other_forwards)
        if self._not_meant and not self.forwards and not reasons:
            reasons.append(why_left_out(self.modules, self._not_meant))
        if self._no_numbers:
            reasons.append(f"{and_more([*self._no_numbers])} cannot be recorded")
        if said := [not_monitored(name, why) for name, why in self.left_out.items()]:
            reasons.append(f"left out: {and_more(said)}")
        if self._names is not None:
            reasons = reasons or [f"no attention was seen: {self._names.why_nothing()}"]
        return "; ".join(reasons) or "the monitor was paused"

    # ── what it has come to ─────────────────────────────────────────────────────────────────────

    @property
    def largest(self) -> str | None:
        """The statistic that holds the largest scores; −inf where they are not above its limit."""
        wanted = next((s for s in self._wanted.of_all if isinstance(s, MaxLogit)), None)
        return None if wanted is None else wanted.names[0]

    @property
    def maxima(self) -> dict[str, Tensor]:
        """The largest score of each head `[H]` by module, where they were all taken."""
        return {name: x[0] for name, x in self.sums.kept.get("max_logit", {}).items()}


_ALL = Looking()
_EVAL_MODE = "the model ran in eval mode (call model.train())"
_NO_GRADIENTS = "the model ran without gradients (such as in torch.no_grad())"
_ELSEWHERE = "a forward in another thread than that of the last step"
"""Reasons why a forward does not count as training."""


def not_monitored(name: str, why: str) -> str:
    """Say why a module is not among those that are recorded."""
    return f"{name or 'the model'} is not monitored: {why}"


def _in_reentrant_checkpoint() -> bool:
    """Whether gradients are off because a checkpoint of the reentrant kind runs the forward."""
    inside, frame = CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is inside:
            return True
        frame = frame.f_back
    return False
