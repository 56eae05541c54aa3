"""What commands share: progress, one width, a pager, a pipe whose reader may leave, numbers."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SEEDS = 2**63 - 1  # the largest that PyTorch's generators take
STOPPED = 130  # what shells give for a program that Ctrl-C ended


WIDTH = 120
"""The columns of what is printed where there is no terminal to ask."""

FIRST_LINE, NEXT_LINES = 2.0, 10.0
"""After how many seconds a log gets its first line of progress, and its next ones."""

Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no remarks.")]


def console() -> Console:
    """Standard output, `WIDTH` wide where it is no terminal. `NO_COLOR` takes its colours."""
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
    """Progress on standard error, for each thing that is done in turn: a bar in a terminal, and
    elsewhere a line now and then."""
    errors = Console(stderr=True)
    if not drawn:
        yield _nothing
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


def _nothing(doing: str, share: float) -> None:
    """Report nothing."""


@contextlib.contextmanager
def _lines(doing: str) -> Iterator[Callable[[str, float], None]]:
    """A line of progress after `FIRST_LINE` seconds, and every `NEXT_LINES` from then on.

    A thread writes them, so that there are some while one long step is done.
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


class _Unread:
    """Standard output whose reader may leave: then what is written is dropped."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self._stream.fileno())
        os.close(nothing)


@contextlib.contextmanager
def read_or_not() -> Iterator[None]:
    """Let a command go on when the reader of its pipe, `head` say, has had enough.

    For commands whose exit code is an answer.
    """
    before = sys.stdout
    sys.stdout = _Unread(before)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = before
