"""`make fuzz`: as many random calls as are asked for, on every core and by every unit."""

from __future__ import annotations

import argparse
import os
import random
import sys

from headwise.kernels import ctypes_api as cpu

from .batches import Batch, run_all
from .trial import Seen, units


def main() -> int:
    """The command; 1 where a fault was found."""
    options = _options()
    if not units():
        print(f"fuzz: {cpu.why_not()}", file=sys.stderr)
        return 2
    chosen = units() if options.units == "all" else tuple(options.units.split(","))
    again = f"make fuzz SEED={options.seed} CASES={options.cases} UNITS={options.units}"
    print(f"fuzz: {options.cases} cases on each of {', '.join(chosen)}; again: {again}", flush=True)
    seen, ran = Seen(), 0
    for batch in run_all(options.seed, options.cases, chosen, options.jobs):
        ran += batch.ran
        seen.join(batch.seen)
        if batch.fault:
            _tell(batch)
            return 1
        print(f"  {ran} cases, {seen.numbers} numbers compared, none outside", flush=True)
    print(f"{ran} cases, {seen.calls} calls. The largest errors, as shares of their bounds:")
    for name, (share, where) in sorted(seen.shares.items()):
        print(f"  {name:18} {share:.3f}  {where}")
    return 0


def _tell(batch: Batch) -> None:
    print(f"\nfuzz: a fault after {batch.ran} cases from SEED={batch.seed}:\n  {batch.fault}")
    print("\nAgain, in tests/:")
    print("  from fuzz.case import Case; from fuzz.trial import check")
    print(f"  check({batch.case!r})")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m fuzz",
        description="Random calls of the native kernel against the definition in float64.",
    )
    parser.add_argument("--cases", type=int, default=20_000, help="how many (default: 20000)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--units", default="all", help="such as avx2,plain (default: all here)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
