"""Helpers that commands share: progress, console width, a pager, broken pipes, ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..report.tokens import LookError

SEEDS = 2**63 - 1  # the largest seed of PyTorch's generators
STOPPED = 130  # the exit code of a program that Ctrl-C ended

WIDTH = 120
"""The number of columns if standard output is not a terminal."""

TIMEOUT = 600.0
"""Seconds to wait for other ranks; long, because the first step may compile."""

Quiet = Annotated[bool, typer.Option("--quiet", help="Hide progress and notes.")]


def console() -> Console:
    """Return a console on standard output, as wide as the terminal or `COLUMNS`, else `WIDTH`.

    `NO_COLOR` turns colors off.
    """
    known = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if known else WIDTH)


@contextlib.contextmanager
def paged(console: Console, lines: int) -> Iterator[None]:
    """Show text printed inside the block in a pager if `lines` reaches the terminal's height.

    The pager is `PAGER`, usually `less`, which leaves short texts on the screen.
    """
    if not console.is_terminal or lines < console.height:
        yield
        return
    os.environ.setdefault("LESS", "-FRX")
    with console.pager(styles=not console.no_color):
        yield


@contextlib.contextmanager
def bar(doing: str, *, drawn: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on standard error if it is a terminal.

    Yields a function that takes the current task and its completed fraction.
    """
    errors = Console(stderr=True)
    if not drawn or not errors.is_terminal:
        yield lambda doing, share: None
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
def ignore_broken_pipe() -> Iterator[None]:
    """Continue after the reader of standard output, such as `head`, has closed its pipe."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)


DTYPES = ("float32", "float16", "bfloat16", "float64")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of `--dtype`, or raise `LookError`."""
    if name not in DTYPES:
        raise LookError(f"--dtype must be one of {', '.join(DTYPES)}, got {name}")
    return getattr(torch, name)


def device_of(name: str) -> str:
    """Return the device of `--device`, or raise `LookError` if it is not available."""
    if name not in ("cpu", "cuda") or (name == "cuda" and not torch.cuda.is_available()):
        there = "cpu or cuda" if torch.cuda.is_available() else "cpu (CUDA is not available)"
        raise LookError(f"--device must be {there}, got {name}")
    return name


def launched() -> bool:
    """Return True if a launcher such as `torchrun` started this process as one of several."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return all(name in os.environ for name in names) and int(os.environ["WORLD_SIZE"]) > 1
