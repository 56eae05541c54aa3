"""Where figures go: into the history, to the trackers, past the rules."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Mapping, Sequence

from .figures import Figures
from .history import HistoryWriter
from .rules import Alarm, Record, Rule, alarms_at
from .step_capture import Warn
from .trackers import Tracker, logged

_KEPT = 64
"""Records that wait while the history cannot be written; then the oldest are lost."""


class Recorder:
    """Takes in what was seen at a step. What fails costs a warning, never the training.

    Args:
        history: writes the file, if there is to be one.
        trackers: are told.
        rules: name heads.
        after: the training goes on after this step.
        warn: told, once, of what cannot be written.
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
        self._recent: deque[Record] = deque(maxlen=max((r.reach for r in rules), default=1))
        self._unwritten: deque[tuple[Record, list[Alarm]]] = deque(maxlen=_KEPT)
        before = history.read() if history is not None and after else None
        self._resumed = before is not None
        if before is not None:
            self.heads = before.layers
            self._recent.extend(before.records(self._recent.maxlen, until=after))

    def know(self, heads: Mapping[str, int]) -> None:
        """Take up layers that are new, behind those that are known.

        Raises:
            ValueError: a layer has other heads than before, or no layer is one of the history's.
        """
        if self._resumed and self.heads and not set(self.heads) & set(heads):
            raise ValueError(f"the history has no layer {next(iter(heads))!r}: of another model")
        self._resumed = False
        for layer, number in heads.items():
            if self.heads.setdefault(layer, number) != number:
                raise ValueError(
                    f"{layer or 'the model'} has {number} heads, and had {self.heads[layer]} before"
                )

    def record(
        self,
        step: int,
        figures: Mapping[str, Figures],
        unavailable: Mapping[str, Mapping[str, str]],
    ) -> list[Alarm]:
        """Keep the figures of a step, and the reasons for missing ones; return its alarms."""
        self.unavailable = unavailable
        record = Record(step, figures)
        self._recent.append(record)
        alarms = alarms_at(self.rules, list(self._recent), self.heads)
        if self.history is not None:
            self._unwritten.append((record, alarms))
            self._write(self.history)
        self._tell(step, figures)
        return alarms

    def _write(self, history: HistoryWriter) -> None:
        try:
            if history.restore():
                self._warn(
                    f"the history was deleted or replaced while it is written; a new file holds "
                    f"all steps recorded so far: {history.path}"
                )
            if self._unwritten:
                history.write(list(self._unwritten), self.heads, self.unavailable)
                self._unwritten.clear()
        except (sqlite3.Error, OSError, ValueError) as error:
            self._warn(f"the history cannot be written ({error}): {history.path}", history)

    def _tell(self, step: int, figures: Mapping[str, Figures]) -> None:
        if not self.trackers:
            return
        scalars, heads = logged(figures, self.heads)
        for tracker in self.trackers:
            try:
                tracker(step, dict(scalars), dict(heads))
            except Exception as error:
                self._warn(f"a tracker failed ({type(error).__name__}: {error})", tracker)

    def close(self) -> None:
        """Write what waits, and close the history."""
        if self.history is not None:
            self._write(self.history)
            self.history.close()
