"""Files appear whole or not at all, where they are asked for; a folder has one writer at a time."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headwise as hw
from headwise import _io as _files
from headwise._io import only_writer, place_for, write_whole
from headwise.capture.captured import Watched
from headwise.cli.main import main
from headwise.models.gpt import GPT, FolderError, GPTConfig
from headwise.models.run import TrainConfig
from headwise.models.training import train
from headwise.report.page import write_page
from headwise.report.schema import Look, load
from headwise.weights.files import convert_file

TINY = TrainConfig(context=5, layers=1, heads=3, width=15, vocab=263, steps=2, batch=2)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(50)))
    return str(path)


# ── where a file goes ───────────────────────────────────────────────────────────────────────────


def a_look() -> Look:
    return Look([], [], [], {"model": "m", "text": "t", "texts": 1, "notice": None})


def converted(path: Path) -> None:
    names = [f"layers.0.attention.w{part}.weight" for part in "qkvo"]
    with tempfile.TemporaryDirectory() as folder:
        source = f"{folder}/weights.safetensors"
        save_file({name: torch.eye(6) for name in names}, source)
        convert_file(source, path, target="headwise", num_heads=3, overwrite=True)


WRITERS: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "seen": (lambda path: Watched().save(path), Watched.load),
    "look": (lambda path: a_look().save(path), load),
    "page": (lambda path: write_page(a_look(), path), load),
    "convert": (converted, load_file),
}
"""What writes a file that is named, and what reads it."""


@pytest.mark.parametrize("name", WRITERS)
def test_a_symlink_stays_one_and_its_file_is_replaced(name: str, tmp_path: Path) -> None:
    write, read = WRITERS[name]
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for file in (folder / "old.safetensors", folder / "new.safetensors"):
        link = tmp_path / f"to-{file.name}"
        link.symlink_to(file)
        if file.name.startswith("old"):
            file.write_text("old")
        write(link)
        assert link.is_symlink()
        assert not file.is_symlink()
        read(file)
    assert sorted(one.name for one in folder.iterdir()) == ["new.safetensors", "old.safetensors"]


def test_a_models_folder_may_be_of_symlinks(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", tmp_path / "folder"
    store.mkdir()
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(store / "blob")
    GPT(GPTConfig(vocab_size=7, n_positions=5, n_embd=6, n_layer=1, n_head=3)).save_pretrained(
        folder
    )
    assert (folder / "model.safetensors").is_symlink()
    assert load_file(store / "blob")
    assert GPT.from_pretrained(folder).config.n_embd == 6


@contextmanager
def a_place(kind: str, folder: Path) -> Iterator[Path]:
    """Something at which no file can be put."""
    path = folder / "x.safetensors"
    with suppress(OSError):
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            bound = socket.socket(socket.AF_UNIX)
            here = Path.cwd()
            os.chdir(folder)  # the address has room for few characters
            bound.bind(path.name)
            os.chdir(here)
            bound.close()
        elif kind == "link to itself":
            path.symlink_to(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "no folder":
            path = folder / "no" / path.name
        elif kind == "link into no folder":
            path.symlink_to(folder / "no" / "file")
    yield path


REFUSED = {
    "pipe": "is a pipe, and only a file can be replaced",
    "socket": "is a socket, and only a file can be replaced",
    "link to itself": "cannot be written (Too many levels of symbolic links)",
    "folder": "is a directory",
    "no folder": "there is no folder",
    "link into no folder": "there is no folder",
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("kind", REFUSED)
def test_where_no_file_can_be_put_nothing_changes(kind: str, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with a_place(kind, folder) as path:
        before = {one: one.lstat().st_mode for one in folder.iterdir()}
        with pytest.raises((OSError, ValueError)) as raised:
            WRITERS[name][0](path)
        assert REFUSED[kind] in str(raised.value)
        assert "\n" not in str(raised.value)
        assert {one: one.lstat().st_mode for one in folder.iterdir()} == before


def test_commands_refuse_it_before_the_slow_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    for call in (
        ["look", "--text", "gone", "--out", "{}"],
        ["look", "--json", "--save", "{}", "--text", str(tmp_path / "text")],
    ):
        (tmp_path / "text").write_text("so much, so much.\n")
        arguments = [word.format(tmp_path / "pipe") for word in call]
        if "--save" not in call:
            assert main(arguments) == 2
            assert "is a pipe, and only a file can be replaced" in capsys.readouterr().err
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
def test_a_device_is_refused() -> None:
    ends = os.openpty()
    try:
        with pytest.raises(OSError, match="is a device, and only a file can be replaced"):
            place_for(Path(os.ttyname(ends[1])))
    finally:
        for end in ends:
            os.close(end)


def test_the_file_that_we_print_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "page.html"
    path.write_text("")
    monkeypatch.setattr(_files, "_streams", lambda: [path.stat()])
    with pytest.raises(OSError, match="receives the output of this program; name another file"):
        a_look().save(path)


def test_a_file_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    Watched().save(path)
    (tmp_path / "other").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    path.chmod(0o600)
    Watched().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_long_names_are_names(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    a_look().save(path)
    assert load(path).provenance["model"] == "m"


def test_two_threads_that_write_one_file_each_write_a_whole_one(tmp_path: Path) -> None:
    both, size = threading.Barrier(2), 1000

    def write(letter: bytes) -> None:
        def fill(part: Path) -> None:
            with part.open("wb") as file:
                for _ in range(size):
                    file.write(letter)
                    file.flush()
                both.wait(60)

        write_whole(tmp_path, {"file": fill})

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"a", b"b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_bytes() in (b"a" * size, b"b" * size)
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_a_file_that_comes_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    def slow(part: Path) -> None:
        part.write_text("ours")
        (tmp_path / "file").write_text("theirs")

    with pytest.raises(FileExistsError, match="already exists; it was written meanwhile"):
        write_whole(tmp_path, {"file": slow}, replace=False)
    assert (tmp_path / "file").read_text() == "theirs"
    write_whole(tmp_path, {"file": lambda part: part.write_text("ours")})
    assert (tmp_path / "file").read_text() == "ours"
    assert len(list(tmp_path.iterdir())) == 1


# ── one writer at a time ────────────────────────────────────────────────────────────────────────


def test_a_folder_has_one_writer_and_no_trace_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with only_writer(folder):
        with (
            pytest.raises(
                BlockingIOError, match="another run is writing into this directory; wait"
            ),
            only_writer(folder),
        ):
            pass
        (folder / "file").touch()
    with only_writer(folder):
        pass
    assert [one.name for one in folder.iterdir()] == ["file"]
    with pytest.raises(KeyError), only_writer(tmp_path / "c" / "d"):
        raise KeyError
    assert not (tmp_path / "c").exists()


def _hold(folder: Path, ready: Connection) -> None:
    with only_writer(folder):
        (folder / ".headwise-0.tmp").mkdir()
        (folder / ".headwise-0.tmp" / "half").touch()
        (folder / "file").touch()
        ready.send(None)
        ready.recv()


def test_the_lock_of_a_killed_process_is_gone(tmp_path: Path) -> None:
    ready, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(tmp_path, theirs))
    process.start()
    assert ready.poll(60)
    with pytest.raises(BlockingIOError), only_writer(tmp_path):
        pass
    process.kill()
    process.join()
    with only_writer(tmp_path):
        left = {one.name for one in tmp_path.iterdir()}
    assert left == {"file", _files.LOCK}  # and of its unfinished files, nothing
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(sys.platform == "win32", reason="there are no locks there")
@pytest.mark.parametrize("how", ["", "--resume", "--overwrite"])
def test_two_trainings_into_one_folder(
    how: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = tmp_path / "model", replace(TINY, texts=(text,))
    codes: list[int] = []

    def second(_: object) -> None:
        given = [text, "--steps", "1"] if how != "--resume" else []
        codes.append(main(["train", *given, "--out", str(folder), *filter(None, [how])]))
        with pytest.raises(FolderError, match="another run is writing into this directory"):
            train(folder, None if how == "--resume" else config, resume=how == "--resume")

    first = train(folder, config, report=second)
    assert first.finished
    assert codes == [2, 2]
    out, err = capsys.readouterr()
    assert out == ""
    line = f"headwise: {folder}: another run is writing into this directory; wait until it ends"
    assert err == f"{line}, or name another directory\n" * 2
    assert train(folder, resume=True).step == config.steps


def test_two_conversions_into_one_place(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    state = {f"layers.0.attention.w{part}.weight": torch.eye(6) for part in "qkvo"}
    save_file(state, source)

    def convert(path: Path, report: Callable[[float], object] = lambda share: None) -> None:
        convert_file(source, path, target="headwise", num_heads=3, report=report)

    folder = tmp_path / "folder"

    def second(share: float) -> None:
        with pytest.raises(BlockingIOError, match="another run is writing into this directory"):
            convert(folder)

    convert(folder, second)
    assert [one.name for one in folder.iterdir()] == ["model.safetensors"]
    file = tmp_path / "file.safetensors"
    started: list[float] = []

    def third(share: float) -> None:
        if not started:
            started.append(share)
            convert(file)

    with pytest.raises(FileExistsError, match="already exists; it was written meanwhile"):
        convert(file, third)
    assert hw.detect_layout(load_file(file)) == "headwise"
