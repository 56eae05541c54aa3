"""Process groups of headwise's commands under `torchrun`: a timeout, a heartbeat, one last line.

Each rank writes into the store, at every step and from a thread of its own besides, that it lives
and how far it has come: the step, and the number of collectives begun. Rank 0 reads what all write,
the others what rank 0 does. A rank whose beats end is dead or stopped. The one with the fewest
collectives is the one that the others wait for: where it does not move, it hangs. One rank, the
first that asks the store, says so in one line; then all end.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from select import select
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch

from .._text import one_line
from ..capture.private_torch import collectives_begun

_T = TypeVar("_T")

_LOST, _INTERRUPTED, _TERMINATED = 1, 130, 143


@contextmanager
def joined(timeout: float, *, saves: bool = False) -> Iterator[Heartbeat]:
    """Join the group of all ranks that the launcher has started, and watch over it.

    When a rank is lost, or raises, all end: with exit code 1 and one line, or with what it raised.

    Args:
        timeout: seconds without progress after which a rank is given up.
        saves: SIGINT and SIGTERM are only noted (`asked`), for a command that then saves and ends.

    Raises:
        ValueError: a timeout that is no time; or not all ranks came.
    """
    from torch import cuda
    from torch import distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if not 0 < timeout < 1e6:
        raise ValueError(f"timeout={timeout:g}: must be seconds, above 0")
    most = timedelta(seconds=timeout)
    try:
        store, rank, size = next(rendezvous("env://", timeout=most))
    except dist.DistError as error:
        raise ValueError(f"not all ranks have come: {one_line(error)[:200]}") from None
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # what was before stays in the store
    store = PrefixStore(f"start {again}", store)
    heartbeat = Heartbeat(store, rank, size, timeout)
    heartbeat.begin(saves)
    _current.append(heartbeat)
    try:
        if there := cuda.device_count():
            cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % there)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if there else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=most,
        )
        yield heartbeat
        heartbeat.wait_for_all()
    except BaseException as error:
        heartbeat.failed(error)
    finally:
        _current.remove(heartbeat)
    heartbeat.end()
    dist.destroy_process_group()


_current: list[Heartbeat] = []


def current() -> Heartbeat | None:
    """The heartbeat of the group that this process has joined; `None` in groups of others."""
    return _current[-1] if _current else None


def from_first(make: Callable[[], _T]) -> _T:
    """Call the function on rank 0; all ranks get its result, or raise what it raised.

    Raises:
        ValueError, OSError: whatever the function raises of these.
    """
    from torch import distributed as dist

    sent: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            sent[0] = make()
        except (ValueError, OSError) as error:  # which others would wait for in vain
            sent[1] = error
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    if sent[1] is not None:
        raise sent[1]
    return sent[0]


@dataclass(frozen=True)
class _Beat:
    """What a rank writes: the number of this beat; how far it is, in collectives, in marks of its
    own and in words; and whether it `works`, `waits` for others or is `done`."""

    count: int
    begun: int
    marks: int
    does: str
    where: str

    def __str__(self) -> str:
        return f"{self.count} {self.begun} {self.marks} {self.does} {self.where}"

    @classmethod
    def of(cls, said: bytes) -> _Beat:
        count, begun, marks, does, where = said.decode().split(" ", 4)
        return cls(int(count), int(begun), int(marks), does, where)

    @property
    def progress(self) -> tuple[int, int]:
        return self.begun, self.marks


class Heartbeat:
    """Tells the store that this rank lives and how far it is; ends it when another is lost.

    A rank without a beat for half of the timeout, or without progress for three fifths of it, is
    lost; the rest of the timeout is for all to end.

    asked: whether a signal has asked for an end.

    Args:
        store: of the launcher; cloned, so that beats do not wait for what else uses it.
        timeout: in seconds.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: float) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self.rank, self.size, self.timeout = rank, size, timeout
        self.asked = False
        self._interval, self._stuck_after = min(2.0, timeout / 25), 0.6 * timeout
        self._patience = min(10.0, 0.3 * timeout)  # for signs of life once something is wrong
        self._store = PrefixStore("heartbeat", store.clone())
        self._count = self._marks = self._waits = 0
        self._does, self._where, self._going = "works", "the start", False
        self._seen: dict[int, tuple[_Beat, float, float]] = {}
        self._signals: dict[int, Any] = {}
        self._alarm = socket.socketpair()
        for end in self._alarm:
            end.setblocking(False)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headwise heartbeat", daemon=True)

    # ── what the main thread says ───────────────────────────────────────────────────────────────

    def at(self, where: str) -> None:
        """Say where this rank is: `"step 7"`. That is a message to the store, of 40 bytes or so."""
        self._where = where
        self._marks += 1
        self._write()

    def wait_for_all(self) -> None:
        """Wait until all ranks have come here, however long those work that move."""
        self._waits += 1
        name, self._does, pause = f"wait {self._waits}", "waits", 0.005
        self._store.add(name, 1)
        while int(self._store.add(name, 0)) < self.size:
            time.sleep(pause)
            pause = min(2 * pause, self._interval)
        self._does = "works"

    # ── begin and end ───────────────────────────────────────────────────────────────────────────

    def begin(self, saves: bool) -> None:
        """Wait for the other ranks, then watch.

        Raises:
            ValueError: not all came.
        """
        self._write()
        names = [f"rank {rank}" for rank in range(self.size)]
        try:
            self._store.wait(names, timedelta(seconds=self.timeout))
        except RuntimeError:
            late = [name for name in names if not self._store.check([name])]
            raise ValueError(f"not all ranks have come: {', '.join(late)} did not") from None
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(self._alarm[1].fileno(), warn_on_full_buffer=False)
            for number in (signal.SIGTERM, signal.SIGINT) if saves else (signal.SIGTERM,):
                self._signals[number] = signal.signal(number, self._note if saves else self._quit)
        self._thread.start()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def _quit(self, number: int, frame: FrameType | None) -> None:
        if not self._ending.is_set():
            raise SystemExit(_TERMINATED)

    def end(self) -> None:
        """Watch no more. The rank that may hold the store goes last."""
        self._stop()
        if self._signals:
            signal.set_wakeup_fd(-1)
        for number, handler in self._signals.items():
            signal.signal(number, handler)
        self._go(self.size, self.timeout)

    def failed(self, error: BaseException) -> NoReturn:
        """End this rank for what it raised: its own fault, or that of a rank which is lost.

        Raises:
            BaseException: the error itself, where no other rank is lost or has told of its own.
        """
        own = isinstance(error, ValueError | OSError | KeyboardInterrupt)
        if not own and (lost := self._who_is_lost()) is not None:
            self._tell_and_exit(lost, self.size - 1)
        code = _INTERRUPTED if isinstance(error, KeyboardInterrupt) else 2 if own else _LOST
        if isinstance(error, SystemExit):
            self._tell_and_exit(f"{self._name} was stopped at {self._where}; all ranks end")
        if not self._is_first():
            self._exit(code)
        self._stop()
        self._let_all_end(code, self.size)
        self._go(self.size)
        error.add_note(f"({self._name}, at {self._where})")
        raise error

    def _stop(self) -> None:
        """End the thread, and let others expect no more beats."""
        self._ending.set()
        self._alarm[1].send(b"0")
        self._thread.join(self.timeout)
        self._does = "done"
        with suppress(RuntimeError):
            self._write()

    def _go(self, ranks: int, at_most: float | None = None) -> None:
        """Say that this rank goes. Where its process holds the store, it is the last of so many."""
        with suppress(RuntimeError):
            first, self._going = not self._going, True
            gone = int(self._store.add("gone", int(first)))
            until = time.monotonic() + (self._patience if at_most is None else at_most)
            while self.rank == 0 and not _of_launcher() and gone < ranks:
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
                gone = int(self._store.add("gone", 0))

    def _let_all_end(self, code: int, ranks: int) -> None:
        with suppress(RuntimeError):
            self._store.set("over", f"{code} {ranks}")

    # ── the thread ──────────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._ending.is_set():
            told = bool(select([self._alarm[0]], [], [], self._interval)[0])
            if self._ending.is_set():
                return
            try:
                if told:  # by a launcher, perhaps, that ends the others of a rank which has died
                    self._alarm[0].recv(64)
                    if (lost := self._who_is_lost()) is not None:
                        self._tell_and_exit(lost, self.size - 1)
                self._write()
                self._leave_if_over()
                self._watch()
            except RuntimeError:
                if not self._ending.is_set():
                    self._store_is_gone()

    def _write(self) -> None:
        self._count += 1
        beat = _Beat(self._count, collectives_begun(), self._marks, self._does, self._where)
        self._store.set(f"rank {self.rank}", str(beat))

    def _read(self, ranks: Iterable[int]) -> dict[int, _Beat]:
        ranks = list(ranks)
        said = self._store.multi_get([f"rank {rank}" for rank in ranks])
        return {rank: _Beat.of(one) for rank, one in zip(ranks, said, strict=True)}

    def _watch(self) -> None:
        """Look whether rank 0 beats; on rank 0, whether all do, and whether the last one moves."""
        now, silent, behind = time.monotonic(), {}, {}
        for rank, beat in self._read(range(self.size) if self.rank == 0 else (0,)).items():
            before, beaten, moved = self._seen.get(rank, (None, now, now))
            if before is None or beat.count != before.count:
                beaten = now
            if before is None or beat.progress != before.progress or beat.does != "works":
                moved = now
            self._seen[rank] = beat, beaten, moved
            if beat.does != "done" and now - beaten > self.timeout / 2:
                silent[rank] = beat
            if beat.does == "works":
                behind[rank] = beat.progress
        if silent:
            rank, beat = min(silent.items())
            self._tell_and_exit(self._line(rank, "gives no sign of life", beat), self.size - 1)
        if self.rank == 0 and behind:  # the others wait for the one that is behind all
            beat, _, moved = self._seen[last := min(behind, key=lambda rank: behind[rank])]
            if now - moved > self._stuck_after:
                how = f"hangs (no progress for {self._stuck_after:g} s)"
                self._tell_and_exit(self._line(last, how, beat))

    def _who_is_lost(self) -> str | None:
        """Look for a rank whose beats have ended, and say so."""
        try:
            before, others = self._read(range(self.size)), set(range(self.size)) - {self.rank}
            until = time.monotonic() + self._patience
            while others and time.monotonic() < until:
                time.sleep(self._interval / 2)
                self._write()
                self._leave_if_over()
                now = self._read(others)
                others -= {r for r in others if now[r].count > before[r].count}
        except RuntimeError:
            self._store_is_gone()
        gone = [rank for rank in others if before[rank].does != "done"]
        return self._line(min(gone), "died", before[min(gone)]) if gone else None

    def _store_is_gone(self) -> NoReturn:
        """The process that holds the store has died: the launcher, or else rank 0.

        Nothing can be agreed on any more, so it is settled which rank says so.
        """
        who, speaker = ("the launcher", 0) if _of_launcher() else (f"rank 0 of {self.size}", 1)
        if self.rank == speaker:
            self._print(f"{who} died, when {self._name} was at {self._where}; all ranks end")
        self._exit(_LOST)

    # ── the last line ───────────────────────────────────────────────────────────────────────────

    @property
    def _name(self) -> str:
        return f"rank {self.rank} of {self.size}"

    def _line(self, rank: int, how: str, beat: _Beat) -> str:
        return f"rank {rank} of {self.size} {how} at {beat.where}; all ranks end"

    def _is_first(self) -> bool:
        """Whether no other rank has told before."""
        try:
            return int(self._store.add("told", 1)) == 1
        except RuntimeError:
            return True

    def _tell_and_exit(self, line: str, ranks: int | None = None) -> NoReturn:
        """Say it, if nobody has, and let so many ranks end, all by default."""
        ranks = ranks or self.size
        if self._is_first():
            self._print(line)
            self._let_all_end(_LOST, ranks)
        self._go(ranks)
        self._exit(_LOST)

    def _leave_if_over(self) -> None:
        """End as another rank has told."""
        if self._store.check(["over"]):
            code, ranks = map(int, self._store.get("over").split())
            self._go(ranks)
            self._exit(code)

    @staticmethod
    def _print(line: str) -> None:
        print(f"headwise: {line}", file=sys.stderr, flush=True)

    @staticmethod
    def _exit(code: int) -> NoReturn:
        """End the process at once: its main thread may wait for a rank that is gone."""
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _of_launcher() -> bool:
    """Whether the launcher's own process holds the store, as that of `torchrun` does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
