"""Code that somebody else wrote, run in a process of its own, with limits.

`run("module:function", arguments)` calls that function in a fresh Python and gives back what it
reported, and how it ended. Whatever the code does in there, the caller lives: time, memory, printed
text and processes are limited, and all that it started is ended with it.

It guards against accidents (an endless loop, an `exit()`, a fork without an end), not against
malice: the code runs with the user's own rights, like any file that is run with Python.

    parent: run()  --stdin: the job-->  child: child()
                   <--a pipe: lines "token {json}"--   what the function reports
                   <--a pipe: faulthandler--           where the code was when time ran out
                   <--stdout, stderr--                 what the code prints, kept short
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import re
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

GIB = 2**30
KEPT = 4096  # bytes of what the code prints that are kept
START = 120.0  # seconds to import torch on a busy machine, before the clock starts
TICK = 0.05
STACK = 30  # calls that are told of

# What may happen: it came to its end, went over a limit, or ended itself (an exit, a signal).
Ending = Literal["done", "time", "memory", "output", "processes", "exit", "signal"]


@dataclass(frozen=True)
class Limits:
    """Seconds from the moment the child is ready, GiB, bytes printed, processes at once."""

    seconds: float = 60.0
    memory: float = 4.0
    output: int = 16_000_000
    processes: int = 32

    def __post_init__(self) -> None:
        for name in ("seconds", "memory", "output", "processes"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Limits({name}={getattr(self, name)}): {name} must be over 0")


@dataclass(frozen=True)
class Place:
    """A line of code that was being run."""

    file: str
    line: int
    function: str


@dataclass
class Run:
    """What came of a run.

    `code` is the exit status, or the signal's number; `where` is the stack when time ran out, the
    innermost call first; `printed` is the beginning of what was printed, `printed_bytes` all of it.
    """

    messages: list[Any] = field(default_factory=list)
    ended: Ending = "done"
    code: int = 0
    seconds: float = 0.0
    printed: str = ""
    printed_bytes: int = 0
    where: list[Place] = field(default_factory=list)


def run(
    function: str,
    arguments: Mapping[str, Any],
    limits: Limits | None = None,
    *,
    report: Callable[[float], object] = lambda seconds: None,
) -> Run:
    """Call a function in a process of its own.

    Args:
        function: `"module:name"`. It is called with `send`, which takes anything JSON can hold and
            makes it a message, and with the arguments.
        arguments: for JSON too.
        report: told now and then how many seconds it has run.

    Raises:
        ValueError: the system is not one that can limit processes so.

    >>> run("headwise.check.sandbox:_echo", {"text": "hello"}).messages
    ['hello']
    """
    if os.name != "posix":
        raise ValueError(
            "headwise check FILE.py runs on Linux and macOS; here, call hw.check(…) in Python, "
            "which has no limits"
        )
    return _Watch(function, arguments, limits or Limits(), report).run()


def _echo(send: Callable[[Any], None], text: str) -> None:
    send(text)


class _Watch:
    """The parent's side of one run."""

    def __init__(
        self,
        function: str,
        arguments: Mapping[str, Any],
        limits: Limits,
        report: Callable[[float], object],
    ) -> None:
        self.limits, self.report = limits, report
        self.token = secrets.token_hex(16)
        self.job = {"function": function, "arguments": dict(arguments), "token": self.token}
        self.job["memory"] = int(limits.memory * GIB)
        self.job["cpu"] = int(START + limits.seconds) * (os.cpu_count() or 1)
        self.result = Run()
        self.text = {"messages": b"", "trace": b"", "printed": b""}
        self.ready: float | None = None
        self.held = 0  # bytes of memory, when it was ready
        self.taken = 0  # bytes, from all pipes
        self.finished = False

    def run(self) -> Run:
        messages, trace = os.pipe(), os.pipe()
        self.job |= {"messages": messages[1], "trace": trace[1]}
        command = "from headwise.check.sandbox import child; child()"
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(messages[1], trace[1]),
                start_new_session=True,
                env={"OMP_NUM_THREADS": "1", **os.environ, MARK: self.token},
            )
        finally:
            os.close(messages[1])
            os.close(trace[1])
        assert process.stdout is not None
        pipes = {"messages": messages[0], "trace": trace[0], "printed": process.stdout.fileno()}
        try:
            self._follow(process, pipes)
            _end(process, self.token)
            for name, fd in pipes.items():
                while self._read(fd, name):  # what is left in the pipes
                    pass
        finally:
            _end(process, self.token)
            os.close(messages[0])
            os.close(trace[0])
            process.stdout.close()
        self._sum_up(process.returncode)
        return self.result

    def _follow(self, process: subprocess.Popen[bytes], pipes: dict[str, int]) -> None:
        """Read all pipes until the child has ended or a limit is passed."""
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(self.job).encode() + b"\n")
            process.stdin.close()
        began, next_look = time.monotonic(), 0.0
        with selectors.DefaultSelector() as selector:
            for name, fd in pipes.items():
                os.set_blocking(fd, False)
                selector.register(fd, selectors.EVENT_READ, name)
            while process.poll() is None and self.result.ended == "done":
                for key, _ in selector.select(TICK):
                    if self._read(key.fd, key.data) is False:
                        selector.unregister(key.fd)
                now = time.monotonic()
                self.result.seconds = now - (self.ready or began)
                self.report(self.result.seconds)
                if self.ready is None:
                    over = now - began > START
                else:
                    over = self.result.seconds > self.limits.seconds
                if over:
                    self._out_of_time(process, pipes["trace"])
                elif now >= next_look:
                    self._look_at_processes(process.pid)
                    next_look = time.monotonic() + max(TICK, 10 * (time.monotonic() - now))

    def _read(self, fd: int, name: str) -> bool | None:
        """Take what a pipe holds: False at its end, None where there is nothing now."""
        try:
            piece = os.read(fd, 65_536)
        except BlockingIOError:
            return None
        self.taken += len(piece)
        if self.taken > self.limits.output and self.result.ended == "done":
            self.result.ended = "output"
        if name == "printed":
            self.result.printed_bytes += len(piece)
            self.text[name] += piece[: KEPT - len(self.text[name])]
        elif name == "messages":
            *lines, self.text[name] = (self.text[name] + piece).split(b"\n")
            for line in lines:
                self._take(line)
        else:
            self.text[name] += piece
        return bool(piece)

    def _take(self, line: bytes) -> None:
        """A line on the pipe; without the token it is not from us."""
        token, _, text = line.partition(b" ")
        if token != self.token.encode():
            return
        try:
            kind, message = json.loads(text)
        except ValueError:  # somebody else wrote in between
            return
        if kind == "ready":
            self.ready = time.monotonic()
        elif kind == "end":
            self.finished = True
        else:
            self.result.messages.append(message)

    def _out_of_time(self, process: subprocess.Popen[bytes], trace: int) -> None:
        """Ask where the code is, wait a little for the answer."""
        self.result.ended = "time"
        if self.ready is None:  # its handler is not there yet
            return
        process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            length = len(self.text["trace"])
            time.sleep(TICK)
            self._read(trace, "trace")
            if 0 < length == len(self.text["trace"]):
                return

    def _look_at_processes(self, session: int) -> None:
        found = _session(session)
        if len(found) > self.limits.processes:
            self.result.ended = "processes"
        elif self.ready is None:
            self.held = max(found.values(), default=0)
        # A fork shares what the child held when it began.
        elif sum(held - self.held for held in found.values()) > self.limits.memory * GIB:
            self.result.ended = "memory"

    def _sum_up(self, returncode: int) -> None:
        result = self.result
        result.printed = self.text["printed"].decode(errors="replace")
        trace = self.text["trace"].decode(errors="replace")
        found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', trace, re.MULTILINE)
        result.where = [Place(file, int(line), name) for file, line, name in found[:STACK]]
        if result.ended != "done" or self.finished:
            return
        result.ended, result.code = (
            ("signal", -returncode) if returncode < 0 else ("exit", returncode)
        )
        if result.code == OUT_OF_MEMORY and result.ended == "exit":
            result.ended = "memory"


# --- processes ------------------------------------------------------------------------------------

MARK = "HEADWISE_CHECK"  # in the environment of the child, and so of all that it starts


def _session(session: int) -> dict[int, int]:
    """The processes of a session and the bytes each holds, dead ones not yet fetched included."""
    found = {}
    for pid, text in _read_proc("stat"):
        # pid (name) state parent group session …; the name may hold anything
        words = text.rpartition(b")")[2].split()
        if len(words) > 21 and int(words[3]) == session:
            found[pid] = int(words[21]) * PAGE
    return found


def _marked(token: str) -> list[int]:
    mark = f"{MARK}={token}".encode()
    return [pid for pid, text in _read_proc("environ") if mark in text.split(b"\0")]


def _read_proc(name: str) -> Iterator[tuple[int, bytes]]:
    """That file of every process; nothing where the system has none."""
    try:
        entries = os.listdir("/proc")
    except OSError:
        return
    for entry in entries:
        if entry.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry), Path("/proc", entry, name).read_bytes()


PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _end(process: subprocess.Popen[bytes], token: str) -> None:
    """End the child and all that it started, those that left its session too."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for _ in range(10):  # one may start another while we look
        left = _marked(token)
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(TICK)


# --- the child ------------------------------------------------------------------------------------

OUT_OF_MEMORY = 77


def child() -> None:
    """Do the job that stands on standard input, then leave without a look back.

    `os._exit` passes over what the code hung into the interpreter's end, and threads that run on.
    """
    job = json.loads(sys.stdin.buffer.readline())
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)  # input() finds the end, not the job
    os.close(null)
    for fd in (job["messages"], job["trace"]):
        os.set_inheritable(fd, False)
    module, _, name = job["function"].partition(":")
    function = getattr(importlib.import_module(module), name)
    write, exit_now, dumps, pid = os.write, os._exit, json.dumps, os.getpid()
    token, channel = job["token"], job["messages"]

    def say(kind: str, message: Any = None) -> None:
        if os.getpid() != pid:  # a copy of us, made by a fork, that has come back
            exit_now(0)
        line = f"{token} {dumps([kind, message])}\n".encode()
        while line:
            line = line[write(channel, line) :]

    _set_limits(job["memory"], job["cpu"])
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=job["trace"], all_threads=False)
    sys.dont_write_bytecode = True  # nothing appears beside the user's files
    say("ready")
    try:
        function(lambda message: say("message", message), **job["arguments"])
    except MemoryError:
        exit_now(OUT_OF_MEMORY)
    except SystemExit as error:
        exit_now(error.code if isinstance(error.code, int) else int(error.code is not None))
    say("end")
    exit_now(0)


def _set_limits(memory: int, cpu: int) -> None:
    """Limits that the system keeps, should the parent be gone."""
    try:
        import resource
    except ImportError:  # Windows
        return
    wanted = {"RLIMIT_DATA": memory, "RLIMIT_CPU": cpu, "RLIMIT_FSIZE": GIB, "RLIMIT_CORE": 0}
    for name, value in wanted.items():
        with contextlib.suppress(ValueError, OSError, AttributeError):
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            least = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (least, least))
    if sys.platform == "linux":
        die_with_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGKILL)
