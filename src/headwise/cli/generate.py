"""`headwise generate`: text generation."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .terminal import SEEDS

PROMPT = "If the expression is true, the suite is executed, and"
"""The default prompt: the built-in model was trained on texts of this kind."""

NOTE = f"""\
headwise: the built-in model is a small GPT (3 layers of 4 heads) that has learned from a part of
Python's manual and from repeated random tokens. It continues prose such as "{PROMPT}"."""


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            help="Text to continue; - reads standard input. The built-in model has a default.",
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A Hugging Face GPT-2 folder. Default: the built-in model.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of new tokens.")] = 100,
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always selects the most likely token.")
    ] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the top tokens with this total probability.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Minimum probability, relative to that of the most likely token."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=SEEDS, help="The same seed generates the same text.")
    ] = 0,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON array: prompt, text, ids, reason.")
    ] = False,
) -> int:
    """Continue each prompt; the text of a single prompt is streamed.

    Example: `headwise generate "If the expression is true, the suite is executed, and" --tokens 60`
    """
    from ..models import corpus, generation, gpt

    if model is None:
        print(NOTE, file=sys.stderr)
    elif not prompts:
        raise ValueError(
            f"generate --model {model}: give a PROMPT; the built-in model alone has one."
        )
    prompts = prompts or [PROMPT]
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
