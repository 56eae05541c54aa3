"""What seeing costs: `observe()` beside the plain forward and beside materialised weights.

    python benchmarks/observe.py [--rounds N] [--no-record]

Self-attention, causal, float32, B 1, H 12, T 2048, D 64, on the CPU. All contenders take turns in
every round; equality is asserted before the clock starts. Peak memory is that of a process of its
own, above what it held before the call.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.tutorial import timing

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, LENGTH = 12, 64, 2048
SET = "lse, entropy, first, previous, self"


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
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf)
    weights = scores.softmax(-1)
    return {
        "out": weights @ v,
        "lse": scores.logsumexp(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "first": weights[..., 0],
        "previous": torch.nn.functional.pad(weights.diagonal(-1, -2, -1), (1, 0)),
        "self": weights.diagonal(0, -2, -1),
    }


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k and v."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, HEADS, length, DIM)
    return q, k, v


def assert_equal() -> None:
    """`observe()` and the materialised figures agree, and observing leaves the output alone."""
    q, k, v = inputs()
    seen = hw.observe(q, k, v, *statistics(), mask=hw.Causal())
    assert torch.equal(seen.out, hw.attend(q, k, v, mask=hw.Causal()))
    for name, want in materialised(q, k, v).items():
        got = seen.out if name == "out" else seen[name]
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=name)


def contenders() -> dict[str, Callable[[], Any]]:
    """Everything that takes a turn, by the name in the table."""
    q, k, v = inputs()
    mask = hw.Causal()

    def observing(*chosen: Any) -> Callable[[], Any]:
        return lambda: hw.observe(q, k, v, *chosen, mask=mask)

    return {
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
        "materialised weights": lambda: materialised(q, k, v),
    }


def peak(kind: str, length: int) -> int:
    """Bytes that a call adds to the peak of a fresh process."""
    done = subprocess.run(
        [sys.executable, __file__, "--peak", kind, "--length", str(length)],
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout)


def measure_peak(kind: str, length: int) -> int:
    """In the fresh process: run once, and say by how much the peak rose."""
    small = inputs(64)
    q, k, v = inputs(length)
    run = {
        "attend": lambda *x: hw.attend(*x, mask=hw.Causal()),
        "observe": lambda *x: hw.observe(*x, *statistics(), mask=hw.Causal()),
        "materialised": materialised,
    }[kind]
    with torch.no_grad():
        run(*small)  # what is loaded only once must not count
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = resident("VmRSS")
        run(q, k, v)
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
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=LENGTH, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.peak:
        print(measure_peak(chosen.peak, chosen.length))
        return

    assert_equal()
    with torch.no_grad():
        taken = timing.interleaved(contenders(), rounds=chosen.rounds)
    rows, lines = [], []
    for name, seconds in taken.items():
        time, beside = timing.Spread.of(seconds), timing.ratio(taken, name, "attend")
        rows.append({"contender": name, "seconds": time, "beside_attend": beside})
        spread = f"{beside.median:.2f} ({beside.low:.2f} to {beside.high:.2f})"
        lines.append([name, f"{1e3 * time.median:.1f}", spread])
    seen = f"observe: {SET}"
    gain = timing.ratio(taken, "materialised weights", seen)
    rows.append({"contender": "materialised / observe", "ratio": gain})
    timing.show(
        f"B 1, H {HEADS}, T {LENGTH}, D {DIM}, causal, float32",
        ["", "ms", "× attend"],
        lines,
    )
    print(f"the same from materialised weights takes {gain.median:.1f} × as long as {seen}")

    lengths = [1024, 2048, 4096, 8192]
    memory = []
    for kind in ("attend", "observe", "materialised"):
        sizes = [peak(kind, n) for n in (lengths if kind != "materialised" else lengths[:3])]
        memory.append([kind, *(f"{size / 2**20:.0f}" for size in sizes)])
        rows.append({"peak_bytes": kind, "lengths": lengths, "bytes": sizes})
    timing.show(
        "peak memory above the inputs, MiB",
        ["T", *map(str, lengths)],
        [[*line, *[""] * (5 - len(line))] for line in memory],
    )
    if not chosen.no_record:
        print(f"kept in {timing.record('observe', {'rounds': chosen.rounds}, rows, RESULTS)}")


if __name__ == "__main__":
    main()
