"""Layers that others wrote, mended: nothing is found in them any more; see tests/authored.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from authored import HERE, MENDED, checked

pytestmark = [pytest.mark.usefixtures("imports"), pytest.mark.slow]  # all of them together


@pytest.mark.parametrize("file", MENDED)
def test_nothing_is_found(file: str, tmp_path: Path) -> None:
    text = (HERE / f"{file}.py").read_text("utf-8")
    for wrong, right in MENDED[file].items():
        assert wrong in text
        text = text.replace(wrong, right)
    path = tmp_path / f"{file}.py"
    path.write_text(text, "utf-8")
    verdict = checked(path)
    assert verdict is not None
    assert verdict.passed, str(verdict)
