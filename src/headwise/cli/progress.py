"""What `headwise train` shows on the terminal, and how it takes Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .._text import escaped
from ..models.train import Progress, Summary


@contextlib.contextmanager
def until_interrupted() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into an answer; a second one ends the program at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


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


@contextlib.contextmanager
def training_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar on standard error, and a line for every measurement on held-out text."""
    console = Console(stderr=True)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None, loss=float("nan"), speed=0.0)

        def report(now: Progress) -> None:
            bar.update(
                task,
                total=now.steps,
                completed=now.step,
                loss=now.loss,
                speed=now.tokens_per_second,
            )
            if now.held_out is not None:
                console.print(
                    f"step {now.step:,} of {now.steps:,}: loss {now.loss:.3f}, "
                    f"held-out {now.held_out:.3f}, {now.tokens_per_second:,.0f} tokens/s, "
                    f"{_duration(now.seconds_left)} left",
                    highlight=False,
                    soft_wrap=True,
                )

        yield report


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def told(summary: Summary) -> str:
    """The summary for people."""
    return "\n".join(
        (
            f"text       {escaped(summary.source)}",
            f"           {summary.held_out_rule}",
            f"held-out   {summary.held_out_loss:.3f} nats a token "
            f"({summary.held_out_bits_per_byte:.2f} bits a byte); "
            f"bigram {summary.bigram_loss:.3f}, unigram {summary.unigram_loss:.3f}",
            f"repeats    first copy {summary.repeats_first_loss:.2f}, "
            f"second copy {summary.repeats_second_loss:.2f}",
            f"model      {escaped(summary.folder)}: {summary.parameters:,} parameters, "
            f"step {summary.step:,} of {summary.steps:,}",
        )
    )
