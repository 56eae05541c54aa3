"""Processes of their own, forked from one that has PyTorch and headwise loaded.

A new Python takes seconds to import PyTorch; a fork of a server that has it takes none. It has no
hooks of the test run, such as shape checks, and nothing that a test has changed. What is asked of
an import itself, or of variables that one reads, needs a new Python still.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import Any

LOADED = ["headwise.check.steps", "headwise.cli", "torch._dynamo"]
SERVER = multiprocessing.get_context("forkserver")


def ready() -> None:
    """Start the server, in the folder of the test run."""
    SERVER.set_forkserver_preload(LOADED)  # no change once it has started
    forkserver.ensure_running()


def started(work: Callable[..., None], *arguments: object) -> Any:
    """A process that calls `work(*arguments)`."""
    ready()
    process = SERVER.Process(target=work, args=arguments)
    process.start()
    return process


def begun(folder: Path, code: str, *arguments: str) -> Any:
    """A process that runs `python -c code arguments…` and prints to `out` and `err` in a folder."""
    return started(_code, str(folder), os.getcwd(), code, arguments)


def run(code: str, *arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """What `python -c code arguments…` prints, and how it ends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        process = begun(folder, code, *arguments)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, seconds)
        texts = [(folder / file).read_text() for file in ("out", "err")]
        return subprocess.CompletedProcess(code, process.exitcode, *texts)


def _print_to(*files: str) -> None:
    """Let what is printed go to these files, also by other programs."""
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115


def _code(folder: str, here: str, code: str, arguments: tuple[str, ...]) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(here)
    _print_to(f"{folder}/out", f"{folder}/err")
    sys.argv = ["-c", *arguments]
    status = 1
    try:
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(main))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


SANDBOXED: dict[int, Any] = {}


def sandboxed(job: dict[str, Any]) -> int:
    """Do a job of the checker's sandbox in a fork; return its number."""
    from headwise.check.sandbox import environment

    told = environment(os.environ, Path(job["box"], "home"))
    process = started(_work, os.getcwd(), job, told)
    SANDBOXED[process.pid] = process
    return process.pid


class System:
    """The module `os` as the sandbox sees it: it can wait for the server's children, too."""

    def __init__(self, system: ModuleType) -> None:
        self._system = system

    def __getattr__(self, name: str) -> Any:
        return getattr(self._system, name)

    def waitpid(self, pid: int, options: int) -> tuple[int, int]:
        process = SANDBOXED[pid]
        process.join(0 if options else None)
        code = process.exitcode
        if code is None:
            return 0, 0
        return pid, -code if code < 0 else code << 8


def _work(here: str, job: dict[str, Any], told: dict[str, str]) -> None:
    from headwise.check.sandbox import work

    os.setsid()
    os.chdir(here)
    os.closerange(3, 256)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(told)
    tempfile.tempdir = None
    work(job)
