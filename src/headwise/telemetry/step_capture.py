"""What the attention calls of one training step's forwards add up to."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from .._text import and_more
from ..capture.adapters.compiled import AS_WRITTEN
from ..capture.call import AttentionCall, Looking, seed_of_call
from ..capture.modules import Modules, chosen, why_left_out
from ..capture.net import Net
from ..capture.ranks import rank_of_all
from ..capture.session import catch
from ..stats.max_logit import MaxLogit, Norms
from ..stats.record import Reading
from ..stats.statistic import Statistic
from .figures import kept_of
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
    def of_all(self) -> tuple[Statistic, ...]:
        """What is taken of every query."""
        kept = tuple(s for s in self.statistics if self._whole(s))
        if self.largest is None or any(s == MaxLogit() for s in kept if isinstance(s, MaxLogit)):
            return kept
        return (*kept, self.largest)

    @cached_property
    def of_some(self) -> tuple[Statistic, ...]:
        """What is taken of drawn queries."""
        return tuple(s for s in self.statistics if not self._whole(s))

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
        self.clear()

    def clear(self) -> None:
        """Forget all that was added up, and why nothing else was."""
        self.forwards = 0
        self.sums = StepSums()
        self._left_out: dict[str, str] = {}
        self._not_meant: dict[str, None] = {}
        self._other_forwards: dict[str, None] = {}
        self._no_numbers: dict[str, None] = {}
        self._why = ""

    # ── open and shut ───────────────────────────────────────────────────────────────────────────

    def open(self, wanted: Wanted, step: int, every: bool = False) -> None:
        """See the model's calls from now on, until `close()`; compiled code runs as it is written.

        With `every`, all forwards count, not only those that train.
        """
        self._wanted, self._step, self._every = wanted, step, every
        if self._stack is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(AS_WRITTEN)
            found = catch(
                self.model, self._listen, self._begin, self._elsewhere, function="Monitor"
            )
            self._net = stack.enter_context(found)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """See nothing any more; what was added up stays."""
        stack, self._stack = self._stack, None
        if stack is None or self._net is None:
            return
        self._left_out = self.left_out
        names, self._net = self._net.names, None
        if names.calls or not self._why:
            self._why = f"no attention was seen: {names.why_nothing()}"
        stack.close()

    @property
    def left_out(self) -> dict[str, str]:
        """The modules that attended and whose calls were not captured, and why."""
        found = {} if self._net is None else self._net.names.left_out
        meant = {name: why for name, why in found.items() if self._is_meant(name)}
        return meant | self._left_out

    def _is_meant(self, name: str) -> bool:
        return self._meant(plain_name(self.model, name))

    def _elsewhere(self, model: nn.Module) -> None:
        self._warn(f"{_ELSEWHERE} is not counted")
        self._other_forwards[f"there was only {_ELSEWHERE}"] = None

    def _begin(self) -> None:
        """The model is called anew, with gradients or without."""
        self._graded = torch.is_grad_enabled() or _in_reentrant_checkpoint()

    def _counts(self) -> bool:
        """Whether the forward that is running counts; with its first call, it does so as one."""
        assert self._net is not None
        running = self._net.names.stack
        training = innermost(running[0].module).training
        counts = self._every or (self._graded and training)
        if not counts:
            self._other_forwards[_NO_GRADIENTS if training else _EVAL_MODE] = None
        elif running[0] is not self._forward:
            self._forward = running[0]
            self._begun()
            self.forwards += 1
            self._calls.clear()
        return counts

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _listen(self, call: AttentionCall) -> None:
        """Add up what a call gives; whatever goes wrong here, the training goes on."""
        if call.again:
            return
        if not self._is_meant(call.name):
            self._not_meant[call.name] = None
            return
        if not self._counts():
            return
        try:
            readings = self._readings(call)
        except Exception as error:
            self._left_out[call.name] = str(error)
            return
        self._calls[call.name] += 1
        name, span = call.name, Span(call.first_head, call.heads, call.all_heads)

        def keep(queries: int) -> None:
            try:
                self._keep(name, span, readings, queries)
            except Exception as error:
                self._left_out[name] = str(error)

        call.once_whole(keep)

    def _readings(self, call: AttentionCall) -> dict[str, tuple[Reading, int]]:
        """The readings of a call, each with the number of queries that were looked at."""
        wanted, found = self._wanted, {}
        for statistics, queries in ((wanted.of_all, None), (wanted.of_some, wanted.queries)):
            if not statistics:
                continue
            looking = Looking(queries, seed=self._draw(call.name))
            some, every = looking.looked_at(call.queries), call.queries
            for name, reading in call.observe(statistics, looking).items():
                sampled = reading.sampled and reading.whole is None
                found[name] = reading, call.batch * (some if sampled else every)
        return found

    def _draw(self, name: str) -> int:
        """A seed of its own for each call of a module in each forward of a step, on each rank."""
        mixed = (self._seed + rank_of_all()) * 1_000_003 + self._step
        mixed = mixed * 1_000_003 + self.forwards
        return seed_of_call(mixed, self._calls[name]) % 2**62

    def _keep(
        self, name: str, span: Span, readings: Mapping[str, tuple[Reading, int]], queries: int
    ) -> None:
        """Add up the readings of a call that has so many queries."""
        self.sums.know(name, span)
        for statistic, (reading, looked_at) in readings.items():
            if reading.unknown:
                self.sums.leave_out(statistic, name, reading.unknown)
                continue
            found = kept_of(reading)
            if found is None:
                why = "is not one number a query or head, and is not recorded"
                self._warn(f"{statistic!r} {why}", statistic)
                self._no_numbers[repr(statistic)] = None
                continue
            self.sums.add(statistic, name, found, (min(looked_at, queries), queries))

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
        return "; ".join(reasons) or self._why or "the monitor was paused"

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
