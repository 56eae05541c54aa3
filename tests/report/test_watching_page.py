"""docs/watching.md: the sessions it shows are real."""

import re
import shlex
from pathlib import Path

import pytest

from headwise.cli.main import main
from sessions import pattern, sessions

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


@pytest.mark.slow
def test_the_sessions_of_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = []
    for name, text in sessions(PAGE.read_text("utf-8")):
        if not name.startswith("$ "):
            Path(name).write_text(text, "utf-8")
            continue
        words = shlex.split(name[2:])
        assert (words[0], main(words[1:])) == ("headwise", 0), name
        out = re.sub(r"(?<=: )/\S*/", "", capsys.readouterr().out)  # whole paths
        assert re.fullmatch(pattern(text), out), f"{name}\n{out}"
        ran.append(name)
    assert len(ran) == 3
    assert {"heads.html", "texts.html", "both.html"} <= {path.name for path in tmp_path.iterdir()}
