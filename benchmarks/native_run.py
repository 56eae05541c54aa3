"""What `native.py` is made of: shapes, the clock, the goals of the kernel, and tables."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.tutorial.timing import Spread, interleaved, ratio
from recording import show

NATIVE, SEEING, SCORES, COLUMNS = "native", "native, seeing", "scores only", "column sums"
SDPA, MATMUL = "SDPA", "matmul + softmax"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Work = Callable[[], Any]
Taken = dict[str, list[float]]


@dataclass(frozen=True)
class Goal:
    """A bound that every ratio of its kind shall keep."""

    what: str
    bound: float
    upper: bool = False

    def kept(self, found: float) -> bool:
        """Whether a ratio is on the right side."""
        return found <= self.bound if self.upper else found >= self.bound


GOALS = {
    "causal": Goal("causal forward, seeing: × SDPA's speed, float32, T 128 to 4096", 1.25),
    "full": Goal("full forward, seeing: × SDPA's speed, float32, T 128 to 4096", 1.05),
    "never": Goal("any forward, seeing: × SDPA's speed", 1.0),
    "seeing": Goal("every statistic: × own plain forward's time", 1.05, upper=True),
    "training": Goal("forward+backward, float32: × SDPA's speed, T ≥ 256", 1.2),
    "training_bf16": Goal("forward+backward, bfloat16: × SDPA's speed, T ≥ 256", 1.2),
    "learning": Goal("… with three statistics' gradients: × own plain time", 1.10, upper=True),
    "bf16": Goal("bfloat16 forward, seeing: × SDPA's bfloat16 speed", 2.0),
    "half": Goal("bfloat16 forward: × own float32 speed", 1.5),
    "decode": Goal("decoding in bfloat16: × SDPA's speed", 4.0),
    "decode_bf16": Goal("decoding in bfloat16: × plain matmul's speed", 1.2),
    "decode_float32": Goal("decoding in float32: × plain matmul's speed", 1.2),
    "scores": Goal("scores only: × own forward's time", 0.6, upper=True),
    "columns": Goal("column sums: × own forward's time", 0.7, upper=True),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of a call; as many keys as queries unless `keys` says otherwise."""

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    causal: bool = False

    @classmethod
    def square(
        cls, length: int, dim: int, causal: bool, multiply_adds: float, least: int = 1
    ) -> Shape:
        """As many heads of self-attention as make a call of about that size, at most 8 × 12."""
        heads = max(least, round(multiply_adds / (2 * length**2 * dim)))
        batch, heads = (min(8, heads // 12), 12) if heads >= 12 else (1, heads)
        return cls(batch, heads, length, length, dim, causal)

    def __str__(self) -> str:
        length = f"T {self.queries}" + ("" if self.queries == self.keys else f" S {self.keys}")
        return f"{'causal' if self.causal else 'full'} {length} D {self.dim}"

    @property
    def mask(self) -> hw.Mask | None:
        """The mask of headwise."""
        return hw.Causal() if self.causal else None

    @property
    def multiply_adds(self) -> int:
        """Of both products, hidden keys left out."""
        pairs = self.queries * self.keys
        if self.causal:
            pairs = self.queries * (self.queries + 1) // 2
        return 2 * self.batch * self.heads * pairs * self.dim

    def inputs(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Random q, k and v."""
        torch.manual_seed(0)
        sizes = (self.queries, self.keys, self.keys)
        q, k, v = (torch.randn(self.batch, self.heads, n, self.dim, dtype=dtype) for n in sizes)
        return q, k, v


@dataclass
class Run:
    """The clock, the time that each shape may take, and what was found so far."""

    clock: Callable[[], float]
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    goals: dict[str, list[tuple[float, str]]] = field(default_factory=dict)

    def take(self, calls: dict[str, Work]) -> Taken:
        """Seconds per call, a figure for each of 3 to 15 rounds: as many as the time allows."""
        return interleaved(calls, 15, 0.01, within=self.seconds, clock=self.clock)

    def keep(self, part: str, shape: Shape, taken: Taken, refused: dict[str, str]) -> None:
        """Adds a row for each contender; of `float32: SDPA` the dtype is the first word."""
        print(f"{part}: {shape}", file=sys.stderr)
        about = {"part": part, **asdict(shape)}
        for name, seconds in taken.items():
            dtype, contender = name.split(": ", 1)
            own = NATIVE if f"{dtype}: {NATIVE}" in taken else SEEING
            found: dict[str, Any] = {"ms": Spread.of([1e3 * s for s in seconds])}
            found["times_native"] = ratio(taken, name, f"{dtype}: {own}")
            middle = statistics.median(seconds)
            if part in ("forward", "peers") and contender not in (SCORES, COLUMNS):
                found["gflops"] = round(2e-9 * shape.multiply_adds / middle, 2)
            if part == "decode":
                wide = DTYPES[dtype].itemsize
                read = 2 * shape.batch * shape.heads * shape.keys * shape.dim * wide
                found["gb_per_s"] = round(1e-9 * read / middle, 2)
            found["rounds"] = len(seconds)
            self.rows.append({**about, "dtype": dtype, "contender": contender, **found})
        for name, reason in refused.items():
            dtype, contender = name.split(": ", 1)
            self.rows.append({**about, "dtype": dtype, "contender": contender, "refused": reason})

    def goal(self, name: str, where: str, taken: Taken, one: str, other: str) -> None:
        """Notes how many times as long `one` takes as `other`, for a goal."""
        found = ratio(taken, one, other)
        self.goals.setdefault(name, []).append((found.median, where))
        reached = GOALS[name].kept(found.median)
        self.rows.append({"goal": name, "where": where, "ratio": found, "kept": reached})


def brief(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put rows on record: one a shape and dtype with all contenders, and one a goal."""
    about = ("part", *Shape.__dataclass_fields__, "dtype")
    shapes: dict[tuple[Any, ...], dict[str, Any]] = {}
    goals: dict[str, dict[str, Any]] = {}
    for row in rows:
        if "goal" in row:
            of = goals.setdefault(row["goal"], {"goal": row["goal"], "kept": 0, "ratios": {}})
            of["kept"] += row["kept"]
            of["ratios"][row["where"]] = row["ratio"].median
            continue
        key = tuple(row[name] for name in about)
        of = shapes.setdefault(key, {**dict(zip(about, key, strict=True))})
        for name in ("ms", "times_native", "gflops", "gb_per_s", "refused"):
            if name in row:
                found = row[name]
                spread = isinstance(found, Spread)
                found = [found.median, found.low, found.high] if spread else found
                of.setdefault(name, {})[row["contender"]] = found
    return [*shapes.values(), *goals.values()]


def rates(run: Run) -> dict[str, float]:
    """What the machine does by the clock of the run: matmuls in both dtypes, and a copy."""
    source = torch.ones(2**25)  # 128 MiB, larger than caches
    target = torch.empty_like(source)
    calls: dict[str, Work] = {"copy": lambda: target.copy_(source)}
    for name, dtype in DTYPES.items():
        a, b = torch.randn(2, 1024, 1024).to(dtype)
        calls[name] = partial(torch.mm, a, b)
    best = {name: min(seconds) for name, seconds in run.take(calls).items()}
    found = {f"{name}_matmul_gflops": 2e-9 * 1024**3 / best[name] for name in DTYPES}
    return {**found, "copy_gb_per_s": 2e-9 * source.nbytes / best["copy"]}  # read and written


def show_goals(run: Run) -> None:
    """What was asked for, the worst found and where, and how often it was kept."""
    lines = []
    for name, found in run.goals.items():
        goal = GOALS[name]
        ratios = [figure for figure, _ in found]
        worst, where = (max if goal.upper else min)(found)
        kept = sum(goal.kept(figure) for figure in ratios)
        middle = math.exp(statistics.fmean(map(math.log, ratios)))
        bound = f"{'≤' if goal.upper else '≥'} {goal.bound:.2f}"
        lines.append([goal.what, bound, f"{middle:.2f}", f"{worst:.2f}", f"{kept}/{len(found)}"])
        lines.append([f"    worst at {where}", "", "", "", ""])
    show("goals", ["", "goal", "mean", "worst", "kept"], lines)


def show_rows(rows: list[dict[str, Any]], part: str) -> None:
    """A line for each shape and dtype, a column for each contender."""
    mine = [row for row in rows if row.get("part") == part and "goal" not in row]
    names = list(dict.fromkeys(row["contender"] for row in mine))
    lines: dict[str, dict[str, str]] = {}
    for row in mine:
        shape = Shape(**{name: row[name] for name in Shape.__dataclass_fields__})
        cells = lines.setdefault(f"{shape} {row['dtype']}", {})
        if "refused" in row:
            cells[row["contender"]] = "–"
        elif row["contender"] in (NATIVE, names[0]):
            cells[row["contender"]] = f"{row['ms'].median:.2f} ms"
        else:
            cells[row["contender"]] = f"{row['times_native'].median:.2f}"
    table = [[where, *(cells.get(name, "") for name in names)] for where, cells in lines.items()]
    show(f"{part}: ms, and multiples of native's time", ["", *names], table)
    reasons = (f"{r['contender']}, {r['dtype']}: {r['refused']}" for r in mine if "refused" in r)
    for reason in dict.fromkeys(reasons):
        print(reason)
