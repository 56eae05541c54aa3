"""`headwise train --monitor`: a run's heads recorded while it trains, and their timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from .._text import escaped
from ..models.train_loop import Run
from ..report.page.timeline import write_timeline
from ..report.timeline import HISTORY, NothingRecordedError, read_timeline
from ..telemetry import RULES, Alarm, Monitor

PAGE = "timeline.html"
RECORDS = 200
"""Steps of a whole run that are recorded, or all where it has fewer."""


def recording(
    folder: Path, *, wanted: bool, resume: bool
) -> Callable[[Run], AbstractContextManager[object]]:
    """What is open while a run trains: a monitor, where it is wanted or a resumed run had one.

    A run that replaces another leaves none of its history.
    """

    def during(run: Run) -> AbstractContextManager[object]:
        history = folder / HISTORY
        if wanted or (resume and history.exists()):
            return Monitor(
                run.model,
                run.optimizer,
                every=max(1, run.config.steps // RECORDS),
                rules=[replace(rule, then=_tell) for rule in RULES],
                history=history,
                step=run.step,
                overwrite=True,
            )
        for name in (HISTORY, f"{HISTORY}-wal", f"{HISTORY}-shm", PAGE):
            (folder / name).unlink(missing_ok=True)
        return nullcontext()

    return during


def _tell(alarm: Alarm) -> None:
    print(f"headwise: {escaped(alarm)}", file=sys.stderr)


def write_page(folder: Path) -> str:
    """Write the timeline of a run into its folder, if it was recorded; a line that says where."""
    if not (folder / HISTORY).exists():
        return ""
    try:
        run = read_timeline(folder)
    except NothingRecordedError:
        return ""
    page = write_timeline(run, folder / PAGE)
    named = len({(alarm.layer, alarm.head) for alarm in run.alarms})
    return f"timeline   {escaped(page)}: {named} of {len(run.heads)} heads with an alarm"
