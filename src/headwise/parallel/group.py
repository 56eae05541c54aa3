"""Process groups for headwise's commands under `torchrun`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import cuda
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from .._text import one_line

_T = TypeVar("_T")


@contextmanager
def joined(timeout: float) -> Iterator[int]:
    """Join the process group of the launcher; yield the rank of this process.

    Collectives fail after `timeout` seconds without the other ranks; then the launcher ends the
    remaining ranks. If several ranks raise, one reports its error and the others exit silently.

    Raises:
        ValueError: the timeout is out of range; or some ranks did not join.
    """
    if not 0 < timeout < 1e6:
        raise ValueError(f"timeout must be a number of seconds above 0, got {timeout:g}")
    limit = timedelta(seconds=timeout)
    gpus = cuda.device_count()
    if gpus:
        cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % gpus)
    try:
        store, rank, size = next(rendezvous("env://", timeout=limit))
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store may outlive it
        store = PrefixStore(f"attempt {attempt}", store)
        backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise ValueError(f"not all ranks have joined: {one_line(error)[:200]}") from None
    try:
        yield rank
    except Exception as error:
        with suppress(RuntimeError):  # the store has ended with its process
            if int(store.add("errors", 1)) > 1:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(2 if isinstance(error, ValueError | OSError) else 1)
        error.add_note(f"(rank {rank} of {size})")
        raise
    dist.destroy_process_group()


def from_first(make: Callable[[], _T]) -> _T:
    """Call the function on rank 0; all ranks return its result, or raise what it raised.

    Raises:
        ValueError, OSError: the function raised it.
    """
    sent: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            sent[0] = make()
        except (ValueError, OSError) as error:  # or the other ranks would wait forever
            sent[1] = error
    dist.broadcast_object_list(sent, src=0, device=torch.device("cpu"))
    if sent[1] is not None:
        raise sent[1]
    return sent[0]
