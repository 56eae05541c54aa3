"""`MonitorCallback` in transformers' own `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import headwise as hw

ROWS, LENGTH, VOCAB, LAYERS, HEADS = 24, 11, 37, 2, 3


class Rows(torch.utils.data.Dataset):
    """Rows of random tokens, some of them padding."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        ids = torch.randint(VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(row))
        attended = torch.arange(LENGTH) < LENGTH - row % 3
        return {"input_ids": ids, "attention_mask": attended.long(), "labels": ids}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": LENGTH, "n_embd": 24, "n_layer": LAYERS}
    return GPT2LMHeadModel(GPT2Config(**sizes, n_head=HEADS, bos_token_id=0, eos_token_id=0))


def trainer(folder: Path, *callbacks: TrainerCallback, **more: Any) -> Trainer:
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 3,
        "max_steps": 6,
        "logging_steps": 2,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    } | more
    return Trainer(
        model(),
        TrainingArguments(str(folder), **settings),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=list(callbacks),
    )


def weights(of: Trainer) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in of.model.state_dict().items()}


@pytest.mark.parametrize("more", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
def test_the_training_is_the_same_and_steps_are_the_trainers(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    plain = trainer(tmp_path / "plain", **more)
    plain.train()
    path = tmp_path / "heads.sqlite"
    callback = hw.integrations.MonitorCallback(every=2, queries=None, history=path)
    assert isinstance(callback, TrainerCallback)
    watched = trainer(tmp_path / "watched", callback, **more)
    watched.train()
    want = weights(plain)
    assert all(torch.equal(x, want[name]) for name, x in weights(watched).items())
    history = hw.History(path)
    assert history.steps == [1, 2, 4, 6]
    assert history.layers == {f"transformer.h.{n}.attn": HEADS for n in range(LAYERS)}
    # Three micro-batches of two rows, and no row of an evaluation; padding does not count.
    for record in history.records():
        counts = record.figures["entropy"].data[0]
        assert len(set(counts)) == 1
        assert 6 * (LENGTH - 2) <= counts[0] <= 6 * LENGTH
        assert record.figures["entropy"].of_queries == 6 * LENGTH * LAYERS
    logged = {one["step"]: one for one in watched.state.log_history if "loss" in one}
    scalars = history.scalars
    assert [*logged] == [2, 4, 6]
    for name in ("loss", "grad_norm"):
        assert scalars[name] == {step: pytest.approx(one[name]) for step, one in logged.items()}
    assert [*scalars["learning_rate"]] == [1, 2, 4, 6]


def test_a_resumed_trainer_goes_on_with_its_history(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.sqlite", tmp_path / "heads.sqlite"
    trainer(tmp_path / "a", hw.integrations.MonitorCallback(every=1, history=whole)).train()
    trainer(tmp_path / "b", hw.integrations.MonitorCallback(every=1, history=path)).train()
    again = trainer(tmp_path / "b", hw.integrations.MonitorCallback(every=1, history=path))
    again.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-3"))
    one, two = hw.History(whole), hw.History(path)
    assert one.steps == two.steps == [1, 2, 3, 4, 5, 6]
    for name in one.statistics:
        np.testing.assert_array_equal(one[name].values, two[name].values)


def test_a_stop_saves_first(tmp_path: Path) -> None:
    rules = [hw.telemetry.Rule("entropy", above=0.0, steps=2, then="stop")]
    callback = hw.integrations.MonitorCallback(every=2, rules=rules)
    stopped = trainer(tmp_path, callback, save_steps=100)
    with pytest.warns(UserWarning, match=r"step 2: L0H0 \(transformer.h.0.attn\)"):
        stopped.train()
    assert stopped.state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    assert {alarm.step for alarm in callback.monitor.alarms} == {2}


def test_what_the_trainer_tells_is_refused() -> None:
    with pytest.raises(ValueError, match=r"MonitorCallback\(model=…\): the trainer sets it"):
        hw.integrations.MonitorCallback(model=model())


def test_a_rule_is_refused_in_the_words_of_a_monitor(tmp_path: Path) -> None:
    rules = [hw.telemetry.Rule("entropie", below=0.1)]
    callback = hw.integrations.MonitorCallback(rules=rules)
    with pytest.raises(ValueError, match="not recorded") as told:
        trainer(tmp_path, callback).train()
    with pytest.raises(ValueError, match="not recorded") as refused:
        hw.Monitor(model(), rules=rules)
    assert str(told.value) == str(refused.value)


def test_an_optimizer_in_accelerates_wrapper_tells_of_its_steps() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    own = model()
    own, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters()))
    with hw.Monitor(own, optimizer, every=1, queries=None) as monitor:
        for row in range(4):
            with accelerator.accumulate(own):
                ids = Rows()[row]["input_ids"][None]
                accelerator.backward(own(ids, labels=ids).loss)
                optimizer.step()
                optimizer.zero_grad()
    assert monitor.steps == 2
    assert monitor.latest["entropy"].of_queries == 2 * LENGTH * LAYERS


def test_a_compiled_trainer(tmp_path: Path) -> None:
    torch._dynamo.reset()
    more = {"torch_compile": True, "torch_compile_backend": "eager", "eval_strategy": "no"}
    callback = hw.integrations.MonitorCallback(every=3, queries=None)
    trainer(tmp_path, callback, **more).train()
    assert set(callback.monitor.layers) == {f"transformer.h.{n}.attn" for n in range(LAYERS)}
    assert callback.monitor.steps == 6
