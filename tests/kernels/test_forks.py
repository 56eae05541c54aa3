"""Processes that are forked after use, workers of a `DataLoader`, and CPUs that a cgroup shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.kernels import ctypes_api
from headwise.kernels import threads as counting
from headwise.kernels.threads import cpu_limit, threads

FORKED = """
import os, sys, time
import torch, headwise as hw
from torch.utils.data import DataLoader

torch.set_num_threads(2)
q = torch.randn(2, 4, 256, 32)
mask = hw.Causal()
want = {name: hw.attend(q, q, q, mask=mask, backend=name) for name in sys.argv[1:]}
entropy = hw.observe(q, q, q, hw.Entropy(), mask=mask)["entropy"]

class Heads(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return hw.observe(q, q, q, hw.Entropy(), mask=mask)["entropy"]

loaded = DataLoader(Heads(), batch_size=None, num_workers=1, multiprocessing_context="fork")
assert all(torch.equal(one, entropy) for one in loaded)

child = os.fork()
if not child:
    close = all(
        torch.allclose(hw.attend(q, q, q, mask=mask, backend=name), want[name], atol=1e-6)
        for name in want
    )
    same = torch.equal(hw.observe(q, q, q, hw.Entropy(), mask=mask)["entropy"], entropy)
    os._exit(0 if close and same else 3)
for _ in range(600):
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
sys.exit(4)  # it waits for threads that it does not have
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_and_a_worker_after_use_compute_what_the_parent_did() -> None:
    native = ["native"] if ctypes_api.library() else []
    done = subprocess.run(
        [sys.executable, "-c", FORKED, *native, "sdpa", "blocked"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


@pytest.mark.parametrize(
    ("line", "limits", "most"),
    [
        ("0::/a/b", {"a/b": {"cpu__max": "150000 100000"}}, 2),
        ("0::/a/b", {"a/b": {"cpu__max": "max 100000"}, "a": {"cpu__max": "300000 100000"}}, 3),
        ("0::/a/b", {"a/b": {"cpu__max": "50000 100000"}, "a": {"cpu__max": "max 1"}}, 1),
        ("0::/", {"": {"cpu__max": "400000 100000"}}, 4),
        ("0::/gone", {"": {"cpu__max": "200000 100000"}}, 2),
        ("0::/a", {"a": {"cpu__max": "max 100000"}}, None),
        ("0::/a", {"a": {"cpu__max": "odd"}}, None),
        ("0::/a", {}, None),
        (
            "4:cpu,cpuacct:/d",
            {"cpu,cpuacct/d": {"cpu__cfs_quota_us": "250000", "cpu__cfs_period_us": "100000"}},
            3,
        ),
        ("4:cpu:/d", {"cpu/d": {"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}}, None),
        ("3:memory:/d", {"memory/d": {"cpu__max": "100000 100000"}}, None),
    ],
)
def test_the_cgroups_share_of_cpus(
    line: str, limits: dict[str, dict[str, str]], most: int | None, tmp_path: Path
) -> None:
    process = write(tmp_path / "proc", cgroup=f"{line}\n")
    for place, files in limits.items():
        write(tmp_path / "root" / place, **files)
    assert cpu_limit(process, tmp_path / "root") == most
    assert cpu_limit(tmp_path / "none", tmp_path / "root") is None


def test_the_kernel_takes_no_more_threads_than_the_cgroup_has_cpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        for limit, number in ((None, 5), (3, 3), (8, 5)):
            monkeypatch.setattr(counting, "_limit", lambda limit=limit: limit)
            assert threads() == number
    finally:
        torch.set_num_threads(before)
    if ctypes_api.library() is None:
        pytest.skip("the native kernel was not built")
    asked: list[Any] = []
    monkeypatch.setattr(ctypes_api, "threads", lambda: asked.append(1) or 1)
    q = torch.randn(1, 2, 9, 4)
    hw.attend(q, q, q, backend="native")
    assert asked
