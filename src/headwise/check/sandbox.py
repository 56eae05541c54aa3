"""Run a user's code in a separate process, with limits on time and memory.

The limits guard against accidents (an endless loop, an `exit()`, too much memory) but are not a
security boundary: the code runs with the rights of the user, like any Python file. Its environment
contains no secrets, and its home directory is empty.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import re
import resource
import signal
import site
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
PRINTED_BYTES = 4096  # the part of the printed output that is reported
FILE_BYTES = 64 * 2**20  # the size limit of each file that the code writes
START = 120.0  # seconds to import torch on a busy machine, before the clock starts
GRACE = 2.0  # seconds to report the current line after a timeout
OUT_OF_MEMORY = 77

Ending = Literal["done", "time", "memory", "exit", "signal"]
Report = Callable[[float], object]
Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Limits:
    """Limits on the run time in seconds, from the start of the job, and on memory in GiB.

    Raises:
        ValueError: a limit is not positive.
    """

    seconds: float = 60.0
    memory: float = 4.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}")


@dataclass
class Outcome:
    """The outcome of a run.

    `code` is the exit status or the signal number; `stack` is the call stack at the timeout, from
    `faulthandler`; `printed` is the beginning of the printed output.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    ended: Ending = "done"
    code: int = 0
    printed: str = ""
    stack: str = ""


def run(
    function: str,
    arguments: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    report: Report = lambda seconds: None,
) -> Outcome:
    """Call a function in a separate process.

    Args:
        function: `"module:name"`. It is called with `send`, which sends a dict as a JSON message,
            and with the arguments.
        report: called repeatedly with the number of seconds elapsed.

    Raises:
        ValueError: the operating system does not support these limits.

    >>> run("headwise.check.sandbox:_echo", {"text": "hello"}).messages
    [{'text': 'hello'}]
    """
    if os.name != "posix":
        raise ValueError(
            "headwise check FILE.py runs on Linux and macOS; here, call hw.check(…) in Python"
        )
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="headwise-", ignore_cleanup_errors=True) as name:
        box = Path(name)
        (box / "home").mkdir()
        job = {"function": function, "arguments": dict(arguments), "box": name, **vars(limits)}
        pid = _forked(job) if _may_fork() else _started(job)
        status, began = None, time.monotonic()
        try:
            while (
                status is None
                and (spent := time.monotonic() - began) < START + limits.seconds + GRACE
            ):
                report(spent)
                time.sleep(0.01)
                ended, code = os.waitpid(pid, os.WNOHANG)
                status = code if ended else None
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # with all processes that it started
            if status is None:
                status = os.waitpid(pid, 0)[1]
        return _sum_up(box, os.waitstatus_to_exitcode(status))


def _echo(send: Send, text: str) -> None:
    send({"text": text})


def _may_fork() -> bool:
    """Return True if a fork of this process can do the job, which saves another import of torch:
    that is, in the command itself, on Linux, before it has a second thread."""
    called = Path(sys.argv[0])
    command = called.name == "headwise" or called.parts[-2:] == ("headwise", "__main__.py")
    alone = sys.platform == "linux" and threading.active_count() == 1
    return command and alone and "torch" in sys.modules


def _forked(job: dict[str, Any]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            own = environment(os.environ, Path(job["box"], "home"))
            os.environ.clear()
            os.environ.update(own)
            tempfile.tempdir = None
            sys.path[:] = sys.path[1 - sys.flags.safe_path :]  # without the command's own folder
            with contextlib.suppress(ValueError):
                sys.modules["torch"].set_num_threads(int(own["OMP_NUM_THREADS"].partition(",")[0]))
            work(job)
        finally:
            os._exit(1)
    return pid


def _started(job: dict[str, Any]) -> int:
    code = f"from {__name__} import work; import json, sys; work(json.loads(sys.argv[1]))"
    with open(Path(job["box"], "printed"), "ab") as printed:
        process = subprocess.Popen(
            [sys.executable, "-u", "-P", "-c", code, json.dumps(job)],
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment(os.environ, Path(job["box"], "home")),
        )
    process.returncode = 0  # run() waits for its pid instead
    return process.pid


PASSED_ON = re.compile(
    r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM|PYTHON(PATH|HOME|HASHSEED|UTF8)|VIRTUAL_ENV|CONDA_PREFIX|"
    r"(LD|DYLD)_\w+|CUDA_\w+|(OMP|MKL|OPENBLAS)_\w+|ATEN_CPU_CAPABILITY|SSL_CERT_(FILE|DIR)|"
    r"(HF|TRANSFORMERS)_(HUB_)?OFFLINE|HF_HUB_CACHE|TORCH_HOME|PYTHONUSERBASE|"
    r"(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|MODULAR_(HOME|CACHE_DIR|DERIVED_PATH)|HEADWISE_\w+"
)
"""Environment variables that are passed on: paths of programs and libraries, the language, settings
of numerical libraries and of torchrun. Tokens, keys and agents' sockets are not passed on."""


def environment(given: Mapping[str, str], home: Path) -> dict[str, str]:
    """Return the environment for the code.

    >>> own = environment({"PATH": "/bin", "LC_ALL": "C", "HF_TOKEN": "secret"}, Path("/tmp/home"))
    >>> own["PATH"], own["LC_ALL"], own["HOME"], "HF_TOKEN" in own
    ('/bin', 'C', '/tmp/home', False)
    """
    caches = Path.home() / ".cache"
    usual = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUSERBASE": site.getuserbase(),
        "HF_HUB_CACHE": str(Path(given.get("HF_HOME", caches / "huggingface"), "hub")),
        "TORCH_HOME": str(caches / "torch"),
    }
    own = {name: value for name, value in given.items() if PASSED_ON.fullmatch(name)}
    return {**usual, **own, "HOME": str(home), "TMPDIR": str(home)}


def work(job: dict[str, Any]) -> None:
    """Run the job in this process, then call `os._exit`, even if threads are still running."""
    box, append = Path(job["box"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    printed, channel, trace = (
        os.open(box / name, append, 0o600) for name in ("printed", "messages", "trace")
    )
    for stream in (1, 2):
        os.dup2(printed, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # input() reads end of file
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    write, leave, dumps = os.write, os._exit, json.dumps

    def send(message: dict[str, Any]) -> None:
        write(channel, f"{dumps(message)}\n".encode())

    for kind, value in (
        ("DATA", int(job["memory"] * GIB) + _held()),
        ("FSIZE", FILE_BYTES),
        ("CORE", 0),
    ):
        with contextlib.suppress(ValueError, OSError, AttributeError):
            which = getattr(resource, f"RLIMIT_{kind}")
            resource.setrlimit(which, (value, resource.getrlimit(which)[1]))
    sys.dont_write_bytecode = True  # write nothing next to the user's files
    faulthandler.dump_traceback_later(job["seconds"], exit=True, file=trace)
    try:
        function(send, **job["arguments"])
    except MemoryError:
        leave(OUT_OF_MEMORY)
    except SystemExit as error:
        leave(error.code if isinstance(error.code, int) else int(error.code is not None))
    send({"end": True})
    leave(0)


def _held() -> int:
    """Return the memory that this process already uses, in bytes."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    return 0


def _sum_up(box: Path, code: int) -> Outcome:
    """Return the outcome of a run from the files in its directory."""
    sent, trace, printed = (
        (box / name).read_bytes() if (box / name).exists() else b""
        for name in ("messages", "trace", "printed")
    )
    messages = [json.loads(line) for line in sent.splitlines() if line]
    outcome = Outcome(messages, printed=printed[:PRINTED_BYTES].decode(errors="replace"))
    stacks = trace.decode(errors="replace")
    if messages and messages[-1] == {"end": True}:
        outcome.messages = messages[:-1]
    elif stacks.startswith("Timeout"):
        outcome.ended = "time"
        outcome.stack = stacks.partition("(most recent call first)")[2].partition("\nThread ")[0]
    elif code < 0:
        outcome.ended, outcome.code = "time" if code == -signal.SIGKILL else "signal", -code
    else:
        outcome.ended, outcome.code = "memory" if code == OUT_OF_MEMORY else "exit", code
    return outcome
