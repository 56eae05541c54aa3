"""Which unit computes, and whether the kernel or PyTorch does: measured tables, and their order."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import headwise as hw
from headwise.backends import Call, choose
from headwise.backends.native import faster
from headwise.cli import main, tune
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import speeds
from headwise.kernels.speeds import Row, Table

LIBRARY = cpu.library()
needs_library = pytest.mark.skipif(LIBRARY is None, reason=cpu.why_not() or "-")
UNITS = ("avx512bf16", "avx512", "avx2", "plain")


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speeds.forget()
    yield
    speeds.forget()


def table(*rows: Row, vendor: str = "AuthenticAMD", richest: str = UNITS[0]) -> Table:
    return Table("a CPU", vendor, richest, "2026-11-23", rows)


def row(dtype: str = "float32", size: int = 64, training: bool = False, **found: float) -> Row:
    return Row(dtype, training, size, size, 64, found)


def as_json(found: Table) -> dict[str, Any]:
    rows = [vars(row) for row in found.rows]
    return {
        **{n: getattr(found, n) for n in ("cpu", "vendor", "richest", "measured")},
        "rows": rows,
    }


# ── what a table says ───────────────────────────────────────────────────────────────────────────


def test_the_fastest_unit_of_a_dtype_is_taken() -> None:
    found = table(
        row("bfloat16", avx512bf16=4.0, avx512=1.0),
        row("bfloat16", 512, avx512bf16=0.5, avx512=1.5),
        row("float32", avx512=1.0),
    )
    assert found.unit(torch.bfloat16, UNITS, "plain") == "avx512bf16"  # by the geometric mean
    assert found.unit(torch.bfloat16, UNITS[1:], "plain") == "avx512"  # of those that there are
    assert found.unit(torch.float16, UNITS, "plain") == "plain"  # nothing is known


def test_the_speed_is_that_of_the_nearest_call() -> None:
    found = table(
        row(size=64, avx512=1.2), row(size=2048, avx512=0.8), row(training=True, avx512=3)
    )
    assert found.speed(torch.float32, False, (100, 100, 64), "avx512") == 1.2
    assert found.speed(torch.float32, False, (1000, 4000, 32), "avx512") == 0.8
    assert found.speed(torch.float32, True, (1000, 4000, 32), "avx512") == 3
    assert found.speed(torch.float32, False, (100, 100, 64), "avx2") is None


@needs_library
def test_a_checkout_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    layer = hw.MultiHeadAttention(16, 2)
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(torch.randn(1, 5, 16))
    assert len(seen.table()) == 2


@needs_library
def test_the_kernel_serves_what_it_was_faster_at(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = cpu.unit(torch.float32)
    known = table(row(size=128, **{unit: 1.3}), Row("float32", False, 1, 4096, 64, {unit: 0.8}))
    monkeypatch.setattr(cpu, "table", lambda: known)

    def call(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> Call:
        k = torch.zeros(1, 1, keys, 64, dtype=dtype)
        return Call.of(k[:, :, :queries], k, k)

    assert faster(call(100, 300))
    assert not faster(call(2, 3000))
    assert choose(call(2, 3000)).name == "sdpa"
    assert faster(call(2, 3000, torch.bfloat16))  # nothing is known of these
    q = torch.zeros(1, 1, 2, 64)
    k = torch.zeros(1, 1, 3000, 64)
    said = str(hw.explain(q, k, k))
    assert f"by {unit}, measured 0.80 × as fast as the others: a CPU, 2026-11-23" in said
    said = str(hw.explain(q.half(), k.half(), k.half()))
    assert "not measured for torch.float16 on a CPU" in said


# ── which table ─────────────────────────────────────────────────────────────────────────────────


def test_what_is_shipped_is_whole() -> None:
    found = speeds._record()
    assert len({(x.vendor, x.richest) for x in found}) == len(found) > 0
    for x in found:
        calls = [(r.dtype, r.training, r.queries, r.keys, r.dim) for r in x.rows]
        assert len(set(calls)) == len(calls) == len(list(tune._calls()))
        assert {name for r in x.rows for name in r.speeds} <= set(UNITS) | {"amx"}


def test_a_cpu_that_nobody_measured_has_the_lowest_speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    one = table(row(avx512=1.5), row("bfloat16", avx512=1.0, avx512bf16=3.0))
    other = table(row(avx512=0.9), row(size=512, avx512=2.0), vendor="GenuineIntel")
    monkeypatch.setattr(speeds, "_record", lambda: (one, other))
    assert speeds.shipped("GenuineIntel", "", UNITS[0]) is other
    assert speeds.shipped("GenuineIntel", "", "avx2") is None
    found = speeds.careful(UNITS, "avx512")
    assert found.rows == (row(avx512=0.9), row("bfloat16", avx512=1.0), row(size=512, avx512=2.0))
    assert "nothing was measured" in found.measured
    monkeypatch.setattr(speeds, "processor", lambda: ("HygonGenuine", "another"))
    assert speeds.table(UNITS, "avx512").rows == found.rows


DAMAGES = {
    "no JSON": lambda text: text[: len(text) // 2],
    "another CPU": lambda text: text.replace(speeds.processor()[1], "another", 1),
    "other threads": lambda text: text.replace('"threads": ', '"threads": 9'),
    "another PyTorch": lambda text: text.replace(f'"torch": "{torch.__version__}"', '"torch": "1"'),
    "no rows": lambda text: text.replace('"rows"', '"lines"'),
    "a list": lambda text: "[]",
    "a speed that is none": lambda text: text.replace("1.25", "NaN"),
    "a speed of 0": lambda text: text.replace("1.25", "0"),
    "a row too wide": lambda text: text.replace('"dim"', '"dims"'),
    "a folder": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_table_of_ones_own_goes_first_unless_it_is_damaged(damage: str) -> None:
    path, change = speeds.tuned_path(), DAMAGES[damage]
    path.parent.mkdir(parents=True)
    own = table(row(avx512=1.25), vendor=speeds.processor()[0])
    text = json.dumps({"identity": speeds.identity(), **as_json(own)})
    path.write_text(text)
    assert speeds.table(UNITS, "avx512").rows == own.rows
    speeds.forget()
    if change is None:
        path.unlink()
        path.mkdir()
    else:
        assert change(text) != text
        path.write_text(change(text))
    assert speeds.table(UNITS, "avx512").rows != own.rows


def test_processes_of_a_group_take_one_table() -> None:
    mine, others = speeds.table(UNITS, "avx512"), table(row(avx512=0.5))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        within = dist.distributed_c10d._get_default_store()
        within.set("headwise/speeds", json.dumps(as_json(others)))
        assert speeds.table(UNITS, "avx512").rows == others.rows
        assert speeds.table(UNITS, "avx512") is speeds.table(UNITS, "avx512")
    finally:
        dist.destroy_process_group()
    assert speeds.table(UNITS, "avx512").rows == mine.rows
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:  # the first to come
        assert speeds.table(UNITS, "avx512").rows == mine.rows
        said = dist.distributed_c10d._get_default_store().get("headwise/speeds")
        assert json.loads(said)["measured"] == mine.measured
    finally:
        dist.destroy_process_group()


# ── headwise tune ───────────────────────────────────────────────────────────────────────────────


@needs_library
def test_tune_measures_and_is_believed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tune, "SIZES", ((1, 16), (16, 16)))
    monkeypatch.setattr(tune, "QUIET", 0.0)
    assert main(["tune", "--seconds", "0.01"]) == 2
    assert "this machine is busy" in capsys.readouterr().err
    assert not speeds.tuned_path().exists()
    monkeypatch.setattr(tune, "QUIET", float("inf"))
    assert main(["tune", "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out
    assert "16 × 16 bfloat16, with gradients" in said
    assert "by `headwise tune`" in said
    found = cpu.table()
    assert len(found.rows) == 6
    assert all(set(r.speeds) <= set(speeds.contenders(LIBRARY.usable)) for r in found.rows)
    q = torch.zeros(1, 1, 2, 64)
    assert "by `headwise tune`" in str(hw.explain(q, q, q))
    assert main(["tune", "--remove"]) == 0
    assert "shipped with headwise" in capsys.readouterr().out
    assert cpu.table().rows != found.rows
    assert main(["tune", "--show", "--remove"]) == 2


@needs_library
def test_nothing_is_timed_where_numbers_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tune.attend

    def wrong(*inputs: Any, backend: str, **keywords: Any) -> Any:
        return real(*inputs, **keywords) * (1.01 if backend == "native" else 1)

    monkeypatch.setattr(tune, "attend", wrong)
    monkeypatch.setattr(tune, "interleaved", None)
    with pytest.raises(AssertionError, match="other numbers"):
        next(iter(tune.measure(speeds.contenders(LIBRARY.usable), 0.01)))
