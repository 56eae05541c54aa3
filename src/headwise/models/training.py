"""Training of a small GPT: `train()`, which `headwise train` runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .._io import holds_files, place_for
from ..weights.folders import FolderError, only_run
from . import corpus
from .run import ALONE, Run, TrainConfig, TrainingRanks

SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """The state of training after a step; `held_out` is None unless it was measured."""

    step: int
    steps: int
    loss: float
    learning_rate: float
    tokens_per_step: int
    tokens_per_second: float
    held_out: float | None = None

    @property
    def seconds_left(self) -> float:
        """The estimated remaining seconds."""
        return (self.steps - self.step) * self.tokens_per_step / self.tokens_per_second


During = AbstractContextManager[Callable[[Progress], None] | None]


@dataclass(frozen=True)
class Summary:
    """The result of a run. Losses are in nats per token; baselines use the same held-out tokens."""

    folder: str
    source: str
    held_out_rule: str
    finished: bool
    step: int
    steps: int
    parameters: int
    held_out_loss: float
    unigram_loss: float
    bigram_loss: float
    held_out_bits_per_byte: float
    repeats_first_loss: float
    repeats_second_loss: float
    tokens_per_second: float
    seconds: float


def train(
    folder: str | Path,
    config: TrainConfig | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    stop_after: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    report: Callable[[Progress], None] = lambda progress: None,
    during: Callable[[Run], During] = lambda run: nullcontext(),
    ranks: TrainingRanks = ALONE,
) -> Summary:
    """Train a small GPT and write it to `folder` in Hugging Face's format, with a checkpoint.

    The model is saved at the start, every minute, and at the end. Its held-out loss is measured
    twenty times.

    Args:
        folder: the output folder; it must be new or empty, unless `resume` or `overwrite` is True.
        config: the settings. With `resume` they come from the checkpoint, and config must be None.
        resume: continue the run in the folder.
        overwrite: replace the run in the folder.
        stop_after: save and stop after this many steps in this call.
        should_stop: called after every step; True saves and stops the run.
        report: called after every step.
        during: returns a context manager for training, such as a monitor of the run's model; a
            function that it yields is also called after every step.
        ranks: the processes that train together (`parallel.training.DataParallelRanks`). Each calls
            this function; only rank 0 reads texts and writes the model; all return the summary.

    Raises:
        FolderError: the folder is not empty, is in use by another run, contains no run to resume,
            or cannot be written.
        TextError: a text cannot be read or is too short.
        ValueError: a setting is out of range, settings are given with `resume`, or the run
            diverged.
    """
    folder = Path(folder)
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after must be at least 1, got {stop_after}")
    with only_run(folder) if ranks.rank == 0 else nullcontext():
        run = _begin(folder, config, ranks, resume=resume, overwrite=overwrite)
        with during(run) as record:
            reports = [report] if record is None else [report, record]
            return _train(run, folder, stop_after, should_stop, reports)


def _train(
    run: Run,
    folder: Path,
    stop_after: int | None,
    should_stop: Callable[[], bool],
    reports: Sequence[Callable[[Progress], None]],
) -> Summary:
    """Take the remaining steps, saving and measuring along the way."""
    first, started, saved = run.step, time.monotonic(), time.monotonic()
    every = max(1, run.config.steps // 20)
    last = run.config.steps if stop_after is None else min(run.config.steps, first + stop_after)
    tokens = run.config.batch * run.config.context
    training = 0.0  # seconds spent in steps only
    while run.step < last:
        before = time.monotonic()
        rate, loss = run.config.learning_rate(run.step), run.advance()
        training += time.monotonic() - before
        if not math.isfinite(loss):
            raise _diverged(run)
        speed = (run.step - first) * tokens / training
        held_out = run.held_out_loss() if run.step % every == 0 else None
        progress = Progress(run.step, run.config.steps, loss, rate, tokens, speed, held_out)
        for report in reports:
            report(progress)
        late = run.ranks.rank == 0 and time.monotonic() - saved > SAVE_SECONDS
        stop, save = run.ranks.total(torch.tensor([float(should_stop()), float(late)])).tolist()
        if stop:
            break
        if save:
            _save(run, folder)
            saved = time.monotonic()
    if run.step > first:
        _save(run, folder)
    speed = (run.step - first) * tokens / training if training else 0.0
    return _summary(run, folder, speed, time.monotonic() - started)


def _save(run: Run, folder: Path) -> None:
    """Save the run; if its weights are not finite, raise instead and keep the last valid model."""
    if not run.finite():
        raise _diverged(run)
    run.save(folder)


def _diverged(run: Run) -> ValueError:
    return ValueError(
        f"the run diverged at step {run.step} and is not saved; the folder keeps an earlier "
        f"state; start again with a learning rate below {run.config.lr:g}"
    )


def _summary(run: Run, folder: Path, tokens_per_second: float, seconds: float) -> Summary:
    """Measure the current model and return the summary of the run."""
    held_out = run.held_out_loss()
    first, second = run.repeat_losses()
    scored = sum(len(text.encode()) for text in run.corpus.held_out) / len(run.held_ids)
    return Summary(
        folder=str(folder),
        source=run.corpus.source,
        held_out_rule=run.corpus.rule,
        finished=run.step >= run.config.steps,
        step=run.step,
        steps=run.config.steps,
        parameters=sum(p.numel() for p in run.model.parameters()),
        held_out_loss=held_out,
        unigram_loss=corpus.unigram_loss(run.train_ids, run.targets, run.vocab),
        bigram_loss=corpus.bigram_loss(run.train_ids, run.inputs, run.targets, run.vocab),
        held_out_bits_per_byte=held_out / math.log(2) / scored,
        repeats_first_loss=first,
        repeats_second_loss=second,
        tokens_per_second=tokens_per_second,
        seconds=seconds,
    )


def _begin(
    folder: Path, config: TrainConfig | None, ranks: TrainingRanks, *, resume: bool, overwrite: bool
) -> Run:
    if resume:
        if config is not None or overwrite:
            raise ValueError("resume uses the settings of the run; config must be None")
        run = Run.resume(folder, ranks)
        ranks.shared(lambda: [place_for(folder / name) for name in Run.FILES])
        return run
    ranks.shared(lambda: _check_empty(folder, overwrite))
    config = config or TrainConfig()
    config = replace(config, texts=tuple(_absolute(path) for path in config.texts))
    run = Run(config, ranks=ranks)
    run.save(folder)
    return run


def _check_empty(folder: Path, overwrite: bool) -> None:
    """Raise FolderError for a folder that is not empty, unless it may be overwritten."""
    if holds_files(folder) and not overwrite:
        raise FolderError(
            f"{folder} is not empty; continue its run (--resume), replace it (--overwrite) "
            f"or name another folder"
        )


def _absolute(path: str) -> str:
    return path if path == "-" else str(Path(path).absolute())
