"""Real trackers are told, and what they kept is read back."""

from __future__ import annotations

import json
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


def test_wandb_offline(tmp_path: Path) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    run = wandb.init(project="heads", mode="offline", dir=str(tmp_path))
    run.log({"loss": 1.0})  # the run's own steps are left alone
    monitor = told(run)
    run.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    file, rows, metrics = DataStore(), [], []
    file.open_for_scan(str(path))
    while (data := file.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            )
        if record.WhichOneof("record_type") == "metric":
            metrics.append(record.metric)
    rows = [row for row in rows if "headwise/step" in row]
    assert [json.loads(row["headwise/step"]) for row in rows] == STEPS
    assert any(m.glob_name == "headwise/*" and m.step_metric == "headwise/step" for m in metrics)
    last = rows[-1]
    layers = [f"headwise/entropy/{name}" for name in LAYERS]
    assert [name in last for name in layers] == [True] * len(LAYERS)
    histogram = json.loads(last["headwise/entropy/heads"])
    assert histogram["_type"] == "histogram"
    assert sum(histogram["values"]) == len(monitor.layers) * H


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    import trackio

    run = trackio.init(project="heads", name="one", embed=False)
    told(run)
    trackio.finish()
    metric = f"headwise/entropy/{LAYERS[0]}"
    found = trackio.Api().runs("heads")[0].metrics()
    assert metric in found


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
