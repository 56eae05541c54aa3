"""Layers that the other authors wrote: what is said of each; see tests/authored.py."""

from __future__ import annotations

import pytest

from authored import ROWS, first_words

pytestmark = [pytest.mark.usefixtures("imports"), pytest.mark.slow]  # all of them together

OWN = [row for row in ROWS if row[2] >= "c"]


@pytest.mark.parametrize(
    ("status", "rule", "file", "said"), OWN, ids=[f"{row[2]}-{row[0]}" for row in OWN]
)
def test_what_is_said_of_it(status: str, rule: str, file: str, said: str) -> None:
    told, verdict = first_words(status, rule, file)
    assert told == status, f"{said}\n{verdict}"
