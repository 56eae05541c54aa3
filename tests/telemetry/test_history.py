"""`History`: one file, each step whole or not at all, read while it is written, and resumed."""

from __future__ import annotations

import copy
import math
import os
import pickle
import shutil
import sqlite3
import sys
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headwise as hw
from headwise.stats.record import Reading
from headwise.telemetry.figures import HeadMetrics, merged, sums_of_each
from headwise.telemetry.history import HistoryWriter, _is_remote
from headwise.telemetry.rules import RecordedStep
from headwise.telemetry.step_sums import joined
from monitored import LAYERS, H, advance, made, monitored

LAYERS_OF = {"low": 2, "high": 3}


def figures(step: int, kind: str = "mean", heads: int = 5, queries: int = 4) -> HeadMetrics:
    rows = 4 if kind == "mean" else 1
    data = np.random.default_rng(step).uniform(1, 2, (rows, heads))
    return HeadMetrics(kind, data, queries, 8)


def record(step: int, **more: HeadMetrics) -> RecordedStep:
    return RecordedStep(
        step, {"entropy": figures(step), "max_logit": figures(step, "maximum"), **more}
    )


def written(path: Path, steps: list[int], after: int = 0) -> HistoryWriter:
    writer = HistoryWriter(path, after, {"every": 2})
    for step in steps:
        writer.write([(record(step), [])], LAYERS_OF)
    return writer


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heads.sqlite"


def test_what_is_written_is_read(path: Path) -> None:
    alarm = hw.telemetry.Alarm(4, "too large", "max_logit", "high", 2, 123.5)
    writer = written(path, [2])
    writer.write([(record(4), [alarm])], LAYERS_OF)
    history = hw.History(path)  # while the writer has it open
    assert history.steps == [2, 4]
    assert history.statistics == ["entropy", "max_logit"]
    assert history.layers == LAYERS_OF
    assert history.heads == [("low", 0), ("low", 1), ("high", 0), ("high", 1), ("high", 2)]
    assert history.alarms == [alarm]
    assert history.about["every"] == 2
    series = history["entropy"]
    assert series.steps.tolist() == [2, 4]
    assert series.sampled.tolist() == [True, True]
    for row, step in enumerate((2, 4)):
        data = figures(step).data
        np.testing.assert_array_equal(series.values[row], data[1] / data[0])
        np.testing.assert_array_equal(series.errors[row], np.sqrt(data[3]) / data[0])
    assert history["max_logit"].kind == "maximum"
    np.testing.assert_array_equal(history["max_logit"].values[1], figures(4, "maximum").data[0])
    assert "steps 2 to 4; 5 heads; entropy, max_logit" in repr(history)
    with pytest.raises(KeyError, match="'received' was not recorded; there are: entropy"):
        history["received"]
    writer.close()


def test_layers_that_come_later_stand_behind_and_were_not_seen_before(path: Path) -> None:
    writer = written(path, [1])
    wide = {**LAYERS_OF, "late": 1}
    writer.write([(RecordedStep(2, {"entropy": figures(2, heads=6)}), [])], wide)
    series = hw.History(path)["entropy"]
    assert series.values.shape == (2, 6)
    assert np.isnan(series.values[0, 5])
    assert np.isfinite(series.values[1]).all()
    writer.close()


def test_resuming_from_an_earlier_step_overwrites_and_leaves_no_double(path: Path) -> None:
    alarm = hw.telemetry.Alarm(6, "too large", "max_logit", "high", 2, 123.5)
    writer = written(path, [2, 4])
    writer.write([(record(6), [alarm])], LAYERS_OF)
    writer.close()
    again = HistoryWriter(path, 4, {"every": 1})
    assert hw.History(path).steps == [2, 4, 6]  # nothing is lost before there is something new
    again.write([(record(5), [])], LAYERS_OF)
    again.write([(record(5), [])], LAYERS_OF)
    history = hw.History(path)
    assert history.steps == [2, 4, 5]
    assert history.alarms == []
    rows = sqlite3.connect(path).execute("SELECT count(*) FROM figures").fetchone()
    assert rows == (6,)
    again.close()


def test_a_monitor_resumes_its_history(path: Path) -> None:
    def run(path: Path, steps: range, **settings: Any) -> None:
        model, optimizer = made()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        model.blocks.eval()
        with hw.Monitor(
            model, optimizer, every=2, queries=2, history=path, step=steps.start, **settings
        ):
            for number in steps:
                advance(model, optimizer, number)

    whole = path.with_name("whole.sqlite")
    run(whole, range(8))
    run(path, range(7))
    run(path, range(3, 8))
    for name in ("figures", "alarms", "layers"):
        query = f"SELECT * FROM {name}"
        one, two = (sqlite3.connect(p).execute(query).fetchall() for p in (whole, path))
        assert one == two
    with pytest.raises(ValueError, match=r"already has steps 1 to 8; pass step=… to continue"):
        run(path, range(8))
    run(path, range(2), overwrite=True)
    assert hw.History(path).steps == [1, 2]


def test_a_history_of_another_model_is_kept(path: Path) -> None:
    written(path, [2]).close()
    model, optimizer = made()
    before = path.read_bytes()
    with pytest.warns(UserWarning, match=r"no layer .blocks\.0\.own. and belongs to another model"):
        monitored((model, optimizer), range(2, 3), every=1, history=path, step=2)
    assert hw.History(path).layers == LAYERS_OF
    assert hw.History(path).steps == [2]
    assert path.read_bytes()[:100] == before[:100]


def test_a_second_monitor_takes_over_and_the_first_says_so(path: Path) -> None:
    first = written(path, [2])
    second = written(path, [4], after=2)
    with pytest.raises(ValueError, match="another monitor has started writing to it"):
        first.write([(record(6), [])], LAYERS_OF)
    assert hw.History(path).steps == [2, 4]
    first.close()
    second.close()


# ── what can go wrong ───────────────────────────────────────────────────────────────────────────


def test_a_locked_history_costs_one_warning_and_what_waits_is_written_later(path: Path) -> None:
    model, optimizer = made()
    monitor = hw.Monitor(model, optimizer, every=1, history=path)
    advance(model, optimizer, 0)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(UserWarning, match="the history cannot be written") as warned:
        _ = [advance(model, optimizer, number) for number in (1, 2)]
    assert len(warned) == 1
    other.execute("ROLLBACK")
    other.close()
    advance(model, optimizer, 3)
    monitor.close()
    assert hw.History(path).steps == [1, 2, 3, 4]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_costs_a_warning(path: Path) -> None:
    writer = written(path, [2])
    small = writer._file._open
    assert small is not None
    small[1].execute("PRAGMA max_page_count = 1")  # as SQLite tells of a full disk
    with pytest.raises(sqlite3.OperationalError, match="full"):
        writer.write([(record(n, more=figures(n, heads=5)), []) for n in range(3, 99)], LAYERS_OF)
    assert hw.History(path).steps == [2]
    writer.close()


def test_a_history_that_is_gone_costs_a_warning(path: Path) -> None:
    folder = path.parent / "runs"
    folder.mkdir()
    model, optimizer = made()
    monitor = hw.Monitor(model, optimizer, every=1, history=folder / "heads.sqlite")
    folder.rmdir()
    with pytest.warns(UserWarning, match="the history cannot be written"):
        advance(model, optimizer, 0)
    monitor.close()
    assert monitor.steps == 1


OTHERS = ("-wal", "-shm")


def vanish(path: Path, how: str) -> None:
    """Take the file of a history away, and what SQLite keeps beside it, or not."""
    if how == "renamed":
        path.rename(path.with_name("other.sqlite"))
        return
    if how == "replaced by a copy":
        copied = path.with_name("copy.sqlite")
        with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(copied)) as new:
            old.backup(new)
        os.replace(copied, path)
        return
    path.unlink()
    for other in OTHERS:
        if how == "all of it":
            path.with_name(path.name + other).unlink(missing_ok=True)
    if how == "replaced by nothing":
        path.touch()


@pytest.mark.parametrize(
    "how", ["all of it", "alone", "renamed", "replaced by nothing", "replaced by a copy"]
)
@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_a_history_that_is_deleted_in_a_training_is_written_anew_and_lacks_nothing(
    path: Path, how: str, remote: bool, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.telemetry.history.is_remote", lambda path: remote)

    def run(path: Path, vanishes: bool) -> hw.Monitor:
        model, optimizer = made()
        rules = [hw.telemetry.Rule("entropy", above=0.0, then=lambda alarm: None)]
        with hw.Monitor(model, optimizer, every=1, history=path, rules=rules) as monitor:
            for number in range(5):
                advance(model, optimizer, number)
                if vanishes and number == (4 if last else 1):
                    vanish(path, how)
        return monitor

    whole = path.with_name("whole.sqlite")
    run(whole, vanishes=False)
    with pytest.warns(UserWarning, match="deleted or replaced .* a new file holds all") as warned:
        monitor = run(path, vanishes=True)
    assert len(warned) == 1
    assert set(hw.History(path).alarms) == set(monitor.alarms)
    for name in ("figures", "alarms", "layers"):
        query = f"SELECT * FROM {name} ORDER BY 1, 2, 3"
        one, two = (sqlite3.connect(p).execute(query).fetchall() for p in (whole, path))
        assert one == two


def test_a_history_that_is_deleted_before_the_training_goes_on_with_it_lacks_nothing(
    path: Path,
) -> None:
    before = made()
    monitored(before, range(3), every=1, history=path)
    model, optimizer = before
    with hw.Monitor(model, optimizer, every=1, history=path, step=2):
        vanish(path, "all of it")
        with pytest.warns(UserWarning, match="a new file holds all steps"):
            advance(model, optimizer, 3)
    assert hw.History(path).steps == [1, 2, 3]


def test_steps_wait_while_the_folder_of_a_history_is_gone(path: Path) -> None:
    folder = path.parent / "runs"
    folder.mkdir()
    model, optimizer = made()
    with hw.Monitor(model, optimizer, every=1, history=folder / "heads.sqlite"):
        advance(model, optimizer, 0)
        shutil.rmtree(folder)
        with pytest.warns(UserWarning, match="the history cannot be written"):
            _ = [advance(model, optimizer, number) for number in (1, 2)]
        folder.mkdir()
        with pytest.warns(UserWarning, match="a new file holds all steps"):
            advance(model, optimizer, 3)
    assert hw.History(folder / "heads.sqlite").steps == [1, 2, 3, 4]


def test_a_history_that_another_monitor_has_replaced_is_left_to_it(path: Path) -> None:
    writer = written(path, [2])
    vanish(path, "all of it")
    written(path, [7]).close()
    for _ in range(2):
        with pytest.raises(ValueError, match="another monitor has started writing to it"):
            writer.restore()
    assert hw.History(path).steps == [7]
    vanish(path, "all of it")
    assert writer.restore()
    assert not writer.restore()
    writer.write([(record(4), [])], LAYERS_OF)
    assert hw.History(path).steps == [2, 4]
    writer.close()


def test_a_closed_history_that_is_deleted_is_begun_anew(path: Path) -> None:
    writer = written(path, [2])
    writer.close()
    vanish(path, "all of it")
    writer.write([(record(4), [])], LAYERS_OF)
    assert hw.History(path).steps == [4]
    assert hw.History(path).about["every"] == 2
    writer.close()


def test_a_history_is_not_named_as_a_file_of_another_format(path: Path) -> None:
    model, _ = made()
    with pytest.raises(ValueError, match=r"the name ends in \.csv; name it 'heads\.sqlite'"):
        hw.Monitor(model, history=path.with_suffix(".csv"))
    for suffix in (".db", "", ".7"):
        hw.Monitor(model, history=path.with_suffix(suffix)).close()


def test_other_files_are_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        hw.History(path)
    path.write_text("not a database, whatever it is called" * 30)
    with pytest.raises(ValueError, match="not a history"):
        hw.History(path)
    path.unlink()
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE things (name TEXT)")
    other.commit()
    other.close()
    with pytest.raises(ValueError, match="not a history that this version"):
        hw.History(path)
    model, _ = made()
    for wrong in (path, path.parent, path.parent / "none" / "heads.sqlite"):
        with pytest.raises((ValueError, OSError)):
            hw.Monitor(model, history=wrong)


def test_an_empty_file_is_a_history_without_steps(path: Path) -> None:
    path.touch()  # as after a kill at the very start
    history = hw.History(path)
    assert (history.steps, history.layers, history.alarms) == ([], {}, [])
    written(path, [2]).close()
    assert hw.History(path).steps == [2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_process_and_a_copy_have_connections_of_their_own(path: Path) -> None:
    writer = written(path, [2])
    child = os.fork()
    if child == 0:
        writer.write([(record(4), [])], LAYERS_OF)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    writer.write([(record(6), [])], LAYERS_OF)
    copies = copy.deepcopy(writer), pickle.loads(pickle.dumps(hw.History(path)))
    copies[0].write([(record(8), [])], LAYERS_OF)
    assert copies[1].steps == [2, 4, 6, 8]
    writer.close()
    copies[0].close()


def test_the_journal_is_a_write_ahead_log_but_on_a_network(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def journal() -> str:
        with closing(sqlite3.connect(path)) as file:
            return file.execute("PRAGMA journal_mode").fetchone()[0]

    written(path, [2]).close()
    assert journal() == "wal"
    path.unlink()
    monkeypatch.setattr("headwise.telemetry.history.is_remote", lambda path: True)
    written(path, [2]).close()
    assert journal() == "delete"
    assert not path.with_name("heads.sqlite-wal").exists()


MOUNTS = """\
1 0 8:1 / / rw,relatime - ext4 /dev/sda1 rw
2 1 0:5 / /home rw - nfs4 host:/home rw
3 2 8:2 / /home/me/scratch rw shared:1 master:2 - xfs /dev/sdb rw
4 1 0:6 / /mnt/my\\040drive rw - fuse.sshfs host: rw
5 1 0:7 / /over rw - nfs host:/over rw
6 1 0:8 / /over rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("/runs/heads.sqlite", False),
        ("/home/me/heads.sqlite", True),
        ("/homely/heads.sqlite", False),
        ("/home/me/scratch/heads.sqlite", False),
        ("/mnt/my drive/heads.sqlite", True),
        ("/over/heads.sqlite", False),
    ],
)
def test_network_file_systems_are_known(path: str, remote: bool) -> None:
    assert _is_remote(path, MOUNTS) is remote


# ── tables ──────────────────────────────────────────────────────────────────────────────────────


def test_columns_and_pandas(path: Path) -> None:
    writer = written(path, [2])
    writer.write([(RecordedStep(4, {"max_logit": figures(4, "maximum")}), [])], LAYERS_OF)
    writer.close()
    history = hw.History(path)
    columns = history.columns()
    assert list(columns) == [
        "step",
        "layer",
        "head",
        "module",
        "entropy",
        "entropy_se",
        "max_logit",
    ]
    assert columns["step"].tolist() == [2] * 5 + [4] * 5
    assert columns["layer"].tolist() == [0, 0, 1, 1, 1] * 2
    assert columns["module"].tolist() == ["low", "low", "high", "high", "high"] * 2
    assert columns["head"].tolist() == [0, 1, 0, 1, 2] * 2
    assert np.isnan(columns["entropy"]).tolist() == [False] * 5 + [True] * 5
    frame = history.to_pandas()
    assert list(frame.columns) == list(columns)
    assert frame["max_logit"].tolist() == columns["max_logit"].tolist()


@pytest.mark.parametrize(("package", "call"), [("pandas", "to_pandas"), ("pyarrow", "to_parquet")])
def test_what_is_not_installed_is_named(
    path: Path, package: str, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(path, [2]).close()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"not installed; run `pip install {package}`"):
        getattr(hw.History(path), call)(*([path] if call == "to_parquet" else []))


# ── sums ────────────────────────────────────────────────────────────────────────────────────────


def kept(*tensors: Any, **more: Any) -> torch.Tensor:
    (found,) = sums_of_each([Reading(*tensors, **more)])
    assert found is not None
    return found


def test_sums_merge_to_those_of_all_values() -> None:
    torch.manual_seed(0)
    values, rows = torch.randn(5, 2, 7).double() * 3 + 100, torch.rand(5, 1, 7) > 0.3
    whole, total = kept(values, rows), kept(values[:1], rows[:1])
    for i in range(1, 5):
        total = merged(total, kept(values[i : i + 1], rows[i : i + 1]))
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-9)
    by_hand = values[:, 0][rows[:, 0]]
    assert whole[0, 0] == len(by_hand)
    assert whole[1, 0].item() == pytest.approx(by_hand.sum().item())
    assert whole[2, 0].item() == pytest.approx(by_hand.var(correction=0).item() * len(by_hand))


def test_the_error_of_merged_samples_is_that_of_independent_draws() -> None:
    four, two = torch.ones(1, 1, 4), torch.ones(1, 1, 2)
    one = kept(four, four.bool(), error=torch.tensor([3.0]))
    other = kept(two, two.bool(), error=torch.tensor([6.0]))
    found = joined({"layer": merged(one, other)}, {"layer": 1}, (6, 60))
    assert found.errors.tolist() == pytest.approx([(12**2 + 12**2) ** 0.5 / 6])


def test_what_no_head_has_a_number_for_is_not_summed() -> None:
    assert sums_of_each([Reading(torch.ones(1, 2, 3, 3))]) == [None]
    assert sums_of_each([Reading(torch.ones(1, 2, 3), per_key=True)]) == [None]
    per_head = kept(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert per_head.tolist() == [[2.0, 2.0], [4.0, 8.0], [2.0, 8.0], [0.0, 0.0]]


def test_maxima_merge_by_the_larger_and_layers_that_were_not_seen_have_none() -> None:
    one = kept(torch.tensor([[1.0, 5.0]]), largest=True)
    two = kept(torch.tensor([[2.0, 4.0]]), largest=True)
    found = joined({"b": merged(one, two)}, {"a": 1, "b": 2}, (3, 3))
    np.testing.assert_array_equal(found.values, [np.nan, 2.0, 5.0])
    np.testing.assert_array_equal(found.of_layers({"a": 1, "b": 2}), [np.nan, 5.0])


def test_a_layer_that_is_left_out_of_a_step_has_no_figure_there(path: Path) -> None:
    model, optimizer = made()
    with (
        warnings.catch_warnings(),
        hw.Monitor(model, optimizer, every=1, history=path) as monitor,
    ):
        warnings.simplefilter("error")
        advance(model, optimizer, 0)
        first = model.blocks[0]
        advance(first, optimizer, 1)
        assert tuple(monitor.layers) == LAYERS
    series = hw.History(path)["entropy"]
    assert np.isfinite(series.values[0]).all()
    assert np.isfinite(series.values[1]).tolist() == [True] * 2 * H + [False] * 2 * H


def test_scalars_of_steps(path: Path) -> None:
    """Tensors and numbers, NaN too; a resumed run replaces later ones."""
    model = hw.MultiHeadAttention(24, num_heads=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def train(steps: range, **settings: Any) -> None:
        with hw.Monitor(model, optimizer, every=2, history=path, **settings) as monitor:
            for step in steps:
                loss = model(torch.randn(1, 5, 24), mask=hw.Causal()).square().mean()
                loss.backward()
                monitor.log(loss=torch.tensor(float(step), requires_grad=True), norm=step / 2)
                optimizer.step()
            monitor.log(loss=math.nan)

    train(range(1, 5))
    scalars = hw.History(path).scalars
    assert scalars["learning_rate"] == {1: 0.5, 2: 0.5, 4: 0.5}
    assert scalars["norm"] == {1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0}
    assert math.isnan(scalars["loss"].pop(5))
    assert scalars["loss"] == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}
    train(range(3, 4), step=2)
    assert hw.History(path).scalars["norm"] == {1: 0.5, 2: 1.0, 3: 1.5}


@pytest.mark.parametrize("value", ["low", torch.ones(2), None, True])
def test_scalars_are_numbers(path: Path, value: Any) -> None:
    monitor = hw.Monitor(hw.MultiHeadAttention(24, num_heads=3), history=path)
    with monitor, pytest.raises(ValueError, match=r"monitor\.log\(loss=.*must be a number"):
        monitor.log(loss=value)


def test_a_file_without_scalars_is_read_and_continued(path: Path) -> None:
    written(path, [2]).close()
    with sqlite3.connect(path) as file:
        file.execute("DROP TABLE scalars")
    assert hw.History(path).scalars == {}
    writer = HistoryWriter(path, 2, {"every": 2})
    writer.write([(record(4), [])], LAYERS_OF, scalars=[(4, "loss", 0.5)])
    writer.close()
    assert hw.History(path).scalars == {"loss": {4: 0.5}}
