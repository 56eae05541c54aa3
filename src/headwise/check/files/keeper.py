"""The sandbox's own side: a keeper, and under it the process that does the job.

`sandbox.run` starts this file as a script, or calls `keep` in a copy of itself. The keeper becomes
the subreaper of its descendants: one that makes a session of its own, or whose parent has ended, is
still found under it, counted, and ended with it. The keeper ends when the job does, when a limit is
passed, or when the process that asked for the job is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

START = 120.0  # seconds to import torch on a busy machine, before the clock starts
GRACE = 2.0  # seconds in which the job says where it is, once its time is over
TICK = 0.05
OUT_OF_MEMORY = 77
PAGE = os.sysconf("SC_PAGE_SIZE")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def keep(job: dict[str, Any] | None = None) -> None:
    """Run the job, or the one that stands on standard input, and write how it ended to `ended`."""
    job = job or json.loads(sys.stdin.readline())
    assert job is not None
    box = Path(job["box"])
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)  # input() finds the end, not the job
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    _ask_system(PR_SET_CHILD_SUBREAPER, 1)
    _ask_system(PR_SET_PDEATHSIG, signal.SIGTERM)
    worker = os.fork()
    if worker == 0:
        work(job, box)
    try:
        ended = _watch(worker, job, box)
        (box / "ended").write_text(json.dumps(ended))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_all(worker)
        if os.getppid() != job["parent"]:  # nobody else is left to do it
            shutil.rmtree(box, ignore_errors=True)


def _watch(worker: int, job: dict[str, Any], box: Path) -> tuple[str, int]:
    """Wait for the worker or a passed limit: how it ended, and the code."""
    began, ready, next_look, held = time.monotonic(), None, 0.0, 0
    while True:
        now = time.monotonic()
        status = (_reaped() or {}).get(worker)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return ("signal", -code) if code < 0 else ("exit", code)
        over = began + START if ready is None else ready + job["seconds"] + GRACE
        if now > over or os.getppid() != job["parent"]:
            return "time", 0
        if sum(_size(box / name) for name in ("messages", "trace", "printed")) > job["output"]:
            return "output", 0
        if now >= next_look:
            found = descendants()
            if len(found) > job["processes"]:
                return "processes", 0
            if ready is None:
                held = max(found.values(), default=0)
            # A fork shares what the worker held when it began.
            elif sum(each - held for each in found.values()) > job["memory"]:
                return "memory", 0
            if written([os.getpid(), *found]) > job["disk"]:
                return "disk", 0
            next_look = time.monotonic() + max(TICK, 10 * (time.monotonic() - now))
        if ready is None and _size(box / "messages"):
            ready = time.monotonic()
        time.sleep(TICK)


def _reaped() -> dict[int, int] | None:
    """The statuses of all that have ended; None where nobody is left."""
    found: dict[int, int] = {}
    try:
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found[one[0]] = one[1]
    except ChildProcessError:
        return found or None
    return found


def _end_all(worker: int) -> None:
    """End all descendants; one may start another while we look, so until there is none."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        for pid in (*descendants(), -worker):  # the group, where the system shows no processes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if _reaped() is None:
            return
        time.sleep(TICK / 5)


def descendants() -> dict[int, int]:
    """The bytes that each process below this one holds, whatever its session or group."""
    parents, held = {}, {}
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            with contextlib.suppress(OSError):
                # pid (name) state parent …; the name may hold anything
                words = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()
                parents[int(entry)], held[int(entry)] = int(words[1]), int(words[21]) * PAGE
    found, newest = set[int](), {os.getpid()}
    while newest:
        newest = {pid for pid, parent in parents.items() if parent in newest}
        found |= newest
    return {pid: held[pid] for pid in found}


def written(processes: list[int]) -> int:
    """Bytes that processes wrote, wherever to, with those that they have outlived."""
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            rows = Path("/proc", str(pid), "io").read_text().splitlines()
            counts = dict(row.split(": ") for row in rows)
            # By calls, or by pages of a mapped file.
            total += max(int(counts["wchar"]), int(counts["write_bytes"]))
    return total


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _ask_system(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def work(job: dict[str, Any], box: Path) -> None:
    """Do the job, then leave without a look back.

    `os._exit` passes over what the code hung into the interpreter's end, and threads that run on.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    _ask_system(PR_SET_PDEATHSIG, signal.SIGKILL)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    channel, trace = (os.open(box / name, append, 0o600) for name in ("messages", "trace"))
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    write, exit_now, dumps, pid = os.write, os._exit, json.dumps, os.getpid()
    token = job["token"]

    def say(kind: str, message: Any = None) -> None:
        if os.getpid() != pid:  # a copy of us, made by a fork, that has come back
            exit_now(0)
        line = f"{token} {dumps([kind, message])}\n".encode()
        while line:
            line = line[write(channel, line) :]

    _set_limits(job)
    sys.dont_write_bytecode = True  # nothing appears beside the user's files
    faulthandler.dump_traceback_later(job["seconds"], exit=True, file=trace)
    say("ready", threading.get_ident())
    try:
        function(lambda message: say("message", message), **job["arguments"])
    except MemoryError:
        exit_now(OUT_OF_MEMORY)
    except SystemExit as error:
        exit_now(error.code if isinstance(error.code, int) else int(error.code is not None))
    say("end")
    exit_now(0)


def _set_limits(job: dict[str, Any]) -> None:
    """Limits that the system keeps."""
    import resource

    cpu = int(START + job["seconds"]) * (os.cpu_count() or 1)
    wanted = {"DATA": job["memory"], "CPU": cpu, "FSIZE": job["disk"], "CORE": 0}
    for name, value in wanted.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (least, least))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would raise an OSError, for the code


if __name__ == "__main__":
    keep()
