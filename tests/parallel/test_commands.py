"""The commands of docs/scaling-commands.md work as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from worlds import commanded, world

PAGE = Path(__file__).parents[2] / "docs" / "scaling-commands.md"


@pytest.mark.ranks
def test_commands_work_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{n} times {n} is {n * n}, and {n} more is {n * n + n}\n" for n in range(150))
    Path("notes.txt").write_text(text)
    commands = re.findall(r"^\$ (.*)", PAGE.read_text(), re.M)
    for command in commands:
        words = shlex.split(command)
        torchrun, ranks = words[0] == "torchrun", 1
        if torchrun:
            assert words[1:4] == ["--nproc-per-node", "2", "-m"]
            ranks, words = 2, words[4:]
        words = words[1:] if words[0] == "--" else words
        assert words.pop(0) == "headwise"
        ended = world(ranks, commanded, *words)
        assert [one.code for one in ended] == [0] * ranks, ended
    assert len(commands) == 5
    assert Path("notes.html").exists()
    assert Path("watched/timeline.html").exists()
    assert Path("notes-gpt/checkpoint.safetensors").exists()
    assert not Path("notes-gpt/checkpoints").exists()
