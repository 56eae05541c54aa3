"""Write docs/statistics.md's costs and pictures, docs/entropy-floor.md and docs/logit-growth.md
from runs on record."""

import argparse
from pathlib import Path

import torch
from examples import entropy_floor, logit_growth

from . import costs, floor, growth, pictures, runs

DOCS = Path(__file__).parents[2] / "docs"


def main(arguments: list[str] | None = None) -> None:
    """The command, with the process's arguments unless others are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages",
        description=__doc__,
        epilog="The costs are those of `python benchmarks/every_statistic.py`, the newest of each.",
    )
    parser.add_argument("--look", action="store_true", help="first look at the built-in model anew")
    parser.add_argument("--floor", action="store_true", help="first train anew, about ten minutes")
    parser.add_argument("--growth", action="store_true", help="first train anew, ten minutes")
    parser.add_argument(
        "--toy", action="store_true", help="with --floor or --growth: seconds, for a trial"
    )
    parser.add_argument(
        "--results", type=Path, default=runs.RESULTS, help="where the runs are kept"
    )
    parser.add_argument("--docs", type=Path, default=DOCS, help="where the pages are")
    chosen = parser.parse_args(arguments)
    if chosen.toy and (chosen.results == runs.RESULTS or chosen.docs == DOCS):
        parser.error("--toy: give other folders with --results and --docs; such runs are no record")
    torch.set_num_threads(1)
    if chosen.look:
        print("kept in", pictures.write(pictures.measure(pictures.passage()), chosen.results))
    if chosen.floor:
        settings = floor.toy() if chosen.toy else entropy_floor.Settings()
        print("kept in", floor.write(settings, floor.measure(settings), chosen.results))
    if chosen.growth:
        usual = growth.toy() if chosen.toy else logit_growth.Settings()
        print("kept in", growth.write(usual, growth.measure(usual), chosen.results))
    for path in write(chosen.results, chosen.docs):
        print("written:", path)


def render(results: Path = runs.RESULTS, docs: Path = DOCS) -> dict[str, str]:
    """Pages and pictures by their place in `docs`; the text around the costs is the page's own."""
    found = {
        costs.PAGE: costs.fill((docs / costs.PAGE).read_text("utf-8"), costs.read(results)),
        **floor.render(floor.read(results)),
        **growth.render(growth.read(results)),
    }
    drawn = pictures.render(pictures.read(results))
    return found | {costs.picture(name): svg for name, svg in drawn.items()}


def write(results: Path = runs.RESULTS, docs: Path = DOCS) -> list[Path]:
    """Put pages and pictures into `docs`."""
    files = render(results, docs)
    for name, text in files.items():
        (docs / name).parent.mkdir(exist_ok=True)
        (docs / name).write_text(text, "utf-8")
    return [docs / name for name in files]


if __name__ == "__main__":
    main()
