"""The command line: what it prints, what it refuses, and Ctrl-C."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from headwise import __version__
from headwise.cli.main import main
from headwise.models.training import TrainConfig

TINY = ["--context", "13", "--layers", "1", "--heads", "3", "--width", "15"]
TINY += ["--vocab", "263", "--batch", "4"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(150)))
    return path


@pytest.fixture(scope="module")
def trained(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    assert main(["train", str(text), "--out", str(folder), "--steps", "5", *TINY]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on standard error of a call that exits with 2 and prints nothing else."""
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    return err


def test_a_trace_is_printed_and_written(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "The with statement wraps the"
    prompt, document = tmp_path / "question.txt", tmp_path / "with.txt"
    prompt.write_text(words)
    document.write_text("The with statement wraps a block.")
    page = tmp_path / "page.html"
    given = ["trace", "--prompt", str(prompt), "--document", str(document), "--tokens", "5"]
    assert main([*given, "--json", "--out", str(page)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["segments"]) == 5
    assert all(row["with.txt"] > 0 for row in found["segments"])
    assert page.stat().st_size < 100_000
    assert main([*given, "--out", str(page)]) == 0
    assert f"generated        {found['text']}" in capsys.readouterr().out
    assert "no such file" in refused(capsys, "trace", "--prompt", tmp_path / "none.txt").lower()
    assert "same name" in refused(capsys, *given, "--document", document)


def test_help_shows_an_example_and_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    shown = " ".join(re.sub(r"[│╭╮╰╯─]", " ", capsys.readouterr().out).split())
    assert "headwise train notes.txt --out notes-gpt --steps 2000" in shown
    for name, field in TrainConfig.__dataclass_fields__.items():
        if name != "texts":
            assert f"--{name.replace('_', '-')}" in shown
            assert f"[default: {field.default}]" in shown
    assert main(["generate", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    example = (
        'headwise generate "If the expression is true, the suite is executed, and" --tokens 60'
    )
    assert example in " ".join(shown.split())


def test_no_command_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        shown = capsys.readouterr().out
        assert "train" in shown
        assert "generate" in shown
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headwise {__version__}\n"


def test_the_built_in_model_says_what_it_continues(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--tokens", "3", "--temperature", "0"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("If the expression is true, the suite is executed, and")
    assert "has learned from a part of\nPython's manual" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["spam"], "No such command 'spam'"),
        (["train", "--steps", "many"], "Invalid value for '--steps'"),
        (["train", "--spam"], "No such option: --spam"),
        (["look", "The cat sat."], "The cat sat.): put --text before a text"),
        (["train", "gone.txt"], "gone.txt: no such file"),
        (["train", "--steps", "0"], "steps must be at least 1, got 0"),
        (["train", "--heads", "5"], "heads must be a divisor of width=128, got 5"),
        (["train", "--resume", "--lr", "1"], "leave out lr"),
        (["train", "--resume"], "headwise-gpt does not contain checkpoint.safetensors"),
        (["generate", "--model", "."], "generate --model .: give a PROMPT"),
        (["generate", "a", "--model", "gone"], "gone does not exist"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"", "the text is empty"), (b"caf\xe9", "not UTF-8"), (b"a b", "tokens to train on")],
)
def test_bad_texts_leave_nothing_behind(
    data: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_bytes(data)
    assert message in refused(capsys, "train", tmp_path / "text", "--out", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_folder_in_use_is_left_alone(
    trained: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in trained.iterdir()}
    capsys.readouterr()
    assert "is not empty" in refused(capsys, "train", text, "--out", trained, *TINY)
    assert {path.name: path.read_bytes() for path in trained.iterdir()} == before


def test_training_prints_a_summary(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["train", str(text), "--out", str(tmp_path / "m"), "--steps", "40", *TINY]
    assert main(call) == 0
    out, err = capsys.readouterr()
    assert re.search(r"held-out +\d\.\d{3} nats per token .*; bigram \d\.\d+, unigram \d\.\d+", out)
    assert re.search(r"first copy \d\.\d\d, second copy \d\.\d\d", out)
    lines = re.findall(r"step (\d+) of 40: loss [\d.]+, held-out [\d.]+, [\d,]+ tokens/s, ", err)
    assert lines == [str(step) for step in range(2, 41, 2)]
    assert re.search(r"\d:\d\d:\d\d left", err)


def test_json_alone_is_printed_and_a_run_goes_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "m"), "--json"]
    assert main(["train", str(text), "--steps", "6", "--stop-after", "2", *TINY, *out]) == 0
    printed, err = capsys.readouterr()
    first = json.loads(printed)
    assert (first["step"], first["finished"]) == (2, False)
    assert "stopped and saved at step 2 of 6" in err
    command = err.partition("continue with: ")[2].split()
    assert command == ["headwise", "train", "--resume", "--out", str(tmp_path / "m")]
    assert main([*command[1:], "--json"]) == 0
    last = json.loads(capsys.readouterr().out)
    assert (last["step"], last["finished"]) == (6, True)
    figures = ("held_out_loss", "unigram_loss", "bigram_loss", "repeats_second_loss")
    assert all(isinstance(last[name], float) for name in figures)
    assert last["parameters"] == sum(
        value.numel() for value in load_file(tmp_path / "m" / "model.safetensors").values()
    )


def headwise(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    call = [sys.executable, "-c", "import sys; from headwise.cli import main; sys.exit(main())"]
    return subprocess.Popen(
        [*call, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a model"
    run = headwise("train", text, "--out", folder, "--steps", "400000", *TINY)
    deadline = time.monotonic() + 60
    while not (folder / "checkpoint.safetensors").exists():
        assert time.monotonic() < deadline
        assert run.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "Traceback" not in err
    step = int(re.search(r"stopped and saved at step ([\d,]+)", err)[1].replace(",", ""))  # type: ignore[index]
    assert step > 0
    assert f"headwise train --resume --out '{folder}'" in err
    assert "held-out" in out
    assert not list(folder.glob("*.tmp"))
    again = headwise("train", "--resume", "--out", folder, "--stop-after", "3", "--json")
    out, err = again.communicate(timeout=60)
    assert again.returncode == 0, err
    assert json.loads(out)["step"] == step + 3


def test_a_prompt_is_streamed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    call = ["generate", "7 times", "--model", str(trained), "--tokens", "4", "--seed", "3"]
    assert main(call) == 0
    plain, err = capsys.readouterr()
    assert plain.startswith("7 times")
    assert err == ""
    assert main([*call, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["prompt"] + row["text"] + "\n" == plain
    assert row["reason"] == "length"
    assert len(row["ids"]) == 4
    assert main([*call[:-1], "4"]) == 0
    assert capsys.readouterr().out != plain


def test_several_prompts(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    call = ["generate", "1", "22 is", "--model", str(trained), "--temperature", "0"]
    assert main([*call, "--tokens", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["prompt"] for row in rows] == ["1", "22 is"]
    assert main([*call, "--tokens", "3"]) == 0
    texts = [row["prompt"] + row["text"] for row in rows]
    assert capsys.readouterr().out == "\n\n".join(texts) + "\n"


def test_the_context_ends_the_text(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["generate", "7", "--model", str(trained), "--stop", "\0never"]) == 0
    err = capsys.readouterr().err
    assert err == "headwise: stopped at the end of the model's context (13)\n"
    long = "1 2 3 4 5 6 7 8 9 10"
    assert "leaves no room" in refused(capsys, "generate", long, "--model", trained)
    assert "prompt 0 is empty" in refused(capsys, "generate", "", "--model", trained)
    assert "at most 1, got 2.0" in refused(
        capsys, "generate", "7", "--model", trained, "--top-p", "2"
    )


def test_a_prompt_from_a_pipe(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"7 times")))
    assert main(["generate", "-", "--model", str(trained), "--tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("7 times")


def test_a_reader_that_has_had_enough(trained: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    call = [sys.executable, "-c", "import sys; from headwise.cli import main; sys.exit(main())"]
    done = subprocess.run(
        [*call, "generate", "7", "--model", str(trained)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
