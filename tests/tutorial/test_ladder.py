"""`headwise ladder`: equal first, then measured; the table and the JSON document."""

from __future__ import annotations

import json
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import fresh
from ci import in_ci
from headwise.cli.main import main
from headwise.systems import variants
from headwise.tutorial import compare as module
from headwise.tutorial import runners as rungs
from headwise.tutorial import timing
from headwise.tutorial.compare import (
    Disagreement,
    Ladder,
    Row,
    Size,
    climb,
    notes,
    parse_sizes,
    shown,
)

SMALL, OTHER = Size(2, 5, 6, 3), Size(1, 3, 130, 2)
pytestmark = pytest.mark.slow

NAMES = [rung.name for rung in rungs.RUNGS]


@pytest.fixture(scope="module")
def found() -> Ladder:
    """Both sizes, and the shares of the work that were told on the way."""
    told: list[float] = []
    climbed = climb([SMALL, OTHER], rounds=2, report=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    return climbed


def rows(ladder: Ladder, size: Size = SMALL) -> dict[str, Row]:
    return {row.rung: row for row in ladder.rows if row.size == str(size)}


# --- agreement ------------------------------------------------------------------------------------


def test_every_rung_runs_and_agrees(found: Ladder) -> None:
    for size in (SMALL, OTHER):
        by_name = rows(found, size)
        assert list(by_name) == NAMES
        left_out = {name for name, row in by_name.items() if row.left_out is not None}
        assert left_out == {rungs.FLEX} | (set() if size is SMALL else {"scalar"})
        for row in by_name.values():
            if row.left_out is None:
                assert row.difference is not None
                assert row.allowed is not None
                assert row.gradient_difference is not None
                assert row.gradient_allowed is not None
                assert 0 <= row.difference <= row.allowed < 1e-5
                assert 0 <= row.gradient_difference <= row.gradient_allowed < 1e-4
    # The scalar rung computes in double precision: only the float32 rungs round.
    assert rows(found)["scalar"].difference < 1e-14  # type: ignore[operator]


def test_what_is_left_out_says_why(found: Ladder) -> None:
    said = notes(found, str(OTHER))
    assert any(
        note.startswith("scalar not run: 205,140 multiply-adds, number by number") for note in said
    )
    assert any(note.startswith("FlexAttention not run") and "--compile" in note for note in said)
    assert any("with an added output projection" in note for note in said)


def broken_future(self: variants.SDPAFlag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def broken_gradient(self: variants.SDPAFlag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(q, k.detach(), v, is_causal=True)


def broken_slightly(self: variants.SDPAFlag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return exact * (1 + 1e-5)


def broken_nan(self: variants.SDPAFlag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q * torch.nan


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (broken_future, "output"),
        (broken_slightly, "output"),
        (broken_nan, "output"),
        (broken_gradient, "gradient of the input"),
    ],
)
def test_a_wrong_rung_is_named_and_nothing_is_timed(
    broken: Any, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def timed(*_: object) -> None:
        raise AssertionError("timed a rung that is wrong")

    monkeypatch.setattr(variants.SDPAFlag, "attend", broken)
    monkeypatch.setattr(timing, "interleaved", timed)
    with pytest.raises(Disagreement, match=rf"the rung 'SDPA, flag' .* at 2x5x6x3: its {what}"):
        climb([SMALL])
    assert main(["ladder", "--sizes", str(SMALL)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: the rung 'SDPA, flag' (systems/variants.py) does not agree")
    assert err.count("\n") == 1


def test_a_rung_with_other_weights_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rungs.convert

    def swapped(state: Any, **keywords: Any) -> Any:
        if keywords["target"] == "gpt2":
            state = {**state, "W_q.weight": state["W_k.weight"]}
        return real(state, **keywords)

    monkeypatch.setattr(rungs, "convert", swapped)
    with pytest.raises(Disagreement, match="the rung 'fused, GPT-2'"):
        climb([SMALL])


# --- figures --------------------------------------------------------------------------------------


def test_counts_are_those_of_the_formulas(found: Ladder) -> None:
    for size in (SMALL, OTHER):
        B, T, E = size.batch, size.length, size.width
        by_name = rows(found, size)
        full = B * (4 * T * E * E + 2 * T * T * E)
        alone = B * (4 * T * E * E + E * T * (T + 1))  # what comes later is never computed
        for name, row in by_name.items():
            if row.left_out is None:
                assert row.multiply_adds == (alone if name == "scalar" else full), name
        biases = {"split": E, "fused, GPT-2": 4 * E}
        for name, row in by_name.items():
            if row.left_out is None:
                assert row.parameters == 4 * E * E + biases.get(name, 0), name
    assert rungs.Size(1, 16, 16, 4).multiply_adds == 24_576


def test_memory_is_at_least_what_must_be_kept(found: Ladder) -> None:
    by_name = rows(found, OTHER)
    gradients = 4 * (4 * 130 * 130)
    for name, row in by_name.items():
        if row.left_out is None:
            assert row.peak_bytes is not None
            assert row.peak_bytes > gradients, name
            assert row.peak_bytes < 4 * gradients, name
    again = climb([OTHER], rounds=1)
    assert [r.peak_bytes for r in again.rows] == [r.peak_bytes for r in by_name.values()]


def test_ratios_are_to_the_rung_before(found: Ladder) -> None:
    for size in (SMALL, OTHER):
        ran = [row for row in rows(found, size).values() if row.left_out is None]
        assert ran[0].over_before == {}
        for before, row in pairwise(ran):
            beside: Any = row.over_before
            assert list(beside) == list(module.METRICS)
            assert beside["parameters"] == row.parameters / before.parameters  # type: ignore[operator]
            assert beside["peak_bytes"] == row.peak_bytes / before.peak_bytes  # type: ignore[operator]
            for figure in ("forward", "step"):
                spread = beside[figure]
                assert 0 < spread.low <= spread.median <= spread.high
        assert all(row.forward.median > 0 for row in ran)  # type: ignore[union-attr]


def test_a_rung_that_takes_longer_is_seen_to(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = variants.SDPAFlag.attend

    def slow(self: variants.SDPAFlag, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        time.sleep(0.3)
        return fast(self, q, k, v)

    monkeypatch.setattr(variants.SDPAFlag, "attend", slow)
    few = [rung for rung in rungs.RUNGS if rung.name in ("split", "SDPA, flag", "headwise")]
    monkeypatch.setattr(module, "RUNGS", few)
    by_name = rows(climb([SMALL], rounds=3))
    for figure in ("forward", "step"):
        assert getattr(by_name["SDPA, flag"], figure).median > 0.3
        over: Any = by_name["SDPA, flag"].over_before
        after: Any = by_name["headwise"].over_before
        assert over[figure].median > 1 > after[figure].median


# --- the meters -----------------------------------------------------------------------------------


def test_peak_memory_counts_what_lives_at_once() -> None:
    def work() -> None:
        a = torch.ones(1000)
        b = a.exp()
        del a
        c = torch.ones(3000)
        del b, c
        torch.ones(500)

    kept = torch.ones(10_000)
    assert timing.peak_bytes(work) == 4 * 4000
    assert timing.peak_bytes(lambda: kept.sum().item()) < 100
    weight = torch.ones(100, 10, requires_grad=True)
    out = 4 * (7 * 100)
    grads = 4 * (100 * 10)

    def step() -> None:
        weight.grad = None
        torch.nn.functional.linear(torch.ones(7, 10), weight).sum().backward()

    step()
    weight.grad = None
    assert out + grads <= timing.peak_bytes(step) <= 3 * (out + grads)


def test_peak_memory_of_pythons_objects() -> None:
    assert 800_000 <= timing.python_peak_bytes(lambda: [0.0] * 100_000) < 810_000


def test_multiply_adds_see_fused_attention() -> None:
    q = torch.randn(2, 3, 7, 5)
    mask = torch.ones(7, 7, dtype=torch.bool)
    fused = torch.nn.functional.scaled_dot_product_attention
    expected = 2 * (2 * 3 * 7 * 7 * 5)
    assert timing.multiply_adds(lambda: fused(q, q, q, is_causal=True)) == expected
    assert timing.multiply_adds(lambda: fused(q, q, q, attn_mask=mask)) == expected
    assert timing.multiply_adds(lambda: q.mT @ q) == 2 * 3 * 5 * 7 * 5


def test_turns_are_repeated_by_each_one_for_itself() -> None:
    calls = {"slow": 0, "quick": 0}

    def slow() -> None:
        calls["slow"] += 1
        time.sleep(0.03)

    def quick() -> None:
        calls["quick"] += 1

    contenders = {"slow": slow, "quick": quick}
    shares: list[float] = []
    taken = timing.interleaved(contenders, rounds=4, least=0.03, report=shares.append)
    assert calls["slow"] == 2 + 5
    assert calls["quick"] > 10 * calls["slow"]
    assert [len(times) for times in taken.values()] == [4, 4]
    assert min(taken["slow"]) >= 0.03
    assert timing.ratio(taken, "slow", "quick").median > 2
    assert shares == [0.2, 0.4, 0.6, 0.8, 1.0]
    calls["slow"] = 0
    timing.interleaved({"slow": contenders["slow"]}, rounds=2, least=0.0)
    assert calls["slow"] == 2 + 3


def test_the_scalar_rung_runs_batches_and_gives_gradients() -> None:
    state = rungs.weights(SMALL, torch.Generator().manual_seed(1))
    run = rungs.runner(rungs.RUNGS[0], SMALL, state, "cpu", compile=False)
    assert isinstance(run, rungs.Scalars)
    x, pull = torch.randn(2, 2, 5, 6)
    other = rungs.runner(rungs.RUNGS[2], SMALL, state, "cpu", compile=False)
    torch.testing.assert_close(run.forward(x).float(), other.forward(x))
    torch.testing.assert_close(run.step(x, pull).float(), other.step(x, pull))


# --- sizes and refusals ---------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["ladder", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.count("\n") == 1
    return err


def test_sizes_are_read_once_each() -> None:
    assert parse_sizes(["1x16x16x4, 2x5x6x3", "1×16×16×4"]) == [Size(1, 16, 16, 4), SMALL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "1x16x16"), "--sizes 1x16x16: must be batch x length x width x heads"),
        (("--sizes", "1x16x16x4,"), "--sizes : must be batch x length x width x heads"),
        (("--sizes", "1x16x0x4"), "integers of at least 1, such as 1x16x16x4"),
        (("--sizes", "-1x16x16x4"), "must be batch x length x width x heads"),
        (("--sizes", "1x16x16x5"), "the width 16 must be a multiple of the 5 heads"),
        (("--sizes", "1x9000000x16x4"), "GiB, but this machine has"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--device", "tpu"), "--device must be cpu or cuda, got tpu"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert "PyTorch finds no CUDA device" in refused(capsys, "--device", "cuda")


def test_a_fault_of_the_compiler_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def fails(*_: Any, **__: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            raise BackendCompilerFailed(fails, RuntimeError("no C++ compiler"), None)

        return call

    monkeypatch.setattr(torch, "compile", fails)
    said = refused(capsys, "--compile", "--sizes", str(OTHER))
    assert "--compile: PyTorch cannot compile the rung 'per head' here" in said
    assert "no C++ compiler" in said
    assert "leave --compile out" in said


# --- what people and programs get -----------------------------------------------------------------


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ladder", "--sizes", str(SMALL), "--rounds", "1"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "B x T x E x H = 2x5x6x3" in out
    for name in NAMES:
        assert re.search(rf"^ *{re.escape(name)} ", out, re.MULTILINE), name
    assert "FlexAttention not run" in out
    assert re.search(r"this machine, in the same run: [\d,]+ GFLOP/s", out)


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["ladder", "--sizes", str(SMALL), "--rounds", "1", "--json"]
    assert main(call) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert err == ""
    assert set(document) == {"date", "machine", "limits", "settings", "rows"}
    assert [row["rung"] for row in document["rows"]] == NAMES
    assert document["settings"]["sizes"] == [str(SMALL)]
    split = document["rows"][NAMES.index("split")]
    assert split["over_before"]["parameters"] == pytest.approx(150 / 144)
    assert set(split["forward"]) == {"median", "low", "high"}
    assert document["limits"]["matmul_gflops"] > 0


def test_tables_fit_eighty_columns(found: Ladder) -> None:
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for part in shown(found):
        if not isinstance(part, str):
            console.print(part)
    text = console.export_text()
    assert "…" not in text
    for row in found.rows:
        if row.left_out is None:
            assert f" {row.multiply_adds:,}" in text
            assert f"{row.difference:.1e}" in text


# --- compiled -------------------------------------------------------------------------------------


def test_compiled_rungs_agree_and_flex_attention_runs_or_says_why() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        if in_ci():
            pytest.fail("a C++ compiler is missing: apt-get install g++")
        pytest.skip("torch.compile needs a C++ compiler")
    code = """
import json, torch
from headwise.tutorial import compare as ladder
torch.set_num_threads(1)
keep = ("scalar", "SDPA, flag", "FlexAttention", "headwise")
ladder.RUNGS = [rung for rung in ladder.RUNGS if rung.name in keep]
sizes = [ladder.Size(1, 9, 6, 3)]
print(json.dumps(ladder.climb(sizes, rounds=1, compile=True).to_dict()))
"""
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["rows"]
    assert len(found) == 4
    for row in found:
        if row["rung"] == "FlexAttention" and row["left_out"] is not None:
            assert row["left_out"].startswith("it does not run here: ")
            continue
        assert row["left_out"] is None
        assert row["difference"] <= row["allowed"]
        if row["rung"] == "FlexAttention":
            assert row["multiply_adds"] is None
            assert row["step"] is None
            assert "no backward pass on a CPU" in row["note"]
        else:
            assert row["gradient_difference"] <= row["gradient_allowed"]
            assert row["peak_bytes"] > 0
