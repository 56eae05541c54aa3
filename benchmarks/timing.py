"""Timing for people first: interleaved rounds, what the machine can do, one JSON file a run.

Contenders take turns within a round and rounds are many, so that whatever else the machine does
hits all of them alike; a ratio is taken round by round, and its median and quartiles reported.
"""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Work = Callable[[], Any]


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """The spread of at least one value.

        >>> Spread.of([3.0, 1.0, 2.0])
        Spread(median=2.0, low=1.5, high=2.5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high)


def interleaved(
    contenders: Mapping[str, Work], rounds: int = 21, least: float = 0.03
) -> dict[str, list[float]]:
    """Seconds per call of each contender, one figure a round.

    Each takes its turn in every round, in an order drawn anew. A turn repeats the call until
    the quickest contender's turn lasts about `least` seconds; all repeat it equally often. One
    round comes first that does not count.
    """
    once = {name: _turn(work, 1) for name, work in contenders.items()}  # compiles, allocates
    once = {name: _turn(work, 1) for name, work in contenders.items()}
    repeats = max(1, round(least / min(once.values())))
    order, taken = list(contenders), {name: [] for name in contenders}
    shuffle = random.Random(0).shuffle
    for number in range(rounds + 1):
        shuffle(order)
        for name in order:
            seconds = _turn(contenders[name], repeats)
            if number:
                taken[name].append(seconds)
    return taken


def _turn(work: Work, repeats: int) -> float:
    _wait()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait()
    return (time.perf_counter() - start) / repeats


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(taken: Mapping[str, list[float]], name: str, beside: str) -> Spread:
    """How many times as long `name` takes as `beside`, round by round."""
    pairs = zip(taken[name], taken[beside], strict=True)
    return Spread.of([mine / other for mine, other in pairs])


def fastest(taken: Mapping[str, list[float]], without: str) -> str:
    """The contender with the lowest median, `without` left out."""
    others = [name for name in taken if name != without]
    return min(others, key=lambda name: statistics.median(taken[name]))


def limits() -> dict[str, float]:
    """What this machine can do right now: float32 matmul and memory copy, best of several."""
    a, b = torch.randn(2, 2048, 2048)
    product = min(_turn(lambda: a @ b, 1) for _ in range(5))
    source = torch.ones(64 * 2**20)  # 256 MiB, larger than caches
    target = torch.empty_like(source)
    copy = min(_turn(lambda: target.copy_(source), 1) for _ in range(5))
    return {
        "matmul_gflops": 2 * 2048**3 / product / 1e9,
        "copy_gb_per_s": 2 * source.nbytes / copy / 1e9,  # read and written
    }


def machine() -> dict[str, Any]:
    """Where and with what this runs."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    versions = {}
    for package in ("headwise", "torch", "transformers", "x-transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": versions,
    }


def record(name: str, settings: Mapping[str, Any], rows: list[dict[str, Any]]) -> Path:
    """Writes one run to `results/<name>-<date>.json`, prints it as one line, returns the path."""
    now = datetime.now(UTC)
    run = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "machine": machine(),
        "limits": limits(),
        "settings": dict(settings),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now:%Y%m%dT%H%M%SZ}.json"
    part = path.with_suffix(".part")
    part.write_text(json.dumps(run, indent=1, default=_plain) + "\n")
    os.replace(part, path)
    print(json.dumps(run, default=_plain))
    return path


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Spread) else str(value)


def show(title: str, columns: list[str], lines: list[list[str]]) -> None:
    """Prints a table; the first column is left-aligned, figures right-aligned."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(width=120).print(table)
