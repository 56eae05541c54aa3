"""`headwise train`: train a small GPT, show progress, and save on Ctrl-C."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .._text import escaped
from ..models.run import ALONE, TrainingRanks
from ..models.training import Progress, Summary, TrainConfig
from .terminal import STOPPED, TIMEOUT, Quiet, launched


def _setting(name: str, help: str, *flags: str) -> Any:
    """Return an option that is None unless given; its help shows the default of the setting."""
    default = getattr(TrainConfig, name)
    return typer.Option(*flags, help=f"{help} [default: {default}]", show_default=False)


def train(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="UTF-8 files. Default: Python's own manual."),
    ] = None,
    out: Annotated[Path, typer.Option(help="New or empty folder for the model.")] = Path(
        "headwise-gpt"
    ),
    steps: Annotated[int | None, _setting("steps", "Total training steps.")] = None,
    batch: Annotated[int | None, _setting("batch", "Rows per step.")] = None,
    context: Annotated[int | None, _setting("context", "Tokens per row.")] = None,
    layers: Annotated[int | None, _setting("layers", "Number of layers.")] = None,
    heads: Annotated[int | None, _setting("heads", "Heads per layer.")] = None,
    width: Annotated[int | None, _setting("width", "Width of the residual stream.")] = None,
    vocab: Annotated[
        int | None, _setting("vocab", "Vocabulary size of the byte-level BPE.")
    ] = None,
    lr: Annotated[float | None, _setting("lr", "Peak learning rate.")] = None,
    warmup: Annotated[
        int | None, _setting("warmup", "Warm-up steps; cosine decay to 0 follows.")
    ] = None,
    weight_decay: Annotated[
        float | None, _setting("weight_decay", "Weight decay of weight matrices.")
    ] = None,
    clip: Annotated[float | None, _setting("clip", "Maximum gradient norm.")] = None,
    dropout: Annotated[
        float | None, _setting("dropout", "Dropout of embeddings and the residual stream.")
    ] = None,
    repeats: Annotated[
        float | None, _setting("repeats", "Fraction of rows with repeated random tokens.")
    ] = None,
    sinusoids: Annotated[
        bool | None,
        _setting(
            "sinusoids",
            "Initialize the position table with sinusoids, or at random.",
            "--sinusoids/--no-sinusoids",
        ),
    ] = None,
    sinusoid_std: Annotated[
        float | None, _setting("sinusoid_std", "Standard deviation of the sinusoids.")
    ] = None,
    sinusoid_base: Annotated[
        float | None, _setting("sinusoid_base", "Longest wavelength of the sinusoids ÷ 2π.")
    ] = None,
    held_out: Annotated[
        float | None, _setting("held_out", "Fraction of the text that is held out.")
    ] = None,
    seed: Annotated[int | None, _setting("seed", "Seed of weights, rows and dropout.")] = None,
    dtype: Annotated[
        str | None,
        _setting("dtype", "auto, float32 or bfloat16 (autocast); auto: bfloat16 on CUDA."),
    ] = None,
    device: Annotated[str | None, _setting("device", "auto, cpu or cuda.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out, bit for bit.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Save and stop after this many steps.")
    ] = None,
    monitor: Annotated[
        bool,
        typer.Option(
            "--monitor", help="Record every head: print alarms, and write a timeline into --out."
        ),
    ] = False,
    parallel: Annotated[
        str | None,
        typer.Option(
            help="Under torchrun: ddp (each rank holds the whole model) or fsdp (a shard of it). "
            "[default: ddp]",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Under torchrun: seconds to wait for another rank.")
    ] = TIMEOUT,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
) -> int:
    """Train a small GPT on text files, or on Python's own manual.

    Ctrl-C saves the run and prints the command to continue. `torchrun` distributes the rows of
    each step over processes.

    Example: `headwise train notes.txt --out notes-gpt --steps 2000`

    Example: `torchrun --nproc-per-node 2 -m headwise train notes.txt --out notes-gpt`
    """
    options: dict[str, Any] = locals() | {"texts": tuple(texts) if texts else None}
    from ..models import training
    from .monitored import recording

    names = (field.name for field in fields(TrainConfig))
    given = {name: options[name] for name in names if options[name] is not None}
    if resume and given:
        raise ValueError(
            f"--resume continues with the settings of the run; leave out {', '.join(given)}"
        )
    with _ranks(parallel, timeout) as (ranks, interrupted):
        with training_bar(shown=ranks.rank == 0 and not quiet) as report:
            summary = training.train(
                out,
                None if resume else TrainConfig(**given),
                resume=resume,
                overwrite=overwrite,
                stop_after=stop_after,
                should_stop=interrupted,
                report=report,
                during=recording(out, wanted=monitor, resume=resume),
                ranks=ranks,
            )
        if ranks.rank == 0:
            print(json.dumps(asdict(summary)) if as_json else summary_text(summary), flush=True)
            if not summary.finished:
                folder = escaped(shlex.quote(str(out)))
                print(
                    f"headwise: stopped and saved at step {summary.step:,} of {summary.steps:,}; "
                    f"continue with: headwise train --resume --out {folder}",
                    file=sys.stderr,
                )
        return STOPPED if interrupted() else 0


@contextlib.contextmanager
def _ranks(
    strategy: str | None, timeout: float
) -> Iterator[tuple[TrainingRanks, Callable[[], bool]]]:
    """Yield the training ranks, and a function that returns True after a signal to stop.

    `ddp` is the default: this command's models fit on one device, and `ddp` transfers the fewest
    bytes.
    """
    if not launched():
        if strategy is not None:
            raise ValueError(
                f"--parallel {strategy} needs several processes; start them with torchrun: "
                f"torchrun --nproc-per-node 2 -m headwise train …"
            )
        with until_signalled(signal.SIGINT) as signalled:
            yield ALONE, signalled
        return
    from ..parallel.group import joined  # torch.distributed takes a while to import
    from ..parallel.training import DataParallelRanks

    # The terminal and torchrun both send Ctrl-C to each rank, so a repeated signal is ignored.
    with until_signalled(signal.SIGINT, signal.SIGTERM, once=False) as signalled, joined(timeout):
        yield DataParallelRanks(strategy or "ddp"), signalled


@contextlib.contextmanager
def until_signalled(*numbers: int, once: bool = True) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns True after one of these signals.

    With `once`, a second signal of the same kind has its usual effect.
    """
    received, before = False, {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal received
        received = True
        if once:
            signal.signal(number, before[number])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def training_bar(*, shown: bool = True) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on standard error, and a line for every held-out loss."""
    console = Console(stderr=True, quiet=not shown)
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=None, loss=float("nan"), speed=0.0)

        def report(now: Progress) -> None:
            bar.update(
                task,
                total=now.steps,
                completed=now.step,
                loss=now.loss,
                speed=now.tokens_per_second,
            )
            if now.held_out is not None:
                console.print(
                    f"step {now.step:,} of {now.steps:,}: loss {now.loss:.3f}, "
                    f"held-out {now.held_out:.3f}, {now.tokens_per_second:,.0f} tokens/s, "
                    f"{_duration(now.seconds_left)} left",
                    highlight=False,
                    soft_wrap=True,
                )

        yield report


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def summary_text(summary: Summary) -> str:
    """Format the summary as text."""
    return "\n".join(
        (
            f"text       {escaped(summary.source)}",
            f"           {summary.held_out_rule}",
            f"held-out   {summary.held_out_loss:.3f} nats per token "
            f"({summary.held_out_bits_per_byte:.2f} bits per byte); "
            f"bigram {summary.bigram_loss:.3f}, unigram {summary.unigram_loss:.3f}",
            f"repeats    first copy {summary.repeats_first_loss:.2f}, "
            f"second copy {summary.repeats_second_loss:.2f}",
            f"model      {escaped(summary.folder)}: {summary.parameters:,} parameters, "
            f"step {summary.step:,} of {summary.steps:,}",
        )
    )
