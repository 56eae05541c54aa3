"""Record metrics in the history and in trackers, and check them against the rules."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .figures import HeadMetrics
from .history import HistoryWriter, Scalar
from .rules import Alarm, RecordedStep, Rule, alarms_at
from .step_capture import Warn
from .trackers import Tracker, logged

_MOST_UNWRITTEN = 64
"""The maximum number of steps held while the history cannot be written."""

_MOST_SCALARS = 1 << 16
"""The maximum number of scalars held until the next recorded step."""


class Recorder:
    """Record the metrics of each step. Errors cause a warning and never stop the training.

    Args:
        history: the writer of the file, if any.
        trackers: called with the metrics.
        rules: the rules that raise alarms.
        after: the number of steps already completed.
        warn: called once for each file that cannot be written and each tracker that fails.
    """

    def __init__(
        self,
        history: HistoryWriter | None,
        trackers: Sequence[Tracker],
        rules: Sequence[Rule],
        after: int,
        warn: Warn,
    ) -> None:
        self.history, self.trackers, self.rules, self._warn = history, trackers, rules, warn
        self.heads: dict[str, int] = {}
        self.unavailable: Mapping[str, Mapping[str, str]] = {}
        self._recent: deque[RecordedStep] = deque(maxlen=max((r.reach for r in rules), default=1))
        self._unwritten: deque[tuple[RecordedStep, list[Alarm]]] = deque(maxlen=_MOST_UNWRITTEN)
        before = history.read() if history is not None and after else None
        self._scalars: deque[tuple[int, str, float | Tensor]] = deque(maxlen=_MOST_SCALARS)
        self._resumed = before is not None
        if before is not None:
            self.heads = before.layers
            self._recent.extend(before.records(self._recent.maxlen, until=after))

    def know(self, heads: Mapping[str, int]) -> None:
        """Append new layers to the known ones.

        Raises:
            ValueError: a layer's number of heads differs from before, or the history has other
                layers.
        """
        if self._resumed and self.heads and not set(self.heads) & set(heads):
            raise ValueError(
                f"the history has no layer {next(iter(heads))!r} and belongs to another model"
            )
        self._resumed = False
        for layer, number in heads.items():
            if self.heads.setdefault(layer, number) != number:
                raise ValueError(
                    f"{layer or 'the model'} has {number} heads, but had {self.heads[layer]} before"
                )

    def log(self, step: int, scalars: Mapping[str, float | Tensor]) -> None:
        """Keep scalars of a step for the history; tensors are read when the history is written."""
        if self.history is not None:
            self._scalars.extend((step, name, value) for name, value in scalars.items())

    def record(
        self,
        step: int,
        figures: Mapping[str, HeadMetrics],
        unavailable: Mapping[str, Mapping[str, str]],
        rate: float | Tensor | None = None,
    ) -> list[Alarm]:
        """Record the metrics of a step, the reasons for missing ones and the learning rate.

        Return the alarms of the step.
        """
        self.unavailable = unavailable
        record = RecordedStep(step, figures)
        self._recent.append(record)
        alarms = alarms_at(self.rules, list(self._recent), self.heads)
        if self.history is not None:
            self._unwritten.append((record, alarms))
            if rate is not None:
                self._scalars.append((step, "learning_rate", rate))
            self._write(self.history)
        self._log(step, figures, [str(alarm) for alarm in alarms])
        return alarms

    def _write(self, history: HistoryWriter) -> None:
        try:
            if history.restore():
                self._warn(
                    f"the history was deleted or replaced during recording; a new file holds "
                    f"all steps recorded so far: {history.path}"
                )
            if self._unwritten or self._scalars:
                records = list(self._unwritten)
                scalars = as_floats(self._scalars)
                history.write(records, self.heads, self.unavailable, scalars)
                self._unwritten.clear()
                self._scalars.clear()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._warn(f"the history cannot be written ({error}): {history.path}", history)

    def _log(self, step: int, figures: Mapping[str, HeadMetrics], alarms: Sequence[str]) -> None:
        if not self.trackers:
            return
        scalars, heads = logged(figures, self.heads)
        for tracker in self.trackers:
            try:
                tracker(step, dict(scalars), dict(heads), list(alarms))
            except Exception as error:
                self._warn(f"a tracker failed ({type(error).__name__}: {error})", tracker)

    def close(self) -> None:
        """Write the remaining steps and close the history."""
        if self.history is not None:
            self._write(self.history)
            self.history.close()


def as_floats(scalars: Iterable[tuple[int, str, float | Tensor]]) -> list[Scalar]:
    """Return scalars as floats; those in tensors are copied to the host together."""
    scalars = list(scalars)
    tensors = [value for _, _, value in scalars if isinstance(value, Tensor)]
    copied: Iterator[float] = iter(())
    if tensors:
        device = tensors[0].device
        copied = iter(torch.stack([x.float().to(device) for x in tensors]).tolist())
    return [
        (step, name, next(copied) if isinstance(value, Tensor) else value)
        for step, name, value in scalars
    ]
