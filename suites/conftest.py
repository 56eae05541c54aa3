"""Settings of the suites, and the counts at the end."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headwise.kernels import cpu

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


def pytest_configure() -> None:
    """Under CI the native kernel must be there to be tested."""
    if os.environ.get("CI") == "true" and cpu.library() is None:
        raise pytest.UsageError("the native kernel is not built: `make native`")


@pytest.fixture(autouse=True)
def _fresh_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Add to the counts that are printed for the test's file: `count(calls=3)`."""

    def add(**numbers: int) -> None:
        request.node.user_properties.extend(numbers.items())

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each file's tests counted."""
    counts: dict[str, Counter[str]] = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if outcome != "skipped" and report.when != "call":
                continue
            suite = counts.setdefault(Path(report.nodeid.partition("::")[0]).stem, Counter())
            suite[outcome] += 1
            for name, number in report.user_properties:
                suite[name] += number
    for suite, numbers in sorted(counts.items()):
        words = ", ".join(f"{number:,} {name}" for name, number in numbers.items())
        terminalreporter.write_line(f"{suite}: {words}")
