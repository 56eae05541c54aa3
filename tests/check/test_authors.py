"""Layers that others wrote: what is said of each, and that nothing is found once mended."""

from __future__ import annotations

from pathlib import Path

import pytest

from authored import HERE, MENDED, ROWS, loaded
from headwise.check import Verdict, check


def checked(text: str, folder: Path) -> tuple[str, Verdict | None]:
    """Return the rule of the first error, and the verdict; "asked" and None where it asks."""
    try:
        verdict = check(loaded(text, folder)[0])
    except ValueError:
        return "asked", None
    return (verdict.errors[0].rule if verdict.errors else ""), verdict


@pytest.mark.parametrize(
    ("status", "rule", "file", "said"), ROWS, ids=[f"{row[2]}-{row[0]}" for row in ROWS]
)
def test_what_is_said_of_it(status: str, rule: str, file: str, said: str, tmp_path: Path) -> None:
    first, verdict = checked((HERE / f"{file}.py").read_text("utf-8"), tmp_path)
    told = "named" if first == rule else "caught" if first else "missed"
    told = {"asked": "asked", "": "missed"}.get(first, told)
    told = "right" if (told, rule) == ("missed", "") else told
    assert told == status, f"{said}\n{verdict}"


def test_no_right_one_is_accused() -> None:
    """A row says so where it is right, and the test above sees to what stands there."""
    right = [row for row in ROWS if not row[3]]
    assert {row[0] for row in right} == {"right", "asked"}
    assert len(right) > 12
    wrong = [row[0] for row in ROWS if row[3]]
    assert wrong.count("named") > 0.6 * len(wrong)


@pytest.mark.parametrize("file", MENDED)
def test_nothing_is_found_once_it_is_mended(file: str, tmp_path: Path) -> None:
    text = (HERE / f"{file}.py").read_text("utf-8")
    for wrong, right in MENDED[file].items():
        assert wrong in text
        text = text.replace(wrong, right)
    _, verdict = checked(text, tmp_path)
    assert verdict is not None
    assert verdict.passed, str(verdict)
