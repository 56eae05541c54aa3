"""The ladder side by side: every rung on the same weights and input, first equal, then measured.

A rung is equal when its output and its input's gradient are as near to the definition in float64 as
the definition itself is in float32, times a small factor. One that is not is named, and nothing is
timed. The rungs are the files of `headwise.systems`; beside them stands what else people write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor

from ..core.masks import Causal
from ..core.reference import attention
from ..systems.variants import flex_lacks_backward
from . import timing
from .runners import FLEX, RUNGS, SIZES, Rung, Runner, Size, parse_sizes, runner, weights
from .timing import Spread

__all__ = [
    "SIZES",
    "Disagreement",
    "Ladder",
    "Row",
    "Size",
    "climb",
    "notes",
    "parse_sizes",
    "shown",
    "table",
]

FACTOR = 4  # a rung's error over the float32 definition's: another order of the same sums
SCALAR_MULTIPLY_ADDS = 100_000  # about a second forward and backward, one number at a time
FIGURES = ("parameters", "multiply_adds", "peak_bytes", "forward", "step")


class Disagreement(Exception):
    """A rung does not compute what the definition does: the message says which and by how much."""


@dataclass(frozen=True)
class Row:
    """One rung at one size.

    Attributes:
        left_out: why it was not run; then it has no figures.
        difference: the output's largest difference from the definition in float64.
        allowed: the most that would have been accepted.
        gradient_difference: the same of the input's gradient; None where there is no backward.
        parameters: numbers that training would change.
        multiply_adds: of the forward pass, as if no key were hidden where that is how the rung
            computes; None where they cannot be counted.
        peak_bytes: what forward and backward add to memory, gradients included.
        forward: seconds without gradients.
        step: seconds of forward and backward.
        over_before: for each of these figures, the ratio to the rung before that has it; of times
            the median of the ratios round by round, with quartiles.
    """

    size: str
    rung: str
    where: str
    note: str
    left_out: str | None = None
    difference: float | None = None
    allowed: float | None = None
    gradient_difference: float | None = None
    gradient_allowed: float | None = None
    parameters: int | None = None
    multiply_adds: int | None = None
    peak_bytes: int | None = None
    forward: Spread | None = None
    step: Spread | None = None
    over_before: Mapping[str, float | Spread] | None = None


@dataclass(frozen=True, repr=False)
class Ladder:
    """All rows, rung by rung and size by size, and how they came about."""

    rows: list[Row]
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        sizes = ", ".join(dict.fromkeys(row.size for row in self.rows))
        return f"<Ladder: {len(self.rows)} rows at {sizes}; .to_dict() has the figures>"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {**self.provenance, "rows": [asdict(row) for row in self.rows]}


def climb(
    sizes: Sequence[Size] = SIZES,
    *,
    device: str = "cpu",
    compile: bool = False,
    rounds: int = 11,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> Ladder:
    """Run every rung at every size.

    Args:
        sizes: what to compare at. The scalar rung runs where a forward pass has at most
            `SCALAR_MULTIPLY_ADDS`.
        device: `cpu` or `cuda`.
        compile: run every rung but the scalar one through `torch.compile`; FlexAttention, which
            is only fast compiled, runs only then.
        rounds: of timing; each rung has a turn in every round.
        seed: of weights, input and the gradient that comes back.
        report: called with the share of the work that is done.

    Raises:
        ValueError: no sizes, a device that is not there, a size that does not fit in memory, or
            a rung that cannot be compiled here.
        Disagreement: a rung that is not equal to the definition; nothing is timed at that size.
    """
    _check_call(sizes, device, rounds)
    rows: list[Row] = []
    for done, size in enumerate(sizes):

        def report_share(share: float, done: int = done) -> None:
            if report is not None:
                report((done + share) / len(sizes))

        try:
            rows += _at(size, device, compile, rounds, seed, report_share)
        except torch.OutOfMemoryError:
            raise ValueError(
                f"--sizes {size}: the GPU's memory does not hold it; give a smaller batch or length"
            ) from None
    provenance = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": timing.machine(),
        "limits": timing.limits(device),
        "settings": {
            "sizes": [str(size) for size in sizes],
            "device": device,
            "compile": compile,
            "rounds": rounds,
            "seed": seed,
            "dtype": "float32",
        },
    }
    return Ladder(rows, provenance)


def _check_call(sizes: Sequence[Size], device: str, rounds: int) -> None:
    if not sizes:
        raise ValueError("no sizes; give one such as 1x16x16x4")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device {device}: give cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch sees no such device; leave --device out")
    if rounds < 1:
        raise ValueError(f"--rounds {rounds}: must be at least 1")
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for size in sizes:
        need = 6 * 8 * size.batch * size.heads * size.length**2  # float64, forward and backward
        if need > there:
            raise ValueError(
                f"--sizes {size}: the definition's matrices need about {need / 2**30:,.0f} GiB, "
                f"and this machine has {there / 2**30:,.0f}; give a smaller batch or length"
            )


def _at(
    size: Size,
    device: str,
    compile: bool,
    rounds: int,
    seed: int,
    report: Callable[[float], None],
) -> list[Row]:
    """Run all rungs at one size."""
    if compile:
        torch.compiler.reset()  # rungs share code; PyTorch gives up where it has too many versions
    generator = torch.Generator().manual_seed(seed)
    state = weights(size, generator)
    x, pull = torch.randn(2, size.batch, size.length, size.width, generator=generator).to(device)
    truth = _Truth(size, state, x, pull)
    rows: list[Row] = []
    runners: dict[str, Runner] = {}
    for rung in RUNGS:
        row = Row(str(size), rung.name, rung.where, rung.note)
        left_out = _refusal(rung, size, compile)
        if left_out is None:
            runners[rung.name] = runner(rung, size, state, device, compile)
            row = _checked(row, rung, runners[rung.name], truth)
        else:
            row = replace(row, left_out=left_out)
        if row.left_out is not None:
            runners.pop(rung.name, None)
        rows.append(row)
        report(0.4 * len(rows) / len(RUNGS))
    return _timed(rows, runners, x, pull, rounds, report)


class _Truth:
    """The definition's results in float64, and their error in float32."""

    def __init__(self, size: Size, state: Mapping[str, Tensor], x: Tensor, pull: Tensor) -> None:
        self.x, self.pull = x, pull
        self.exact = self._run(size, state, torch.float64)
        plain = self._run(size, state, torch.float32)
        eps = torch.finfo(torch.float32).eps
        self.allowed = [
            FACTOR * (_largest(p, e) + eps * e.abs().max().item())
            for p, e in zip(plain, self.exact, strict=True)
        ]

    def _run(
        self, size: Size, state: Mapping[str, Tensor], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        leaf = self.x.to(dtype).detach().requires_grad_()
        w = {name: tensor.to(leaf) for name, tensor in state.items()}
        q, k, v = (
            (leaf @ w[f"W_{part}.weight"].T).unflatten(-1, (size.heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        out = attention(q, k, v, mask=Causal()).out
        out = out.transpose(1, 2).flatten(2) @ w["W_o.weight"].T
        (grad,) = torch.autograd.grad(out, leaf, self.pull.to(dtype))
        return out.detach(), grad


def _largest(got: Tensor, exact: Tensor) -> float:
    return (got.to(exact) - exact).abs().max().item()


def _refusal(rung: Rung, size: Size, compile: bool) -> str | None:
    """Return the reason that a rung is not run at a size, or None."""
    if rung.build is None and size.multiply_adds > SCALAR_MULTIPLY_ADDS:
        return (
            f"number by number, {size.multiply_adds:,} multiply-adds take too long; it runs where "
            f"there are at most {SCALAR_MULTIPLY_ADDS:,}"
        )
    if rung.name == FLEX and not compile:
        return "it is only fused where it is compiled; give --compile"
    return None


def _checked(row: Row, rung: Rung, run: Runner, truth: _Truth) -> Row:
    """Return the row with everything but times; or the reason that FlexAttention does not run here.

    Raises:
        Disagreement: the rung does not compute what the definition does.
    """
    x, pull = truth.x, truth.pull
    backward = flex_lacks_backward(x.device) if rung.name == FLEX else None
    try:
        got = run.forward(x), None if backward else run.step(x, pull)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2])}"
        if rung.name == FLEX:
            # What its compiler needs (a tool chain, a head's width) differs between machines.
            return replace(row, left_out=f"it does not run here: {reason}")
        if _from_compiler(error):
            raise ValueError(
                f"--compile: PyTorch cannot compile the rung {rung.name!r} here ({reason}); "
                "leave --compile out"
            ) from error
        raise
    found: list[float | None] = []
    for what, value, exact, allowed in zip(
        ("output", "gradient of the input"), got, truth.exact, truth.allowed, strict=True
    ):
        found.append(None if value is None else _largest(value.to(x.device), exact))
        if found[-1] is not None and not found[-1] <= allowed:  # NaN too
            raise Disagreement(
                f"the rung {rung.name!r} ({rung.where}) does not agree at {row.size}: its {what} "
                f"differs from the definition by {found[-1]:.2g}, and at most {allowed:.2g} would "
                "be rounding; nothing was timed"
            )
    return replace(
        row,
        note="; ".join(filter(None, (row.note, backward))),
        difference=found[0],
        allowed=truth.allowed[0],
        gradient_difference=found[1],
        gradient_allowed=None if backward else truth.allowed[1],
        parameters=run.parameters,
        multiply_adds=run.multiply_adds(x),
        peak_bytes=None if backward else run.peak_bytes(x, pull),
    )


def _from_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def _timed(
    rows: list[Row],
    runners: Mapping[str, Runner],
    x: Tensor,
    pull: Tensor,
    rounds: int,
    report: Callable[[float], None],
) -> list[Row]:
    """Return the rows with times, and every metric beside that of the rung before."""
    forward = timing.interleaved(
        {name: partial(run.forward, x) for name, run in runners.items()},
        rounds,
        report=lambda share: report(0.4 + 0.25 * share),
    )
    able = {row.rung for row in rows if row.gradient_difference is not None}
    step = timing.interleaved(
        {name: partial(run.step, x, pull) for name, run in runners.items() if name in able},
        rounds,
        report=lambda share: report(0.65 + 0.35 * share),
    )
    taken = {"forward": forward, "step": step}
    rows = [
        replace(
            row,
            **{
                figure: Spread.of(seconds[row.rung])
                for figure, seconds in taken.items()
                if row.rung in seconds
            },
        )
        for row in rows
    ]
    return [
        replace(row, over_before=_beside(row, rows[:index], taken))
        for index, row in enumerate(rows)
    ]


def _beside(
    row: Row, earlier: Sequence[Row], taken: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, float | Spread]:
    found: dict[str, float | Spread] = {}
    for figure in FIGURES:
        value = getattr(row, figure)
        before = next((r for r in reversed(earlier) if getattr(r, figure) is not None), None)
        if value is None or before is None:
            continue
        found[figure] = (
            timing.ratio(taken[figure], row.rung, before.rung)
            if figure in taken
            else value / getattr(before, figure)
        )
    return found


# --- for people -----------------------------------------------------------------------------------


def shown(ladder: Ladder) -> Iterator[Table | str]:
    """Yield the output for a terminal: for each size a table and its notes, then an explanation."""
    facts = ladder.provenance
    for size in facts["settings"]["sizes"]:
        yield table(ladder, size)
        yield from (f"  {note}" for note in notes(ladder, size))
    yield (
        f"medians of {facts['settings']['rounds']} rounds; ×: beside the rung before; off by: from "
        "the definition in float64; memory: added by forward and backward"
    )
    yield (
        f"the machine, in the same run: {facts['limits']['matmul_gflops']:,.0f} GFLOP/s in a "
        f"matrix product, {facts['limits']['copy_gb_per_s']:,.0f} GB/s in a copy"
    )


HEADINGS = (
    "off by",
    "parameters",
    "multiply-\nadds",
    "memory\nKiB",
    "forward\nms",
    "forward and\nbackward ms",
)


def table(ladder: Ladder, size: str) -> Table:
    """Return the rows of one size: each metric, and its ratio to the rung before."""
    rows = [row for row in ladder.rows if row.size == size and row.left_out is None]
    cells = [_cells(row) for row in rows]
    drawn = Table(
        title=f"B x T x E x H = {size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    drawn.add_column("rung", no_wrap=True)
    for heading, column in zip(HEADINGS, zip(*cells, strict=True), strict=True):
        # Down to 80 columns no number is cut: ratios go to a line of their own.
        words = " ".join((heading, *column)).split()
        drawn.add_column(heading, justify="right", min_width=max(map(len, words)))
    for row, figures in zip(rows, cells, strict=True):
        drawn.add_row(row.rung, *figures)
    return drawn


def notes(ladder: Ladder, size: str) -> list[str]:
    """Return notes on single rows, and the rows that were left out."""
    rows = [row for row in ladder.rows if row.size == size]
    lines = [f"{row.rung}: {row.note}" for row in rows if row.note and row.left_out is None]
    return lines + [f"{row.rung} left out: {row.left_out}" for row in rows if row.left_out]


def _cells(row: Row) -> list[str]:
    def cell(figure: str, text: str) -> str:
        ratio = (row.over_before or {}).get(figure)
        if ratio is None:
            return text
        ratio = ratio.median if isinstance(ratio, Spread) else ratio
        return f"{text} ×{ratio:.2f}" if ratio < 9.995 else f"{text} ×{ratio:.0f}"

    def brief(value: float | None) -> str:
        if value is None:
            return "–"
        return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"

    def ms(spread: Spread | None) -> float | None:
        return None if spread is None else 1e3 * spread.median

    adds, peak = row.multiply_adds, row.peak_bytes
    return [
        f"{row.difference:.1e}",
        cell("parameters", f"{row.parameters:,}"),
        cell("multiply_adds", "–" if adds is None else f"{adds:,}"),
        cell("peak_bytes", brief(None if peak is None else peak / 1024)),
        cell("forward", brief(ms(row.forward))),
        cell("step", brief(ms(row.step))),
    ]
