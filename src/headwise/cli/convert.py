"""`headwise convert`: convert weights from one layout to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .._text import escaped
from .terminal import Quiet, bar


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN", help="A .safetensors file, or a folder with a file or shards."
        ),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The .safetensors file or folder to write.")
    ],
    to: Annotated[str, typer.Option("--to", help="The layout to write.")],
    from_: Annotated[
        str | None, typer.Option("--from", help="The layout of IN. Default: detected.")
    ] = None,
    heads: Annotated[
        int | None, typer.Option(help="Query heads. Default: from the shapes or config.json.")
    ] = None,
    kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads. Default: from the shapes.")
    ] = None,
    bias: Annotated[
        bool | None,
        typer.Option(
            "--bias/--no-bias",
            help="Write zero biases, or omit biases that are all zero, if OUT allows both.",
        ),
    ] = None,
    rotary_dim: Annotated[
        int | None,
        typer.Option(help="Rotated features per head. Default: from config.json, else all."),
    ] = None,
    qk_norm_eps: Annotated[
        float | None, typer.Option(help="Epsilon of the QK-norm. Default: from config.json.")
    ] = None,
    shard_gb: Annotated[
        float, typer.Option(min=1e-6, help="Maximum size of a file in GB, if OUT is a folder.")
    ] = 5.0,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing OUT.")
    ] = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a summary as one JSON object.")
    ] = False,
) -> int:
    """Convert attention weights exactly from one implementation's layout to another.

    Every attention layer is converted; other tensors are copied unchanged. If the layout of OUT
    cannot hold a parameter, the error names it and nothing is written.

    Example: `headwise convert gpt2/ ours.safetensors --from gpt2 --to headwise --heads 12`
    """
    from ..weights.files import convert_file

    with bar("converting", drawn=not quiet) as report:
        done = convert_file(
            source,
            target,
            source=from_,
            target=to,
            num_heads=heads,
            num_kv_heads=kv_heads,
            bias=bias,
            rotary_dim=rotary_dim,
            qk_norm_eps=qk_norm_eps,
            shard_bytes=round(shard_gb * 1e9),
            overwrite=overwrite,
            report=lambda share: report("converting", share),
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
