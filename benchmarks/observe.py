"""What seeing costs: `observe()` beside the plain forward and beside materialised weights.

    python benchmarks/observe.py [--rounds N] [--no-record]
    python benchmarks/observe.py --device cuda --dtype bfloat16 --batch 4 --length 8192

Causal self-attention, by default in float32 at B 1, H 12, T 2048, D 64 on the CPU. All contenders
take turns in every round; equality is asserted before the clock starts. Peak memory is above what
was held before the call: on the CPU that of a process of its own, on CUDA the allocator's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
import recording
from headwise.tutorial import timing

RESULTS = Path(__file__).parent / "results"
HEADS = 12
FITS = 4096  # the longest context of which the T×T matrix is made
SET = "lse, entropy, first, previous, self"


@dataclass(frozen=True)
class Case:
    """What is computed, and where."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    batch: int = 1
    length: int = 2048
    dim: int = 64

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"B {self.batch}, H {HEADS}, T {self.length}, D {self.dim}, causal, {dtype}"


def statistics() -> list[Any]:
    """The set that the comparison is about."""
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.Mass(hw.First()),
        hw.Mass(hw.Previous()),
        hw.Mass(hw.Self()),
    ]


def materialised(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """The same figures as a user would write them, from the T×T matrix."""
    length = q.shape[2]
    scores = ((q @ k.mT) * q.shape[-1] ** -0.5).float()
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    return {
        "out": weights.to(v.dtype) @ v,
        "lse": scores.logsumexp(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "first": weights[..., 0],
        "previous": torch.nn.functional.pad(weights.diagonal(-1, -2, -1), (1, 0)),
        "self": weights.diagonal(0, -2, -1),
    }


def inputs(on: Case, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    torch.manual_seed(0)
    shape = 3, on.batch, HEADS, length or on.length, on.dim
    q, k, v = torch.randn(shape, device=on.device, dtype=on.dtype)
    return q, k, v


def assert_equal(on: Case) -> None:
    """`observe()` and the definition in float64 agree; observing leaves the output alone."""
    q, k, v = (x[:1, :2] for x in inputs(on, min(on.length, 2048)))
    seen = hw.observe(q, k, v, *statistics(), hw.Distance(), hw.MaxLogit(), mask=hw.Causal())
    assert torch.equal(seen.out, hw.attend(q, k, v, mask=hw.Causal()))
    exact = materialised(q.double(), k.double(), v.double())
    near = 1e-4 if on.dtype == torch.float32 else 2e-2
    for name, want in exact.items():
        got = seen.out if name == "out" else seen[name]
        torch.testing.assert_close(got.to(want), want, rtol=near, atol=near, msg=name)


def contenders(on: Case) -> dict[str, Callable[[], Any]]:
    """Everything that takes a turn, by the name in the table."""
    q, k, v = inputs(on)
    mask = hw.Causal()

    def observing(*chosen: Any) -> Callable[[], Any]:
        def work() -> None:
            seen = hw.observe(q, k, v, *chosen, mask=mask)
            for name in seen.readings.known:  # figures are made when they are first read
                seen[name]

        return work

    found: dict[str, Callable[[], Any]] = {
        "attend": lambda: hw.attend(q, k, v, mask=mask),
        "F.scaled_dot_product_attention": lambda: torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        f"observe: {SET}": observing(*statistics()),
        "observe: lse": observing(hw.LSE()),
        "observe: entropy": observing(hw.Entropy()),
        "observe: first, previous, self": observing(*statistics()[2:]),
        "observe: distance": observing(hw.Distance()),
        "observe: max logit": observing(hw.MaxLogit()),
        "observe: received": observing(hw.Received()),
    }
    if on.length <= FITS:
        found["materialised weights"] = lambda: materialised(q, k, v)
    return found


CALLS: dict[str, Callable[..., Any]] = {
    "attend": lambda *x: hw.attend(*x, mask=hw.Causal()),
    "observe": lambda *x: hw.observe(*x, *statistics(), mask=hw.Causal()),
    "materialised": materialised,
}


def peak(kind: str, on: Case, length: int) -> int:
    """Bytes that a call adds to the peak: on the CPU, of a fresh process."""
    if on.device == "cuda":
        CALLS[kind](*inputs(on, 64))
        q, k, v = inputs(on, length)
        return timing.peak_bytes(lambda: CALLS[kind](q, k, v), "cuda")
    done = subprocess.run(
        [sys.executable, __file__, "--peak", kind, "--length", str(length)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def measure_peak(kind: str, on: Case) -> int:
    """In the fresh process: run once, and say by how much the peak rose."""
    small, (q, k, v) = inputs(on, 64), inputs(on)
    with torch.no_grad():
        CALLS[kind](*small)  # what is loaded only once must not count
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = resident("VmRSS")
        CALLS[kind](q, k, v)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory now (`VmRSS`) or at most (`VmHWM`); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main() -> None:
    """Measure, print the tables, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--batch", type=int, default=Case.batch)
    parser.add_argument("--length", type=int, nargs="+", default=[Case.length])
    parser.add_argument("--dim", type=int, default=Case.dim)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    dtype = getattr(torch, chosen.dtype)
    cases = [Case(chosen.device, dtype, chosen.batch, n, chosen.dim) for n in chosen.length]
    if chosen.peak:
        print(measure_peak(chosen.peak, cases[0]))
        return

    rows: list[dict[str, Any]] = []
    for on in cases:
        rows += timed(on, chosen.rounds)
    rows += memory(cases[0])
    if not chosen.no_record:
        settings = {"rounds": chosen.rounds, "device": chosen.device, "dtype": chosen.dtype}
        name = "observe" if chosen.device == "cpu" else f"observe_{chosen.device}"
        print(f"kept in {recording.record(name, settings, rows, RESULTS, chosen.device)}")


def timed(on: Case, rounds: int) -> list[dict[str, Any]]:
    """The times of all contenders, as a table and as rows of the record."""
    assert_equal(on)
    with torch.no_grad():
        taken = timing.interleaved(contenders(on), rounds=rounds)
    rows, lines = [], []
    for name, seconds in taken.items():
        time, beside = timing.Spread.of(seconds), timing.ratio(taken, name, "attend")
        rows.append({"case": str(on), "contender": name, "seconds": time, "beside_attend": beside})
        spread = f"{beside.median:.2f} ({beside.low:.2f} to {beside.high:.2f})"
        lines.append([name, f"{1e3 * time.median:.2f}", spread])
    recording.show(str(on), ["", "ms", "× attend"], lines)
    if "materialised weights" in taken:
        seen = f"observe: {SET}"
        gain = timing.ratio(taken, "materialised weights", seen)
        rows.append({"case": str(on), "contender": "materialised / observe", "ratio": gain})
        print(f"the same from materialised weights takes {gain.median:.1f} × as long as {seen}")
    return rows


def memory(on: Case) -> list[dict[str, Any]]:
    """The peaks at several lengths, as a table and as rows of the record."""
    lengths = [1024, 2048, 4096, 8192]
    rows, lines = [], []
    for kind in CALLS:
        within = [n for n in lengths if kind != "materialised" or n <= FITS]
        sizes = [peak(kind, on, n) for n in within]
        lines.append([kind, *(f"{size / 2**20:.0f}" for size in sizes)])
        rows.append({"peak_bytes": kind, "lengths": within, "bytes": sizes})
    recording.show(
        "peak memory above the inputs, MiB",
        ["T", *map(str, lengths)],
        [[*line, *[""] * (5 - len(line))] for line in lines],
    )
    return rows


if __name__ == "__main__":
    main()
