"""`headwise train --monitor`: record every head during training, and write the timeline."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from .._text import escaped
from ..models.run import Run
from ..models.training import Progress
from ..report.page.timeline import write_timeline
from ..report.timeline import HISTORY, NothingRecordedError, read_timeline
from ..telemetry import RULES, Monitor

PAGE = "timeline.html"
RECORDS = 200
"""Approximate number of steps recorded in a run; all, if it has fewer."""


def recording(
    folder: Path, *, wanted: bool, resume: bool
) -> Callable[[Run], AbstractContextManager[Callable[[Progress], None] | None]]:
    """Return a function from a run to its context: a monitor, if `wanted` or a resumed run had one.

    The timeline is written when the run ends, even after an error. A run that replaces an earlier
    one deletes that history. With several ranks, all of them monitor and the first one writes.
    """

    def during(run: Run) -> AbstractContextManager[Callable[[Progress], None] | None]:
        monitored = run.ranks.shared(lambda: wanted or (resume and (folder / HISTORY).exists()))
        if not monitored:
            run.ranks.shared(lambda: _forget(folder))
        return _recorded(run, folder) if monitored else nullcontext()

    return during


def _forget(folder: Path) -> None:
    for name in (HISTORY, f"{HISTORY}-wal", f"{HISTORY}-shm", PAGE):
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _recorded(run: Run, folder: Path) -> Iterator[Callable[[Progress], None]]:
    monitor = Monitor(
        run.model,
        run.optimizer,
        every=max(1, run.config.steps // RECORDS),
        rules=[replace(rule, then=_print) for rule in RULES],
        history=folder / HISTORY,
        step=run.step,
        overwrite=True,
    )
    try:
        with monitor:
            yield lambda progress: monitor.log(step=progress.step, loss=progress.loss)
    finally:
        if run.ranks.rank == 0:
            _write_page(folder)


def _write_page(folder: Path) -> None:
    """Write the timeline of a run into its folder, and print its path."""
    try:
        run = read_timeline(folder)
        page = write_timeline(run, folder / PAGE)
    except NothingRecordedError:
        return
    except (ValueError, OSError) as error:
        _print(f"the timeline was not written: {error}")
        return
    named = len({(alarm.layer, alarm.head) for alarm in run.alarms})
    _print(f"{named} of {len(run.heads)} heads with an alarm; timeline: {page}")


def _print(message: object) -> None:
    print(f"headwise: {escaped(message)}", file=sys.stderr)
