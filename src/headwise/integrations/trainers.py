"""`Monitor` as a callback of transformers' `Trainer` and of Lightning's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..capture.modules import check_model
from ..telemetry.monitor import Monitor
from ..telemetry.rules import Alarm
from ..telemetry.wrappers import hook_steps


class _TrainersMonitor(Monitor):
    """A monitor without a hook: a trainer reports its steps, and stops when the monitor asks."""

    stopping = False

    def _hook_optimizer(self, call: str, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: the trainer reports its steps."""

    def _stop(self, alarms: Sequence[Alarm]) -> None:
        self.stopping = True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the end of an optimizer call, whose step a GradScaler may have skipped."""
        self._stepped(optimizer)

    def ended(self) -> None:
        """Record the end of a step."""
        self._end()


_TRAINERS = ("model", "optimizer", "step", "save", "scaler")
_SETTINGS = [name for name in inspect.signature(Monitor).parameters if name not in _TRAINERS]


class _Callback:
    """Hold the settings until the trainer starts, and the monitor while it trains."""

    monitor: _TrainersMonitor | None = None
    """The monitor of the current or most recent training run."""

    def __init__(self, **settings: Any) -> None:
        for name in settings:
            if name in _TRAINERS:
                raise ValueError(
                    f"{type(self).__name__}({name}=…): the trainer sets it; leave it out."
                )
            if name not in _SETTINGS:
                near = get_close_matches(name, _SETTINGS, n=1)
                hint = (
                    f"did you mean {near[0]}=?" if near else f"there are: {', '.join(_SETTINGS)}."
                )
                raise TypeError(
                    f"{type(self).__name__}({name}=…): there is no such setting; {hint}"
                )
        self._settings = settings

    def _start(self, model: Any, optimizer: Any, step: int, scaler: Any = None) -> None:
        self._end()
        settings = {**self._settings, "step": step, "scaler": scaler, "save": lambda: None}
        self.monitor = _TrainersMonitor(model, optimizer, **settings)
        self.monitor.pause()

    def _end(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


@cache
def _kind_of(cls: type, base: type) -> type:
    """Return a subclass of our class and a trainer's, whose package is imported only if needed."""
    return type(cls.__name__, (cls, base), {"__doc__": cls.__doc__, "__module__": cls.__module__})


class MonitorCallback(_Callback):
    """Run a `Monitor` as a callback of transformers' `Trainer`: `callbacks=[MonitorCallback(…)]`.

    Settings are those of `Monitor`; model, optimizer and steps come from the trainer, even when it
    resumes from a checkpoint. A rule with `then="stop"` makes the trainer save, then stop.

    Raises:
        ImportError: transformers is not installed.
        ValueError: a setting that comes from the trainer.
        TypeError: a setting that `Monitor` does not have.
    """

    def __new__(cls, **settings: Any) -> MonitorCallback:
        try:
            from transformers import TrainerCallback
        except ImportError:
            raise ImportError(
                "MonitorCallback(…): transformers is not installed; `pip install transformers`"
            ) from None
        return object.__new__(_kind_of(cls, TrainerCallback))

    def on_train_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._start(known["model"], known.get("optimizer"), state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.monitor is not None:
            self.monitor.steps = state.global_step
            self.monitor.resume()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.monitor is None:
            return
        self.monitor.pause()
        if getattr(known.get("optimizer"), "step_was_skipped", False):
            self.monitor.skip()
        else:
            self.monitor.ended()

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        if self.monitor is not None and self.monitor.stopping:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        given = known.get("logs") or {}
        scalars = {name: given[name] for name in ("loss", "grad_norm") if name in given}
        if self.monitor is not None:
            self.monitor.log(step=state.global_step, **scalars)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self._end()


class LightningMonitor(_Callback):
    """Run a `Monitor` as a callback of Lightning's `Trainer`: `callbacks=[LightningMonitor(…)]`.

    Settings are those of `Monitor`; the model is the `LightningModule`, the steps are those of the
    trainer's first optimizer. A rule with `then="stop"` makes the trainer save
    `headwise-stop-STEP.ckpt` in its `default_root_dir`, then stop.

    Raises:
        ImportError: neither lightning nor pytorch_lightning is installed.
        ValueError: a setting that comes from the trainer.
        TypeError: a setting that `Monitor` does not have.
    """

    def __new__(cls, **settings: Any) -> LightningMonitor:
        return object.__new__(_kind_of(cls, _lightning_callback()))

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        optimizer = trainer.optimizers[0]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._start(pl_module, optimizer, trainer.global_step, scaler)
        self._hook = hook_steps(check_model("Monitor", pl_module), optimizer, self._after_step)

    def _after_step(self, optimizer: Any) -> None:
        if self.monitor is not None:
            self.monitor.pause()
            self.monitor.stepped(optimizer)

    def on_train_batch_start(self, *args: Any) -> None:
        if self.monitor is not None:
            self._step = self.monitor.steps + 1
            self.monitor.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        monitor = self.monitor
        if monitor is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and loss.numel() == 1:
            # Lightning divides the loss by the number of micro-batches.
            monitor.log(step=self._step, loss=loss * trainer.accumulate_grad_batches)
        if not monitor.stopping or trainer.should_stop:
            return
        folder = Path(trainer.default_root_dir)
        trainer.save_checkpoint(folder / f"headwise-stop-{monitor.steps}.ckpt")
        trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_exception(self, *args: Any) -> None:
        self._end()

    def _end(self) -> None:
        super()._end()
        if self._hook is not None:
            self._hook.remove()

    _hook: Any = None
    _step = 0


def _lightning_callback() -> type:
    """Return the class of Lightning's callbacks, from the installed package.

    Raises:
        ImportError: neither lightning nor pytorch_lightning is available.
    """
    try:
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
    except ImportError:
        try:
            from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError(
                "LightningMonitor(…): Lightning is not installed; `pip install lightning`"
            ) from None
    return Callback
