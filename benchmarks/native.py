"""The native CPU kernel beside all that PyTorch and others offer on a CPU.

    python benchmarks/native.py                          # all parts, about 8 minutes on two cores
    python benchmarks/native.py --part forward --dims 64 --lengths 512 2048
    python benchmarks/native.py --cpu-time               # on a machine that others use too

Parts: `forward`, `backward`, `decode` and `peers` (FlexAttention, onnxruntime, whole layers).
Everything timed for a shape takes turns in every round, both dtypes together; results are compared
before the clock starts. Spreads on record are median, lower and upper quartile. The table at the
end says which of the kernel's goals were reached, and where they were not.

Wall time with all threads by default. `--cpu-time` counts what the process itself computes, on one
thread: so that work of others on the machine costs little more than shared caches.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import metadata
from pathlib import Path

import torch

from headwise.kernels import ctypes_api as cpu
from native_own import MATRIX, backward, decode, forward
from native_peers import layers, peers
from native_run import DTYPES, NATIVE, Run, Shape, brief, rates, show_goals, show_rows
from recording import record

RESULTS = Path(__file__).parent / "results"
PARTS = ("forward", "backward", "decode", "peers")
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
PEERS = ((128, 64), (512, 64), (2048, 64), (8192, 64), (512, 128))  # length, dim; each is compiled
LONGEST = 8192 * 64  # length × dim, of gradients


def versions() -> dict[str, str]:
    """Of what is no dependency of headwise."""
    found = {}
    for package in ("onnxruntime", "onnx"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all, in order")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--cpu-time", action="store_true", help="the process's own, on one thread")
    parser.add_argument("--seconds", type=float, default=1.2, help="for the rounds of each shape")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if options.cpu_time and options.threads not in (None, 1):
        parser.error("--cpu-time adds up the work of all threads, so it takes one (--threads 1)")
    if options.cpu_time:
        options.threads = 1
    return options


def measure(run: Run, part: str, lengths: list[int], dims: list[int]) -> None:
    """One of the parts that are timed here, shape by shape."""
    masks = (True, False)
    shapes = [(t, d) for t in lengths for d in dims]
    if part == "forward":
        for (length, dim), causal in ((s, c) for s in shapes for c in masks):
            forward(run, Shape.square(length, dim, causal, 1e9))
    elif part == "backward":
        for (length, dim), causal in ((s, c) for s in shapes for c in masks if s[0] >= 256):
            # PyTorch's gradient has a thread a head: with one head it would idle
            shape = Shape.square(length, dim, causal, 4e8, least=2)
            if length * dim <= LONGEST:
                backward(run, shape)
            else:
                why = "not tried: a round takes a minute"
                run.keep("backward", shape, {}, {f"{name}: {NATIVE}": why for name in DTYPES})
    elif part == "decode":
        for keys, dim in ((n, d) for n in (1024, 16384) for d in dims):
            decode(run, keys, dim)
    elif part == "peers":
        for (length, dim), causal in ((s, c) for s in PEERS if s in shapes for c in masks):
            peers(run, Shape.square(length, dim, causal, 1e9))
        for length in sorted({s[0] for s in PEERS if s in shapes and s[0] <= MATRIX}):
            layers(run, length)


def main() -> None:
    """Measure, print the tables, and keep the run."""
    options = parse()
    if options.threads:
        torch.set_num_threads(options.threads)
    if cpu.why_not():
        sys.exit(cpu.why_not())
    run = Run(time.process_time if options.cpu_time else time.perf_counter, options.seconds)
    parts = options.part or PARTS
    for part in parts:
        measure(run, part, options.lengths, options.dims)
    for part in dict.fromkeys(row["part"] for row in run.rows if "goal" not in row):
        show_rows(run.rows, part)
    if run.goals:
        show_goals(run)
    if not options.no_record:
        library = cpu.library()
        clock = "CPU time of the process, one thread" if options.cpu_time else "wall time"
        settings = {**vars(options), **versions(), "clock": clock}
        settings["instructions"] = library.best if library else None
        settings["rates_by_this_clock"] = rates(run)
        name = "native" if options.part is None else f"native-{'-'.join(options.part)}"
        print("recorded in", record(name, settings, brief(run.rows), RESULTS))


if __name__ == "__main__":
    main()
