"""`headwise tune`: measures the native kernel on this machine, and has choices go by that."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from .._io import write_whole
from ..attend import attend
from ..core.mask_algebra import Mask
from ..core.masks import Causal
from ..kernels import ctypes_api as cpu
from ..kernels import speeds
from ..tutorial.timing import Clock, Spread, fastest, interleaved, ratio
from .terminal import bar, console

SIZES = ((1, 2048), (64, 64), (512, 512), (2048, 2048))
"""Queries and keys of the calls that are measured; heads are 64 wide."""

OTHERS = ("sdpa", "eager")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORK = 3e7  # multiply-adds of a call, where there are not more with a head for each thread
TOLERANCES = {"float32": 1e-4, "bfloat16": 4e-2}
QUIET = 1.3
"""A ratio's upper quartile over its lower one: how far half of the calls may spread, at most."""


def tune(
    show: Annotated[
        bool, typer.Option("--show", help="Measure nothing; print what choices go by now.")
    ] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Go by the figures that are shipped again.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=0.01, max=60, help="For each of the calls that are measured.")
    ] = 0.3,
) -> int:
    """Measure the native kernel beside PyTorch's attention on this machine, and go by that.

    `backend="auto"` then takes the faster one, and the kernel its fastest instructions, as measured
    here: for this CPU, number of threads and version of PyTorch. Leave the machine alone meanwhile:
    figures that spread are not kept.

    Example: `headwise tune`
    """
    if show and remove:
        raise ValueError("--show and --remove: give one of them")
    if cpu.library() is None:
        raise ValueError(f"tune: there is nothing to measure: {cpu.why_not()}")
    path = speeds.tuned_path()
    if remove:
        path.unlink(missing_ok=True)
    elif not show:
        with bar("measuring") as report:
            found = _measured(seconds, report)
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(found)
        write_whole(path.parent, {path.name: lambda part: part.write_text(text, "utf-8")})
    speeds.forget()
    table = cpu.table()
    assert table is not None
    if table.rows:
        console().print(_shown(table))
    at = path if path.exists() else f"shipped with headwise; `headwise tune` would write {path}"
    print(f"{table.cpu}: {table.measured}\n{at}")
    return 0


def _measured(seconds: float, report: Callable[[str, float], None]) -> dict[str, Any]:
    loaded = cpu.library()
    assert loaded is not None
    rows: list[speeds.Row] = []
    spreads: list[float] = []
    calls = len(list(_calls()))
    for row, spread in measure(speeds.contenders(loaded.usable), seconds):
        rows.append(row)
        spreads.append(spread)
        report("measuring", len(rows) / calls)
    if statistics.median(spreads) > QUIET:
        raise ValueError(
            f"tune: this machine is busy: of half of the calls, the ratios spread by "
            f"{statistics.median(spreads):.2f} × and more (at most {QUIET}), and nothing was kept; "
            f"try again when it is quiet, or with a larger --seconds"
        )
    identity = speeds.identity()
    clock = f"wall time, threads: {identity['threads']}"
    measured = f"{date.today()}, PyTorch {identity['torch']}, {clock}, by `headwise tune`"
    about = {"cpu": identity["cpu"], "vendor": identity["vendor"], "richest": loaded.usable[0]}
    rows_said = [asdict(row) for row in rows]
    return {"identity": identity, **about, "measured": measured, "rows": rows_said}


def _calls() -> Iterator[tuple[int, int, str, bool]]:
    for queries, keys in SIZES:
        for dtype in DTYPES:
            for training in (False, True)[: 1 if queries == 1 else 2]:
                yield queries, keys, dtype, training


def measure(
    units: Sequence[str], seconds: float, clock: Clock = time.perf_counter
) -> Iterable[tuple[speeds.Row, float]]:
    """How fast each unit is beside the fastest other backend, call by call; the worse of two masks.

    With each row comes how far its ratios spread: the upper quartile over the lower one.

    Raises:
        AssertionError: a unit's output is not that of the others; nothing is timed then.
    """
    for queries, keys, dtype, training in _calls():
        names = speeds.units_for(dtype, units)
        found = [
            _beside_others(_inputs(queries, keys, dtype, training), mask, names, seconds, clock)
            for mask in ((None,) if queries == 1 else (None, Causal()))
        ]
        worst = {name: round(min(speed[name].median for speed in found), 2) for name in names}
        spread = max(x.high / x.low for speed in found for x in speed.values())
        yield speeds.Row(dtype, training, queries, keys, 64, worst), spread


def _inputs(queries: int, keys: int, dtype: str, training: bool) -> list[torch.Tensor]:
    """Random q, k and v: as many heads as make a call of `WORK`, and one for each thread."""
    heads = min(96, 12 if queries == 1 else round(WORK / (128 * queries**2)))
    heads = max(torch.get_num_threads(), heads)
    random = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, heads, n, 64, generator=random) for n in (queries, keys, keys))
    return [x.to(DTYPES[dtype]).requires_grad_(training) for x in drawn]


def _beside_others(
    leaves: list[torch.Tensor], mask: Mask | None, units: list[str], seconds: float, clock: Clock
) -> dict[str, Spread]:
    """The fastest other backend's time over each unit's, for one call."""
    q, k, v = leaves
    pull = torch.ones_like(q)

    def work(backend: str) -> tuple[torch.Tensor, ...]:
        out = attend(q, k, v, mask=mask, backend=backend)
        return torch.autograd.grad(out, leaves, pull) if q.requires_grad else (out,)

    def by_unit(name: str) -> tuple[torch.Tensor, ...]:
        with cpu.instructions(name):
            return work("native")

    calls = {name: partial(work, name) for name in OTHERS}
    calls |= {name: partial(by_unit, name) for name in units}
    _assert_equal({name: call() for name, call in calls.items()})
    taken = interleaved(calls, 15, 0.01, within=seconds, clock=clock)
    other = fastest({name: taken[name] for name in OTHERS}, "")
    return {name: ratio(taken, other, name) for name in units}


def _assert_equal(found: dict[str, tuple[torch.Tensor, ...]]) -> None:
    for name, mine in found.items():
        for one, other in zip(mine, found["sdpa"], strict=True):
            tolerance = TOLERANCES[speeds.name_of(one.dtype)]
            if not torch.allclose(one, other, tolerance, tolerance * float(other.abs().max())):
                raise AssertionError(f"tune: {name} and sdpa give other numbers; nothing is timed")


def _shown(table: speeds.Table) -> Table:
    """A line a call: the speed of each unit beside PyTorch's, and who serves it."""
    names = list(dict.fromkeys(name for row in table.rows for name in row.speeds))
    shown = Table(title="the kernel's speed beside PyTorch's attention", title_justify="left")
    for name in ("call", *names, "taken"):
        shown.add_column(name, justify="left" if name in ("call", "taken") else "right")
    for row in table.rows:
        unit = cpu.unit(DTYPES[row.dtype])
        taken = f"native, {unit}" if row.speeds.get(unit, 1.0) >= 1.0 else "PyTorch's"
        training = ", with gradients" if row.training else ""
        cells = (f"{row.speeds[name]:.2f}" if name in row.speeds else "" for name in names)
        shown.add_row(f"{row.queries} × {row.keys} {row.dtype}{training}", *cells, taken)
    return shown
