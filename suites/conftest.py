"""Settings of the suites, and the counts at the end."""

import os
from collections.abc import Callable

import counts
import pytest
import torch

from headwise.kernels import ctypes_api as cpu

os.environ["KERAS_BACKEND"] = "torch"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the counts are the CPU's
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    torch.set_num_threads(1)
LINES = pytest.StashKey[list[str]]()


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


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a whole run whose counts are not those of `counts.toml`, and say how they differ."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or "PYTEST_XDIST_WORKER" in os.environ:
        return
    found = counts.found(reporter)
    lines = counts.lines(found)
    if found and whole(session.config) and (wrong := counts.wrong(found)):
        lines += ["", f"other counts than in {counts.TABLE}:", *wrong]
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    session.config.stash[LINES] = lines


def whole(config: pytest.Config) -> bool:
    """Whether every test of the files was asked for."""
    chosen = config.option.keyword or config.option.markexpr or os.environ.get("CELLS")
    return not chosen and not any("::" in arg for arg in config.args)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what each file's tests counted."""
    for line in config.stash.get(LINES, []):
        terminalreporter.write_line(line)
