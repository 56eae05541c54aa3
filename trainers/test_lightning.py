"""`LightningMonitor` in Lightning's own `Trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import headwise as hw
from monitored import LAYERS, B, E, H, T, made

STEPS, MICRO = 6, 2


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, _ = made()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        self.log("loss", self.net(batch[0]).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows() -> DataLoader[Any]:
    drawn = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(40, T, E, generator=drawn)), batch_size=B)


def trained(
    folder: Path,
    *callbacks: Callback,
    checkpoint: Any = None,
    of: type[Module] | None = None,
    **more: Any,
) -> Module:
    torch.manual_seed(0)
    module = (of or Module)()
    settings = {"max_steps": STEPS, "val_check_interval": 3, "limit_val_batches": 2} | more
    trainer = Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        accumulate_grad_batches=MICRO,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        **settings,
    )
    trainer.fit(module, rows(), rows(), ckpt_path=checkpoint)
    return module


def test_the_training_is_the_same_and_every_micro_batch_counts(tmp_path: Path) -> None:
    plain = trained(tmp_path).state_dict()
    path = tmp_path / "heads.sqlite"
    callback = hw.integrations.LightningMonitor(every=2, queries=None, history=path)
    assert isinstance(callback, Callback)
    watched = trained(tmp_path, callback).state_dict()
    assert all(torch.equal(watched[name], plain[name]) for name in plain)
    history = hw.History(path)
    assert history.steps == [1, 2, 4, 6]
    assert tuple(history.layers) == tuple(f"net.{name}" for name in LAYERS)
    for record in history.records():
        counts = record.figures["entropy"].data[0]
        assert counts.tolist() == [B * T * MICRO] * len(LAYERS) * H


def test_the_loss_of_each_step_is_that_of_its_last_micro_batch(tmp_path: Path) -> None:
    class Losses(Module):
        def training_step(self, batch: Any, number: int) -> Tensor:
            losses.append(super().training_step(batch, number))
            return losses[-1]

    losses: list[Tensor] = []
    path = tmp_path / "heads.sqlite"
    trained(tmp_path, hw.integrations.LightningMonitor(every=4, history=path), of=Losses)
    last = [float(loss) for loss in losses[MICRO - 1 :: MICRO]]
    assert hw.History(path).scalars["loss"] == pytest.approx(dict(enumerate(last, 1)))


def test_clipping_is_after_each_step(tmp_path: Path) -> None:
    class Tell(Callback):
        def on_train_batch_end(self, trainer: Trainer, module: Any, *told: Any) -> None:
            with torch.no_grad(), hw.watch(module, hw.MaxLogit()) as seen:
                module.net(torch.ones(1, T, E))
            found.append(max(row["max_logit"] for row in seen.table()))

    plain: list[float] = []
    found = plain
    trained(tmp_path, Tell())
    clipped = found = []
    trained(tmp_path, hw.integrations.LightningMonitor(every=100, clip=0.05), Tell())
    assert max(clipped[MICRO:]) < 0.5 * max(plain[MICRO:])


def test_a_resumed_trainer_goes_on_with_its_history(tmp_path: Path) -> None:
    path = tmp_path / "heads.sqlite"

    class Save(Callback):
        def on_train_batch_end(self, trainer: Trainer, *told: Any) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(tmp_path / "three.ckpt")

    trained(tmp_path, hw.integrations.LightningMonitor(every=1, history=path), Save())
    before = hw.History(path)["entropy"].values
    callback = hw.integrations.LightningMonitor(every=1, history=path)
    trained(tmp_path, callback, checkpoint=tmp_path / "three.ckpt")
    history = hw.History(path)
    assert history.steps == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal(history["entropy"].values[:3], before[:3])


def test_a_stop_saves_first(tmp_path: Path) -> None:
    rules = [hw.telemetry.Rule("entropy", above=0.0, steps=2, then="stop")]
    callback = hw.integrations.LightningMonitor(every=2, rules=rules)
    with pytest.warns(UserWarning, match="step 2: L0H0"):
        trained(tmp_path, callback)
    assert callback.monitor.steps == 2
    saved = torch.load(tmp_path / "headwise-stop-2.ckpt", weights_only=False)
    assert saved["global_step"] == 2
