"""What commands share: a bar, a pipe whose reader may leave, numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SEEDS = 2**63 - 1  # the largest that PyTorch's generators take
STOPPED = 130  # what shells give for a program that Ctrl-C ended


def console() -> Console:
    """Standard output, 120 wide where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 120)


@contextlib.contextmanager
def bar(doing: str, *, drawn: bool = True) -> Iterator[Callable[[str, float], None]]:
    """A bar on standard error, for each thing that is done in turn."""
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    hidden = not (drawn and errors.is_terminal)
    with Bar(*columns, console=errors, disable=hidden, transient=True) as shown:
        task = shown.add_task(doing, total=1.0)

        def report(doing: str, share: float) -> None:
            if shown.tasks[0].description != doing:
                shown.reset(task, description=doing)
            shown.update(task, completed=share)

        yield report


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
