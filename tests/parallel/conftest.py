"""What tests over ranks share."""

from __future__ import annotations

import pytest
from over_ranks import RANKS, on_ranks


@pytest.fixture(scope="module", params=RANKS, ids="{} ranks".format)
def told(request: pytest.FixtureRequest) -> dict[str, str]:
    """What went wrong in the `CHECKS` of the test's module, run on so many ranks."""
    return on_ranks(request.module.__name__, request.param)
