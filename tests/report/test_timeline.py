"""The timeline as data and as a command: what is read, matched, rounded, printed and refused."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import shlex
import sqlite3
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import headwise as hw
from headwise.cli.main import main
from headwise.report.codec import pack_float, unpack
from headwise.report.page import PageError
from headwise.report.page import timeline as page
from headwise.report.timeline import (
    NothingRecordedError,
    Timeline,
    differences,
    matched,
    read_timeline,
)
from headwise.telemetry.figures import HeadMetrics
from histories import ALARMS, LAYERS, STEPS, drawn, write_history
from sessions import pattern, sessions


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with a history."""
    made = tmp_path / "run"
    made.mkdir()
    write_history(made / "monitor.sqlite")
    return made


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line on standard error of a call that exits with 2."""
    assert main(["timeline", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"headwise: .*\n", err), err
    return err


# --- what is read ----------------------------------------------------------------------------


def test_a_run_is_read_by_folder_file_or_history(folder: Path, tmp_path: Path) -> None:
    other = write_history(tmp_path / "heads.sqlite")
    for run, name in (
        (folder, "run"),
        (str(folder / "monitor.sqlite"), "run"),
        (hw.History(other), "heads"),
    ):
        read = read_timeline(run)
        assert read.name == name
        assert read.steps.tolist() == list(STEPS)
        assert read.layers == LAYERS
        assert read.alarms == list(ALARMS)
        for place, step in enumerate(STEPS):
            for key, figures in drawn(step, 5, 0).items():
                np.testing.assert_array_equal(read.tracks[key].values[place], figures.values)
        np.testing.assert_allclose(read.tracks["entropy"].errors, 0.05)
        assert read.tracks["max_logit"].errors is None
        assert not read.tracks["max_logit"].sampled


def test_what_was_not_seen_differs_from_what_is_not_finite(tmp_path: Path) -> None:
    data = np.array([[5.0, 0, 5, 5, 5], [1.0, 0, math.nan, math.inf, 2], [0.0] * 5, [0.0] * 5])
    changed = {30: {"entropy": HeadMetrics("mean", data, 8, 8)}}
    read = read_timeline(write_history(tmp_path / "heads.sqlite", changed=changed))
    assert read.tracks["entropy"].values[3].tolist()[2:] == [math.inf, math.inf, 0.4]
    assert np.isnan(read.tracks["entropy"].values[3, 1])


def test_statistics_are_in_the_monitors_order(tmp_path: Path) -> None:
    statistics = (hw.MaxLogit(), hw.Entropy())
    model = hw.MultiHeadAttention(24, num_heads=3)
    path, x = tmp_path / "heads.sqlite", torch.randn(2, 7, 24)
    with hw.Monitor(model, statistics=statistics, history=path, probe=x) as monitor:
        model(x)
        monitor.step()
    names = ["max_logit", "entropy", "entropy_share"]
    assert list(read_timeline(path).tracks) == [*names, *(f"probe/{name}" for name in names)]


def test_steps_that_lack_a_statistic_have_no_figure(tmp_path: Path) -> None:
    path = write_history(tmp_path / "heads.sqlite")
    with sqlite3.connect(path) as file:
        file.execute("DELETE FROM figures WHERE step = 20 AND statistic = 'first'")
    read = read_timeline(path)
    assert np.isnan(read.tracks["first"].values[2]).all()
    assert np.isfinite(read.tracks["first"].values[[0, 1, 3]]).all()


def test_a_layer_that_comes_later_was_not_seen_before(tmp_path: Path) -> None:
    path = write_history(tmp_path / "heads.sqlite", [1, 2])
    write_history(path, [3], {**LAYERS, "late": 1}, after=2)
    read = read_timeline(path)
    assert read.heads[-1] == ("late", 0)
    assert np.isnan(read.tracks["entropy"].values[:, -1]).tolist() == [True, True, False]


# --- what cannot be read ---------------------------------------------------------------------


def test_where_there_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such file or folder" in refused(capsys, tmp_path / "missing")
    assert "record one with `headwise train --monitor`" in refused(capsys, tmp_path)
    only = write_history(tmp_path / "a.sqlite")
    assert read_timeline(tmp_path).name == "a"
    only.with_name("b.sqlite").write_bytes(only.read_bytes())
    assert "choose one: a.sqlite, b.sqlite" in refused(capsys, tmp_path)


def test_a_history_without_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = write_history(tmp_path / "heads.sqlite", [])
    assert "no step is recorded yet" in refused(capsys, empty)
    (tmp_path / "nothing.sqlite").touch()
    assert "no step is recorded yet" in refused(capsys, tmp_path / "nothing.sqlite")
    with pytest.raises(NothingRecordedError):
        read_timeline(empty)


def torn(content: bytes) -> bytes:
    return content[: len(content) // 2 // 4096 * 4096]


def scribbled(content: bytes) -> bytes:
    return content[:6000] + bytes(len(content) - 6000)


def text(content: bytes) -> bytes:
    return b"step,head,value\n" * 400


@pytest.mark.parametrize("damage", [torn, scribbled, text])
def test_a_file_that_is_torn(
    damage: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_history(tmp_path / "heads.sqlite", range(1, 40))
    path.write_bytes(damage(path.read_bytes()))
    said = refused(capsys, path)
    assert str(path) in said
    assert "cannot be read as a history" in said


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("data", b"no zlib"),
        ("data", b""),
        ("data", zlib.compress(bytes(8 * 7))),  # not four rows of numbers
        ("kind", "median"),
    ],
)
def test_a_row_that_is_torn(
    column: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_history(tmp_path / "heads.sqlite")
    with sqlite3.connect(path) as file:
        query = f"UPDATE figures SET {column} = ? WHERE statistic = 'entropy' AND step = 20"
        file.execute(query, (value,))
    assert "cannot be read as a history" in refused(capsys, path)


def test_a_page_that_cannot_be(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, folder, "--out", folder / "missing" / "page.html")
    assert "there is no folder" in said
    assert "is a directory" in refused(capsys, folder, "--out", folder)
    assert "leave out --json" in refused(capsys, folder, "--watch", "5", "--json")
    with pytest.raises(PageError, match="is a directory"):
        hw.timeline(folder, folder)


# --- two runs --------------------------------------------------------------------------------


def other_model(path: Path) -> Path:
    layers = {"blocks.1.attn": 4, "blocks.0.attn": 2, "blocks.2.attn": 1, "<i>": 1}
    return write_history(path, (1, 20, 40, 80), layers, (), seed=1)


def test_two_models_are_matched_by_layer_and_number(folder: Path, tmp_path: Path) -> None:
    one, other = read_timeline(folder), read_timeline(other_model(tmp_path / "other.sqlite"))
    one = replace(one, tracks={**one.tracks, "self": one.tracks["first"]})
    a, b, left_out = matched(one, other)
    names = [
        ("blocks.0.attn", 0),
        ("blocks.0.attn", 1),
        ("blocks.1.attn", 0),
        ("blocks.1.attn", 1),
    ]
    assert a.heads == b.heads == names
    assert list(a.tracks) == list(b.tracks) == ["entropy", "first", "max_logit"]
    for mine, whole in ((a, one), (b, other)):
        for place, head in enumerate(names):
            np.testing.assert_array_equal(
                mine.tracks["first"].values[:, place],
                whole.tracks["first"].values[:, whole.heads.index(head)],
            )
    assert left_out == [
        "layers only in B: blocks.2.attn, <i>",
        "heads only in A: blocks.0.attn 2",
        "heads only in B: blocks.1.attn 2, blocks.1.attn 3",
        "statistics only in A: self",
    ]
    assert [alarm.head for alarm in a.alarms] == [1]  # the other is of a head that is left out


def test_differences_are_of_the_last_common_step(folder: Path, tmp_path: Path) -> None:
    a, b, _ = matched(read_timeline(folder), read_timeline(other_model(tmp_path / "o.sqlite")))
    step, rows = differences(a, b)
    assert step == 40
    expected = b.tracks["entropy"].values[2] - a.tracks["entropy"].values[4]
    assert [row["entropy"] for row in rows] == expected.tolist()
    np.testing.assert_allclose([row["entropy_se"] for row in rows], math.sqrt(2) * 0.05)
    assert differences(a, replace(b, steps=b.steps + 1000)) == (None, [])


def test_runs_with_nothing_in_common(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strange = write_history(tmp_path / "strange.sqlite", layers={"h.0": 2}, alarms=())
    said = refused(capsys, folder, "--compare", strange, "--out", tmp_path / "page.html")
    assert "run and strange have no head in common" in said
    assert not (tmp_path / "page.html").exists()


def test_runs_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    read = read_timeline(folder)
    assert [run.name for run in matched(read, read)[:2]] == ["run (A)", "run (B)"]


# --- what the page keeps ---------------------------------------------------------------------


def results(text: str) -> Any:
    found = re.search(r'<script type="text/plain" id="results">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


@pytest.mark.parametrize(("planes", "bits"), [(4, 24), (2, 11)])
def test_floats_keep_their_bits(planes: int, bits: int) -> None:
    draw = np.random.default_rng(0)
    values = draw.choice([-1, 1], (7, 400)) * 10.0 ** draw.uniform(-3, 5, (7, 400))
    values[0, :3] = math.nan, math.inf, 0
    grid = pack_float(values, planes)
    found = unpack(grid)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(values))
    assert np.isnan(found[0, 0])
    assert found[0, 1] == math.inf
    known = np.isfinite(values)
    np.testing.assert_allclose(found[known], values[known], rtol=2.0**-bits)
    assert json.loads(json.dumps(grid)) == grid


def test_a_small_run_is_kept_in_single_precision(folder: Path) -> None:
    read = read_timeline(folder)
    (run,) = results(page.render_timeline(read))["runs"]
    for key, track in read.tracks.items():
        np.testing.assert_array_equal(unpack(run["values"][key]), track.values.T.astype("f4"))
    np.testing.assert_allclose(unpack(run["errors"]["entropy"]), 0.05, rtol=2**-11)
    assert (run["first"], run["last"]) == (list(STEPS), list(STEPS))
    quartiles = np.quantile(read.tracks["entropy"].values, (0.25, 0.5, 0.75), axis=1)
    np.testing.assert_allclose(run["crowd"]["entropy"], quartiles, rtol=1e-4)
    assert dict(run["made"])["In this page"].startswith("values are stored in single precision")


def long(steps: int, heads: int, sampled: bool = True) -> Timeline:
    """A run with so many recorded steps, of noise."""
    draw = np.random.default_rng(0)
    track = read_tracks(draw.lognormal(0, 1, (steps, heads)), sampled)
    return Timeline("run", {}, [("a", n) for n in range(heads)], np.arange(1, steps + 1), track, [])


def read_tracks(values: np.ndarray, sampled: bool) -> dict[str, Any]:
    from headwise.report.timeline import Track

    largest = values.copy()
    largest[1, 0], values[1, 0] = math.nan, math.nan
    errors = np.full_like(values, 0.01) if sampled else None
    return {
        "entropy": Track("mean", values, errors, sampled),
        "max_logit": Track("maximum", largest, None, False),
    }


@pytest.mark.parametrize(
    ("room", "says", "digits"),
    [
        (1.0, "single precision", 4),
        (0.6, "eleven bits", 3),
        (0.35, "standard errors are left out", 3),
        (0.1, "a column covers 4 recorded steps", 3),
    ],
)
def test_longer_runs_are_rounded_and_the_page_says_so(
    room: float, says: str, digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = long(101, 40)
    size = int(room * 101 * 40 * (2 * 3.8 + 1.5) * 1.05)
    monkeypatch.setattr(page, "ROOM", size)
    monkeypatch.setattr(page, "LARGEST", size * 4 // 3 + 3000)
    text = page.render_timeline(run)
    found = results(text)
    (shown,) = found["runs"]
    assert says in dict(shown["made"])["In this page"]
    assert found["digits"] == digits
    assert shown["last"][-1] == 101
    assert sum(shown["count"]) == 101
    steps = shown["count"][0]
    rounded = {4: 2**-24, 3: 2**-11}[digits]
    for key, pool in (("entropy", np.nanmean), ("max_logit", np.nanmax)):
        expected = run.tracks[key].values.T
        if steps > 1:
            parts = np.split(expected, range(steps, 101, steps), axis=1)
            expected = np.stack([pool(part, axis=1) for part in parts], axis=1)
        np.testing.assert_allclose(unpack(shown["values"][key]), expected, rtol=1.01 * rounded)


def test_what_does_not_fit_is_made_to_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numbers pack worse than was thought, more steps share a column."""
    monkeypatch.setattr(page, "LARGEST", 9_000)
    found = page.render_timeline(long(101, 40, sampled=False))
    assert len(re.findall(r'id="results">(.*?)</script>', found)[0]) < 9_000
    assert results(found)["runs"][0]["count"][0] > 1


def test_the_file_names_no_address_and_is_the_same_each_time(folder: Path) -> None:
    text = page.render_timeline(read_timeline(folder))
    assert text == page.render_timeline(read_timeline(folder))
    own = re.sub(r'<script type="text/plain".*?</script>', "", text, flags=re.DOTALL)
    own = own.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody asks for
    assert not re.search(r"https?://|//cdn|<link|\bsrc=", own)
    assert "default-src 'none'" in own
    assert "@@" not in own
    assert str(Path.home()) not in own


def test_names_are_packed_or_escaped(tmp_path: Path) -> None:
    layers = {"</script><script>alert(1)</script>": 2}
    path = write_history(tmp_path / "<b>run.sqlite", layers=layers, alarms=())
    out = hw.timeline(path, tmp_path / "page.html", compare=path)
    text = out.read_text("utf-8")
    assert "alert(" not in text
    assert "<b>run" not in text
    assert results(text)["layers"] == [list(one) for one in layers.items()]


def test_every_statistic_is_explained(folder: Path) -> None:
    read = read_timeline(folder)
    track = read.tracks["entropy"]
    sampled = replace(read.tracks["max_logit"], sampled=True)
    named = {"probe/first": track, "my_own": track, "query_norm": sampled}
    found = results(page.render_timeline(replace(read, tracks=named)))["statistics"]
    titles = {one["key"]: (one["title"], one["short"], one["unit"]) for one in found}
    assert titles["probe/first"] == ("First token, on the probe", "first (probe)", "share")
    assert titles["my_own"] == ("my own", "my own", "")
    assert titles["query_norm"][0] == "Largest query"
    said = {one["key"]: one["meaning"] for one in found}
    assert said["query_norm"].endswith("Over sampled queries only: a lower bound.")
    assert said["my_own"] == "A mean over sampled queries."


# --- the command -----------------------------------------------------------------------------


def test_a_run_is_told_and_its_page_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(folder), "--out", str(folder / "page.html")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run        run: 5 heads in 2 layers"
    assert lines[1] == "recorded   7 steps, 1 to 60; entropy, first, max_logit"
    assert lines[2].startswith("alarms     step 30: L1H1 (blocks.1.attn): max_logit is 123.5")
    assert lines[3].startswith("           step 50: L0H2 (blocks.0.attn)")
    assert lines[4] == f"page: {folder / 'page.html'}"
    assert (folder / "page.html").read_text().startswith("<!doctype html>")


def test_json_has_steps_alarms_and_the_last_figures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(folder), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    assert found["steps"] == list(STEPS)
    assert found["layers"] == LAYERS
    assert found["alarms"][0]["value"] == 123.5
    expected = drawn(60, 5, 0)
    assert [row["entropy"] for row in found["heads"]] == expected["entropy"].values.tolist()
    assert [row["max_logit"] for row in found["heads"]] == expected["max_logit"].values.tolist()
    assert found["heads"][3]["layer"] == "blocks.1.attn"
    assert not (Path.cwd() / "headwise-timeline.html").exists()


def test_json_of_two_runs_has_their_differences(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = other_model(tmp_path / "other.sqlite")
    assert main(["timeline", str(folder), "--compare", str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 40
    assert len(found["differences"]) == len(found["a"]["heads"]) == 4
    assert found["left_out"][0] == "layers only in B: blocks.2.attn, <i>"
    out = str(tmp_path / "page.html")
    assert main(["timeline", str(folder), "--compare", str(other), "--out", out]) == 0
    told = capsys.readouterr().out
    assert "run        B: other: 8 heads in 4 layers" in told
    assert "left out   heads only in A: blocks.0.attn 2" in told


def test_the_page_is_written_anew_while_the_training_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = write_history(tmp_path / "heads.sqlite", []), tmp_path / "page.html"
    told: list[tuple[list[int], bool]] = []

    def sleep(seconds: float) -> None:
        assert seconds == 2.5
        if out.exists():
            (run,) = (found := results(out.read_text("utf-8")))["runs"]
            told.append((run["first"], found["reread"] is not None))
        turn = len(told) if told else -1
        if turn == -1:
            write_history(path, [1, 10], after=1)
        elif turn == 1:
            write_history(path, [20], after=10)
        elif turn == 2:
            out.write_text(out.read_text("utf-8"), "utf-8")  # nothing new: it is left alone
        elif turn == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["timeline", str(path), "--out", str(out), "--watch", "2.5"]) == 0
    assert told == [([1, 10], True), *[([1, 10, 20], True)] * 3]
    assert results(out.read_text("utf-8"))["reread"] is None  # a page that stays
    printed, err = capsys.readouterr()
    assert "no step is recorded yet" in err
    assert err.count("\n") == 1
    assert printed.count("page: ") == 1


def test_watching_what_is_no_history_ends_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.sqlite").write_text("no history " * 1000)
    assert "cannot be read" in refused(capsys, tmp_path / "x.sqlite", "--watch", "1")


# --- headwise train --monitor ----------------------------------------------------------------

TINY = ["--context", "13", "--layers", "2", "--heads", "3", "--width", "15"]
TINY += ["--vocab", "263", "--batch", "4", "--dropout", "0.1", "--steps", "8"]


@pytest.fixture(scope="module")
def written_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(150)))
    return str(path)


def train(out: Path, *arguments: str) -> int:
    return main(["train", "--out", str(out), *arguments])


def same(one: Path, other: Path) -> None:
    """Both histories hold the same numbers."""
    a, b = read_timeline(one), read_timeline(other)
    assert (a.heads, a.alarms) == (b.heads, b.alarms)
    np.testing.assert_array_equal(a.steps, b.steps)
    for name, track in a.tracks.items():
        np.testing.assert_array_equal(track.values, b.tracks[name].values)


def test_a_monitored_run_is_the_same_run_with_a_timeline(
    written_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, whole, parted = (tmp_path / name for name in ("plain", "whole", "parted"))
    assert train(plain, written_text, *TINY) == 0
    assert "timeline" not in capsys.readouterr().err
    assert train(whole, written_text, *TINY, "--monitor") == 0
    said = f"headwise: 0 of 6 heads with an alarm; timeline: {whole / 'timeline.html'}\n"
    assert said in capsys.readouterr().err
    for name in ("model.safetensors", "checkpoint.safetensors"):  # weights, moments
        one, other = load_file(plain / name), load_file(whole / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    read = read_timeline(whole)
    assert read.steps.tolist() == list(range(1, 9))
    assert {"entropy", "first", "max_logit", "query_norm"} <= set(read.tracks)
    assert results((whole / "timeline.html").read_text())["runs"][0]["last"][-1] == 8
    assert train(parted, written_text, *TINY, "--monitor", "--stop-after", "5") == 0
    assert train(parted, "--resume") == 0  # goes on monitored
    same(whole, parted)
    assert hw.History(parted / "monitor.sqlite").about["every"] == 1


def test_resuming_replaces_what_came_after_the_checkpoint(
    written_text: str, tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train(whole, written_text, *TINY, "--monitor") == 0
    assert train(parted, written_text, *TINY, "--monitor", "--stop-after", "4") == 0
    ahead = (parted / "checkpoint.safetensors").read_bytes()
    assert train(parted, "--resume", "--stop-after", "2") == 0
    (parted / "checkpoint.safetensors").write_bytes(ahead)  # as if killed before it was saved
    assert read_timeline(parted).steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert train(parted, "--resume") == 0
    same(whole, parted)


def test_a_run_that_replaces_another_leaves_none_of_its_history(
    written_text: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert train(out, written_text, *TINY, "--monitor") == 0
    assert train(out, written_text, *TINY, "--monitor", "--overwrite", "--stop-after", "3") == 0
    assert read_timeline(out).steps.tolist() == [1, 2, 3]
    assert train(out, written_text, *TINY, "--overwrite") == 0
    assert sorted(one.name for one in out.iterdir() if "monitor" in one.name) == []
    assert not (out / "timeline.html").exists()


def test_alarms_are_told_while_training(
    written_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, written_text, *TINY, "--lr", "3", "--warmup", "0", "--monitor") == 0
    err = capsys.readouterr().err
    alarms = read_timeline(out).alarms
    assert alarms
    assert f"headwise: {alarms[0]}" in err
    named = len({(alarm.layer, alarm.head) for alarm in alarms})
    assert f"headwise: {named} of 6 heads with an alarm" in err


def test_a_run_that_diverges_leaves_its_timeline(
    written_text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert train(out, written_text, *TINY, "--lr", "1e18", "--warmup", "0", "--monitor") == 2
    err = capsys.readouterr().err
    assert f"heads with an alarm; timeline: {out / 'timeline.html'}" in err
    assert "finite" in err.splitlines()[-1]  # why it ended
    read = read_timeline(out)
    assert len(read.steps) < 8
    (shown,) = results((out / "timeline.html").read_text())["runs"]
    assert shown["last"] == read.steps.tolist()


# --- docs/timeline.md ------------------------------------------------------------------------


@pytest.mark.slow
def test_the_sessions_of_the_page_are_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = Path(__file__).parents[2] / "docs"
    notes = [(docs / name).read_text("utf-8") for name in ("watching.md", "telemetry.md")]
    (tmp_path / "notes.txt").write_text("\n".join(notes), "utf-8")
    monkeypatch.chdir(tmp_path)
    ran = []
    for name, shown in sessions((docs / "timeline.md").read_text("utf-8")):
        words = shlex.split(name.removeprefix("$ "))
        assert (words[0], main(words[1:])) == ("headwise", 0), name
        out = re.sub(r"(?<=: )/\S*/", "", capsys.readouterr().out)  # whole paths
        assert re.fullmatch(pattern(shown), out), f"{name}\n{out}"
        ran.append(words[1])
    assert ran == ["train", "timeline", "train", "timeline"]
    assert read_timeline("grown").alarms
    assert {"both.html", "headwise-timeline.html"} <= {path.name for path in tmp_path.iterdir()}
