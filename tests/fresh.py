"""Processes of their own, forked from one that has PyTorch and headwise loaded.

A new Python takes seconds to import PyTorch; a fork of a server that has it takes none. It has no
hooks of the test run, such as shape checks, and nothing that a test has changed. What is asked of
an import itself, or of variables that one reads, needs a new Python still.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType
from typing import IO, Any

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


class Keeper:
    """Stands where the checker's sandbox starts `keeper.py` in a new Python: it runs in a fork."""

    def __init__(
        self, command: list[str], *, stdout: IO[bytes], env: Mapping[str, str], **_: object
    ) -> None:
        assert command[-1].endswith("keeper.py")
        self.stdin = Job(lambda job: self._start(job, str(stdout.name), dict(env)))

    def _start(self, *given: object) -> None:
        self._process = started(_keep, os.getcwd(), *given)

    def poll(self) -> int | None:
        return self._process.exitcode

    def terminate(self) -> None:
        self._process.terminate()


class Job(io.BytesIO):
    """A pipe whose reader is started when all has been written."""

    def __init__(self, start: Callable[[bytes], None]) -> None:
        super().__init__()
        self._start = start

    def close(self) -> None:
        if not self.closed:
            self._start(self.getvalue())
        super().close()


def _keep(here: str, job: bytes, printed: str, env: dict[str, str]) -> None:
    from headwise.check.files import keeper

    os.setsid()
    os.chdir(here)
    os.closerange(3, 256)
    _print_to(printed, printed)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None
    sys.stdin = io.StringIO(json.dumps(json.loads(job) | {"parent": os.getppid()}))
    keeper.keep()
    os._exit(0)
