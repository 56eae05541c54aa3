"""Costs and pictures of statistics and the entropy floor: pages as the runs on record have them."""

from __future__ import annotations

import copy
import doctest
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.core.observers import observers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # `benchmarks` and `examples` are no part of the installed package
sys.path.append(str(ROOT / "benchmarks"))  # whose scripts import one another by bare names

from benchmarks import every_statistic, recording  # noqa: E402
from benchmarks.pages import __main__ as pages  # noqa: E402
from benchmarks.pages import costs, floor, growth, pictures  # noqa: E402
from examples import entropy_floor, logit_growth  # noqa: E402


def test_pages_are_what_the_runs_on_record_say() -> None:
    for name, text in pages.render().items():
        assert (pages.DOCS / name).read_text("utf-8") == text, f"{name}: render it again"


# --- costs and pictures ----------------------------------------------------------------------


def test_every_statistic_has_a_picture_and_a_cost() -> None:
    classes = {
        name
        for name in hw.__all__
        if isinstance(kind := getattr(hw, name), type) and issubclass(kind, hw.Statistic)
        if kind is not hw.Statistic
    }
    shown = " ".join(line.statistic for line in (*costs.PER_QUERY, *costs.PER_KEY_AND_HEAD))
    assert {name for name in classes if f"`{name}(" not in shown} == set()


@pytest.fixture
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as plain operators, which gives the same in seconds."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_contenders_agree_before_any_clock_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    every_statistic.assert_equal()
    wrong = every_statistic.two_pass
    monkeypatch.setattr(
        every_statistic,
        "two_pass",
        lambda q, k, v: {name: figure + 0.01 for name, figure in wrong(q, k, v).items()},
    )
    with pytest.raises(AssertionError):
        every_statistic.assert_equal()


@pytest.mark.usefixtures("_uncompiled")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_every_contender_on_the_page_is_one_of_the_benchmark() -> None:
    calls, refused = every_statistic.contenders(64)
    known = {*calls, *refused}
    lines = [*costs.PER_QUERY, *costs.PER_KEY_AND_HEAD]
    named = {contender for line in lines for contender in line.contenders.values()}
    assert named | set(costs.TOGETHER.values()) <= known
    assert all(bool(line.picture) != bool(line.without) for line in lines)
    drawn = {line.picture for line in lines if not line.without}
    assert drawn == set(pictures.render(pictures.read()))


def _record(length: int, figure: float, **row: Any) -> dict[str, Any]:
    spread = {"median": figure, "low": figure, "high": figure}
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {
            "cpu": "a CPU",
            "threads": 1,
            "cores": 3,
            "cpu_capability": "NONE",
            "load": 0.5,
            "versions": {"torch": "9"},
        },
        "settings": {"rounds": 7},
        "rows": [
            {"length": length, "contender": "attend", "seconds": spread, "beside_attend": spread},
            {"length": length, "contender": "LSE", "seconds": spread, "beside_attend": spread},
            *([{"length": length, **row}] if row else []),
        ],
    }


def test_the_newest_run_of_each_length_counts(tmp_path: Path) -> None:
    for name, record in {
        "every_statistic-1": _record(512, 1.25),
        "every_statistic-2": _record(2048, 3.5),
        "every_statistic-3": _record(512, 1.75, contender="FlexAttention, LSE", refused="Too new."),
        "every_statistic-4": _record(512, 9.5) | {"settings": {"rounds": 7, "backend": "eager"}},
        "every_statistic-5": _record(
            512, 2.5, contender="Segments, 4", seconds={}, beside_attend={"median": 1.5}
        )
        | {"settings": {"rounds": 5, "only": ["Segments, 4"]}},
    }.items():
        recording.write_run(tmp_path / f"{name}.json", record)
    text = "".join(
        f"before <!-- costs: {name} -->\nold\n<!-- end of costs -->\n"
        for name in ("per query", "per key and head", "together")
    )
    filled = costs.fill(text, costs.read(tmp_path))
    assert "| `LSE()` | 1.75 | 3.50 | ![lse" in filled
    assert "| `Segments({…})`, 4 of them | 1.50 | – |" in filled
    assert (
        "7 rounds; Segments, 4: 2026-01-02, a CPU, 1 of 3 cores, load 0.5 after, 5 rounds."
        in " ".join(filled.split())
    )
    assert "FlexAttention with LSE (Too new)" in filled
    assert "T 512: 2026-01-02, a CPU, 1 of 3 cores, NONE, load 0.5 after, PyTorch 9" in " ".join(
        filled.split()
    )
    assert "old" not in filled
    assert filled.count("before") == 3
    assert costs.fill(filled, costs.read(tmp_path)) == filled


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="together"):
        costs.fill("<!-- costs: per query -->\n<!-- end of costs -->", costs.Costs({}, None))


def test_pictures_show_what_the_heads_do_now() -> None:
    then = pictures.read()
    now = pictures.measure(then["ids"])
    assert now["layers"] == then["layers"]
    for name in ("max_logit", "query_norm", "key_norm"):
        assert now[name] == pytest.approx(then[name], rel=0.02)
    assert torch.allclose(
        torch.tensor(now["similarity"]), torch.tensor(then["similarity"]), atol=0.02
    )
    for name, shaded in then["shades"].items():
        assert now["shades"][name]["high"] == pytest.approx(shaded["high"], rel=0.02)
        for mine, theirs in zip(now["shades"][name]["rows"], shaded["rows"], strict=True):
            levels = [abs(ord(a) - ord(b)) for a, b in zip(mine, theirs, strict=True)]
            assert max(levels) <= 1, name
    for mine, theirs in zip(now["top"], then["top"], strict=True):
        assert mine["head"] == theirs["head"]
        assert torch.allclose(
            torch.tensor(mine["weights"]), torch.tensor(theirs["weights"]), atol=0.02
        )


def test_shades_follow_the_figures() -> None:
    """Head L0H2 looks at the token before; the first query has none, and its entropy is 0."""
    found = pictures.read()
    names = [name for layer in found["layers"] for name in layer]
    previous = found["shades"]["previous"]["rows"][names.index("0.2")]
    first = found["shades"]["first"]["rows"][names.index("0.2")]
    middle = chr(ord("a") + pictures.LEVELS // 2)
    assert sum(letter >= middle for letter in previous) > 50
    assert all(letter < middle for letter in first[10:])
    assert previous[0] == "."
    assert found["shades"]["entropy"]["rows"][0][0] == "a"


def test_another_figure_is_another_picture() -> None:
    found = pictures.read()
    before = pictures.render(found)
    changed = copy.deepcopy(found)
    rows = changed["shades"]["entropy"]["rows"]
    rows[3] = rows[3][:50] + ("a" if rows[3][50] != "a" else "u") + rows[3][51:]
    after = pictures.render(changed)
    assert {name for name in before if before[name] != after[name]} == {"entropy"}
    assert all(len(svg) < 60_000 and "nan" not in svg for svg in before.values())


# --- the entropy floor -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy() -> dict[str, Any]:
    """Plain and held at a small size and a high rate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            floor.timing, "interleaved", lambda calls, rounds: {name: [1.0] for name in calls}
        )
        return floor.measure(floor.toy())


def test_heads_collapse_without_the_floor_and_not_with_it(toy: dict[str, Any]) -> None:
    plain, held = toy["runs"]
    assert (plain["floor"], held["floor"]) == (None, 0.5)
    assert min(plain["marks"][-1]["entropy"]) < entropy_floor.COLLAPSED
    assert min(held["marks"][-1]["entropy"]) > 0.4


def test_a_floor_under_all_heads_changes_nothing() -> None:
    config = replace(floor.toy().config, steps=10)
    plain = entropy_floor.train(config, None, 1.0, 2)
    assert entropy_floor.train(config, 1e-9, 1.0, 2) == plain
    assert entropy_floor.train(config, 0.5, 1.0, 2) == plain  # its rate is gentle: none is lower


def test_the_floor_pulls_at_queries_and_keys_alone() -> None:
    run = floor.Run(floor.toy().config)
    held = hw.EntropyFloor(run.model)
    with held:
        logits = run.model(run.inputs[:2])
    assert not observers
    assert torch.equal(logits, run.model(run.inputs[:2]))
    (means,) = held.entropies.values()
    held.floor = means.max().item() + 0.25
    penalty = held.loss
    torch.testing.assert_close(penalty, (held.floor - means).sum())
    penalty.backward()
    gradient = run.model.transformer.h[0].attn.c_attn.weight.grad
    assert gradient is not None
    q, k, v = gradient.split(run.config.width, dim=1)
    assert q.norm() > 0
    assert k.norm() > 0
    assert v.norm() == 0
    held.floor = means.min().item() - 0.01
    assert held.loss == 0


def test_the_page_says_what_came_out(toy: dict[str, Any], tmp_path: Path) -> None:
    floor.write(floor.toy(), toy, tmp_path)
    run = floor.read(tmp_path)
    drawn = floor.render(run)
    page = " ".join(drawn[floor.PAGE].split())
    heads = floor.collapsed(run["runs"][:1])
    assert f"{heads} heads collapse with the plain loss and 0 with the floor" in page
    run["runs"][1]["marks"][-1]["entropy"] = [0.0] * 4
    changed = " ".join(floor.render(run)[floor.PAGE].split())
    assert f"{heads} heads collapse with the plain loss and 4 with the floor" in changed
    run["runs"][0]["marks"][-1]["entropy"] = [1.0] * 4
    assert "say nothing about the floor" in floor.render(run)[floor.PAGE]
    assert "nan" not in drawn[floor.PICTURE]


def test_the_recorded_run_has_the_settings_in_the_code(tmp_path: Path) -> None:
    floor.write(entropy_floor.Settings(), {}, tmp_path)
    now, then = floor.read(tmp_path)["settings"], floor.read()["settings"]
    # a training setting that came later leaves an earlier run as it was
    config = now.pop("config")
    assert all(config[key] == value for key, value in then.pop("config").items())
    assert now == then


def test_the_example_tells_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        entropy_floor.main(["--seeds", "1", "--rates", "0.003", "--steps", "2"])
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[1].startswith("0.003, 0, 0, none: ")
    assert lines[2].startswith("0.003, 0, 0, 0.5: ")


# --- logit growth ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def grown() -> dict[str, Any]:
    """Every method at a small size and a high rate."""
    return growth.measure(growth.toy())


def test_logits_grow_and_are_held(grown: dict[str, Any]) -> None:
    runs = [one for one in grown["runs"] if one["rate"] in growth.toy().rates]
    tops = {one["method"]: growth.last([one], "max_logit")[0] for one in runs}
    assert list(tops) == list(logit_growth.METHODS)
    assert tops["plain"] > 300
    assert max(top for name, top in tops.items() if name != "plain") < 0.5 * tops["plain"]
    entropies = {one["method"]: growth.shares([one])[0] for one in runs}
    assert min(entropies["floor"], entropies["clip"]) > 2 * entropies["plain"]


def test_heads_whose_logits_grow_are_named_and_no_others(grown: dict[str, Any]) -> None:
    plain, *_, healthy = grown["runs"]
    assert healthy["alarms"] == []
    assert {one["rule"] for one in plain["alarms"]} >= {"max_logit > 100"}
    step = next(m["step"] for m in plain["marks"] if m["max_logit"] > 100)
    assert plain["alarms"][0]["step"] == step


def test_means_that_do_nothing_change_nothing() -> None:
    settings = replace(growth.toy(), rates=(1e-3,), steps=5, every=1)
    text = logit_growth.Text(settings.context)
    idle = logit_growth.Method(limit=1e9, floor=1e-9)
    plain, held = (
        logit_growth.train(settings, 1e-3, method, 0, text)
        for method in (logit_growth.Method(), idle)
    )
    assert plain == held


def test_the_page_of_logit_growth_says_what_came_out(grown: dict[str, Any], tmp_path: Path) -> None:
    growth.write(growth.toy(), grown, tmp_path)
    run = growth.read(tmp_path)
    drawn = growth.render(run)
    assert f"{growth.last(run['runs'][:1], 'max_logit')[0]:,.0f} at the end" in " ".join(
        drawn[growth.PAGE].split()
    )
    run["runs"][2]["held_out"] = 1.25
    changed = " ".join(growth.render(run)[growth.PAGE].split())
    assert "The lowest mean over the seeds is 1.250, with clipping." in changed
    for mark in run["runs"][0]["marks"]:
        mark["max_logit"] = 7.0
    assert "does not exceed 30 with every seed and is 7 at the end" in " ".join(
        growth.render(run)[growth.PAGE].split()
    )
    assert "nan" not in drawn[growth.PICTURE]
    first = run["runs"][0]["alarms"][0]
    assert f"| {first['rule']} ({first['head']}) | {first['step']} |" in drawn[growth.PAGE]
    assert ": no alarm." in " ".join(drawn[growth.PAGE].split())
    run["runs"][0]["alarms"], run["runs"][-1]["alarms"] = [], [first]
    silent = " ".join(growth.render(run)[growth.PAGE].split())
    assert "| none | – | 0 | – | – |" in silent
    assert "an alarm in 1 of 1." in silent


def test_the_recorded_growth_has_the_settings_in_the_code(tmp_path: Path) -> None:
    growth.write(logit_growth.Settings(), {}, tmp_path)
    assert growth.read(tmp_path)["settings"] == growth.read()["settings"]
    assert list(growth.read()["methods"]) == list(logit_growth.METHODS)


def test_the_example_of_logit_growth_tells_its_runs(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        logit_growth.main(["--seeds", "1", "--rates", "0.01", "--steps", "10"])
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == [
        *(f"0.01, 0, {name}" for name in logit_growth.METHODS),
        "0.001, 0, plain",
    ]


@pytest.mark.parametrize("page", ["--floor", "--growth"])
def test_toy_runs_are_no_record(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        pages.main([page, "--toy"])
    assert stopped.value.code == 2
    assert "--results" in capsys.readouterr().err


@pytest.mark.parametrize("module", [every_statistic, floor, growth])
def test_examples_in_the_code_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
