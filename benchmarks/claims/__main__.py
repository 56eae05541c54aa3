"""Measure what is often said about attention heads and write the tables of docs/claims.md."""

import argparse
import json
import re
from pathlib import Path
from types import ModuleType

import torch

from ..pages import runs
from . import learn, paths, relations, specialise, wrapper

EXPERIMENTS: dict[str, ModuleType] = {
    "wrapper": wrapper,
    "learn": learn,
    "specialise": specialise,
    "relations": relations,
    "paths": paths,
}
PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
MARK = re.compile(r"(<!-- table: ([\w .-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main(arguments: list[str] | None = None) -> None:
    """Run the command with the process's arguments unless others are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims",
        description=__doc__,
        epilog="Example: python -m benchmarks.claims --only learn",
    )
    names = list(EXPERIMENTS)
    parser.add_argument(
        "--only",
        nargs="*",
        choices=names,
        default=names,
        metavar="NAME",
        help=f"experiments to measure, of {', '.join(names)}; none: tables alone [default: all]",
    )
    torch.set_num_threads(1)  # the recorded setting of the built-in model, and the least noise
    for name in parser.parse_args(arguments).only:
        experiment = EXPERIMENTS[name]
        settings = experiment.Settings()
        found = {"claim": name, **experiment.measure(settings)}
        print("recorded in", runs.keep(record(name), settings, found))
    PAGE.write_text(fill(PAGE.read_text("utf-8")), "utf-8")
    print("written:", PAGE)


def record(name: str, folder: Path = runs.RESULTS) -> Path:
    """Return the path of an experiment's newest run."""
    return folder / f"claims-{name}.json"


def fill(page: str, folder: Path = runs.RESULTS) -> str:
    """Return the page with every table between marks written from the runs in `folder`.

    Raises:
        ValueError: the page lacks the mark of a table, or has an unknown one.
    """
    tables: dict[str, str] = {}
    for name, experiment in EXPERIMENTS.items():
        tables |= experiment.tables(json.loads(record(name, folder).read_text("utf-8")))
    marks = [name for _, name, _ in MARK.findall(page)]
    if sorted(marks) != sorted(tables):
        raise ValueError(f"the page has the marks {marks}; it needs each of {list(tables)} once")
    return MARK.sub(lambda found: f"{found[1]}\n{tables[found[2]]}\n\n{found[3]}", page)


if __name__ == "__main__":
    main()
