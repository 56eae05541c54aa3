"""Write this machine's part of `headwise/kernels/speeds.json`: the kernel beside other backends.

    python benchmarks/native_choice.py [--seconds N]

By CPU time of one thread. A table belongs to a CPU's vendor and its richest unit; each that this
machine can stand for is measured in a process of its own, in which PyTorch's kernels, MKL and
oneDNN may use no more than such a CPU has. Tables of other machines stay as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import date
from typing import Any

import torch

from headwise.cli.tune import measure
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import speeds
from headwise.tutorial.timing import write_run

# What PyTorch's own kernels, MKL and oneDNN may use on a machine that has no more than that.
LIKE = {
    "amx": ("avx512", "AVX512", "AVX512_CORE_AMX"),
    "avx512bf16": ("avx512", "AVX512", "AVX512_CORE_BF16"),
    "avx512": ("avx512", "AVX512", "AVX512_CORE"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "plain": ("default", "SSE4_2", "SSE41"),
}
CAPS = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")


def tables(seconds: float) -> list[dict[str, Any]]:
    """A table for each CPU that this one can stand for; rows are printed as they come."""
    library, found = cpu.library(), []
    vendor, name = speeds.processor()
    for richest in () if library is None else library.usable:
        caps = dict(zip(CAPS, LIKE[richest], strict=True)) if richest in LIKE else {}
        part = subprocess.run(
            [sys.executable, __file__, "--only", richest, "--seconds", str(seconds)],
            env={**os.environ, **caps, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        rows = [json.loads(line) for line in part.stdout.splitlines()]
        measured = f"{date.today()}, PyTorch {torch.__version__}, CPU time of one thread"
        about = {"cpu": name, "vendor": vendor, "richest": richest, "measured": measured}
        found.append({**about, "rows": rows})
    return found


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="for the rounds of each call")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in the process of one table
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        library = cpu.library()
        assert library is not None
        units = speeds.contenders(library.usable[library.usable.index(options.only) :])
        for row, spread in measure(units, options.seconds, time.process_time):
            print(json.dumps(asdict(row)), flush=True)
            print(f"{row}: ratios spread by {spread:.2f}", file=sys.stderr)
        return
    found = tables(options.seconds)
    mine = {(x["vendor"], x["richest"]) for x in found}
    kept = [
        x
        for x in json.loads(speeds.SHIPPED.read_text("utf-8"))["machines"]
        if (x["vendor"], x["richest"]) not in mine
    ]
    print("written to", write_run(speeds.SHIPPED, {"machines": [*kept, *found]}))


if __name__ == "__main__":
    main()
