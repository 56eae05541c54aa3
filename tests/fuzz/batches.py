"""Batches of random calls, each from a seed of its own, on several processes at once."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from .case import Case
from .drawing import cases
from .trial import Seen, check

BATCH = 1000
"""Cases from one seed of Hypothesis's; the next batch has the next seed."""


@dataclass
class Batch:
    """Cases to run from one seed, and what became of them."""

    seed: int
    count: int
    units: tuple[str, ...]
    seen: Seen = field(default_factory=Seen)
    ran: int = 0
    fault: str = ""
    case: Case | None = None


def run(batch: Batch) -> Batch:
    """Run a batch up to its first fault, and shrink the case that has it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")

    @seed(batch.seed)
    @settings(
        max_examples=batch.count,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(case=cases())
    def attempt(case: Case) -> None:
        batch.ran += not batch.fault
        try:
            check(case, batch.units, batch.seen)
        except Exception as error:
            batch.case, batch.fault = case, f"{type(error).__name__}: {error}"
            raise

    try:
        attempt()
    except Exception as error:
        batch.fault = batch.fault or f"{type(error).__name__}: {error}"
    return batch


def run_all(seed: int, count: int, units: tuple[str, ...], jobs: int) -> Iterator[Batch]:
    """So many cases in batches, in order."""
    batches = [
        Batch(seed + i, min(BATCH, count - i * BATCH), units) for i in range(-(-count // BATCH))
    ]
    with multiprocessing.get_context("spawn").Pool(min(jobs, len(batches))) as pool:
        yield from pool.imap(run, batches)
