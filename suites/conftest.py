"""Settings of the suites: the list of cases that are left out, and the counts at the end."""

import os
import tomllib
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LEFT_OUT = tomllib.loads((HERE / "skipped.toml").read_text())["left_out"]

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)


def source(package: str) -> Path:
    """Where `make` unpacked the sources of a package that ships its tests in these alone."""
    [folder] = (HERE.parent / ".venv-suites" / "sources").glob(f"{package}-*/")
    return folder


@pytest.fixture(autouse=True)
def _fresh_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture
def count(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Add to the counts that are printed for the test's file: `count(calls=3)`."""

    def add(**numbers: int) -> None:
        request.node.user_properties.extend(numbers.items())

    return add


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `skipped.toml`, each with its reason."""
    for item in items:
        file, _, name = item.nodeid.partition("::")
        for entry in LEFT_OUT:
            if Path(file).stem == entry["suite"] and any(
                fnmatchcase(name, pattern) for pattern in entry["cases"]
            ):
                item.add_marker(pytest.mark.skip(reason=entry["why"]))


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
