"""`headwise ladder`: every rung on the same weights."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .terminal import Quiet, bar, console


def ladder(
    sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes",
            metavar="BxTxExH",
            help="Batch x length x width x heads; comma-separated or repeated.",
            show_default="1x16x16x4,4x256x256x8",
        ),
    ] = None,
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the rungs, and run FlexAttention too.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    rounds: Annotated[int, typer.Option(help="Timing rounds; each runs every rung.")] = 11,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of tables.")
    ] = False,
) -> int:
    """Run every rung of the ladder on the same weights, verify the outputs, then time the rungs.

    Each metric is shown with its ratio to the previous rung. If a rung differs from the
    definition, the error names it, nothing is timed, and the exit code is 1.

    Example: `headwise ladder --sizes 1x16x16x4,2x128x64x4`
    """
    from ..tutorial.compare import SIZES, Disagreement, climb, parse_sizes, shown

    chosen = parse_sizes(sizes) if sizes else SIZES
    try:
        with bar("climbing", drawn=not quiet) as report:
            result = climb(
                chosen,
                device=device,
                compile=compile,
                rounds=rounds,
                report=lambda share: report("climbing", share),
            )
    except Disagreement as error:
        print(f"headwise: {error}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(result.to_dict()))
    else:
        for part in shown(result):
            console().print(part, markup=False, highlight=False, soft_wrap=isinstance(part, str))
    return 0
