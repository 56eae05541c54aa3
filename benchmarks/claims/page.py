"""`docs/claims.md` and its pictures, from the runs on record and from nothing else."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from . import learn, paths, relations, runs, shared, sixteenth, specialise, wrapper
from ..pages.words import prose, table

EXPERIMENTS: dict[str, ModuleType] = {
    "wrapper": wrapper,
    "sixteenth": sixteenth,
    "shared": shared,
    "learn": learn,
    "specialise": specialise,
    "relations": relations,
    "paths": paths,
}
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "claims.md"


def missing(results: Path = runs.RESULTS) -> list[str]:
    """The experiments that have no run on record."""
    return [name for name in EXPERIMENTS if not runs.path_of(name, results).exists()]


def render(results: Path = runs.RESULTS) -> dict[str, str]:
    """The page and its pictures: file names and their text."""
    found = {name: runs.read(name, results) for name in EXPERIMENTS}
    sections = [EXPERIMENTS[name].section(run) for name, run in found.items()]
    files = {PAGE: "\n\n".join([_head(found), *sections]) + "\n"}
    for name, run in found.items():
        draw = getattr(EXPERIMENTS[name], "pictures", None)
        files |= draw(run) if draw else {}
    return files


def write(results: Path = runs.RESULTS, docs: Path = DOCS) -> list[Path]:
    """Put the page and its pictures into `docs`."""
    docs.mkdir(exist_ok=True)
    paths = []
    for name, text in render(results).items():
        (docs / name).write_text(text)
        paths.append(docs / name)
    return paths


def _head(found: dict[str, dict[str, Any]]) -> str:
    """What the page is, and where and with what its figures were taken."""
    rows = [
        [
            f"`{name}`",
            run["date"][:10],
            f"{run['machine']['cpu']}, {run['machine']['threads']} of {run['machine']['cores']} "
            f"cores, {run['machine']['cpu_capability']}",
            f"{run['machine']['load']:.1f}",
            f"{run['machine']['versions']['torch']}, {run['machine']['python']}",
        ]
        for name, run in found.items()
    ]
    return "\n\n".join(
        [
            "# The claims, measured",
            prose(
                """Sentences that are often said about attention heads, each with an experiment, its
                figures and a verdict. Everything is counted, timed and trained at sizes that one
                core can take, and a verdict holds for these sizes."""
            ),
            prose(
                """`python -m benchmarks.claims` takes every figure again (about an hour on one
                core) and writes this page; `--only NAME` repeats one experiment, and `--render`
                writes the page alone from the runs in `benchmarks/results/claims-*.json`."""
            ),
            table(["experiment", "date", "machine", "load after", "PyTorch, Python"], rows),
        ]
    )
