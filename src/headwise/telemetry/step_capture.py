"""What the attention calls of one training step's forwards add up to."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from ..capture.call import AttentionCall, HeadsCall, Looking
from ..capture.net import Net
from ..capture.session import catch
from ..stats.base import Statistic
from ..stats.per_head import MaxLogit
from ..stats.results import Reading
from .figures import Figures, Heads, joined, merged, sums_of


class Warn(Protocol):
    """Tells of what went wrong, once of each thing that it is `about`."""

    def __call__(self, said: str, about: object = None) -> None: ...


_WHOLE = ("max_logit", "query_norm", "key_norm")
"""Figures that are maxima: they are taken of every query."""


@dataclass(frozen=True)
class Wanted:
    """What is taken of a step.

    statistics: recorded figures, of `queries` drawn queries of each call; maxima of all.
    largest_over: where not `None`, the largest score of each head is taken, exactly where it may be
        over this limit; of others a bound suffices. −inf: exactly everywhere.
    """

    statistics: tuple[Statistic, ...]
    queries: int | None
    largest_over: float | None

    @property
    def of_all(self) -> tuple[Statistic, ...]:
        """Those statistics that are taken of every query."""
        if self.queries is None:
            return self.statistics
        return tuple(s for s in self.statistics if set(s.names) <= set(_WHOLE))

    @property
    def of_some(self) -> tuple[Statistic, ...]:
        """Those that are taken of drawn queries."""
        whole = self.of_all
        return tuple(s for s in self.statistics if s not in whole)


class StepCapture:
    """Adds up what the attention calls of a model give, from one optimizer step to the next.

    Counted are forwards that train: of a module in training mode, with gradients on, also inside
    activation checkpointing. What a backward pass computes again is not counted twice.

    Args:
        model: any module.
        warn: told of what cannot be seen.
        seed: of the drawn queries, with the step and the number of the forward.
        meant: whether a module is looked at, by its name.
        begun: called when a forward that counts begins.
    """

    def __init__(
        self,
        model: nn.Module,
        warn: Warn,
        seed: int,
        meant: Callable[[str], bool],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self._warn, self._seed = model, warn, seed
        self.meant, self._begun = meant, begun
        self._stack: ExitStack | None = None
        self._net: Net | None = None
        self._every = False
        self.clear()

    def clear(self) -> None:
        """Forget all that was added up."""
        self.forwards, self.others = 0, 0
        self.heads: dict[str, int] = {}
        self._sums: dict[str, dict[str, Tensor]] = {}
        self._looked_at: dict[str, tuple[int, int]] = {}
        self._largest: dict[str, tuple[Tensor, bool]] = {}

    # ── open and shut ───────────────────────────────────────────────────────────────────────────

    @property
    def is_open(self) -> bool:
        return self._stack is not None

    def open(self, wanted: Wanted, step: int, every: bool = False) -> None:
        """See the model's calls from now on, until `close()`; compiled code runs as it is written.

        With `every`, all forwards count, not only those that train.
        """
        self.wanted, self._step, self._every = wanted, step, every
        if self.is_open:
            return
        with ExitStack() as stack:
            eager = torch.compiler.set_stance("force_eager")
            stack.callback(eager.__exit__, None, None, None)
            found = catch(self.model, self._listen, self._begin, self._elsewhere)
            self._net = stack.enter_context(found)
            self._stack = stack.pop_all()

    def close(self) -> None:
        """See nothing any more; what was added up stays."""
        stack, self._stack = self._stack, None
        if stack is None or self._net is None:
            return
        for name, why in self._net.names.left_out.items():
            self._warn(f"{name or 'the model'} is not monitored: {why}", name)
        self._net = None
        stack.close()

    def _elsewhere(self, model: nn.Module) -> None:
        self._warn("a forward in another thread than that of the last step is not counted")

    def _begin(self) -> None:
        """The model is called anew: find out, before it has a part of its own, who calls."""
        self._graded = torch.is_grad_enabled() or _in_reentrant_checkpoint()

    def _counts(self) -> bool:
        """Whether the forward that is running counts; the first call of it makes it a new one."""
        assert self._net is not None
        outermost = self._net.names.stack[0]
        counts = self._every or (outermost.module.training and self._graded)
        if not counts:
            self.others += 1
        elif outermost is not self._forward:
            self._forward = outermost
            self._begun()
            self.forwards += 1
        return counts

    _forward: Any = None

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _listen(self, call: AttentionCall) -> None:
        """Add up what a call gives; whatever goes wrong here, the training goes on."""
        if call.again or not self.meant(call.name) or not self._counts():
            return
        try:
            readings = self._readings(call)
        except Exception as error:
            self._warn(f"{call.name or 'the model'} is not monitored: {error}", call.name)
            return
        heads, batch, known = call.heads, call.batch, call.queries
        some = Looking(self.wanted.queries).looked_at(known) * batch
        name = call.name

        def keep(queries: int) -> None:
            try:
                self._keep(name, heads, readings, (some, queries))
            except Exception as error:
                self._warn(f"{name or 'the model'} is not monitored: {error}", name)

        call.once_whole(keep)

    def _readings(
        self, call: AttentionCall
    ) -> tuple[dict[str, Reading], tuple[Tensor, bool] | None]:
        """The readings of a call, and the largest score of each head `[H]`: exact, or a bound."""
        wanted = self.wanted
        found: dict[str, Reading] = {}
        if wanted.of_all:
            found |= call.observe(wanted.of_all, Looking(seed=self._seed))
        largest = None
        if wanted.largest_over is not None:
            exact = found["max_logit"].values if "max_logit" in found else None
            largest = _largest(call, wanted.largest_over, exact)
        if wanted.of_some:
            looking = Looking(wanted.queries, seed=self._draw())
            found |= call.observe(wanted.of_some, looking)
        return found, largest

    def _draw(self) -> int:
        """A seed of its own for each forward of each step."""
        mixed = (self._seed * 1_000_003 + self._step) * 1_000_003 + self.forwards
        return mixed % 2**62

    def _keep(
        self,
        name: str,
        heads: int,
        found: tuple[dict[str, Reading], tuple[Tensor, bool] | None],
        looked_at: tuple[int, int],
    ) -> None:
        readings, largest = found
        if self.heads.setdefault(name, heads) != heads:
            raise ValueError(f"it has {heads} heads, and had {self.heads[name]} before")
        for statistic, reading in readings.items():
            sums = sums_of(reading)
            if sums is None:
                self._warn(f"{statistic!r} is not one number a query or head, and is not recorded")
                continue
            kept = self._sums.setdefault(statistic, {})
            kept[name] = merged(kept[name], sums) if name in kept else sums
            of = looked_at if statistic not in _WHOLE else (looked_at[1], looked_at[1])
            before = self._looked_at.get(statistic, (0, 0))
            self._looked_at[statistic] = (before[0] + of[0], before[1] + of[1])
        if largest is not None:
            known = self._largest.get(name)
            if known is not None:
                largest = torch.maximum(known[0], largest[0]), known[1] and largest[1]
            self._largest[name] = largest

    # ── what it has come to ─────────────────────────────────────────────────────────────────────

    def figures(self, names: Mapping[str, str], heads: Heads) -> dict[str, Figures]:
        """What was added up, by statistic, of the layers of `heads`; `names` are by module."""
        sums = dict(self._sums)
        exact = {name: x.double()[None] for name, (x, true) in self._largest.items() if true}
        if exact and "max_logit" not in sums:
            sums["max_logit"] = exact
        return {
            statistic: joined(
                {names[name]: x for name, x in parts.items()},
                heads,
                self._looked_at.get(statistic, (0, 0)),
            )
            for statistic, parts in sums.items()
        }

    def largest(self, exact: bool) -> dict[str, Tensor]:
        """The largest score of each head `[H]` by module; also those that are bounds, or not."""
        return {name: x for name, (x, true) in self._largest.items() if true or not exact}


def _largest(call: AttentionCall, limit: float, exact: Tensor | None) -> tuple[Tensor, bool]:
    """The largest score of each head `[H]`, and whether it is exact: else a bound below `limit`."""
    if exact is not None:
        return exact.amax(0), True
    bound = score_bound(call)
    if bound is not None and bool((bound <= limit).all()):
        return bound, False
    found = call.observe((MaxLogit(),), Looking())
    return found["max_logit"].values.amax(0), True


def score_bound(call: AttentionCall) -> Tensor | None:
    """Bound the scores of each head `[H]` by `|scale| · max‖q‖ · max‖k‖` (Cauchy-Schwarz).

    `None` where queries and keys are not known, or where something is added to their product.
    """
    if not isinstance(call, HeadsCall) or (call.mask is not None and call.mask.biased):
        return None
    q, k = call.q.detach(), call.k.detach()
    if not (q.numel() and k.numel()):
        return None
    scale = call.keywords.get("scale")
    scale = q.shape[-1] ** -0.5 if scale is None else abs(scale)
    of_q, of_k = (torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).amax(-1) for x in (q, k))
    of_k = of_k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (of_q * of_k * scale).amax(0) * (1 + 1e-4)  # scores are rounded too


def _in_reentrant_checkpoint() -> bool:
    """Whether gradients are off because a checkpoint of the reentrant kind runs the forward."""
    inside, frame = CheckpointFunction.forward.__code__, sys._getframe(1)
    while frame is not None:
        if frame.f_code is inside:
            return True
        frame = frame.f_back
    return False


def plain_name(model: nn.Module, name: str) -> str:
    """A module's qualified name, less what wrappers put into it.

    >>> plain_name(nn.Sequential(nn.DataParallel(nn.Linear(2, 3))), "0.module")
    '0'
    """
    module, parts = model, []
    for part in name.split(".") if name else []:
        if not (part in _WRAPPED or (part == "module" and _wraps(module))):
            parts.append(part)
        module = module.get_submodule(part)
    return ".".join(parts)


_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_forward_module")


def _wraps(module: nn.Module) -> bool:
    """Whether a module keeps another as its `module`, to run it on several devices."""
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return isinstance(module, kinds) or type(module).__name__ in ("DeepSpeedEngine", "FSDP")
