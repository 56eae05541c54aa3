"""`Monitor`: record statistics of every head during training, at regular steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .._tables import html_summary
from .._text import and_more
from ..capture.modules import Modules, as_written, check_model
from ..capture.private_torch import outside_graphs, skipped_since_update
from ..core.numbers import as_int, fault_of_flags, format_value, real
from ..stats.entropy import Entropy
from ..stats.mass import Mass
from ..stats.max_logit import ABOVE, MaxLogit, Norms
from ..stats.output_norm import OutputLength
from ..stats.patterns import First, Previous
from ..stats.statistic import Statistic, check_statistics
from .clip import qk_clip_
from .figures import HeadMetrics
from .history import HistoryWriter
from .ranks import MonitorRanks, any_of_all, is_first, several
from .recorder import Recorder
from .rules import RULES, Alarm, Rule
from .step_capture import Probe, StepCapture, StepNeeds, not_monitored, run_probe
from .step_sums import StepSums
from .trackers import as_tracker
from .wrappers import check_optimizer, hook_steps, plain_name

_PATIENCE = 3
"""The number of consecutive empty steps after which the monitor warns."""


class _OutputSize(Statistic):
    """The norm of each head's output `[B, H, T]`, before the output projection."""

    names = raw = ("output_norm",)
    needs = MappingProxyType({"output_norm": OutputLength()})
    free = deferred = True

    def define(self, full: Any) -> dict[str, Tensor]:
        out = full.out.to(full.weights.dtype)
        return {"output_norm": torch.linalg.vector_norm(out, dim=-1)}


DEFAULT_STATISTICS: tuple[Statistic, ...] = (
    Entropy(),
    Mass(First()),
    Mass(Previous()),
    _OutputSize(),
    MaxLogit(),
    Norms(),
)
"""The statistics that a `Monitor` records by default."""


class StopTraining(Exception):
    """Raised when a rule stops training, after `save=` was called. `alarms` names the heads."""

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        super().__init__("; ".join(map(str, alarms)))
        self.alarms = tuple(alarms)


class Monitor:
    """Record statistics of every head during training, and raise alarms for unhealthy heads.

    With an optimizer nothing else is needed: the monitor hooks `optimizer.step()`. Without one,
    call `monitor.step()` after `optimizer.step()`. Step 1 and every `every`-th step are recorded,
    with all micro-batches; evaluation in between is not. Monitoring leaves training results
    bitwise unchanged. Compiled models stay compiled and are compiled once more for recorded
    steps; if attention cannot be captured in a graph, recorded steps run eagerly, with different
    rounding. Errors in recording cause one warning each and do not stop training.

    In distributed training every rank creates a monitor with the same settings. Metrics cover the
    data and heads of all ranks, rank 0 writes the history, and all ranks clip by the global maxima;
    only `maxima` are local to each rank.

    Maxima (`max_logit`, norms) are exact, over all queries. Other statistics use `queries` sampled
    queries of each call and have standard errors. A metric that is unavailable in a layer (norms,
    if only the scores are visible) is not recorded; `monitor.unavailable[layer][metric]` has the
    reason.

    Args:
        model: any module that `watch()` supports, including wrapped ones (DDP, `torch.compile`).
        optimizer: the optimizer that trains the model; its steps are hooked.
        every: the number of steps from one recorded step to the next.
        queries: the number of queries sampled in each call to estimate means; `None` for all.
        statistics: the statistics to record; by default entropy, the attention to the first and the
            previous token, the norm of head outputs, the largest logit, and norms of queries and
            keys.
        rules: alarms (`Rule`); by default those of `RULES` whose metrics are recorded.
        history: the file to record into (`History`).
        trackers: a TensorBoard `SummaryWriter`, a run of W&B or trackio, or functions such as
            `mlflow.log_metrics`.
        clip: after every step, clip heads whose largest logit exceeds this (`qk_clip_`).
        maxima: record the exact largest logits of every step, for `monitor.maxima`.
        probe: a batch for the model, or a function that runs the model on one. It is recorded in
            evaluation mode, as `probe/entropy` and so on.
        scaler: the `GradScaler`; steps that it skips are not counted.
        step: the number of steps already completed; later steps in the history are replaced.
        overwrite: allow a run that starts at step 0 to replace the steps in the history.
        save: called before a rule with `then="stop"` raises `StopTraining`.
        modules: the modules to record, as in `watch()`.
        seed: the seed of sampled queries.

    Raises:
        ValueError: a setting is out of range; a rule needs a metric that is not recorded; the
            optimizer holds none of the model's parameters; the history has steps, `step` is 0 and
            `overwrite` is False.
        OSError: the history cannot be created at this path.
        StopTraining: raised at the end of a step, if a rule stops training.

    >>> import torch, headwise as hw
    >>> model = hw.MultiHeadAttention(24, num_heads=3)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> monitor = hw.Monitor(model, optimizer, every=2)
    >>> for _ in range(4):
    ...     loss = model(torch.randn(2, 7, 24), mask=hw.Causal()).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> monitor.steps, monitor.latest["entropy"].values.shape
    (4, (3,))
    >>> monitor.close()
    """

    @outside_graphs
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        every: int = 100,
        queries: int | None = 64,
        *,
        statistics: Sequence[Statistic] = DEFAULT_STATISTICS,
        rules: Sequence[Rule] | None = None,
        history: str | os.PathLike[str] | None = None,
        trackers: Sequence[Any] = (),
        clip: float | None = None,
        maxima: bool = False,
        probe: Probe | None = None,
        scaler: Any = None,
        step: int = 0,
        overwrite: bool = False,
        save: Callable[[], object] | None = None,
        modules: Modules = None,
        seed: int = 0,
    ) -> None:
        call = check_model("Monitor", model)
        _check_lists(call, statistics=statistics, rules=rules or (), trackers=trackers)
        _check(call, every, queries, statistics, clip, step, seed)
        _check_kinds(call, probe, scaler, save, maxima=maxima, overwrite=overwrite)
        recorded = _recorded(statistics, probe is not None)
        default = (rule for rule in RULES if rule.statistic in recorded)
        self._rules = tuple(default if rules is None else rules)
        _check_rules(call, self._rules, recorded, save is not None)
        if optimizer is not None:
            check_optimizer(call, model, optimizer)
        self.model, self.every, self.clip, self.steps = model, every, clip, step
        self._optimizer, self._scaler, self._save, self._maxima = optimizer, scaler, save, maxima
        self._scale = None if scaler is None else scaler.get_scale()
        self._statistics, self._queries, self._probe = tuple(statistics), queries, probe
        self._warned: set[object] = set()
        self._known_wanted: dict[object, StepNeeds | None] = {}
        self._missed = 0
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._ranks = MonitorRanks(self._device)
        self._capture = StepCapture(model, self._warn, seed, modules, self._begun)
        loggers = [as_tracker(one) for one in trackers] if is_first() else []
        writer = None
        if history is not None and is_first():
            writer = HistoryWriter(history, step, self._about())
            _check_empty(call, writer, step, overwrite)
        self._recorder = Recorder(writer, loggers, self._rules, step, self._warn)
        self.latest: Mapping[str, HeadMetrics] = {}
        self.unavailable: dict[str, dict[str, str]] = {}
        self.alarms: list[Alarm] = []
        self._last_maxima: dict[str, Tensor] = {}
        # The hook keeps the monitor alive.
        self._hook: Any = None if optimizer is None else self._hook_optimizer(call, optimizer)
        self._paused = False
        self.resume()

    def _hook_optimizer(self, call: str, optimizer: torch.optim.Optimizer) -> Any:
        """Hook the steps of the optimizer; the hook keeps the monitor alive."""
        return hook_steps(call, optimizer, self._stepped)

    def _about(self) -> dict[str, Any]:
        names = [name for statistic in self._statistics for name in statistic.names]
        return {
            "torch": torch.__version__,
            "model": type(self.model).__name__,
            "every": self.every,
            "queries": self._queries,
            "statistics": names,
            "rules": [rule.name for rule in self._rules],
        }

    # ── steps ───────────────────────────────────────────────────────────────────────────────────

    @outside_graphs
    def step(self) -> list[Alarm]:
        """End a training step; call it after `optimizer.step()`. Return new alarms.

        With a scaler, call it after `scaler.step(optimizer)`, before or after `scaler.update()`.

        Raises:
            ValueError: the monitor has an optimizer and hooks its steps.
            StopTraining: a rule with `then="stop"` raised an alarm.
        """
        if self._optimizer is not None:
            raise ValueError(
                "monitor.step(): Monitor(model, optimizer) already hooks the optimizer's steps; "
                "leave this call out, or create the monitor without an optimizer."
            )
        skipped = skipped_since_update(self._scaler)
        fell = self._scale_fell()  # before `update()`: the step was already skipped
        return self.skip() if (fell if skipped is None else skipped) else self._end()

    @outside_graphs
    def log(self, *, step: int | None = None, **scalars: float | Tensor) -> None:
        """Add scalars of the current step to the history, such as `loss=loss`.

        Call it before the step ends; if a name is logged twice, the last value is kept. Tensors are
        copied to the host at the next recorded step, all together. The learning rate of the
        optimizer's first group is recorded automatically. Under data parallelism only the scalars
        of rank 0 are kept.

        Args:
            step: the step that they belong to. Default: the current step.
            scalars: floats, or tensors of one element, by name.

        Raises:
            ValueError: a value is not a number.
        """
        if not is_first():
            return
        kept: dict[str, float | Tensor] = {}
        for name, value in scalars.items():
            if isinstance(value, Tensor) and value.numel() == 1:
                kept[name] = value.detach().reshape(()).clone()
            elif (number := real(value)) is not None:
                kept[name] = number
            else:
                raise ValueError(
                    f"monitor.log({name}={format_value(value)}): {name} must be a number or a "
                    f"tensor of one element."
                )
        self._recorder.log(self.steps + 1 if step is None else step, kept)

    def skip(self) -> list[Alarm]:
        """Discard the forward passes since the last step; call it if the optimizer skips one."""
        self._capture.clear()
        self._last_maxima = {}
        return []

    @outside_graphs
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step of the optimizer; a GradScaler may have skipped a fused step."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self.skip()
        else:
            self._end()

    def _begun(self) -> None:
        """Begin a forward pass; discard the captured calls if the last step was skipped."""
        if self._scale_fell():
            self.skip()

    def _scale_fell(self) -> bool:
        """Return True if the GradScaler skipped a step and lowered its scale since last checked."""
        if self._scaler is None:
            return False
        before, self._scale = self._scale, self._scaler.get_scale()
        return self._scale < before

    def _end(self) -> list[Alarm]:
        self.steps += 1
        self._last_maxima = self._capture.maxima
        due = self._due(self.steps)
        alarms = self._record() if due else []
        if not due:
            self._warn_left_out(self._capture)
        if self.clip is not None:
            self._clip(self.clip)
        self._capture.clear()
        if not self._paused:
            self.resume()
        if due:
            self._act(alarms)
        return alarms

    def _due(self, step: int) -> bool:
        """Return True if a step is recorded; the step after an empty one is recorded too."""
        return step == 1 or step % self.every == 0 or 0 < self._missed < _PATIENCE

    def _wanted(self, step: int) -> StepNeeds | None:
        """Return what to capture in a step; `None` for nothing."""
        due = self._due(step)
        about = (due, self.clip)
        if about not in self._known_wanted:
            rules = [rule for rule in self._rules if due and rule.statistic == "max_logit"]
            largest = self._largest(rules)
            statistics = self._statistics if due else ()
            wanted = StepNeeds(statistics, self._queries, largest) if due or largest else None
            self._known_wanted[about] = wanted
        return self._known_wanted[about]

    def _largest(self, rules: Sequence[Rule]) -> MaxLogit | None:
        """Return the largest logits to record: all, or those above the lowest of the limits."""
        limits = [rule.above for rule in rules] + ([] if self.clip is None else [self.clip])
        given = [limit for limit in limits if limit is not None]
        if self._maxima or len(given) < len(limits):  # `below` and `jump` need all maxima
            return MaxLogit()
        return MaxLogit(above=min(given)) if given else None

    @outside_graphs
    def resume(self) -> None:
        """Capture forward passes again, after `pause()`."""
        self._paused = False
        wanted = self._wanted(self.steps + 1)
        if wanted is None:
            self._capture.close()
        else:
            self._capture.open(wanted, self.steps + 1)

    @outside_graphs
    def pause(self) -> None:
        """Stop capturing forward passes until `resume()`, for a faster evaluation."""
        self._paused = True
        self._capture.close()

    # ── captured ────────────────────────────────────────────────────────────────────────────────

    @property
    def maxima(self) -> dict[str, Tensor]:
        """The exact largest logits `[H]` of all micro-batches since the last step, by module.

        Between a step and the next forward, they are those of that step. They are recorded at every
        step with `maxima=True`, else at steps that record `max_logit`; empty at other steps.
        """
        live = self._capture.maxima if self._capture.forwards else self._last_maxima
        return {plain_name(self.model, name): x for name, x in live.items()}

    @property
    def layers(self) -> Mapping[str, int]:
        """The number of heads of each recorded layer, in the order of `HeadMetrics.values`."""
        return self._recorder.heads

    def _record(self) -> list[Alarm]:
        """Record the step; return its alarms."""
        capture = self._capture
        capture.rest() if self._probe is None else capture.close()
        try:
            every = {"": self._of_all(capture)}
            if self._probe is not None:
                probed = self._probed(self._probe)
                every["probe/"] = self._of_all(probed)
                if not every["probe/"].parts:
                    self._warn(f"the probe was not recorded: {probed.why_nothing}", "probe")
            figures: dict[str, HeadMetrics] = {}
            for start, sums in every.items():
                self._recorder.know(sums.heads)
                found = sums.figures(self._recorder.heads)
                figures |= {f"{start}{name}": x for name, x in found.items()}
                for layer, reasons in sums.unknown.items():
                    known = self.unavailable.setdefault(layer, {})
                    known |= {f"{start}{name}": why for name, why in reasons.items()}
        except Exception as error:
            self._warn(f"a step was not recorded: {error}")
            return []
        if not every[""].parts:
            self._missed += 1
            if self._missed == _PATIENCE:
                self._warn(
                    f"nothing was recorded in {_PATIENCE} optimizer steps: {capture.why_nothing}"
                )
            return []
        self._missed = 0
        self._warn_left_out(capture)
        self.latest = figures
        if not is_first():
            return []
        rate = self._optimizer and self._optimizer.param_groups[0]["lr"]
        alarms = self._recorder.record(self.steps, figures, self.unavailable, rate)
        self.alarms += alarms
        return alarms

    def _warn_left_out(self, capture: StepCapture) -> None:
        """Warn about each module that attended but is not recorded."""
        for name, why in capture.left_out.items():
            self._warn(not_monitored(plain_name(self.model, name), why), ("module", name))

    def _of_all(self, capture: StepCapture) -> StepSums:
        """Return the sums of a capture over all ranks."""
        names = {name: capture.plain_name(name) for name in capture.sums.spans}
        return self._ranks.sums(capture.sums.renamed(names))

    def _probed(self, probe: Probe) -> StepCapture:
        """Capture the probe with the model in its state after the step."""
        capture = StepCapture(self.model, self._warn, 0, self._capture.modules)
        capture.open(StepNeeds(self._statistics, self._queries, None), 0, every=True)
        try:
            run_probe(self.model, probe)
        except Exception as error:  # other ranks wait for the metrics of this one
            capture.clear()
            self._warn(f"the probe was not recorded: {error}", "probe")
        finally:
            capture.close()
        self._warn_left_out(capture)
        return capture

    def _clip(self, limit: float) -> None:
        """Clip the heads whose largest logit exceeds the limit, on all ranks."""
        largest = self._ranks.largest(self._capture.sums, self._capture.largest)
        own = largest
        if several():
            here = {as_written(name) for name, _ in self.model.named_modules()}
            own = {name: x for name, x in largest.items() if name in here}
        if own:
            qk_clip_(self.model, own, limit=limit, optimizer=self._optimizer)

    def _act(self, alarms: Sequence[Alarm]) -> None:
        """Warn, call a function, or stop training, as the rule of each alarm requires."""
        then = {rule.name: rule.then for rule in self._rules}
        for rule in self._rules:
            messages = [str(alarm) for alarm in alarms if alarm.rule == rule.name]
            if messages and not callable(rule.then):
                warnings.warn(f"headwise: {and_more(messages)}", stacklevel=4)
        for alarm in alarms:
            if callable(act := then[alarm.rule]):
                act(alarm)
        stops = [alarm for alarm in alarms if then[alarm.rule] == "stop"]
        if "stop" in then.values() and any_of_all(bool(stops), self._device):
            self._stop(stops)

    def _stop(self, alarms: Sequence[Alarm]) -> None:
        """Save and stop the training; the monitors of trainers stop it otherwise."""
        assert self._save is not None  # required by `_check_rules`
        self._save()
        raise StopTraining(alarms)

    def _warn(self, message: str, about: object = None) -> None:
        """Warn once for each subject `about`, or for each message."""
        if (key := about or message) not in self._warned:
            self._warned.add(key)
            warnings.warn(f"headwise.Monitor: {message}", stacklevel=3)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    @outside_graphs
    def close(self) -> None:
        """Stop capturing and close the history; remove the hooks from model and optimizer."""
        self.pause()
        if self._hook is not None:
            self._hook.remove()
        self._recorder.close()

    def __repr__(self) -> str:
        heads = sum(self.layers.values())
        return (
            f"<Monitor of {type(self.model).__name__}: step {self.steps}, {heads} heads, "
            f"{len(self.alarms)} alarms; {', '.join(self.latest) or 'nothing recorded yet'}>"
        )

    def _repr_html_(self) -> str:
        """Return the alarms, and the metrics of every head at the last recorded step."""
        rows: list[dict[str, Any]] = [
            {"layer": layer, "head": head}
            for layer, heads in enumerate(self.layers.values())
            for head in range(heads)
        ]
        for name, metrics in self.latest.items():
            for row, value in zip(rows, metrics.wide(len(rows)).values.tolist(), strict=True):
                row[name] = value
        return html_summary(repr(self), self.alarms, rows)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _check_lists(call: str, **given: object) -> None:
    """Raise ValueError for a value that is not a list."""
    for name, value in given.items():
        if not isinstance(value, Iterable):
            raise ValueError(
                f"{call}: {name} must be a list, also for a single element, got {value!r:.80}."
            )


def _check(
    call: str,
    every: int,
    queries: int | None,
    statistics: Sequence[Statistic],
    clip: Any,
    step: int,
    seed: int,
) -> None:
    """Raise ValueError for a setting that is out of range."""
    if (as_int(every) or 0) < 1:
        raise ValueError(f"{call}: every must be an integer ≥ 1, got {every!r}.")
    if queries is not None and (as_int(queries) or 0) < 2:
        raise ValueError(
            f"{call}: queries must be an integer ≥ 2 (a standard error requires two), or None for "
            f"all queries, got {queries!r}."
        )
    if (number := as_int(step)) is None or number < 0:
        raise ValueError(
            f"{call}: step must be the number of completed steps, an integer ≥ 0, got {step!r}."
        )
    if as_int(seed) is None:
        raise ValueError(f"{call}: seed must be an integer, got {seed!r}.")
    if clip is not None and not (real(clip) or 0.0) > 0:
        raise ValueError(f"{call}: clip must be a limit for logits above 0, got {clip!r}.")
    check_statistics(statistics, "Monitor")
    names = [name for statistic in statistics for name in statistic.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{call}: statistic {twice[0]!r} is given twice; remove one.")


def _check_kinds(call: str, probe: Any, scaler: Any, save: Any, **flags: Any) -> None:
    """Raise ValueError for a setting of the wrong type."""
    if fault := fault_of_flags(**flags):
        raise ValueError(f"{call}: {fault}.")
    if not (save is None or callable(save)):
        raise ValueError(
            f"{call}: save must be a function that saves a checkpoint, got {save!r:.80}."
        )
    if not (scaler is None or hasattr(scaler, "get_scale")):
        raise ValueError(f"{call}: scaler must be a GradScaler, got {scaler!r:.80}.")
    if not (isinstance(probe, Tensor | Mapping | tuple | list | None) or callable(probe)):
        raise ValueError(
            f"{call}: probe must be a batch for the model (a tensor, a dict or a tuple) or a "
            f"function of the model, got {probe!r:.80}."
        )


def _recorded(statistics: Sequence[Statistic], probed: bool) -> Collection[str]:
    """Return the names of the recorded metrics, with `max_logit` for rules that need it."""
    names = [name for statistic in statistics for name in statistic.names]
    names = ["max_logit" if name.startswith(ABOVE) else name for name in names]
    every = [*names, "max_logit", *(f"probe/{name}" for name in names if probed)]
    return dict.fromkeys(every)


def _check_rules(call: str, rules: Sequence[Rule], recorded: Collection[str], saves: bool) -> None:
    """Raise ValueError for rules that cannot fire, cannot save, or share a name."""
    if odd := [one for one in rules if not isinstance(one, Rule)]:
        raise ValueError(f"{call}: rules must contain Rule(…) objects, got {odd[0]!r:.80}.")
    for rule in rules:
        if rule.statistic not in recorded:
            near = get_close_matches(rule.statistic, recorded, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(
                f"{call}: rules=[Rule({rule.statistic!r}, …)]: {rule.statistic!r} is not recorded, "
                f"so the rule would never fire; {hint}Recorded statistics: "
                f"{', '.join(recorded)}; add others with statistics=[…]."
            )
    names = [rule.name for rule in rules]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{call}: two rules are named {twice[0]!r}; give one another name=….")
    if any(rule.then == "stop" for rule in rules) and not saves:
        raise ValueError(
            f"{call}: a rule stops training; pass save=…, a function that saves a checkpoint first."
        )


def _check_empty(call: str, writer: HistoryWriter, step: int, overwrite: bool) -> None:
    """Raise ValueError if a new run would replace recorded steps."""
    before = writer.read()
    if before is not None and not step and not overwrite and (steps := before.steps):
        raise ValueError(
            f"{call}: {before.path} already has steps {steps[0]} to {steps[-1]}; pass step=… to "
            f"continue after that step, overwrite=True to replace them, or another file."
        )
