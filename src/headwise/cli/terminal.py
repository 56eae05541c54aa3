"""Parts that commands share: progress, one width, a pager, broken pipes, ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SEEDS = 2**63 - 1  # the largest seed of PyTorch's generators
STOPPED = 130  # the exit code of a program that Ctrl-C ended

WIDTH = 120
"""The number of columns where there is no terminal."""

TIMEOUT = 600.0
"""Seconds until a rank that hangs is given up: a first step may compile."""

FIRST_LINE, NEXT_LINES = 2.0, 10.0
"""Seconds until the first line of progress in a log, and between the next ones."""

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no remarks.")]


def console() -> Console:
    """Return standard output, `WIDTH` wide where it is no terminal; `NO_COLOR` turns colors off."""
    return Console(width=None if sys.stdout.isatty() else WIDTH)


@contextlib.contextmanager
def paged(console: Console, lines: int) -> Iterator[None]:
    """Show what is printed meanwhile in a pager, where so many lines are more than a terminal has.

    The pager is that of `PAGER`, and mostly `less`, which leaves short texts on the screen.
    """
    if not console.is_terminal or lines < console.height:
        yield
        return
    os.environ.setdefault("LESS", "-FRX")
    with console.pager(styles=not console.no_color):
        yield


@contextlib.contextmanager
def bar(doing: str, *, drawn: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show progress on standard error: a bar in a terminal, and elsewhere a line now and then.

    Gives a function of the current task and the share of it that is done.
    """
    errors = Console(stderr=True)
    if not drawn:
        yield lambda doing, share: None
        return
    if not errors.is_terminal:
        with _lines(doing) as written:
            yield written
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True) as shown:
        task = shown.add_task(doing, total=1.0)

        def report(doing: str, share: float) -> None:
            if shown.tasks[0].description != doing:
                shown.reset(task, description=doing)
            shown.update(task, completed=share)

        yield report


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[Callable[[str, float], None]]:
    """Print a line of progress after `FIRST_LINE` seconds, and every `NEXT_LINES` from then on.

    A thread prints them, so that there are some during one long step.
    """
    now, done = (doing, 0.0), threading.Event()

    def report(doing: str, share: float) -> None:
        nonlocal now
        now = doing, share

    def write() -> None:
        wait = FIRST_LINE
        while not done.wait(wait):
            print(f"{now[0]}: {now[1]:.0%}", file=sys.stderr, flush=True)
            wait = NEXT_LINES

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        yield report
    finally:
        done.set()
        writer.join()


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Go on after the reader of standard output, such as `head`, has closed its pipe."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


def launched() -> bool:
    """Return True if a launcher such as `torchrun` has started this process as one of several."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
