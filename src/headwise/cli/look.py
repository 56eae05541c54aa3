"""`headwise look`: a table of heads, and a page."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .._io import place_for
from .._text import escaped
from ..models import corpus, gpt
from ..report.codec import finite
from ..report.compare import differences
from ..report.folders import folder_of, load_folder, name_of
from ..report.head_labels import NO_LABEL
from ..report.look import look as look_at
from ..report.page import check_out, write_page
from ..report.page.report import titles
from ..report.sample import LookError
from ..report.samples import TextFile
from ..report.schema import Look, load
from ..report.terminal import METRICS, TOP, fit_table, format_difference, summary, table
from ..weights.folders import read_config
from .terminal import SEEDS, TIMEOUT, Quiet, bar, console, device_of, dtype_of, launched, paged

Once = Callable[[Callable[[], Any]], Any]

PAGE = Path("headwise-look.html")


def look(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|NAME",
            help="A Hugging Face folder of any architecture, or a model's name in its local cache; "
            "default: the built-in model.",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|TEXT|-",
            help="A UTF-8 file, the text itself, or - for a pipe. Default: Python's manual.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|FOLDER", help="Texts: a file's lines, or a folder's .txt files."
        ),
    ] = None,
    image: Annotated[
        Path | None, typer.Option(metavar="FILE", help="An image, for vision transformers.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Input of the decoder. Default: text that the model generates."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(help="Maximum tokens to use. Default: the model's context, up to 2048."),
    ] = None,
    importance: Annotated[
        bool,
        typer.Option("--importance", help="Sensitivity of the loss to each head, by gradient."),
    ] = False,
    ablation: Annotated[
        bool | None,
        typer.Option(
            help="Loss without each head, one forward pass per head. Default: small models only.",
            show_default=False,
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Compare two results (pages or saved JSON files)."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS, help="Seed of the repeated random tokens.")
    ] = 0,
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Page title. Default: the model and the text."),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of heads in the table, by salience.")
    ] = TOP,
    every: Annotated[
        bool, typer.Option("--all", help="Print every head, and every metric that fits.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(help="The page to write. [default: headwise-look.html; none with --json]"),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Save the result as JSON.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Under torchrun: seconds to wait for another rank.")
    ] = TIMEOUT,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array instead: a row for each head.")
    ] = False,
) -> int:
    """Show what every head of a model does on a text, as a table and one offline page.

    Supports causal models, encoders and encoder–decoders with a text, and vision transformers with
    an image. With many texts, metrics are means with standard errors, and maps show the first text.
    `torchrun` distributes the texts over processes.

    Example: `headwise look --text "The cat sat on the mat, and the cat slept."`

    Example: `headwise look --model notes-gpt --text notes.txt --out notes.html`

    Example: `torchrun --nproc-per-node 2 -m headwise look --model notes-gpt --texts notes`
    """
    out = PAGE if out is None and not as_json else out
    if compare is not None:
        _check_places(out, None)
        requested = (model, text, texts, image, target, context, save, title)
        if any(one is not None for one in requested) or importance or ablation or launched():
            raise LookError("--compare A B can be combined with --out and --json only")
        return _compare(*compare, out, as_json)
    precision = dtype_of(dtype)
    with _ranks(timeout) as (first, once):
        once(lambda: _check_places(out, save))  # before the slow part
        where = device_of(device)
        folder = gpt.builtin() if model is None else folder_of(model)
        read_config(folder)  # report an unusable model before reading the text
        what, name = _read(text, texts, image, once)
        with bar("loading", drawn=first and not quiet) as report:
            network, tokenizer = load_folder(folder, dtype=precision, device=where)
            seen = look_at(
                network,
                tokenizer,
                what,
                target=target,
                context=context,
                seed=seed,
                importance=importance,
                ablation=ablation,
                model_name="the built-in model" if model is None else name_of(folder),
                text_name=name,
                title=title,
                report=report,
                over_ranks=launched(),
            )
            if first:
                _write(seen, out, save)
        if first:
            _print_all(seen, out, save, as_json, None if every else top, quiet)
    return 0


@contextmanager
def _ranks(timeout: float) -> Iterator[tuple[bool, Once]]:
    """Join the process group if torchrun started this process.

    Yields True on the first rank, and a function that runs a callable there and shares its result.
    """
    if not launched():
        yield True, lambda make: make()
        return
    from ..parallel.group import from_first, joined  # torch.distributed takes a while to import

    with joined(timeout) as rank:
        yield rank == 0, from_first


def _check_places(out: Path | None, save: Path | None) -> None:
    """Raise LookError if an output file cannot be written."""
    if out is not None:
        check_out(out)
    if save is not None:
        try:
            place_for(save)
        except OSError as error:
            raise LookError(f"cannot write {error}") from None


def _write(seen: Look, out: Path | None, save: Path | None) -> None:
    if out is not None:
        write_page(seen, out)
    if save is not None:
        seen.save(save)


def _print_all(
    seen: Look, out: Path | None, save: Path | None, as_json: bool, top: int | None, quiet: bool
) -> None:
    if as_json:
        print(json.dumps(finite(seen.rows), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        screen = console()
        drawn, left_out = table(seen, screen.width, top=top, columns=METRICS if top else None)
        before, after = ("", "") if quiet else summary(seen, left_out, top=top)
        _print(screen, before, drawn, after)
    for kind, path in (("page", out), ("saved", save)):
        if path is not None:
            print(f"{kind}: {escaped(path.resolve())}", file=sys.stderr if as_json else sys.stdout)


def _read(text: str | None, texts: Path | None, image: Path | None, once: Once) -> tuple[Any, str]:
    """Return the input to look at, and its name."""
    given = {"--text": text, "--texts": texts, "--image": image}
    requested = [name for name, value in given.items() if value is not None]
    if len(requested) > 1:
        raise LookError(f"{' and '.join(requested)}: give only one of them")
    if image is not None:
        return image, image.name
    if texts is not None:
        return TextFile(texts), Path(os.path.realpath(texts)).name
    if text is not None:
        if _is_text(text):
            return text, f"“{shorten(text, 60, placeholder='…')}”"
        content = once(lambda: corpus.read_text(text))  # ranks share one standard input
        return content, "standard input" if text == "-" else Path(text).name
    return corpus.manual_passage(), "Python's manual: with"


def _is_text(text: str) -> bool:
    """Return True if this is the text itself, and False if it names a file or a pipe.

    Raises:
        LookError: it is empty; or it looks like a file name or path, but no such file exists.
    """
    if text == "-" or os.path.exists(text):
        return False
    if not text.strip():
        raise LookError(f"--text {text!r}: the text is empty; give a text, a file, or - for a pipe")
    if re.search(r"\.[a-zA-Z][a-zA-Z0-9]{0,4}$", text) or re.fullmatch(r"\S*[/\\]\S*", text):
        raise LookError(f"{text}: no such file; if it is the text itself, pipe it to --text -")
    return True


def _print(console: Console, before: str, drawn: Table, after: str) -> None:
    with paged(console, drawn.row_count + before.count("\n") + after.count("\n") + 8):
        for part in (before, drawn, after):
            if part:
                console.print(part, markup=False, highlight=False)


def _compare(one: Path, other: Path, out: Path | None, as_json: bool) -> int:
    looks = load(one), load(other)
    rows, alone = differences(*looks)
    if out is not None:
        write_page(looks[0], out, other=looks[1])
    if as_json:
        print(json.dumps(finite(rows), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        screen = console()
        facts = [one.provenance for one in looks]
        names = titles(facts)
        changes = [{**row, "label": [_change(*row["labels"])]} for row in rows]
        drawn, left_out = fit_table(changes, screen.width, format_difference)
        before = f"A: {names[0]}\nB: {names[1]}\n{_losses(*facts)}B − A of every metric:"
        omitted = f"{alone} heads are in only one of the two results and are omitted."
        after = [omitted] if alone else []
        if left_out:
            after.append(f"Omitted columns: {'; '.join(left_out)} (see --json).")
        _print(screen, before, drawn, "\n".join(after))
    if out is not None:
        print(f"page: {escaped(out.resolve())}", file=sys.stderr if as_json else sys.stdout)
    return 0


def _losses(a: dict[str, Any], b: dict[str, Any]) -> str:
    """Return a line with both losses; empty if one is missing or their tokens differ."""
    losses = a.get("loss_text"), b.get("loss_text")
    if None in losses or a.get("loss") != b.get("loss"):
        return ""
    return f"Loss: {losses[0]:.2f} → {losses[1]:.2f} nats on {a.get('loss', 'each token')}\n"


def _change(before: list[str], after: list[str]) -> str:
    """Describe the change of labels between two results."""
    names = [", ".join(labels) or NO_LABEL for labels in (before, after)]
    return names[0] if names[0] == names[1] else " → ".join(names)
