"""Capture the attention calls of one training step and sum their statistics."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from .._text import and_more
from ..capture.bundle import Bundles, together
from ..capture.call import AttentionCall, ObserveOptions, seed_of_call
from ..capture.catch import catch
from ..capture.modules import Modules, Names, chosen, evaluating, why_left_out
from ..capture.ranks import rank_of_all
from ..capture.session import CaptureSession
from ..stats.max_logit import MaxLogit, Norms
from ..stats.record import TOGETHER, Reading
from ..stats.seen import Readings
from ..stats.statistic import Statistic, Statistics
from .figures import sums_of_each, to_host
from .step_sums import Span, StepSums
from .wrappers import innermost, plain_name


@runtime_checkable
class Warn(Protocol):
    """Warn of a problem, once for each subject `about`."""

    def __call__(self, message: str, about: object = None) -> None: ...


@dataclass(frozen=True)
class StepNeeds:
    """The statistics that a step requires.

    statistics: recorded for `queries` sampled queries of each call; maxima for all queries.
    largest: additional largest scores: all, only those above a limit, or None.
    """

    statistics: tuple[Statistic, ...]
    queries: int | None
    largest: MaxLogit | None

    @cached_property
    def of_all(self) -> Statistics:
        """The statistics of all queries."""
        kept = tuple(s for s in self.statistics if self._needs_all_queries(s))
        if self.largest is None or any(s == MaxLogit() for s in kept if isinstance(s, MaxLogit)):
            return Statistics.of(kept)
        return Statistics.of((*kept, self.largest))

    @cached_property
    def of_some(self) -> Statistics:
        """The statistics of sampled queries."""
        return Statistics.of(s for s in self.statistics if not self._needs_all_queries(s))

    @cached_property
    def all_together(self) -> Statistics:
        """The statistics of calls that have no more queries than are sampled."""
        return Statistics.of((*self.of_all, *self.of_some))

    def _needs_all_queries(self, statistic: Statistic) -> bool:
        """Return True for statistics of all queries (always maxima: a sample only bounds them)."""
        return self.queries is None or isinstance(statistic, MaxLogit | Norms)


class StepCapture:
    """Sum the statistics of a model's attention calls between two optimizer steps.

    Only training forwards count (training mode, gradients enabled), including those inside
    activation checkpointing. Recomputation in a backward pass is not counted twice.

    Args:
        model: any module.
        warn: called with a message about each forward or metric that is not counted.
        seed: the seed of sampled queries, combined with the step, forward and call.
        modules: the modules to capture, as in `watch()`, by names without wrappers.
        begun: called at the start of each forward that counts.
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
        self._net: CaptureSession | None = None
        self._forward: Any = None
        self._every = self._graded = False
        self._calls: Counter[str] = Counter()  # by module, in the running forward
        self._plain: dict[str, str] = {}  # module names without wrappers
        self.clear()

    def clear(self) -> None:
        """Discard the sums and the reasons for missing ones."""
        self.forwards = 0
        self._sums = StepSums()
        self._pending: list[tuple[str, Mapping[str, Reading], int, int]] = []
        self._numbers = 0  # in pending readings
        self._reduced: list[tuple[str, bool, list[tuple[int, str, int, int]], Tensor]] = []
        self._calls_before = 0  # calls that were already reduced
        self._bundles = Bundles()
        self._left_out: dict[str, str] = {}
        self._not_meant: dict[str, None] = {}
        self._other_forwards: dict[str, None] = {}
        self._no_numbers: dict[str, None] = {}
        self._names: Names | None = None  # of the last forwards, to explain missing calls

    # ── open and close ──────────────────────────────────────────────────────────────────────────

    def open(self, wanted: StepNeeds, step: int, every: bool = False) -> None:
        """Capture the calls of the model until `close()`.

        With `every`, all forwards count, not only those that train.
        """
        self._wanted, self._step, self._every = wanted, step, every
        if self._stack is not None:
            return
        self._plain.clear()
        with ExitStack() as stack:
            capture = catch(
                *(self.model, self._listen, self._begin, self._elsewhere),
                function="Monitor",
                in_full=False,
                refuse=False,
            )
            self._net = stack.enter_context(capture)
            self._stack = stack.pop_all()

    def rest(self) -> None:
        """End a step: stop capturing if it slows the model down."""
        if self._net is not None and self._net.in_full:
            self.close()

    def close(self) -> None:
        """Stop capturing; keep the sums."""
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
        """The reasons why modules that attended were not captured, by module."""
        missed = {} if self._net is None else self._net.names.left_out
        meant = {name: why for name, why in missed.items() if self._is_meant(name, None)}
        return meant | self._left_out

    def _is_meant(self, name: str, layer: int | None) -> bool:
        return self.modules is None or self._meant(self.plain_name(name), layer)

    def plain_name(self, name: str) -> str:
        """Return a module's name without wrappers."""
        if name not in self._plain:
            self._plain[name] = plain_name(self.model, name)
        return self._plain[name]

    def _elsewhere(self, model: nn.Module) -> None:
        self._warn(f"{_ELSEWHERE} is not counted")
        self._other_forwards[f"there was only {_ELSEWHERE}"] = None

    def _begin(self) -> None:
        """Record, at the start of a forward, if gradients are enabled."""
        self._graded = torch.is_grad_enabled() or _in_reentrant_checkpoint()

    def _counts(self) -> bool:
        """Return True if the running forward counts; its first call decides for all of it."""
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
        """Add a call to the sums; errors never stop the training."""
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
            results = self._readings(call, batch, queries)
        except Exception as error:
            self._left_out[name] = str(error)
            return
        self._calls[name] += 1

        def keep(queries: int) -> None:
            try:
                self._keep(name, span, results, queries)
            except Exception as error:
                self._left_out[name] = str(error)

        if call.waiting is None:
            keep(batch * queries)
        else:
            call.on_complete(keep)

    def _readings(
        self, call: AttentionCall, batch: int, every: int
    ) -> list[tuple[Mapping[str, Reading], int, int]]:
        """Return the readings of a call, with the numbers of its sampled and of all queries."""
        wanted = self._wanted
        if wanted.queries is None or every <= wanted.queries:
            looks = ((wanted.all_together, None),)
        elif (readings := self._in_one_launch(call)) is not None:
            return [(readings, batch * wanted.queries, batch * every)]
        else:
            looks = (wanted.of_all, None), (wanted.of_some, wanted.queries)
        results = []
        for statistics, queries in looks:
            if statistics.each:
                some, looking = every, _ALL
                if queries is not None:
                    some, looking = queries, ObserveOptions(queries, self._draw(call.name))
                readings = self._bundles.observe(call, statistics, looking)
                results.append((readings, batch * some, batch * every))
        return results

    def _in_one_launch(self, call: AttentionCall) -> Readings | None:
        """Return all readings of a call, if a GPU kernel computes the maxima of all queries and the
        other statistics of sampled queries in one launch; `None` for other calls."""
        wanted = self._wanted
        own = call.one_pass is not None and call.one_pass.call.mask.free
        if not call.q.is_cuda or (call.lse is None and not own):
            return None
        looking = ObserveOptions(wanted.queries, self._draw(call.name))
        found = call.observe(wanted.all_together, looking)
        if isinstance(found, Readings) and found.of_all_queries(wanted.of_all):
            return found
        return None

    def _draw(self, name: str) -> int:
        """Return a seed that depends on the rank, the step, the forward and the module's call."""
        mixed = (self._seed + rank_of_all()) * 1_000_003 + self._step
        mixed = mixed * 1_000_003 + self.forwards
        return seed_of_call(mixed, self._calls[name]) % 2**62

    def _keep(
        self,
        name: str,
        span: Span,
        results: list[tuple[Mapping[str, Reading], int, int]],
        queries: int,
    ) -> None:
        """Hold the readings of a call with `queries` valid queries, to be summed with others."""
        self._sums.know(name, span)
        for readings, some, every in results:
            self._pending.append((name, readings, min(some, queries), min(every, queries)))
            self._numbers += some * span.heads
        if self._numbers > TOGETHER:
            self._reduce()

    @property
    def sums(self) -> StepSums:
        """The sums over the calls."""
        if self._pending:
            self._reduce()
        if self._reduced:
            self._add_up()
        return self._sums

    def _reduce(self) -> None:
        """Reduce the pending readings to sums per head, all at once, on their device."""
        pending, self._pending, self._numbers = self._pending, [], 0
        collected: list[tuple[str, list[int], Reading]] = []
        for places, (calls,) in together([[readings] for _, readings, _, _ in pending]):
            names = [pending[place][0] for place in places]
            try:
                for statistic, reading in calls.items():
                    if not reading.unknown:
                        collected.append((statistic, places, reading))
                    for name in names if reading.unknown else ():
                        self._sums.leave_out(statistic, name, reading.unknown)
            except Exception as error:
                self._left_out |= dict.fromkeys(names, str(error))
        sums = sums_of_each([reading for _, _, reading in collected])
        for (statistic, places, reading), block in zip(collected, sums, strict=True):
            if block is None:
                if (text := repr(statistic)) not in self._no_numbers:
                    what = "one number per query or head"
                    self._warn(f"{text} does not give {what} and is not recorded", text)
                    self._no_numbers[text] = None
                continue
            sampled = reading.sampled and reading.whole is None and reading.every is None
            before = self._calls_before
            calls = [(before + n, pending[n][0], *pending[n][2:]) for n in places]
            self._reduced.append((statistic, sampled, calls, block))
        self._calls_before += len(pending)

    def _add_up(self) -> None:
        """Copy the sums of all calls to the host at once, and add them up."""
        reduced, self._reduced = self._reduced, []
        blocks = to_host([block for *_, block in reduced])
        rounds: list[tuple[int, str, dict[str, Tensor], int, int]] = []
        for (statistic, sampled, calls, _), block in zip(reduced, blocks, strict=True):
            parts = block.chunk(len(calls), 1) if len(calls) > 1 else [block]
            one: dict[str, Tensor] = {}  # a call of each layer
            for (place, name, some, every), part in zip(calls, parts, strict=True):
                numbers = some if sampled else every, every
                if not one or name in one or numbers != rounds[-1][3:]:
                    rounds.append((place, statistic, one := {}, *numbers))
                one[name] = part
        rounds.sort(key=itemgetter(0))  # calls of a layer are summed in order
        for _, statistic, one, some, every in rounds:
            self._sums.add(statistic, one, some, every)

    @property
    def why_nothing(self) -> str:
        """Return the reason why nothing was captured, as a clause."""
        reasons = [] if self.forwards else list(self._other_forwards)
        if self._not_meant and not self.forwards and not reasons:
            reasons.append(why_left_out(self.modules, self._not_meant))
        if self._no_numbers:
            reasons.append(f"{and_more([*self._no_numbers])} cannot be recorded")
        if missing := [not_monitored(name, why) for name, why in self.left_out.items()]:
            reasons.append(f"left out: {and_more(missing)}")
        if self._names is not None:
            reasons = reasons or [f"no attention was seen: {self._names.why_nothing()}"]
        return "; ".join(reasons) or "the monitor was paused"

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    @property
    def largest(self) -> str | None:
        """The metric of largest scores; −inf for heads that are not above its limit."""
        wanted = next((s for s in self._wanted.of_all if isinstance(s, MaxLogit)), None)
        return None if wanted is None else wanted.names[0]

    @property
    def maxima(self) -> dict[str, Tensor]:
        """The largest score of each head `[H]` by module, if all were captured."""
        return {name: x[0] for name, x in self.sums.parts.get("max_logit", {}).items()}


_ALL = ObserveOptions()
_EVAL_MODE = "the model ran in eval mode (call model.train())"
_NO_GRADIENTS = "the model ran without gradients (such as in torch.no_grad())"
_ELSEWHERE = "a forward in another thread than that of the last step"
"""Reasons why a forward does not count as training."""


def not_monitored(name: str, why: str) -> str:
    """Return a sentence that explains why a module is not recorded."""
    return f"{name or 'the model'} is not monitored: {why}"


def _in_reentrant_checkpoint() -> bool:
    """Return True if gradients are off because a reentrant checkpoint runs the forward."""
    inside, frame = CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is inside:
            return True
        frame = frame.f_back
    return False


# ── probes ──────────────────────────────────────────────────────────────────────────────────────

Probe = Tensor | Mapping[str, Any] | tuple[Any, ...] | list[Any] | Callable[[nn.Module], object]
"""A batch for the model, by name or by position, or a function that runs the model on one."""


def run_probe(model: nn.Module, probe: Probe) -> None:
    """Run the model on the batch in evaluation mode, without gradients or side effects."""
    with evaluating(model), _same_random_numbers(model), torch.no_grad():
        if isinstance(probe, Tensor):
            model(probe)
        elif isinstance(probe, Mapping):
            model(**probe)
        elif callable(probe):
            probe(model)
        else:
            model(*probe)


def _same_random_numbers(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context that restores the state of the random generators on exit."""
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    return torch.random.fork_rng(devices=sorted(n for n in devices if n is not None))
