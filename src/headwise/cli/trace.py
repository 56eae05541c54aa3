"""`headwise trace`: show the tokens of a prompt that the model's answer attended to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .._text import escaped
from ..capture.head_address import head_label
from ..models import corpus, gpt
from ..report.codec import finite
from ..report.folders import folder_of, load_folder
from ..report.page import check_out
from ..report.tokens import LookError
from ..report.trace import trace as trace_of
from .terminal import Quiet, bar, device_of, dtype_of

PAGE = Path("headwise-trace.html")
PLACES = 8
"""The number of prompt tokens to print, in order of decreasing attention."""


def trace(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[FOLDER|NAME]",
            help="A Hugging Face folder of a causal model, or a model's name in its local cache; "
            "default: the built-in model.",
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option(metavar="FILE|-", help="The prompt: a UTF-8 file, or - for a pipe.")
    ] = "-",
    document: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="A text to put before the prompt, shown as a segment; repeatable."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 64,
    sinks: Annotated[int, typer.Option(min=0, help="Number of initial tokens that are sinks.")] = 1,
    dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help=f"The page to write. [default: {PAGE}; none with --json]")
    ] = None,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print text, heads, segments and tokens as one object.")
    ] = False,
) -> int:
    """Generate an answer, and show which prompt tokens each generated token attended to.

    Writes one offline page. Retrieval heads, which copy from the prompt, are listed; each document
    is a segment.

    Example: `headwise trace my-llama --document report.txt --prompt question.txt`
    """
    out = PAGE if out is None and not as_json else out
    if out is not None:
        check_out(out)  # before the slow part
    precision, place = dtype_of(dtype), device_of(device)
    folder = gpt.builtin() if model is None else folder_of(model)
    documents = {path.name: corpus.read_text(str(path)) for path in document or ()}
    if len(documents) < len(document or ()):
        raise LookError("--document: two files have the same name; give each a name of its own")
    text = "\n\n".join([*documents.values(), corpus.read_text(prompt)])
    with bar("tracing", drawn=not quiet):
        network, tokenizer = load_folder(folder, dtype=precision, device=place)
        options: dict[str, Any] = {} if isinstance(network, gpt.GPT) else {"do_sample": False}
        traced = trace_of(
            network,
            tokenizer,
            text,
            max_new_tokens=tokens,
            segments=documents or None,
            sinks=sinks,
            **options,
        )
    if out is not None:
        traced.save_html(out)
    found = {
        "text": "".join(traced.generated),
        "retrieval": traced.retrieval,
        "segments": traced.segments,
        "strongest": traced.strongest(k=PLACES),
    }
    if as_json:
        print(json.dumps(finite(found), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        rows = traced.retrieval
        heads = [f"{head_label(r['layer'], r['head'])} {r['copying']:.0%}" for r in rows]
        places = [f"{escaped(row['token'])!r} ({row['key']})" for row in found["strongest"]]
        print(f"generated        {escaped(found['text'])}")
        print(f"retrieval heads  {', '.join(heads) or 'none'}")
        print(f"strongest tokens {', '.join(places)}")
        for name in documents:
            mean = sum(row[name] for row in traced.segments) / len(traced.ids)
            print(f"{escaped(name):16} {mean:.1%} of the attention")
    if out is not None:
        print(f"page: {escaped(out.resolve())}", file=sys.stderr if as_json else sys.stdout)
    return 0
