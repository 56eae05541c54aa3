"""What several tests of the checker share."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from headwise.check.target.errors import is_users


@pytest.fixture
def imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a file's import leaves behind is taken back; libraries that it brought stay."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - known:
        if is_users(getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]
