"""Measure what is said about attention heads, keep the runs, and write docs/claims.md."""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from . import page, runs


def main(arguments: list[str] | None = None) -> None:
    """The command, with the process's arguments unless others are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        epilog="Example: python -m benchmarks.claims --only learn --seeds 5",
    )
    names = list(page.EXPERIMENTS)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"which experiments; of {', '.join(names)} [default: all]",
    )
    parser.add_argument("--seeds", type=int, help="how many seeds `learn` trains with")
    parser.add_argument("--render", action="store_true", help="write the page alone")
    parser.add_argument("--toy", action="store_true", help="sizes that take seconds: a trial")
    parser.add_argument(
        "--results", type=Path, default=runs.RESULTS, help="where the runs are kept"
    )
    parser.add_argument("--docs", type=Path, default=page.DOCS, help="where the page is written")
    chosen = parser.parse_args(arguments)
    if chosen.toy and (chosen.results == runs.RESULTS or chosen.docs == page.DOCS):
        parser.error("--toy: give other folders with --results and --docs; such runs are no record")
    torch.set_num_threads(1)  # the recorded settings of the built-in model, and the least noise
    for name in [] if chosen.render else chosen.only:
        experiment = page.EXPERIMENTS[name]
        settings = experiment.TOY if chosen.toy else experiment.Settings()
        if name == "learn" and chosen.seeds:
            settings = replace(settings, seeds=chosen.seeds)
        found = experiment.measure(settings)
        print("kept in", runs.write(name, settings, found, chosen.results))
    if absent := page.missing(chosen.results):
        parser.exit(2, f"no page yet: {', '.join(absent)} not on record; use --only with them\n")
    for path in page.write(chosen.results, chosen.docs):
        print("written:", path)


if __name__ == "__main__":
    main()
