"""Time calls in interleaved rounds; count multiply-adds and peak memory; describe the machine.

The contenders take turns within each of many rounds, so that other load on the machine affects all
of them equally. A ratio is computed in each round; its median and quartiles are reported.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], Any]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """Return the spread of at least one value.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.5, high=2.5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def interleaved(
    contenders: Mapping[str, Work],
    rounds: int = 21,
    least: float = 0.03,
    report: Callable[[float], None] | None = None,
    *,
    within: float = math.inf,
    clock: Clock = time.perf_counter,
) -> dict[str, list[float]]:
    """Time the contenders in turn; return the seconds per call of each, one value for each round.

    Every round runs each contender once, in random order. A turn repeats the call until it lasts
    about `least` seconds; with `least=0` it is one call. A warm-up round is not counted. `report`
    is called after each round with the completed fraction. If the rounds would take more than
    `within` seconds, there are fewer rounds, but at least 3; if one round exceeds that, the first
    calls serve as the warm-up. Pass `time.process_time` as `clock` to measure only this process.
    """
    once = {name: _turn(work, 1, clock) for name, work in contenders.items()}  # compiles, allocates
    before = int(sum(once.values()) < within)
    if before:
        once = {name: _turn(work, 1, clock) for name, work in contenders.items()}
    repeats = {name: max(1, round(least / seconds)) for name, seconds in once.items()}
    if math.isfinite(within):
        a_round = sum(once[name] * repeats[name] for name in contenders)
        rounds = min(rounds, max(3, int(within / a_round)))
    order, taken = list(contenders), {name: [] for name in contenders}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + before):
        shuffle(order)
        for name in order:
            seconds = _turn(contenders[name], repeats[name], clock)
            if number >= before:
                taken[name].append(seconds)
        if report is not None:
            report((number + 1) / (rounds + before))
    return taken


def _turn(work: Work, repeats: int, clock: Clock = time.perf_counter) -> float:
    _wait()
    start = clock()
    for _ in range(repeats):
        work()
    _wait()
    return (clock() - start) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(taken: Mapping[str, list[float]], name: str, beside: str) -> Spread:
    """Return the spread over rounds of the ratio of `name`'s time to that of `beside`."""
    pairs = zip(taken[name], taken[beside], strict=True)
    return Spread.of([value / other for value, other in pairs])


def limits(device: str = "cpu") -> dict[str, float]:
    """Measure the speeds of a matrix product and a memory copy on this machine, best of five.

    The matrix product is in float32; on CUDA in bfloat16, the dtype of attention kernels there.
    """
    size, dtype = (8192, torch.bfloat16) if device == "cuda" else (2048, torch.float32)
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    product = min(_turn(lambda: a @ b, 1) for _ in range(5))
    source = torch.ones(64 * 2**20, device=device)  # 256 MiB, larger than caches
    target = torch.empty_like(source)
    copy = min(_turn(lambda: target.copy_(source), 1) for _ in range(5))
    return {
        "matmul_gflops": 2 * size**3 / product / 1e9,
        "copy_gb_per_s": 2 * source.nbytes / copy / 1e9,  # read and written
    }


def multiply_adds(work: Work) -> int:
    """Count the multiply-adds of the matrix products of a call, in PyTorch's operators.

    Fused attention counts as if no key were hidden. Compiled code is not counted.

    >>> multiply_adds(lambda: torch.ones(2, 3) @ torch.ones(3, 5))
    30
    """
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def fused_on_cpu(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
        return sdpa_flop_count(q, k, v)

    # The counter knows the fused kernels of GPUs but not that of CPUs.
    on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with FlopCounterMode(display=False, custom_mapping={on_cpu: fused_on_cpu}) as counter:
        work()
    return counter.get_total_flops() // 2


def peak_bytes(work: Work, device: str = "cpu") -> int:
    """Measure the peak memory that PyTorch allocates during a call, above the level before it.

    On a CPU it sums the profiler's record of allocations. That is exact and includes workspaces of
    kernels, but not memory that libraries get from the system. On CUDA, the allocator reports it.

    >>> def work():
    ...     a = torch.ones(1000)
    ...     del a
    ...     return torch.ones(500).numel()
    >>> peak_bytes(work)
    4000
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # Otherwise the profiler prints a line at every start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    live = peak = 0
    for _, change in sorted(changes, key=lambda timed: timed[0]):
        live += change
        peak = max(peak, live)
    return peak


def python_peak_bytes(work: Work) -> int:
    """Measure the peak memory of Python objects during a call."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        work()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def _processor() -> str:
    """Return the CPU model as reported by Linux, or elsewhere by Python."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Return the machine's hardware and the versions of packages."""
    versions = {}
    for package in ("headwise", "torch", "transformers", "x-transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }
