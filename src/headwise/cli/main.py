"""The command line: `headwise look`, `check`, `convert`, `ladder`, `train` and `generate`.

Exit codes: 0 fine, 1 a fault was found, 2 bad input (one line on standard error says what, where
and what to do), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from .._text import escaped
from ..models.train import TrainConfig
from .progress import read_or_not, told, training_bar, until_interrupted

SEEDS = 2**63 - 1  # the largest that PyTorch's generators take
STOPPED = 130  # what shells give for a program that Ctrl-C ended

app = typer.Typer(
    name="headwise",
    help="Multi-head attention whose heads you can see.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    usage_error = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")
    code: Any = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the terminal has no bytes for
    try:
        code = typer.main.get_command(app).main(arguments, "headwise", standalone_mode=False)
        sys.stdout.flush()
    except SystemExit:  # how typer ends when the reader of a pipe, `head` say, has had enough
        return 0
    except BrokenPipeError:  # the same, found out by our own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (KeyboardInterrupt, typer.Abort):
        return STOPPED
    except (ValueError, OSError) as error:
        return _bad_input(str(error))
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return _bad_input(f"there is not enough memory for that ({error!r:.200})")
        if not isinstance(error, usage_error):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
            return 0
        return _bad_input(error.format_message())  # pyright: ignore[reportAttributeAccessIssue]
    return code if isinstance(code, int) else 0


def _bad_input(message: str) -> int:
    print(f"headwise: {escaped(' '.join(message.split()))}", file=sys.stderr)
    return 2


def _version(wanted: bool | None) -> None:
    if wanted:
        from .. import __version__

        print(f"headwise {__version__}")
        raise typer.Exit


@app.callback()
def _app(
    version: Annotated[
        bool | None,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = None,
) -> None:
    """Multi-head attention whose heads you can see."""


def _setting(name: str, help: str, *flags: str) -> Any:
    """An option of `train`; it is None unless given, and shows the setting's default."""
    default = getattr(TrainConfig, name)
    return typer.Option(*flags, help=f"{help} [default: {default}]", show_default=False)


@app.command()
def train(
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="UTF-8 files; none: Python's own manual."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model; new or empty.")] = Path(
        "headwise-gpt"
    ),
    steps: Annotated[int | None, _setting("steps", "Steps of the whole run.")] = None,
    batch: Annotated[int | None, _setting("batch", "Rows a step.")] = None,
    context: Annotated[int | None, _setting("context", "Tokens a row.")] = None,
    layers: Annotated[int | None, _setting("layers", "Layers.")] = None,
    heads: Annotated[int | None, _setting("heads", "Heads a layer.")] = None,
    width: Annotated[int | None, _setting("width", "Width of the residual stream.")] = None,
    vocab: Annotated[int | None, _setting("vocab", "Tokens of the byte-level BPE.")] = None,
    lr: Annotated[float | None, _setting("lr", "Highest learning rate.")] = None,
    warmup: Annotated[int | None, _setting("warmup", "Steps up to it; then a cosine to 0.")] = None,
    weight_decay: Annotated[float | None, _setting("weight_decay", "Of matrices only.")] = None,
    clip: Annotated[float | None, _setting("clip", "Longest gradient.")] = None,
    dropout: Annotated[
        float | None, _setting("dropout", "On embeddings and the residual stream.")
    ] = None,
    repeats: Annotated[
        float | None, _setting("repeats", "Share of rows that repeat random tokens.")
    ] = None,
    sinusoids: Annotated[
        bool | None,
        _setting(
            "sinusoids",
            "Start the position table as sinusoids, or at random.",
            "--sinusoids/--no-sinusoids",
        ),
    ] = None,
    sinusoid_std: Annotated[
        float | None, _setting("sinusoid_std", "Deviation of those sinusoids.")
    ] = None,
    sinusoid_base: Annotated[
        float | None, _setting("sinusoid_base", "Longest wavelength of those, over 2π.")
    ] = None,
    held_out: Annotated[float | None, _setting("held_out", "Share of the text kept back.")] = None,
    seed: Annotated[int | None, _setting("seed", "Of weights, rows and dropout.")] = None,
    dtype: Annotated[
        str | None,
        _setting("dtype", "auto, float32 or bfloat16 (autocast); auto: bfloat16 on CUDA."),
    ] = None,
    device: Annotated[str | None, _setting("device", "auto, cpu or cuda.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out, bit for bit.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run in --out.")
    ] = False,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="Stop, saved, after so many steps.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object.")
    ] = False,
) -> int:
    """Train a small GPT on text files, or on Python's own manual.

    Ctrl-C saves and says how to go on.

    Example: `headwise train notes.txt --out notes-gpt --steps 2000`
    """
    from ..models import train as training

    settings = {
        "steps": steps,
        "batch": batch,
        "context": context,
        "layers": layers,
        "heads": heads,
        "width": width,
        "vocab": vocab,
        "lr": lr,
        "warmup": warmup,
        "weight_decay": weight_decay,
        "clip": clip,
        "dropout": dropout,
        "repeats": repeats,
        "sinusoids": sinusoids,
        "sinusoid_std": sinusoid_std,
        "sinusoid_base": sinusoid_base,
        "held_out": held_out,
        "seed": seed,
        "dtype": dtype,
        "device": device,
        "texts": tuple(texts) if texts else None,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    if resume and given:
        raise ValueError(
            f"--resume goes on with the run's own settings; leave out {', '.join(given)}"
        )
    with until_interrupted() as interrupted, training_bar() as report:
        summary = training.train(
            out,
            None if resume else TrainConfig(**given),
            resume=resume,
            overwrite=overwrite,
            stop_after=stop_after,
            should_stop=interrupted,
            report=report,
        )
    print(json.dumps(asdict(summary)) if as_json else told(summary))
    if not summary.finished:
        print(
            f"headwise: stopped and saved at step {summary.step:,} of {summary.steps:,}; "
            f"go on with: headwise train --resume --out {escaped(shlex.quote(str(out)))}",
            file=sys.stderr,
        )
    return STOPPED if interrupted() else 0


@app.command()
def generate(
    prompts: Annotated[
        list[str], typer.Argument(metavar="PROMPT", help="Text to go on from; - reads a pipe.")
    ],
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face GPT-2 folder; none: the built-in model."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest with this much probability.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Draw from those this likely beside the likeliest.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS, help="The same seed writes the same text.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be given again.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an array: prompt, text, ids, reason.")
    ] = False,
) -> int:
    """Write on after each prompt; one prompt is streamed as it comes.

    Example: `headwise generate "If the expression is true, the suite is executed, and" --tokens 60`
    """
    from ..models import data as corpus
    from ..models import generate as generation
    from ..models import gpt

    network, tokenizer = gpt.load(model or gpt.builtin())
    texts = [corpus.read_text("-") if prompt == "-" else prompt for prompt in prompts]
    rows = generation.stream(
        network,
        texts,
        max_new_tokens=tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop or (),
        tokenizer=tokenizer,
    )
    streamed = len(texts) == 1 and not as_json
    if streamed:
        print(texts[0], end="", flush=True)
    done: dict[int, generation.Generation] = {}
    for piece in rows:
        if streamed:
            print(piece.text, end="", flush=True)
        if piece.done is not None:
            done[piece.row] = piece.done
    results = [{"prompt": text, **asdict(done[row])} for row, text in enumerate(texts)]
    if as_json:
        print(json.dumps(results))
    elif streamed:
        print()
    else:
        print("\n\n".join(result["prompt"] + result["text"] for result in results))
    if any(result["reason"] == "context" for result in results):
        size = network.config.n_positions
        print(f"headwise: stopped at the end of the model's context ({size})", file=sys.stderr)
    return 0


@app.command()
def look(
    model: Annotated[
        Path | None,
        typer.Option(help="A Hugging Face folder of any architecture; none: the built-in model."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(metavar="FILE|-", help="A UTF-8 file, - for a pipe; none: Python's manual."),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE|FOLDER", help="Many: a file's lines, or a folder's .txt files."),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An image, for vision transformers.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the decoder reads; none: what the model writes."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens to look at; none: what the model can, up to 2048.")
    ] = None,
    importance: Annotated[
        bool, typer.Option("--importance", help="How much the loss minds each head, by gradient.")
    ] = False,
    ablation: Annotated[
        bool, typer.Option("--ablation", help="The loss without each head: a forward a head.")
    ] = False,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Two earlier results, pages or saved, side by side."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS, help="Of the random tokens that come twice.")
    ] = 0,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write. [default: headwise-look.html; none with --json]"),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Keep the result, as JSON.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print an array instead: a row for each head.")
    ] = False,
) -> int:
    """See what every head of a model does on a text: a table, and one page that needs no network.

    Takes causal models, encoders and encoder–decoders with a text, vision transformers with an
    image. Of many texts, figures are means with standard errors, and maps are of the first.

    Example: `headwise look --model notes-gpt --text notes.txt --out notes.html`
    """
    from .look import command

    return command(
        model=model,
        text=text,
        texts=texts,
        image=image,
        target=target,
        context=context,
        seed=seed,
        importance=importance,
        ablation=ablation,
        compare=compare,
        dtype=dtype,
        device=device,
        save=save,
        out=out,
        as_json=as_json,
    )


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="IN", help="A .safetensors file, or a folder with one or shards."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="A .safetensors file, or a folder, to write.")
    ],
    to: Annotated[str, typer.Option("--to", help="The layout to write.")],
    from_: Annotated[
        str | None, typer.Option("--from", help="The layout that is there; none: found out.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads; none: from the shapes or config.json.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads; none: from the shapes.")
    ] = None,
    bias: Annotated[
        bool | None,
        typer.Option(
            "--bias/--no-bias",
            help="Write biases of zeros, or leave them out, where OUT can be either way.",
        ),
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=1e-6, help="Most gigabytes a file, where OUT is a folder.")
    ] = 5.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what is there under OUT.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was done as one JSON object.")
    ] = False,
) -> int:
    """Move attention weights from one implementation's layout to another's, exactly.

    Every attention layer is converted where it stands, other tensors go through as they are. What
    OUT's layout cannot hold is refused by name, and nothing is written.

    Example: `headwise convert gpt2/ ours.safetensors --from gpt2 --to headwise --heads 12`
    """
    from ..weights.files import convert_file

    errors = Console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
        task = bar.add_task("converting", total=1.0)
        done = convert_file(
            source,
            target,
            source=from_,
            target=to,
            num_heads=heads,
            num_kv_heads=kv_heads,
            bias=bias,
            shard_bytes=round(shard_gb * 1e9),
            overwrite=overwrite,
            report=lambda share: bar.update(task, completed=share),
        )
    if as_json:
        print(json.dumps(asdict(done)))
    else:
        layers = "1 attention layer" if done.layers == 1 else f"{done.layers} attention layers"
        print(
            f"{layers} from {done.source} to {done.target}: {done.tensors} tensors, "
            f"{done.bytes / 1e6:,.3g} MB in {escaped(', '.join(done.files))}"
        )
    return 0


@app.command()
def ladder(
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes",
            metavar="BxTxExH",
            help="Batch x length x width x heads; several parted by commas, or given again.",
            show_default="1x16x16x4,4x256x256x8",
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the rungs, and run FlexAttention too.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Rounds of timing; every rung has a turn.")] = 11,
    out: Annotated[
        Path | None, typer.Option(help="A page to write, with the plot.", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> int:
    """Run every rung of the ladder on the same weights: equal first, then measured.

    Each figure stands beside its ratio to the rung before. A rung that is not equal to the
    definition is named, nothing is timed, and the exit code is 1.

    Example: `headwise ladder --sizes 1x16x16x4,2x128x64x4 --out ladder.html`
    """
    from ..report.page import check_out
    from ..report.page.ladder import write_ladder
    from ..tutorial.compare import SIZES, Disagreement, climb, parse_sizes, shown

    chosen = parse_sizes(sizes) if sizes else SIZES
    if out is not None:
        check_out(out)  # before the slow part
    errors = Console(stderr=True)
    columns = (TextColumn("climbing"), BarColumn(), TimeRemainingColumn())
    try:
        with Bar(*columns, console=errors, disable=not errors.is_terminal, transient=True) as bar:
            task = bar.add_task("climbing", total=1.0)
            found = climb(
                chosen,
                device=device,
                compile=compile,
                rounds=rounds,
                report=lambda share: bar.update(task, completed=share),
            )
    except Disagreement as error:
        print(f"headwise: {error}", file=sys.stderr)
        return 1
    if out is not None:
        write_ladder(found, out)
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        console = Console(width=None if sys.stdout.isatty() else 120)
        for part in shown(found):
            console.print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    if out is not None:
        print(f"page: {escaped(out.resolve())}", file=sys.stderr if as_json else sys.stdout)
    return 0


@app.command(context_settings={"ignore_unknown_options": True})
def check(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE.py[:Name] [--ARGUMENT VALUE]...",
            help="The file, the class or function in it, and arguments of its constructor.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Follow a step: scalar, per_head, split or gpt2.")
    ] = None,
    new: Annotated[
        str | None, typer.Option(help="Write FILE.py, a step's file with blanks to fill in.")
    ] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="RULE", help="A short lesson on one rule.")
    ] = None,
    arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An argument, in another way; may be given again."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds the file may take. [default: 60]")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="GiB of memory the file may take. [default: 4]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the verdict as one JSON object.")
    ] = False,
) -> int:
    """Say what is wrong with an attention that you wrote, where it shows, and what to change.

    The file is run in a process of its own. 0: right; 1: not right; 2: what was asked for makes no
    sense.

    Example: `headwise check attention.py:MultiHeadAttention --d_in 24 --num_heads 3`
    """
    from .check import command

    with read_or_not():
        return command(
            words or [],
            step=step,
            new=new,
            explain=explain,
            arguments=arg or [],
            seconds=timeout,
            memory=memory,
            as_json=as_json,
        )
