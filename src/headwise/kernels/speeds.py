"""What was measured of the native kernel on CPUs like this one: the unit for each dtype, and how
fast it is beside PyTorch's attention.

A table belongs to a CPU's vendor and its richest unit. Where `headwise tune` has measured this very
machine, its table goes before those that are shipped (`speeds.json`); a CPU that nobody measured
has the careful table, in which each speed is the lowest of all machines on record. The processes of
a group take one table, so that all of them choose alike.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .interface import INTERFACE

SHIPPED = Path(__file__).with_name("speeds.json")

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)

BFLOAT16_ONLY = frozenset({"amx", "avx512bf16", "neonbf16"})
"""Units with code of their own for bfloat16 alone; all else is the next unit's after them."""


@dataclass(frozen=True)
class Row:
    """How fast units were for one call: the fastest other backend's time over theirs."""

    dtype: str
    training: bool
    queries: int
    keys: int
    dim: int
    speeds: dict[str, float]


@dataclass(frozen=True, eq=False)
class Table:
    """The measurements that choices on this machine rest on."""

    cpu: str
    vendor: str
    richest: str
    measured: str
    """When, with which PyTorch, by which clock; or why nothing was."""
    rows: tuple[Row, ...]

    @functools.cache  # noqa: B019 (tables live as long as the process)
    def unit(self, dtype: torch.dtype, usable: tuple[str, ...], otherwise: str) -> str:
        """The fastest usable unit for a dtype; `otherwise` where none was measured."""
        found: dict[str, list[float]] = {}
        for row in self.rows:
            for name, speed in row.speeds.items():
                if row.dtype == name_of(dtype) and name in usable:
                    found.setdefault(name, []).append(math.log(speed))
        return max(found, key=lambda name: sum(found[name]) / len(found[name]), default=otherwise)

    @functools.cache  # noqa: B019
    def speed(
        self, dtype: torch.dtype, training: bool, sizes: tuple[int, int, int], unit: str
    ) -> float | None:
        """The unit's speed in the call nearest in queries, keys and dim; `None` if not measured."""

        def away(row: Row) -> float:
            pairs = zip((row.queries, row.keys, row.dim), sizes, strict=True)
            return sum(math.log(a / b) ** 2 for a, b in pairs)

        kind = (name_of(dtype), training)
        alike = [r for r in self.rows if (r.dtype, r.training) == kind and unit in r.speeds]
        return min(alike, key=away).speeds[unit] if alike else None


def processor() -> tuple[str, str]:
    """The CPU's vendor and model, as Linux names them; the vendor is empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        lines = []
    said = {key.strip(): value.strip() for key, _, value in (x.partition(":") for x in lines)}
    model = said.get("model name") or platform.processor() or platform.machine()
    return said.get("vendor_id", ""), model


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name in tables, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def units_for(dtype: str, usable: Iterable[str]) -> list[str]:
    """The units that have code of their own for a dtype, richest first."""
    return [name for name in usable if dtype == "bfloat16" or name not in BFLOAT16_ONLY]


def contenders(usable: tuple[str, ...]) -> tuple[str, ...]:
    """The units that may be the fastest: the first with code for every dtype, and those before."""
    return usable[: 1 + usable.index(units_for("float32", usable)[0])]


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def in_use() -> Table | None:
    """The table that was taken, if it is still the one to take."""
    group = dist.group.WORLD if dist.is_available() else None
    of_group, found = _in_use
    same = of_group is None if group is None else of_group is not None and of_group() is group
    return found if same else None


def table(usable: tuple[str, ...], best: str) -> Table:
    """The table of this machine, or that of the process group once there is one.

    `usable` are the machine's units, richest first; `best` is the one that is taken unmeasured.
    """
    global _in_use
    found = in_use()
    if found is None:
        group = dist.group.WORLD if dist.is_available() else None
        found = tuned() or shipped(*processor(), usable[0]) or careful(usable, best)
        if group is not None:
            found = _agreed(found)
        _in_use = (weakref.ref(group) if group is not None else None, found)
    return found


_in_use: tuple[weakref.ref[Any] | None, Table | None] = (None, None)


def forget() -> None:
    """Look for a table anew at the next call."""
    global _in_use
    _in_use = (None, None)


def shipped(vendor: str, cpu: str, richest: str) -> Table | None:
    """The table on record for CPUs of that vendor and richest unit."""
    mine = (x for x in _record() if (x.vendor, x.richest) == (vendor, richest))
    return next(mine, None)


def careful(usable: Sequence[str], best: str) -> Table:
    """The lowest speed of all machines on record, call by call; of one unit a dtype."""
    lowest: dict[tuple[Any, ...], Row] = {}
    for row in (row for found in _record() for row in found.rows):
        unit = best if row.dtype == "bfloat16" else units_for(row.dtype, usable)[0]
        if unit not in row.speeds:
            continue
        key = (row.dtype, row.training, row.queries, row.keys, row.dim)
        low = min(row.speeds[unit], *(lowest[key].speeds.values() if key in lowest else ()), 1e9)
        lowest[key] = Row(*key, {unit: low})
    vendor, cpu = processor()
    why = "nothing was measured on such a CPU (`headwise tune` does it): the lowest of all others"
    return Table(cpu, vendor, usable[0], why, tuple(lowest.values()))


@functools.cache
def _record() -> tuple[Table, ...]:
    machines = json.loads(SHIPPED.read_text("utf-8"))["machines"]
    return tuple(_parsed(x) for x in machines)


def _parsed(x: dict[str, Any]) -> Table:
    """A table from JSON. Raises KeyError, TypeError or ValueError where it is none."""
    rows = []
    for line in x["rows"]:
        row = Row(**line)
        sizes = (row.queries, row.keys, row.dim)
        if min(sizes) < 1 or not all(0 < s < math.inf for s in row.speeds.values()):
            raise ValueError(f"no measurement: {line}")
        rows.append(row)
    about = {name: str(x[name]) for name in ("cpu", "vendor", "richest", "measured")}
    return Table(**about, rows=tuple(rows))


# ── this machine's own ──────────────────────────────────────────────────────────────────────────


def identity() -> dict[str, Any]:
    """What a measurement of this machine holds for: the CPU, its threads, and the versions."""
    vendor, cpu = processor()
    try:
        version = metadata.version("headwise")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH, not installed
        version = None
    return {
        "vendor": vendor,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "headwise": version,
        "interface": INTERFACE,
    }


def tuned_path() -> Path:
    """Where this machine's own table is kept, whether there is one or not."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(json.dumps(identity()).encode()).hexdigest()[:16]
    return Path(cache) / "headwise" / f"speeds-{name}.json"


def tuned() -> Table | None:
    """This machine's own table; `None` where there is none, or a damaged or foreign file."""
    try:
        found = json.loads(tuned_path().read_text("utf-8"))
        return _parsed(found) if found["identity"] == identity() else None
    except _UNREADABLE:
        return None


# ── a group of processes ────────────────────────────────────────────────────────────────────────


def _agreed(mine: Table) -> Table:
    """The table of the process that came first, through the group's store.

    Nobody waits for anybody, as a collective in the middle of a forward pass could.
    """
    try:
        store = dist.distributed_c10d._get_default_store()
        kept = store.compare_set("headwise/speeds", "", json.dumps(asdict(mine)))
        return _parsed(json.loads(kept))
    except _UNREADABLE:  # a store that cannot, or another headwise: each process has its own
        return mine
