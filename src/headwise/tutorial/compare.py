"""Compare the rungs of the ladder on the same weights and input: first correctness, then cost.

A rung is correct if the errors of its output and of the gradient of its input, relative to the
definition in float64, are at most a small multiple of those of the definition in float32. If a rung
is wrong, an error names it and nothing is timed. The rungs are the files of `headwise.systems` and
the fused layers of PyTorch.
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
from .runners import FLEX, RUNGS, SIZES, Rung, Scalars, Size, Torch, parse_sizes, runner, weights
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

FACTOR = 4  # allowed multiple of the definition's error in float32, as summation orders differ
SCALAR_MULTIPLY_ADDS = 100_000  # takes about a second, forward and backward, in the scalar rung
METRICS = ("parameters", "multiply_adds", "peak_bytes", "forward", "step")


class Disagreement(Exception):
    """A rung differs from the definition; the message names the rung and the difference."""


@dataclass(frozen=True)
class Row:
    """One rung at one size.

    Attributes:
        left_out: the reason why the rung was not run; the row then has no metrics.
        difference: the largest deviation of the output from the definition in float64.
        allowed: the largest deviation that is accepted.
        gradient_difference: the same for the gradient of the input; None without a backward pass.
        parameters: the number of trainable parameters.
        multiply_adds: multiply-adds of the forward pass, including hidden keys unless the rung
            skips them; None if they cannot be counted.
        peak_bytes: the peak memory of forward and backward, gradients included.
        forward: seconds without gradients.
        step: seconds of forward and backward.
        over_before: the ratio of each metric to that of the previous rung with this metric; for
            times, the median and quartiles of the ratios within rounds.
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
    """The rows of all rungs and sizes, and the settings and machine of the run."""

    rows: list[Row]
    provenance: dict[str, Any]

    def __repr__(self) -> str:
        sizes = ", ".join(dict.fromkeys(row.size for row in self.rows))
        return f"<Ladder: {len(self.rows)} rows at {sizes}; .to_dict() has the metrics>"

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
        sizes: the sizes to compare. The scalar rung runs only if a forward pass has at most
            `SCALAR_MULTIPLY_ADDS`.
        device: `cpu` or `cuda`.
        compile: compile every rung but the scalar one with `torch.compile`. FlexAttention runs only
            when compiled.
        rounds: the number of timing rounds; each round times each rung once.
        seed: the seed of weights, input and output gradient.
        report: called with the completed fraction of the work.

    Raises:
        ValueError: no sizes, a missing device, a size that does not fit in memory, or a rung that
            cannot be compiled on this machine.
        Disagreement: a rung differs from the definition; nothing is timed at that size.
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
                f"--sizes {size}: does not fit in the GPU's memory; use a smaller batch or length"
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
        raise ValueError("at least one size is required, such as 1x16x16x4")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu or cuda, got {device}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: PyTorch finds no CUDA device; omit --device")
    if rounds < 1:
        raise ValueError(f"--rounds must be at least 1, got {rounds}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for size in sizes:
        need = 6 * 8 * size.batch * size.heads * size.length**2  # float64, forward and backward
        if need > memory:
            raise ValueError(
                f"--sizes {size}: the definition's matrices need about {need / 2**30:,.0f} GiB, "
                f"but this machine has {memory / 2**30:,.0f}; use a smaller batch or length"
            )


def _at(
    size: Size, device: str, compile: bool, rounds: int, seed: int, report: Callable[[float], None]
) -> list[Row]:
    """Run all rungs at one size."""
    if compile:
        torch.compiler.reset()  # rungs share code, and PyTorch limits its recompilations
    generator = torch.Generator().manual_seed(seed)
    state = weights(size, generator)
    x, pull = torch.randn(2, size.batch, size.length, size.width, generator=generator).to(device)
    truth = _Truth(size, state, x, pull)
    rows: list[Row] = []
    runners: dict[str, Torch | Scalars] = {}
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
    """Return the reason why a rung is not run at a size, or None."""
    if rung.build is None and size.multiply_adds > SCALAR_MULTIPLY_ADDS:
        return (
            f"{size.multiply_adds:,} multiply-adds, number by number, take too long; the limit is "
            f"{SCALAR_MULTIPLY_ADDS:,}"
        )
    if rung.name == FLEX and not compile:
        return "it is fused only if compiled; pass --compile"
    return None


def _checked(row: Row, rung: Rung, run: Torch | Scalars, truth: _Truth) -> Row:
    """Return the row without times; for FlexAttention, it may give the reason why it does not run.

    Raises:
        Disagreement: the rung differs from the definition.
    """
    x, pull = truth.x, truth.pull
    backward = flex_lacks_backward(x.device) if rung.name == FLEX else None
    try:
        got = run.forward(x), None if backward else run.step(x, pull)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split(chr(10))[:2])}"
        if rung.name == FLEX:
            # Its compiler depends on the machine: a toolchain, a minimum head dimension.
            return replace(row, left_out=f"it does not run here: {reason}")
        if _from_compiler(error):
            raise ValueError(
                f"--compile: PyTorch cannot compile the rung {rung.name!r} here ({reason}); "
                "leave --compile out"
            ) from error
        raise
    differences: list[float | None] = []
    for quantity, value, exact, allowed in zip(
        ("output", "gradient of the input"), got, truth.exact, truth.allowed, strict=True
    ):
        differences.append(None if value is None else _largest(value.to(x.device), exact))
        if differences[-1] is not None and not differences[-1] <= allowed:  # NaN too
            raise Disagreement(
                f"the rung {rung.name!r} ({rung.where}) does not agree at {row.size}: its "
                f"{quantity} differs from the definition by {differences[-1]:.2g}, but rounding "
                f"explains at most {allowed:.2g}; nothing was timed"
            )
    return replace(
        row,
        note="; ".join(filter(None, (row.note, backward))),
        difference=differences[0],
        allowed=truth.allowed[0],
        gradient_difference=differences[1],
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
    runners: Mapping[str, Torch | Scalars],
    x: Tensor,
    pull: Tensor,
    rounds: int,
    report: Callable[[float], None],
) -> list[Row]:
    """Return the rows with times, and with the ratio of each metric to the previous rung."""
    forward = timing.interleaved(
        {name: partial(run.forward, x) for name, run in runners.items()},
        rounds,
        report=lambda share: report(0.4 + 0.25 * share),
    )
    trainable = {row.rung for row in rows if row.gradient_difference is not None}
    step = timing.interleaved(
        {name: partial(run.step, x, pull) for name, run in runners.items() if name in trainable},
        rounds,
        report=lambda share: report(0.65 + 0.35 * share),
    )
    times = {"forward": forward, "step": step}
    rows = [
        replace(
            row,
            **{
                metric: Spread.of(seconds[row.rung])
                for metric, seconds in times.items()
                if row.rung in seconds
            },
        )
        for row in rows
    ]
    return [
        replace(row, over_before=_ratios(row, rows[:index], times))
        for index, row in enumerate(rows)
    ]


def _ratios(
    row: Row, earlier: Sequence[Row], times: Mapping[str, Mapping[str, list[float]]]
) -> dict[str, float | Spread]:
    ratios: dict[str, float | Spread] = {}
    for metric in METRICS:
        value = getattr(row, metric)
        before = next((r for r in reversed(earlier) if getattr(r, metric) is not None), None)
        if value is None or before is None:
            continue
        ratios[metric] = (
            timing.ratio(times[metric], row.rung, before.rung)
            if metric in times
            else value / getattr(before, metric)
        )
    return ratios


# --- output ---------------------------------------------------------------------------------------


def shown(ladder: Ladder) -> Iterator[Table | str]:
    """Yield the output for a terminal: for each size a table and its notes, then an explanation."""
    facts = ladder.provenance
    for size in facts["settings"]["sizes"]:
        yield table(ladder, size)
        yield from (f"  {note}" for note in notes(ladder, size))
    yield (
        f"medians of {facts['settings']['rounds']} rounds; ×: ratio to the previous rung; off by: "
        "difference from the definition in float64; memory: the peak of forward and backward"
    )
    yield (
        f"this machine, in the same run: {facts['limits']['matmul_gflops']:,.0f} GFLOP/s in a "
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
    """Return the rows of one size: each metric and its ratio to the previous rung."""
    rows = [row for row in ladder.rows if row.size == size and row.left_out is None]
    cells = [_cells(row) for row in rows]
    output = Table(
        title=f"B x T x E x H = {size}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    output.add_column("rung", no_wrap=True)
    for heading, column in zip(HEADINGS, zip(*cells, strict=True), strict=True):
        # At 80 columns, numbers are not truncated: ratios wrap to the next line.
        words = " ".join((heading, *column)).split()
        output.add_column(heading, justify="right", min_width=max(map(len, words)))
    for row, metrics in zip(rows, cells, strict=True):
        output.add_row(row.rung, *metrics)
    return output


def notes(ladder: Ladder, size: str) -> list[str]:
    """Return the notes on rows and the reasons for omitted rows."""
    rows = [row for row in ladder.rows if row.size == size]
    lines = [f"{row.rung}: {row.note}" for row in rows if row.note and row.left_out is None]
    return lines + [f"{row.rung} not run: {row.left_out}" for row in rows if row.left_out]


def _cells(row: Row) -> list[str]:
    def cell(metric: str, text: str) -> str:
        ratio = (row.over_before or {}).get(metric)
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
