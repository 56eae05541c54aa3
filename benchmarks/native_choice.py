"""Write `headwise/backends/speeds.json`: how fast the native kernel is beside the other backends.

    python benchmarks/native_choice.py [--seconds N]

By CPU time of one thread. Each set is measured in a process of its own, in which PyTorch's kernels,
MKL and oneDNN may use no better one: so that a row is right for a machine that has no better one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.backends import native
from headwise.backends.native import Measured
from headwise.kernels import ctypes_api as cpu
from headwise.tutorial.timing import machine, ratio, write_run
from native_run import DTYPES, NATIVE, Run, Shape, Work

SPEEDS = Path(native.__file__).with_name("speeds.json")

# What PyTorch's own kernels, MKL and oneDNN may use on a machine that has no more than that.
LIKE = {
    "amx": ("avx512", "AVX512", "AVX512_CORE_AMX"),
    "avx512bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "plain": ("default", "SSE4_2", "SSE41"),
}
CAPS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def choice(seconds: float) -> list[Measured]:
    """Measure with every instruction set that this machine has; rows are printed as they come."""
    library, rows = cpu.library(), []
    for name in () if library is None else library.usable:
        caps = dict(zip(CAPS, LIKE[name], strict=True)) if name in LIKE else {}
        found = subprocess.run(
            [sys.executable, __file__, "--only", name, "--seconds", str(seconds)],
            env={**os.environ, **caps, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        for line in found.stdout.splitlines():
            rows.append(Measured(**json.loads(line)))
            print(rows[-1], flush=True)
    return rows


def measure(name: str, seconds: float) -> Iterable[Measured]:
    """By CPU time: how fast the kernel is beside the fastest other; the worse of two masks."""
    run = Run(time.process_time, seconds)
    for length in (1, 64, 512, 2048):
        for dtype in DTYPES:
            for training in (False, True)[: 1 if length == 1 else 2]:
                if length == 1:
                    shapes = [Shape(1, 12, 1, 2048, 64)]
                else:
                    shapes = [Shape.square(length, 64, causal, 3e7) for causal in (True, False)]
                speed = min(beside_others(run, name, x, DTYPES[dtype], training) for x in shapes)
                sizes = (shapes[0].queries, shapes[0].keys, shapes[0].dim)
                yield Measured(name, dtype, training, *sizes, round(speed, 2))


def beside_others(run: Run, name: str, shape: Shape, dtype: torch.dtype, training: bool) -> float:
    """The fastest other backend's time over the kernel's."""
    q, k, v = leaves = [x.requires_grad_(training) for x in shape.inputs(dtype)]
    pull = torch.randn_like(q)

    def work(backend: str) -> Any:
        out = hw.attend(q, k, v, mask=shape.mask, backend=backend)
        return torch.autograd.grad(out, leaves, pull) if training else out

    calls: dict[str, Work] = {b: partial(work, b) for b in (NATIVE, "sdpa", "eager")}
    with cpu.instructions(name):
        taken = run.take(calls)
    return min(ratio(taken, other, NATIVE).median for other in ("sdpa", "eager"))


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="for the rounds of each call")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in the process of one set
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        for row in measure(options.only, options.seconds):
            print(json.dumps(asdict(row)), flush=True)
    else:
        rows = [asdict(row) for row in choice(options.seconds)]
        run = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine()}
        settings = {"clock": "CPU time of one thread, the peers held to the same instruction set"}
        print("written to", write_run(SPEEDS, {**run, "settings": settings, "rows": rows}))


if __name__ == "__main__":
    main()
