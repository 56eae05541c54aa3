"""Worlds of several ranks on this machine: forked from a process that has PyTorch loaded."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

LOADED = ["pytest", "headwise.cli", "headwise.report.page", "headwise.parallel.training"]
LOADED += ["torch.distributed.checkpoint", "torch.distributed.fsdp", "safetensors.torch"]
LOADED += ["torch._dynamo", "torch.profiler", "numpy.random", "tokenizers"]

_SERVER = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code (−9 where it was killed), what it printed, what it gave."""

    code: int | None
    out: str
    err: str
    value: Any


def world(
    size: int,
    work: Callable[..., Any],
    *arguments: Any,
    seconds: float = 60,
    launcher: bool = True,
    restarts: int = 0,
) -> list[Ended]:
    """Let every rank call `work(*arguments)`; how each ended, in order of ranks.

    Those that have not ended after so many seconds are killed. The ranks' store is of this process,
    as of a launcher's own, or else of rank 0. With restarts, all of it again, with the same store.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if launcher else None
    given = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port if store else _free_port()),
        "TORCHELASTIC_USE_AGENT_STORE": str(launcher),
        "TOKENIZERS_PARALLELISM": "false",
    }
    _SERVER.set_forkserver_preload(LOADED)
    for restart in range(restarts):
        _once(size, given | {"TORCHELASTIC_RESTART_COUNT": str(restart)}, work, arguments, seconds)
    given["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
    return _once(size, given, work, arguments, seconds)


def _once(
    size: int, given: dict[str, str], work: Callable[..., Any], arguments: tuple, seconds: float
) -> list[Ended]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            _SERVER.Process(target=_rank, args=(rank, given, folder, work, arguments))
            for rank in range(size)
        ]
        for rank in ranks:
            rank.start()
        until = time.monotonic() + seconds
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
        for rank in ranks:
            rank.kill()  # SIGKILL, which ends a stopped one too
            rank.join()
        return [_ended(Path(folder), number, rank.exitcode) for number, rank in enumerate(ranks)]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def values(size: int, work: Callable[..., Any], *arguments: Any, seconds: float = 60) -> list[Any]:
    """What `work(*arguments)` gave on every rank; all must have ended well."""
    ended = world(size, work, *arguments, seconds=seconds)
    said = "\n".join(f"rank {n}, code {one.code}:\n{one.err}" for n, one in enumerate(ended))
    assert all(one.code == 0 for one in ended), said
    return [one.value for one in ended]


def _ended(folder: Path, rank: int, code: int | None) -> Ended:
    out, err = ((folder / f"{rank}.{name}").read_text() for name in ("out", "err"))
    given = folder / f"{rank}.value"
    value = pickle.loads(given.read_bytes()) if given.exists() else None
    return Ended(code, out, err, value)


def _rank(
    rank: int, given: dict[str, str], folder: str, work: Callable[..., Any], arguments: tuple
) -> None:
    """What runs in the process of a rank."""
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}/{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ |= given | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    torch.manual_seed(0)
    code = 1
    try:
        value = work(*arguments)
        Path(f"{folder}/{rank}.value").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def commanded(*arguments: str) -> None:
    """Run the command line; its exit code is the process's."""
    from headwise.cli import main

    sys.exit(main(list(arguments)))


def gloo() -> None:
    """Join a group of all ranks, as a program of a user's own does."""
    from datetime import timedelta

    from torch import distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
