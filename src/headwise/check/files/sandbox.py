"""Code that somebody else wrote, run in a process of its own, with limits.

`run("module:function", arguments)` calls that function in a process of its own and gives back what
it reported, and how it ended. Whatever the code does in there, the caller lives: time, memory,
written and printed bytes and processes are limited, and all that it started is ended with it.

It guards against accidents (an endless loop, an `exit()`, a fork without an end), not against
malice: the code runs with the user's own rights, like any file that is run with Python. It gets
none of the user's secrets by its environment, and an empty home of its own.

    run()  --stdin: the job-->  keeper.py  --fork-->  the job
           <--files in a private folder: `messages` that the function reports, `trace` by
              faulthandler when time ran out, what is `printed`, and how it `ended`--
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import multiprocessing
import os
import re
import secrets
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, Literal

from .keeper import GRACE, OUT_OF_MEMORY, START, TICK, keep

GIB = 2**30
KEPT = 4096  # bytes of what the code prints that are kept

# What may happen: it came to its end, went over a limit, or ended itself (an exit, a signal).
Ending = Literal["done", "time", "memory", "output", "disk", "processes", "exit", "signal"]


@dataclass(frozen=True)
class Limits:
    """Seconds from the moment the job is ready, GiB held, bytes printed, processes at once, and
    GiB written to files."""

    seconds: float = 60.0
    memory: float = 4.0
    output: int = 16_000_000
    processes: int = 32
    disk: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"Limits({name}={value}): {name} must be over 0")


@dataclass
class Outcome:
    """What came of a run.

    `code` is the exit status, or the signal's number; `stack` is what was being run when time was
    over, as `faulthandler` writes it, the innermost call first; `printed` is the beginning of what
    was printed, `printed_bytes` all of it.
    """

    messages: list[Any] = field(default_factory=list)
    ended: Ending = "done"
    code: int = 0
    printed: str = ""
    printed_bytes: int = 0
    stack: str = ""


def run(
    function: str,
    arguments: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    report: Callable[[float], object] = lambda seconds: None,
) -> Outcome:
    """Call a function in a process of its own.

    Args:
        function: `"module:name"`. It is called with `send`, which takes anything JSON can hold and
            makes it a message, and with the arguments.
        arguments: for JSON too.
        report: told now and then how many seconds it has run.

    Raises:
        ValueError: the system is not one that can limit processes so.

    >>> run("headwise.check.files.sandbox:_echo", {"text": "hello"}).messages
    ['hello']
    """
    if os.name != "posix":
        raise ValueError(
            "headwise check FILE.py runs on Linux and macOS; here, call hw.check(…) in Python, "
            "which has no limits"
        )
    limits = limits or Limits()
    job = {**vars(limits), "function": function, "arguments": dict(arguments)}
    job |= {name: int(getattr(limits, name) * GIB) for name in ("memory", "disk")}
    job |= {"token": secrets.token_hex(16), "parent": os.getpid()}
    with tempfile.TemporaryDirectory(prefix="headwise-", ignore_cleanup_errors=True) as name:
        box = Path(name)
        (box / "home").mkdir()
        code = _wait({**job, "box": name}, box, report)
        return _sum_up(box, job["token"], code)


def _echo(send: Callable[[Any], None], text: str) -> None:
    send(text)


def _wait(job: dict[str, Any], box: Path, report: Callable[[float], object]) -> int:
    """Start the keeper and wait for its end: its exit code."""
    told = environment(os.environ, box / "home")
    with (box / "printed").open("ab") as printed:
        began, seconds = time.monotonic(), 2 * START + job["seconds"] + GRACE
        process, code = (_forked if _may_fork() else _started)(job, printed, told)
    try:
        while code() is None and (spent := time.monotonic() - began) < seconds:
            report(spent)
            time.sleep(TICK / 5)
    finally:
        process.terminate()  # it ends all others first
        while (ended := code()) is None:
            time.sleep(TICK / 5)
    return ended


Started = tuple[subprocess.Popen[bytes] | BaseProcess, Callable[[], int | None]]


def _started(job: dict[str, Any], printed: IO[bytes], told: dict[str, str]) -> Started:
    """A fresh Python that runs the keeper, and what tells its exit code."""
    keeper = Path(__file__).with_name("keeper.py")
    process = subprocess.Popen(
        [sys.executable, "-u", "-P", str(keeper)],
        stdin=subprocess.PIPE,
        stdout=printed,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=told,
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(json.dumps(job).encode() + b"\n")
    return process, process.poll


def _may_fork() -> bool:
    """Whether a copy of this process may run the keeper, which saves another import of torch: the
    command itself, on Linux, before it has a second thread."""
    called = Path(sys.argv[0])
    command = called.name == "headwise" or called.parts[-2:] == ("headwise", "__main__.py")
    alone = sys.platform == "linux" and threading.active_count() == 1
    return command and alone and "torch" in sys.modules


def _forked(job: dict[str, Any], printed: IO[bytes], told: dict[str, str]) -> Started:
    """A copy of this process that runs the keeper, and what tells its exit code."""
    gc.freeze()  # what is there already is not looked through again
    fork = multiprocessing.get_context("fork")
    process = fork.Process(name="MainProcess", target=_keep, args=(job, printed.fileno(), told))
    process.start()
    return process, lambda: process.exitcode


def _keep(job: dict[str, Any], printed: int, told: dict[str, str]) -> None:
    """Run the keeper as a fresh Python would: in a session, with an environment and an output of
    its own."""
    os.setsid()
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    os.closerange(3, 256)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(io.FileIO(1, "w", False), write_through=True)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(io.FileIO(2, "w", False), write_through=True)
    os.environ.clear()
    os.environ.update(told)
    tempfile.tempdir = None
    sys.path[:] = sys.path[1 - sys.flags.safe_path :]  # without the command's own folder
    with contextlib.suppress(ValueError):  # "4,2" counts threads of two levels
        sys.modules["torch"].set_num_threads(int(told["OMP_NUM_THREADS"].partition(",")[0]))
    keep(job)


# What the code is told of the user's environment: where programs and libraries are, the language,
# what settles how numbers are computed, and what torchrun sets. No tokens, no keys, no sockets of
# agents.
TOLD = re.compile(
    r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM|PYTHON(PATH|HOME|HASHSEED|UTF8)|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(LD|DYLD)_\w+|CUDA_\w+|(OMP|MKL|OPENBLAS)_\w+|ATEN_CPU_CAPABILITY|SSL_CERT_(FILE|DIR)|"
    r"(HF|TRANSFORMERS)_(HUB_)?OFFLINE|HF_HUB_CACHE|TORCH_HOME|PYTHONUSERBASE|"
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|"
    r"MODULAR_(HOME|CACHE_DIR|DERIVED_PATH)|HEADWISE_\w+"
)


def environment(given: Mapping[str, str], home: Path) -> dict[str, str]:
    """What the code gets for an environment: nothing secret, and a home of its own.

    >>> given = {"PATH": "/bin", "LC_ALL": "C", "HF_TOKEN": "hf_secret"}
    >>> told = environment(given, Path("/tmp/home"))
    >>> told["PATH"], told["LC_ALL"], told["HOME"], "HF_TOKEN" in told
    ('/bin', 'C', '/tmp/home', False)
    """
    caches = Path.home() / ".cache"
    usual = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUSERBASE": site.getuserbase(),
        "HF_HUB_CACHE": str(Path(given.get("HF_HOME", caches / "huggingface"), "hub")),
        "TORCH_HOME": str(caches / "torch"),
    }
    told = {name: value for name, value in given.items() if TOLD.fullmatch(name)}
    return {**usual, **told, "HOME": str(home), "TMPDIR": str(home)}


def _sum_up(box: Path, token: str, code: int) -> Outcome:
    """What the files in the box say of a run."""
    files = ((box / name) for name in ("messages", "trace", "printed", "ended"))
    sent, trace, printed, ended = (f.read_bytes() if f.exists() else b"" for f in files)
    how, code = json.loads(ended) if ended else ("signal", -code)
    result = Outcome([], how, code, printed[:KEPT].decode(errors="replace"), len(printed))
    thread = 0
    for line in sent.split(b"\n"):
        sender, _, text = line.partition(b" ")
        if sender != token.encode():  # not from us
            continue
        with contextlib.suppress(ValueError):  # somebody else may have written in between
            kind, message = json.loads(text)
            if kind == "ready":
                thread = message
            elif kind == "message":
                result.messages.append(message)
            elif how == "exit":
                result.ended = "done"
    stacks = trace.decode(errors="replace")
    if stacks.startswith("Timeout"):
        result.ended, result.code = "time", 0
    elif how == "signal" and code == signal.SIGXFSZ:
        result.ended = "disk"
    elif result.ended == "exit" and code == OUT_OF_MEMORY:
        result.ended = "memory"
    ours = stacks.partition(f"Thread 0x{thread:016x}")[2]
    result.stack = ours.partition("\nThread ")[0]
    return result
