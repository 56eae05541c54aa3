"""Real trackers are told, and what they kept is read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from monitored import LAYERS, H, made, monitored

STEPS = [1, 2, 4]


def told(*trackers: Any, **more: Any) -> hw.Monitor:
    return monitored(made(), range(4), every=2, queries=4, trackers=trackers, **more)


def test_tensorboards_own_reader_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "board") as writer:
        monitor = told(writer, history=tmp_path / "heads.sqlite")
    board = EventAccumulator(str(tmp_path / "board"), size_guidance={"scalars": 0, "histograms": 0})
    board.Reload()
    tags = board.Tags()
    assert len(tags["scalars"]) == len(monitor.latest) * len(LAYERS)
    assert sorted(tags["histograms"]) == sorted(f"headwise/{name}" for name in monitor.latest)
    series = hw.History(tmp_path / "heads.sqlite")["max_logit"]
    for layer, name in enumerate(LAYERS):
        events = board.Scalars(f"headwise/max_logit/{name}")
        assert [event.step for event in events] == STEPS
        want = series.values[:, layer * H : (layer + 1) * H].max(1)
        np.testing.assert_allclose([event.value for event in events], want, rtol=1e-6)
    histogram = board.Histograms("headwise/entropy")[-1].histogram_value
    assert histogram.num == len(LAYERS) * H
    assert histogram.sum == pytest.approx(monitor.latest["entropy"].values.sum(), rel=1e-6)


def records(path: Path) -> Iterator[bytes]:
    """The records of W&B's own file: LevelDB's log format, in blocks of 32 KiB."""
    data, place, record = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_offline(tmp_path: Path) -> None:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    run = wandb.init(project="heads", mode="offline", dir=str(tmp_path))
    run.log({"loss": 1.0})  # the run's own steps are left alone
    monitor = told(run)
    run.finish()
    wandb.teardown()  # its service has then written the last record
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    rows, metrics = [], []
    for data in records(path):
        record = Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
        elif record.WhichOneof("record_type") == "metric":
            metrics.append(record.metric)
    assert rows[0]["loss"] == 1.0
    assert [row["headwise/step"] for row in rows[1:]] == STEPS
    assert any(m.glob_name == "headwise/*" and m.step_metric == "headwise/step" for m in metrics)
    entropy = monitor.latest["entropy"].of_layers(monitor.layers)
    for layer, want in zip(LAYERS, entropy, strict=True):
        assert rows[-1][f"headwise/entropy/{layer}"] == pytest.approx(want)
    assert rows[-1]["headwise/entropy/heads/_type"] == "histogram"
    assert sum(rows[-1]["headwise/entropy/heads/values"]) == len(LAYERS) * H


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    run = trackio.init(project="heads", name="one", embed=False)
    monitor = told(run)
    trackio.finish()
    rows = SQLiteStorage.get_logs("heads", "one")
    rows = [row for row in rows if "headwise/entropy/heads" in row]
    assert [row["step"] for row in rows] == STEPS
    entropy = monitor.latest["entropy"].of_layers(monitor.layers)
    for layer, want in zip(LAYERS, entropy, strict=True):
        assert rows[-1][f"headwise/entropy/{layer}"] == pytest.approx(want)
    assert rows[-1]["headwise/entropy/heads"]["_type"] == trackio.Histogram.TYPE


def test_mlflow_by_its_own_function(tmp_path: Path) -> None:
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    with mlflow.start_run() as run:
        monitor = told(mlflow.log_metrics)
    client = mlflow.MlflowClient()
    name = f"headwise/entropy/{LAYERS[0]}"
    events = client.get_metric_history(run.info.run_id, name)
    assert [event.step for event in events] == STEPS
    assert events[-1].value == pytest.approx(monitor.latest["entropy"].of_layers(monitor.layers)[0])


def test_parquet(tmp_path: Path) -> None:
    from pyarrow import parquet

    told(history=tmp_path / "heads.sqlite")
    history = hw.History(tmp_path / "heads.sqlite")
    history.to_parquet(tmp_path / "heads.parquet")
    table = parquet.read_table(tmp_path / "heads.parquet")
    columns = history.columns()
    assert table.column_names == list(columns)
    assert table["layer"].to_pylist() == columns["layer"].tolist()
    np.testing.assert_array_equal(table["entropy"].to_numpy(), columns["entropy"])
