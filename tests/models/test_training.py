"""Training: resumed runs, the schedule, what is decayed, what is written."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from headwise.models import checkpoint
from headwise.models.corpus import TextError
from headwise.models.gpt import GPT, FolderError, GPTConfig, load
from headwise.models.run import Run, TrainConfig, sinusoids
from headwise.models.training import Progress, train

TINY = TrainConfig(
    context=13, layers=2, heads=3, width=15, vocab=263, steps=20, batch=5, warmup=3, dropout=0.1
)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(150)))
    return str(path)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / checkpoint.CHECKPOINT)


def test_a_resumed_run_is_bit_for_bit_the_straight_one(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,))
    losses: dict[str, list[float]] = {"straight": [], "parts": []}

    def keep(name: str):
        return lambda now: losses[name].append(now.loss)

    straight = train(tmp_path / "a", config, report=keep("straight"))
    first = train(tmp_path / "b", config, stop_after=10, report=keep("parts"))
    assert (first.step, first.finished) == (10, False)
    torch.rand(7)  # the surroundings' random state must not matter
    second = train(tmp_path / "b", resume=True, report=keep("parts"))
    assert (second.step, second.finished) == (20, True)
    assert losses["parts"] == losses["straight"]
    assert second.held_out_loss == straight.held_out_loss
    a, b = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert a.keys() == b.keys()
    assert any(name.startswith("exp_avg_sq.") for name in a)
    for name in a:
        assert torch.equal(a[name], b[name]), name
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_seeds_differ_and_the_global_state_is_left_alone(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=2)
    before = torch.get_rng_state()
    train(tmp_path / "a", config)
    assert torch.equal(torch.get_rng_state(), before)
    train(tmp_path / "b", replace(config, seed=1))
    name = "weight.transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(tensors(tmp_path / "a")[name], tensors(tmp_path / "b")[name])


def test_rows_are_windows_of_the_text_and_repeats(text: str) -> None:
    run = Run(replace(TINY, texts=(text,), batch=8, repeats=0.25))
    rows = run.batch(3)
    assert rows.shape == (8, 14)
    assert torch.equal(rows, run.batch(3))
    assert not torch.equal(rows, run.batch(4))
    spans = {tuple(run.train_ids[i : i + 14].tolist()) for i in range(len(run.train_ids) - 13)}
    assert [tuple(row.tolist()) in spans for row in rows] == [True] * 6 + [False] * 2
    for row in rows[6:]:
        assert any(torch.equal(row[p:], row[:-p]) for p in range(6, 7))
    assert Run(replace(TINY, texts=(text,), repeats=1.0)).batch(0).shape == (5, 14)
    assert Run(replace(TINY, texts=(text,), repeats=0.0)).batch(0).shape == (5, 14)


def test_it_learns(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=60, repeats=0.0, dropout=0.0)
    seen: list[Progress] = []
    summary = train(tmp_path / "a", config, report=seen.append)
    assert summary.held_out_loss < 0.75 * math.log(263)
    assert summary.held_out_loss < seen[2].held_out  # type: ignore[operator]
    assert [now.step for now in seen] == list(range(1, 61))
    assert [now.step for now in seen if now.held_out is not None] == list(range(3, 61, 3))
    assert seen[-1].tokens_per_second > 0
    assert seen[-1].seconds_left == 0
    model, tokenizer = load(tmp_path / "a")
    run = Run.resume(tmp_path / "a")
    run.model = model
    assert run.held_out_loss() == pytest.approx(summary.held_out_loss, abs=1e-6)
    assert tokenizer.get_vocab_size() == 263
    bits = summary.held_out_loss / math.log(2)
    assert bits / 5 < summary.held_out_bits_per_byte < bits


def test_the_schedule() -> None:
    config = TrainConfig(steps=100, warmup=10, lr=0.5)
    rates = [config.learning_rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * (n + 1) for n in range(10)])
    assert max(rates) == rates[9]
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.25)
    assert 0 < rates[-1] < 0.001
    assert TrainConfig(steps=5, warmup=0, lr=0.5).learning_rate(0) == 0.5


def test_only_matrices_are_decayed(text: str) -> None:
    run = Run(replace(TINY, texts=(text,), weight_decay=0.25))
    decay = {
        id(parameter): group["weight_decay"]
        for group in run.optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in run.model.named_parameters():
        matrix = parameter.dim() == 2 and name != "transformer.wpe.weight"
        assert decay.pop(id(parameter)) == (0.25 if matrix else 0.0), name
    assert not decay


def test_gradients_are_clipped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(replace(TINY, texts=(text,), clip=1e-3))
    lengths: list[float] = []
    step = run.optimizer.step

    def spy() -> None:
        parts = [p.grad.norm() for p in run.model.parameters() if p.grad is not None]
        lengths.append(float(torch.stack(parts).norm()))
        step()

    monkeypatch.setattr(run.optimizer, "step", spy)
    run.advance()
    assert lengths == pytest.approx([1e-3], rel=1e-3)


def test_the_position_table_starts_as_asked(text: str) -> None:
    config = replace(TINY, texts=(text,), sinusoid_std=0.3, sinusoid_base=50.0)
    table = Run(config).model.transformer.wpe.weight.detach()
    assert torch.equal(table, sinusoids(13, 15, 0.3, 50.0))
    peak = 0.3 * math.sqrt(2)
    angle = 3 / 50 ** (2 * 2 / 15)  # row 3, third frequency of 8
    assert float(table[3, 2]) == pytest.approx(math.sin(angle) * peak, rel=1e-6)
    assert float(table[3, 8 + 2]) == pytest.approx(math.cos(angle) * peak, rel=1e-6)
    assert torch.equal(
        Run(replace(TINY, texts=(text,))).model.transformer.wpe.weight, sinusoids(13, 15, 0.3, 20.0)
    )
    other = Run(replace(config, sinusoids=False)).model.transformer.wpe.weight
    assert not torch.equal(other, table)


def test_bfloat16_autocast_keeps_float32_weights(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=3)
    plain: list[float] = []
    half: list[float] = []
    train(tmp_path / "a", config, report=lambda now: plain.append(now.loss))
    train(
        tmp_path / "b", replace(config, dtype="bfloat16"), report=lambda now: half.append(now.loss)
    )
    assert plain != half
    assert plain == pytest.approx(half, rel=0.02)
    assert {value.dtype for value in tensors(tmp_path / "b").values()} == {torch.float32}


def test_a_folder_in_use(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=2)
    folder = tmp_path / "model"
    train(folder, config)
    with pytest.raises(FolderError, match=r"is not empty; continue its run \(--resume\)"):
        train(folder, config)
    before = tensors(folder)
    train(folder, replace(config, steps=3), overwrite=True)
    assert checkpoint.read(folder).step == 3
    assert not torch.equal(
        before["weight.transformer.ln_f.weight"], tensors(folder)["weight.transformer.ln_f.weight"]
    )
    with pytest.raises(ValueError, match="config must be None"):
        train(folder, config, resume=True)
    with pytest.raises(FolderError, match="is a file"):
        train(Path(text), config)


def test_a_stopped_run_is_replaced_from_its_first_step(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=4)
    train(tmp_path / "m", config)
    train(tmp_path / "m", replace(config, seed=2), overwrite=True, stop_after=1)
    assert checkpoint.read(tmp_path / "m").settings["seed"] == 2
    summary = train(tmp_path / "m", config=None, resume=True, should_stop=lambda: True)
    assert summary.step == 2


def test_resuming_a_finished_run_changes_nothing(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,), steps=2)
    first = train(tmp_path / "m", config)
    before = {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    again = train(tmp_path / "m", resume=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "m").iterdir()} == before
    assert again.finished
    assert again.held_out_loss == first.held_out_loss


def test_runs_that_cannot_be_resumed(text: str, tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="does not contain checkpoint"):
        train(tmp_path / "nowhere", resume=True)
    folder = tmp_path / "m"
    train(folder, replace(TINY, texts=(text,), steps=4), stop_after=2)
    words = Path(text).read_text()
    Path(text).write_text(words.replace("is", "was", 1))
    with pytest.raises(FolderError, match="the text differs from that of this run"):
        train(folder, resume=True)
    Path(text).write_text(words)
    whole = (folder / checkpoint.CHECKPOINT).read_bytes()
    for size in (5, 100, len(whole) - 1):
        (folder / checkpoint.CHECKPOINT).write_bytes(whole[:size])
        with pytest.raises(FolderError, match="damaged or truncated"):
            train(folder, resume=True)
    (folder / checkpoint.CHECKPOINT).write_bytes(whole)
    assert train(folder, resume=True).finished


def test_a_checkpoint_of_another_version(text: str, tmp_path: Path) -> None:
    run = Run(replace(TINY, texts=(text,)))
    run.save(tmp_path / "m")
    about = {"step": 0, "settings": {"unheard_of": 1}, "text": run.fingerprint}
    checkpoint.write(tmp_path / "m", run.model, run.optimizer, about)
    with pytest.raises(FolderError, match="written by another version"):
        train(tmp_path / "m", resume=True)


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("a b c d e")
    with pytest.raises(TextError, match=r"tokens to train on, but context=13 needs 14"):
        train(tmp_path / "m", replace(TINY, texts=(str(path),)))
    assert not (tmp_path / "m").exists()
    with pytest.raises(TextError, match="no such file"):
        train(tmp_path / "m", replace(TINY, texts=("gone",)))
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("steps", 0, "at least 1"),
        ("heads", 4, "a divisor of width=15"),
        ("vocab", 256, "at least 257"),
        ("context", 3, "at least 4"),
        ("lr", 0.0, "above 0"),
        ("dropout", 1.0, "at least 0 and below 1"),
        ("repeats", 1.5, "between 0 and 1"),
        ("held_out", 0.0, "between 0 and 1"),
        ("dtype", "float16", "auto, float32 or bfloat16"),
    ],
)
def test_settings_out_of_range(setting: str, value: float | str, rule: str) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be {rule}, got {value!r}"):
        replace(TINY, **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "rule"),
    [
        ("steps", 2.5, "a whole number"),
        ("batch", True, "a whole number"),
        ("seed", "1", "a whole number"),
        ("lr", "0.1", "a float"),
        ("sinusoids", 1, "a bool"),
        ("device", 3, "a str"),
        ("texts", "notes.txt", "a list of files"),
    ],
)
def test_settings_of_another_kind(setting: str, value: Any, rule: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=f"{setting} must be {rule}, got {value!r}"):
        replace(TINY, **{setting: value})


def test_sizes_of_another_kind(unchecked: None) -> None:
    with pytest.raises(ValueError, match=r"n_layer must be a whole number, got 2\.5"):
        GPTConfig(n_layer=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resid_pdrop must be a float, got '0'"):
        GPTConfig(resid_pdrop="0")  # type: ignore[arg-type]


def test_devices(text: str) -> None:
    with pytest.raises(ValueError, match="device must be auto, cpu or cuda, got 'abacus'"):
        Run(replace(TINY, texts=(text,), device="abacus"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="PyTorch finds no CUDA device"):
            Run(replace(TINY, texts=(text,), device="cuda"))


def test_transformers_reads_what_training_wrote(text: str, tmp_path: Path) -> None:
    train(tmp_path / "m", replace(TINY, texts=(text,), steps=2))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    ours, own = load(tmp_path / "m")
    ids = tokenizer("7 times 8 is", return_tensors="pt").input_ids
    assert ids[0].tolist() == own.encode("7 times 8 is").ids
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=0)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "gpt2"
    assert isinstance(ours, GPT)


def test_a_run_that_diverges_says_so_and_keeps_the_last_good_model(text: str, tmp_path) -> None:
    config = replace(TINY, texts=(text,), lr=1e30, clip=1e30, warmup=0)
    with pytest.raises(ValueError, match=r"diverged at step \d+ .*learning rate below 1e\+30"):
        train(tmp_path / "run", config)
    kept = GPT.from_pretrained(tmp_path / "run")
    assert all(p.isfinite().all() for p in kept.parameters())
