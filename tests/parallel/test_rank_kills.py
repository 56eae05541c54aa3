"""A training of two ranks that is killed at any moment goes on: a few kills of it."""

from __future__ import annotations

import pytest
from rank_kills import run


@pytest.mark.ranks
def test_a_killed_training_of_two_ranks_goes_on_with_1_2_and_4(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(kills=4, seed=0) == 0
    assert capsys.readouterr().out.count("the same, bit for bit") >= 2
