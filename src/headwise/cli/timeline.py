"""`headwise timeline`: every head over the training steps, during a run or after it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .._text import escaped
from ..report.codec import finite
from ..report.page.parts import check_out
from ..report.page.timeline import write_timeline
from ..report.timeline import (
    NothingRecordedError,
    Timeline,
    TimelineError,
    differences,
    file_of,
    matched,
    read_timeline,
)

PAGE = Path("headwise-timeline.html")
MOST_ALARMS = 10
"""Maximum number of alarms printed; the page and `--json` contain all of them."""


def timeline(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A history file, or a monitored run's folder.")
    ],
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN2", help="Another run of the same model; shows B − A.", show_default=False
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"The page to write. [default: {PAGE}]", show_default=False)
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=1,
            help="Rewrite the page at this interval during training, until Ctrl-C; an open page "
            "reloads automatically.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print steps, alarms and final metrics as one JSON object."),
    ] = False,
) -> int:
    """Write one offline page with every head and its alarms over the training steps.

    Example: `headwise timeline notes-gpt --watch 10`
    """
    if watch is not None and as_json:
        raise ValueError("--watch writes pages; leave out --json")
    out = PAGE if out is None and not as_json else out
    if out is not None:
        check_out(out)  # before the slow part
    paths = [run] if compare is None else [run, compare]
    if watch is not None and out is not None:
        return _watch(paths, out, watch)
    runs = [read_timeline(path) for path in paths]
    if out is not None:
        _write(runs, out)
    if as_json:
        print(json.dumps(finite(_document(runs)), ensure_ascii=False, allow_nan=False))
    else:
        print(_summary(runs))
    if out is not None:
        print(f"page: {escaped(out.resolve())}", file=sys.stderr if as_json else sys.stdout)
    return 0


def _write(runs: list[Timeline], out: Path, reread: float | None = None) -> None:
    write_timeline(runs[0], out, other=runs[1] if len(runs) > 1 else None, reread=reread)


# --- during training -------------------------------------------------------------------------


def _watch(paths: list[Path], out: Path, every: float) -> int:
    """Rewrite the page when there are new steps, until Ctrl-C; then once without auto-reload."""
    shown: list[Timeline] = []
    try:
        for runs in _newer(paths, every):
            _write(runs, out, reread=every)
            if not shown:
                print(f"{_summary(runs)}\npage: {escaped(out.resolve())}", flush=True)
            shown = runs
    except KeyboardInterrupt:
        if shown:
            _write(shown, out)
    return 0


def _newer(paths: list[Path], every: float) -> Iterator[list[Timeline]]:
    """Yield the runs now, and again whenever they have new steps."""
    before, waiting, begun = None, "", False
    while True:
        now = [_state(path) for path in paths]
        if now != before:
            try:
                runs = [read_timeline(path) for path in paths]
            except TimelineError as error:
                if not begun and not isinstance(error, NothingRecordedError):
                    raise
                if str(error) != waiting:
                    print(f"headwise: {escaped(error)}; waiting", file=sys.stderr)
                waiting = str(error)
            else:
                before, begun = now, True
                yield runs
        time.sleep(every)


def _state(path: Path) -> list[tuple[int, int]]:
    """Return the times and sizes of the history and of its log, which change with every write."""
    file = file_of(path)
    log = file.with_name(f"{file.name}-wal")  # readers leave an empty log
    files = [one.stat() for one in (file, log) if one.exists()]
    return [(one.st_mtime_ns, one.st_size) for one in files if one.st_size]


# --- output ----------------------------------------------------------------------------------


def _document(runs: list[Timeline]) -> dict[str, Any]:
    """Return the document of one run, or of two runs and the differences of their last metrics."""
    if len(runs) == 1:
        return runs[0].document()
    a, b, left_out = matched(*runs)
    step, rows = differences(a, b)
    both = {"a": a.document(), "b": b.document(), "left_out": left_out}
    return both | {"step": step, "differences": rows}


def _summary(runs: list[Timeline]) -> str:
    """Describe runs and their alarms as text."""
    lines = []
    for letter, run in zip("AB", runs, strict=False):
        name = run.name if len(runs) == 1 else f"{letter}: {run.name}"
        heads, layers = len(run.heads), len(run.layers)
        lines += [
            f"run        {escaped(name)}: {heads:,} heads in {layers:,} layers",
            f"recorded   {len(run.steps):,} steps, {run.steps[0]:,} to {run.steps[-1]:,}; "
            f"{escaped(', '.join(run.tracks))}",
            *_alarms(run),
        ]
    if len(runs) == 2:
        lines += [f"left out   {escaped(line)}" for line in matched(*runs)[2]]
    return "\n".join(lines)


def _alarms(run: Timeline) -> list[str]:
    if not run.alarms:
        return ["alarms     none"]
    lines = [escaped(one) for one in run.alarms[:MOST_ALARMS]]
    if more := len(run.alarms) - len(lines):
        lines.append(f"and {more:,} more (see the page, or --json)")
    return [f"{'alarms' if n == 0 else '':11}{text}" for n, text in enumerate(lines)]
