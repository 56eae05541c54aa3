"""Settings of the whole suite."""

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

collect_ignore_glob = ["check/authors/*", "check/cases/*"]  # which are checked, and not imported

settings.register_profile(
    "headwise",
    deadline=None,  # shared machines: no test is timed
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("headwise")

LONG = ("slow", "browser")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--unit", help="the native kernel's unit, such as avx2 (default: the best)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long first: no worker is left alone with one at the end."""
    long = {item.path for item in items for mark in item.iter_markers() if mark.name in LONG}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True, scope="session")
def _unit(request: pytest.FixtureRequest) -> Iterator[None]:
    from headwise.kernels import (
        ctypes_api as cpu,  # not before jaxtyping's hook, which the options above install
    )

    name = request.config.getoption("--unit", None)
    with cpu.instructions(name) if name else nullcontext():
        yield


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """The same random numbers for each test, and no choice that another has made."""
    from headwise.core.call import PREPARED

    PREPARED.clear()
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Switch shape checks off, where the run has them: users do not, they have our errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker runs files in forks of a process that has PyTorch, not in new Pythons."""
    import fresh
    from headwise.check import sandbox

    fresh.ready()
    monkeypatch.setattr(sandbox, "_started", fresh.sandboxed)
    monkeypatch.setattr(sandbox, "os", fresh.System(sandbox.os))


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a checked file's import leaves behind is taken back; libraries that it brought stay."""
    from headwise.check.code import is_users

    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - known:
        if is_users(getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
