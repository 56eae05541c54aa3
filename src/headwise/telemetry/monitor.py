"""`Monitor`: statistics of every head of a model in training, recorded every so many steps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from .._text import and_more
from ..capture.modules import Modules, as_written, check_model
from ..capture.private_torch import outside_graphs, skipped_since_update
from ..core.numbers import fault_of_flags, real, whole
from ..stats.max_logit import ABOVE, MaxLogit
from ..stats.statistic import Statistic, check_statistics
from .clip import qk_clip_
from .defaults import DEFAULT_STATISTICS
from .figures import Figures
from .history import HistoryWriter
from .optimizers import check_optimizer, hook_steps
from .probe import Probe, run_probe
from .ranks import Ranks, any_of_all, is_first, several
from .recorder import Recorder
from .rules import RULES, Alarm, Rule
from .step_capture import StepCapture, Wanted, not_monitored
from .step_sums import StepSums
from .trackers import as_tracker
from .wrappers import plain_name

_PATIENCE = 3
"""Optimizer steps in a row that give nothing, until the reason is warned of."""


class StopTraining(Exception):
    """A rule says stop; what `save=` does is done. `alarms` names the heads."""

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        super().__init__("; ".join(map(str, alarms)))
        self.alarms = tuple(alarms)


class Monitor:
    """Record statistics of every head of a model in training, and name heads that go wrong.

    With an optimizer there is nothing else to write: the optimizer tells when a step is done.
    Without one, call `monitor.step()` after `optimizer.step()`. Recorded are step 1 and every
    `every`-th; all micro-batches of a step count, evaluation in between does not. A monitored
    training computes the same numbers, bit for bit. Compiled models stay compiled, and compile once
    more for recorded steps; where a graph attends in a way that is not captured in it, recorded
    steps run as they are written, whose rounding is another. What goes wrong in recording is warned
    of, once.

    Of several ranks (`torch.distributed`), each makes a monitor of its own with the same settings:
    figures are of all their data and heads, on every rank alike, the first one writes the history,
    and all clip by the largest logits of all. `maxima` are a rank's own.

    Maxima (`max_logit`, norms) are of all queries and exact; other statistics are of `queries`
    drawn ones of each call, with standard errors. A metric that cannot be known for a layer (norms,
    where only the scores are visible) is not recorded there; `monitor.unavailable[layer][metric]`
    is the reason.

    Args:
        model: any module that `watch()` takes, also in wrappers (DDP, `torch.compile`).
        optimizer: its steps are the training's.
        every: record so often.
        queries: of each call, for statistics that are means; `None` for all.
        statistics: what to record, in place of entropy, the masses on the first and the previous
            token, the length of the heads' outputs, the largest logit, and the largest norms of
            queries and keys.
        rules: alarms (`Rule`), in place of those in `RULES` whose metrics are recorded.
        history: the file to record into (`History`).
        trackers: a TensorBoard `SummaryWriter`, a run of W&B or trackio, or functions such as
            `mlflow.log_metrics`.
        clip: after every step, clip heads whose largest logit is over this (`qk_clip_`).
        maxima: take the exact largest logits of every step, for `monitor.maxima`.
        probe: a batch, as the model takes it, or a function that runs the model on one: recorded
            beside the training's figures, as `probe/entropy` and so on, in evaluation mode.
        scaler: the `GradScaler`, so that a step which it skips is not counted.
        step: the training goes on after this step; what the history has of later ones is replaced.
        overwrite: a training from step 0 may replace what the history has.
        save: called before a rule with `then="stop"` raises `StopTraining`.
        modules: only these, as in `watch()`.
        seed: of the drawn queries.

    Raises:
        ValueError: a setting out of its range; a rule for a metric that is not recorded; an
            optimizer that holds none of the model's parameters; a history that has steps already,
            with `step=0`.
        OSError: no file can be where the history is to be.
        StopTraining: from the step, where a rule says so.

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
        said = check_model("Monitor", model)
        _check_lists(said, statistics=statistics, rules=rules or (), trackers=trackers)
        _check(said, every, queries, statistics, clip, step, seed)
        _check_kinds(said, probe, scaler, save, maxima=maxima, overwrite=overwrite)
        recorded = _recorded(statistics, probe is not None)
        default = (rule for rule in RULES if rule.statistic in recorded)
        self._rules = tuple(default if rules is None else rules)
        _check_rules(said, self._rules, recorded, save is not None)
        if optimizer is not None:
            check_optimizer(said, model, optimizer)
        self.model, self.every, self.clip, self.steps = model, every, clip, step
        self._optimizer, self._scaler, self._save, self._maxima = optimizer, scaler, save, maxima
        self._scale = None if scaler is None else scaler.get_scale()
        self._statistics, self._queries, self._probe = tuple(statistics), queries, probe
        self._warned: set[object] = set()
        self._known_wanted: dict[object, Wanted | None] = {}
        self._missed = 0
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._ranks = Ranks(self._device)
        self._capture = StepCapture(model, self._warn, seed, modules, self._begun)
        loggers = [as_tracker(one) for one in trackers] if is_first() else []
        writer = None
        if history is not None and is_first():
            writer = HistoryWriter(history, step, self._about())
            _check_empty(said, writer, step, overwrite)
        self._recorder = Recorder(writer, loggers, self._rules, step, self._warn)
        self.latest: Mapping[str, Figures] = {}
        self.unavailable: dict[str, dict[str, str]] = {}
        self.alarms: list[Alarm] = []
        self._last_maxima: dict[str, Tensor] = {}
        self._hook: Any = None if optimizer is None else self._hear(said, optimizer)
        self._paused = False
        self.resume()

    def _hear(self, said: str, optimizer: torch.optim.Optimizer) -> Any:
        """Let the optimizer, which keeps the monitor alive, tell of its steps."""
        return hook_steps(said, optimizer, self._stepped)

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
        """End a step of the training: call it after `optimizer.step()`; gives new alarms.

        With a scaler, after `scaler.step(optimizer)`, before `scaler.update()` or after it.

        Raises:
            ValueError: a monitor that was given the optimizer, which tells by itself.
            StopTraining: a rule says so.
        """
        if self._optimizer is not None:
            raise ValueError(
                "monitor.step(): the optimizer that Monitor(model, optimizer) was given tells of "
                "its steps itself; leave this call out, or give no optimizer."
            )
        skipped = skipped_since_update(self._scaler)
        fell = self._scale_fell()  # before `update()`, for a step that is told of already
        return self.skip() if (fell if skipped is None else skipped) else self._end()

    def skip(self) -> list[Alarm]:
        """Forget the forwards since the last step: the optimizer did not take theirs."""
        self._capture.clear()
        self._last_maxima = {}
        return []

    @outside_graphs
    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """A step of the optimizer is over; fused ones are told by a GradScaler to do nothing."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf):
            self.skip()
        else:
            self._end()

    def _begun(self) -> None:
        """A forward begins; if a step was skipped since the last, that step's figures go."""
        if self._scale_fell():
            self.skip()

    def _scale_fell(self) -> bool:
        """Whether the GradScaler skipped a step, and lowered its scale, since it was asked last."""
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
            self._tell_left_out(self._capture)
        if self.clip is not None:
            self._clip(self.clip)
        self._capture.clear()
        if not self._paused:
            self.resume()
        if due:
            self._act(alarms)
        return alarms

    def _due(self, step: int) -> bool:
        """Return True if a step is recorded: also one that follows a step that gave nothing."""
        return step == 1 or step % self.every == 0 or 0 < self._missed < _PATIENCE

    def _wanted(self, step: int) -> Wanted | None:
        """What to take of a step; `None` if nothing."""
        due = self._due(step)
        about = (due, self.clip)
        if about not in self._known_wanted:
            rules = [rule for rule in self._rules if due and rule.statistic == "max_logit"]
            largest = self._largest(rules)
            statistics = self._statistics if due else ()
            wanted = Wanted(statistics, self._queries, largest) if due or largest else None
            self._known_wanted[about] = wanted
        return self._known_wanted[about]

    def _largest(self, rules: Sequence[Rule]) -> MaxLogit | None:
        """What is to be known of largest logits: all, or those above the least of the limits."""
        limits = [rule.above for rule in rules] + ([] if self.clip is None else [self.clip])
        given = [limit for limit in limits if limit is not None]
        if self._maxima or len(given) < len(limits):  # `below` and `jump` look at each
            return MaxLogit()
        return MaxLogit(above=min(given)) if given else None

    @outside_graphs
    def resume(self) -> None:
        """See forwards again, after `pause()`."""
        self._paused = False
        wanted = self._wanted(self.steps + 1)
        if wanted is None:
            self._capture.close()
        else:
            self._capture.open(wanted, self.steps + 1)

    @outside_graphs
    def pause(self) -> None:
        """See no forwards until `resume()`: evaluation, which is not counted, runs faster so."""
        self._paused = True
        self._capture.close()

    # ── what is seen ────────────────────────────────────────────────────────────────────────────

    @property
    def maxima(self) -> dict[str, Tensor]:
        """The exact largest logits `[H]` of all micro-batches since the last step, by module.

        After a step and before the next forward, those of that step. With `maxima=True` of every
        step, else of those that record `max_logit`. Empty where they were not taken.
        """
        live = self._capture.maxima if self._capture.forwards else self._last_maxima
        return {plain_name(self.model, name): x for name, x in live.items()}

    @property
    def layers(self) -> Mapping[str, int]:
        """How many heads each recorded layer has, in the order of every `Figures.values`."""
        return self._recorder.heads

    def _record(self) -> list[Alarm]:
        """Take up what the step gave; gives its alarms."""
        capture = self._capture
        capture.rest() if self._probe is None else capture.close()
        try:
            every = {"": self._of_all(capture)}
            if self._probe is not None:
                probed = self._probed(self._probe)
                every["probe/"] = self._of_all(probed)
                if not every["probe/"].kept:
                    self._warn(f"the probe was not recorded: {probed.why_nothing}", "probe")
            figures: dict[str, Figures] = {}
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
        if not every[""].kept:
            self._missed += 1
            if self._missed == _PATIENCE:
                self._warn(
                    f"nothing was recorded in {_PATIENCE} optimizer steps: {capture.why_nothing}"
                )
            return []
        self._missed = 0
        self._tell_left_out(capture)
        self.latest = figures
        if not is_first():
            return []
        alarms = self._recorder.record(self.steps, figures, self.unavailable)
        self.alarms += alarms
        return alarms

    def _tell_left_out(self, capture: StepCapture) -> None:
        """Warn of each module that attended and is not recorded."""
        for name, why in capture.left_out.items():
            self._warn(not_monitored(plain_name(self.model, name), why), ("module", name))

    def _of_all(self, capture: StepCapture) -> StepSums:
        """What was seen, on all ranks."""
        names = {name: capture.plain_name(name) for name in capture.sums.spans}
        return self._ranks.sums(capture.sums.renamed(names))

    def _probed(self, probe: Probe) -> StepCapture:
        """What is seen of the probe, with the model as it is after the step."""
        capture = StepCapture(self.model, self._warn, 0, self._capture.modules)
        capture.open(Wanted(self._statistics, self._queries, None), 0, every=True)
        try:
            run_probe(self.model, probe)
        except Exception as error:  # other ranks wait for this one's figures
            capture.clear()
            self._warn(f"the probe was not recorded: {error}", "probe")
        finally:
            capture.close()
        self._tell_left_out(capture)
        return capture

    def _clip(self, limit: float) -> None:
        """Clip the heads whose largest logit was over the limit, on all ranks alike."""
        largest = self._ranks.largest(self._capture.sums, self._capture.largest)
        own = largest
        if several():
            here = {as_written(name) for name, _ in self.model.named_modules()}
            own = {name: x for name, x in largest.items() if name in here}
        if own:
            qk_clip_(self.model, own, limit=limit, optimizer=self._optimizer)

    def _act(self, alarms: Sequence[Alarm]) -> None:
        """Warn, call, or stop, as the rules of these alarms say."""
        then = {rule.name: rule.then for rule in self._rules}
        for rule in self._rules:
            said = [str(alarm) for alarm in alarms if alarm.rule == rule.name]
            if said and not callable(rule.then):
                warnings.warn(f"headwise: {and_more(said)}", stacklevel=4)
        for alarm in alarms:
            if callable(act := then[alarm.rule]):
                act(alarm)
        stops = [alarm for alarm in alarms if then[alarm.rule] == "stop"]
        if "stop" in then.values() and any_of_all(bool(stops), self._device):
            self._stop(stops)

    def _stop(self, alarms: Sequence[Alarm]) -> None:
        """Save, and stop the training."""
        assert self._save is not None  # asked for at the start
        self._save()
        raise StopTraining(alarms)

    def _warn(self, said: str, about: object = None) -> None:
        """Warn once of each thing, or of what it is about."""
        if (key := about or said) not in self._warned:
            self._warned.add(key)
            warnings.warn(f"headwise.Monitor: {said}", stacklevel=3)

    # ── the end ─────────────────────────────────────────────────────────────────────────────────

    @outside_graphs
    def close(self) -> None:
        """See nothing more, and close the history; the model and the optimizer are as they were."""
        self.pause()
        if self._hook is not None:
            self._hook.remove()
        self._recorder.close()

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _check_lists(said: str, **given: object) -> None:
    """Raise ValueError for one thing where a list of such is wanted."""
    for name, value in given.items():
        if not isinstance(value, Iterable):
            raise ValueError(f"{said}: {name}={value!r:.80}: give a list of {name}, also of one.")


def _check(
    said: str,
    every: int,
    queries: int | None,
    statistics: Sequence[Statistic],
    clip: Any,
    step: int,
    seed: int,
) -> None:
    """Raise ValueError for a setting out of its range."""
    if (whole(every) or 0) < 1:
        raise ValueError(f"{said}: every={every!r}: give a whole number of steps, 1 or more.")
    if queries is not None and (whole(queries) or 0) < 2:
        raise ValueError(
            f"{said}: queries={queries!r}: give a whole number, 2 or more, so that there is a "
            f"standard error; None for all queries."
        )
    if (number := whole(step)) is None or number < 0:
        raise ValueError(f"{said}: step={step!r}: give the number of steps done before.")
    if whole(seed) is None:
        raise ValueError(f"{said}: seed={seed!r}: give a whole number.")
    if clip is not None and not (real(clip) or 0.0) > 0:
        raise ValueError(f"{said}: clip={clip!r}: give a limit for logits, above 0.")
    check_statistics(statistics, "Monitor")
    names = [name for statistic in statistics for name in statistic.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{said}: {twice[0]!r} is asked for twice; leave one out.")


def _check_kinds(said: str, probe: Any, scaler: Any, save: Any, **flags: Any) -> None:
    """Raise ValueError for what is not of the kind that a setting takes."""
    if fault := fault_of_flags(**flags):
        raise ValueError(f"{said}: {fault}.")
    if not (save is None or callable(save)):
        raise ValueError(f"{said}: save={save!r:.80}: give a function that saves the training.")
    if not (scaler is None or hasattr(scaler, "get_scale")):
        raise ValueError(f"{said}: scaler={scaler!r:.80}: give a GradScaler.")
    if not (isinstance(probe, Tensor | Mapping | tuple | list | None) or callable(probe)):
        raise ValueError(
            f"{said}: probe={probe!r:.80}: give a batch as the model takes it (a tensor, a dict or "
            f"a tuple), or a function of the model."
        )


def _recorded(statistics: Sequence[Statistic], probed: bool) -> Collection[str]:
    """The names of the metrics that are recorded, `max_logit` where a rule needs it."""
    names = [name for statistic in statistics for name in statistic.names]
    names = ["max_logit" if name.startswith(ABOVE) else name for name in names]
    every = [*names, "max_logit", *(f"probe/{name}" for name in names if probed)]
    return dict.fromkeys(every)


def _check_rules(said: str, rules: Sequence[Rule], recorded: Collection[str], saves: bool) -> None:
    """Raise ValueError for a rule that could not fire or save first, and for two of one name."""
    if odd := [one for one in rules if not isinstance(one, Rule)]:
        raise ValueError(f"{said}: rules=[{odd[0]!r:.80}]: that is no Rule; give Rule(…).")
    for rule in rules:
        if rule.statistic not in recorded:
            near = get_close_matches(rule.statistic, recorded, n=3)
            told = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
            raise ValueError(
                f"{said}: rules=[Rule({rule.statistic!r}, …)]: {rule.statistic!r} is not recorded, "
                f"and the rule would never fire; {told}Recorded are: "
                f"{', '.join(recorded)}; statistics=[…] sets which."
            )
    names = [rule.name for rule in rules]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{said}: two rules are called {twice[0]!r}; give one a name=….")
    if any(rule.then == "stop" for rule in rules) and not saves:
        raise ValueError(
            f"{said}: a rule stops the training; give save=…, a function that saves it first."
        )


def _check_empty(said: str, writer: HistoryWriter, step: int, overwrite: bool) -> None:
    """Raise ValueError where a new training would replace what an old one has recorded."""
    before = writer.read()
    if before is not None and not step and not overwrite and (steps := before.steps):
        raise ValueError(
            f"{said}: {before.path} has steps {steps[0]} to {steps[-1]} already; give step=… to go "
            f"on after that step, overwrite=True to replace them, or another file."
        )
