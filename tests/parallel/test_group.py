"""A rank that dies, hangs or raises ends the others, and one rank reports an error."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from worlds import Ended, world

pytestmark = pytest.mark.ranks

TIMEOUT = 5


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(60)))
    return str(path)


def trained(text: str, out: str, how: str, fault: str, rank: int, step: int, *more: str) -> None:
    """`headwise train` of which one rank comes to harm as it draws the rows of a step."""
    import headwise.cli
    from headwise.models import checkpoint
    from headwise.models.run import Run

    drawn, all_tensors = Run.batch, checkpoint.tensors_of

    def batch(run: Run, number: int) -> Any:
        first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if first and (run.ranks.rank, number + 1) == (rank, step):
            Path(f"{out}.harmed").write_text(str(time.monotonic()))
            _come_to_harm(fault)
        return drawn(run, number)

    def tensors_of(*arguments: Any) -> Any:
        if fault == "killed saving" and int(os.environ["RANK"]) == rank:
            Path(f"{out}.harmed").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        return all_tensors(*arguments)

    checkpoint.tensors_of = tensors_of
    Run.batch = batch  # type: ignore[method-assign]
    sizes = "--context 5 --layers 2 --heads 3 --width 15 --vocab 263 --batch 6 --warmup 2".split()
    call = ["train", text, "--out", out, "--steps", "8", *sizes, "--timeout", str(TIMEOUT)]
    raise SystemExit(headwise.cli.main([*call, "--parallel", how, *more]))


def _come_to_harm(fault: str) -> None:
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stopped":
        subprocess.Popen(["sh", "-c", f"sleep {2 * TIMEOUT}; kill -9 {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "hangs":
        time.sleep(600)
    if fault == "bad input":
        raise ValueError("no such row")
    if fault == "a bug":
        raise RuntimeError("what nobody thought of")
    if fault == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)


def lines(ended: list[Ended]) -> list[str]:
    """Return the lines that headwise has printed, from all ranks."""
    return [x for one in ended for x in one.err.splitlines() if x.startswith("headwise: ")]


@pytest.mark.parametrize(
    ("fault", "rank", "how"),
    [
        ("killed", 1, "ddp"),
        ("killed", 2, "fsdp"),
        ("killed saving", 1, "fsdp"),
        ("stopped", 0, "ddp"),
        ("hangs", 2, "ddp"),
        ("hangs", 0, "fsdp"),
    ],
)
def test_a_lost_rank_ends_the_others(
    text: str, tmp_path: Path, fault: str, rank: int, how: str
) -> None:
    out = str(tmp_path / "gpt")
    ended = world(3, trained, text, out, how, fault, rank, 3, seconds=30)
    assert Path(f"{out}.harmed").exists()
    assert sum("Traceback" in one.err for one in ended) == 1, ended
    for number, one in enumerate(ended):  # the launcher ends the rank itself
        assert one.code == (-signal.SIGKILL if number == rank else 1), ended
        assert "Traceback" not in one.err or f"(rank {number} of 3)" in one.err


def test_a_launcher_may_start_all_again(text: str, tmp_path: Path) -> None:
    out = str(tmp_path / "gpt")
    ended = world(2, trained, text, out, "ddp", "killed", 1, 3, "--overwrite", restarts=1)
    assert [one.code for one in ended] == [0, 0], ended
    assert "step 8 of 8" in ended[0].out


@pytest.mark.parametrize("fault", ["bad input", "a bug"])
def test_what_one_rank_raises_is_said_once(text: str, tmp_path: Path, fault: str) -> None:
    ended = world(3, trained, text, str(tmp_path / "gpt"), "ddp", fault, 1, 4)
    if fault == "bad input":
        assert lines(ended) == ["headwise: no such row"]
        assert [one.code for one in ended] == [1, 2, 1]
    else:
        assert lines(ended) == []
        assert "RuntimeError: what nobody thought of" in ended[1].err
        assert "(rank 1 of 3)" in ended[1].err
        assert "Traceback" not in ended[0].err + ended[2].err
        assert [one.code for one in ended] == [1, 1, 1]


def test_bad_input_of_all_ranks_is_said_once(text: str, tmp_path: Path) -> None:
    (tmp_path / "gpt").mkdir()
    (tmp_path / "gpt" / "mine.txt").write_text("mine")
    ended = world(2, trained, text, str(tmp_path / "gpt"), "ddp", "", 0, 0)
    assert [one.code for one in ended] == [2, 2]
    (told,) = lines(ended)
    assert "is not empty; continue its run" in told
    ended = world(2, trained, text, str(tmp_path / "other"), "ddp", "", 0, 0, "--batch", "1")
    assert [one.code for one in ended] == [2, 2]
    (told,) = lines(ended)
    assert "batch must be at least the number of ranks (2)" in told
    assert not (tmp_path / "other").exists()


def test_a_terminated_run_is_saved_and_goes_on(text: str, tmp_path: Path) -> None:
    ended = world(2, trained, text, str(tmp_path / "gpt"), "ddp", "terminated", 1, 3)
    assert "stopped and saved at step 3 of 8" in ended[0].err
    assert ended[1].err == ""
    assert (tmp_path / "gpt" / "model.safetensors").exists()


def failing() -> None:
    """One rank never comes."""
    from headwise.parallel.group import joined

    if os.environ["RANK"] == "1":
        return
    with joined(2):
        pass


def test_a_rank_that_never_comes() -> None:
    ended = world(3, failing)
    assert all("not all ranks have joined" in one.err for one in (ended[0], ended[2]))
    assert [one.code for one in ended] == [1, 0, 1]
