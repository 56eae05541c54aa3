"""The number of threads of the native kernel: PyTorch's, limited by the CPUs of the cgroup."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import torch


def threads() -> int:
    """Return the number of threads for a call: PyTorch's, or the cgroup's CPUs if those are fewer.

    More threads would not help: Linux stops all of them once the period's quota is used up.
    """
    limit = _limit()
    number = torch.get_num_threads()
    return number if limit is None else min(number, limit)


@cache
def _limit() -> int | None:
    return cpu_limit()


def cpu_limit(
    process: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return the CPU limit of the process's cgroups, rounded up; None if there is no limit.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (`cpu.max`) and scheduler/sched-bwc.rst.
    """
    try:
        lines = (process / "cgroup").read_text("ascii", "replace").splitlines()
    except OSError:
        return None
    shares: list[float | None] = []
    for line in lines:
        _, kinds, path = (*line.split(":", 2), "", "")[:3]
        if kinds and "cpu" not in kinds.split(","):
            continue
        tops = (root,) if not kinds else (root / kinds, root / "cpu")
        for top in tops:
            place = top / path.lstrip("/")
            above = (folder for folder in (place, *place.parents) if folder.is_relative_to(top))
            shares += map(_share, above)
    known = [share for share in shares if share is not None]
    return max(1, math.ceil(min(known))) if known else None


def _share(folder: Path) -> float | None:
    """Return the number of CPUs that one cgroup may use; None if there is no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text("ascii").split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text("ascii").strip()
            period = (folder / "cpu.cfs_period_us").read_text("ascii").strip()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such files, or `max`
        return None
