"""`headwise check` on attention that others wrote: what it says of each entry of a list.

    python benchmarks/others_code.py benchmarks/lists/*.tsv --trees FOLDER [--only G H]

A list names code and holds none: kind (right or real), list, repository, commit, path, name, rules,
source, separated by tabs. `FOLDER/owner+name@<12 digits of the commit>/` holds each repository as
it was then; `site-packages` for a commit means the installed package. Every entry is checked by the
command, with no more said than the file and the name.

Printed is a row for each list as in docs/checking-lists.md, then each entry whose answer is not
the one that is due. A mistake is caught where something is found wrong, and named where the first
finding is of one of its rules. With `--told` the whole answers are kept, and compared with those
kept there before. With `--shown` an entry of which the check asks how it is built or called is
checked again with the arguments that stand in that file, as its user would write them behind the
name: repository, commit, path, name, arguments.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

COMMAND = (sys.executable, "-m", "headwise", "check")
NOT_LOADED = {"file-import", "file-syntax"}
SECONDS = 120


@dataclass(frozen=True)
class Entry:
    """A row of a list."""

    kind: str
    list: str
    repository: str
    commit: str
    path: str
    name: str
    rules: str = ""
    source: str = ""

    def file(self, trees: Path) -> Path:
        """Where its code lies."""
        if self.commit != "site-packages":
            return trees / f"{self.repository.replace('/', '+')}@{self.commit[:12]}" / self.path
        package = importlib.util.find_spec(self.path.split("/")[0])
        origin = package.origin if package else None
        return Path(origin).parents[1] / self.path if origin else Path(self.path)


@dataclass(frozen=True)
class Told:
    """What the check said of an entry.

    Attributes:
        answer: right, right as far as seen, asked, not right yet, not loaded, or absent.
        rules: of its errors, the first one first.
        seconds: CPU time.
        shown: whether it asked, and this is what it said when it was told.
    """

    entry: Entry
    answer: str
    rules: tuple[str, ...] = ()
    said: str = ""
    seconds: float = 0.0
    shown: bool = False

    @property
    def named(self) -> bool:
        """Whether the first finding is of a rule that names the mistake."""
        return bool(self.rules) and self.rules[0] in self.entry.rules.split(",")

    @property
    def due(self) -> bool:
        """Whether this is what should be said."""
        return self.named if self.entry.kind == "real" else self.answer.startswith("right")

    @property
    def key(self) -> tuple[str, ...]:
        """What says that two answers are about the same code."""
        one = self.entry
        return one.kind, one.list, one.repository, one.commit, one.path, one.name, one.source


def entries(files: Iterable[Path], only: list[str] | None) -> Iterator[Entry]:
    """The rows of all lists."""
    for file in files:
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
                if only is None or row["list"] in only:
                    yield Entry(**{name: value or "" for name, value in row.items() if name})


Place = tuple[str, str, str, str]
"""Repository, commit, path and name of an entry."""


def arguments(file: Path) -> dict[Place, str]:
    """What users would write behind the names of entries."""
    rows = (line.split("\t") for line in file.read_text(encoding="utf-8").splitlines())
    return {(row[0], row[1], row[2], row[3]): row[4] for row in rows}


def answer(entry: Entry, trees: Path, shown: Mapping[Place, str]) -> Told:
    """What is said of an entry; where the check asks, what it says when it is told."""
    first = ask(entry, trees)
    more = shown.get((entry.repository, entry.commit, entry.path, entry.name), "")
    if first.answer != "asked" or not more:
        return first
    return replace(ask(entry, trees, shlex.split(more)), shown=True)


def ask(entry: Entry, trees: Path, more: Sequence[str] = ()) -> Told:
    """Run the command on an entry."""
    file = entry.file(trees)
    if not file.is_file():
        return Told(entry, "absent")
    words = (*COMMAND, f"{file}:{entry.name}", "--json", *more)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=trees
    ) as run:
        try:
            out, err = run.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            run.kill()
            return Told(entry, "asked", said=f"it took over {SECONDS} s")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if run.returncode not in (0, 1) or not out:
        return Told(entry, "asked", said=(err or out).strip(), seconds=seconds)
    verdict = json.loads(out)
    errors = [one for one in verdict["findings"] if one["severity"] == "error"]
    rules = tuple(one["rule"] for one in errors)
    said = " | ".join(f"{one['rule']}: {one['message']} {one['hint']}" for one in errors)
    if NOT_LOADED & {*rules} - {*entry.rules.split(",")}:
        return Told(entry, "not loaded", rules, said, seconds)
    if verdict["unchecked"] and not rules:
        said = "; ".join(map(str, verdict["unchecked"]))
    seen = "right as far as seen" if verdict["unchecked"] else "right"
    return Told(entry, seen if verdict["passed"] else "not right yet", rules, said, seconds)


def show(told: list[Told]) -> None:
    """Print the rows of docs/checking-lists.md."""
    for kind in ("right", "real"):
        for name in sorted({one.entry.list for one in told if one.entry.kind == kind}):
            here = [one for one in told if (one.entry.kind, one.entry.list) == (kind, name)]
            counts = Counter(one.answer for one in here)
            loaded = len(here) - counts["absent"] - counts["not loaded"]
            if kind == "right":
                names = ("right", "right as far as seen", "asked", "not right yet")
                cells = [loaded, *(counts[answer] for answer in names)]
            else:
                cells = [loaded, counts["not right yet"], sum(one.named for one in here)]
            print("|", kind, name, "|", " | ".join(map(str, cells)), "|")
    taken = [one.seconds for one in told if one.seconds]
    if taken:
        print(f"CPU seconds of a check: {statistics.median(taken):.1f}, at most {max(taken):.1f}")


def main() -> None:
    """Check every entry, print the counts and what is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lists", type=Path, nargs="+")
    parser.add_argument("--trees", type=Path, required=True)
    parser.add_argument("--only", nargs="+", help="letters of lists")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument(
        "--told", type=Path, help="a file of answers, which is read and then written"
    )
    parser.add_argument("--shown", type=Path, help="a file of arguments, where it asks")
    options = parser.parse_args()
    asked = list(entries(options.lists, options.only))
    shown = arguments(options.shown) if options.shown else {}
    with ProcessPoolExecutor(options.workers) as pool:
        told = list(pool.map(partial(answer, trees=options.trees, shown=shown), asked))
    show(told)
    kept = options.told
    before: dict[tuple[str, ...], Told] = {}
    if kept and kept.exists():
        for line in kept.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            one = Told(**{**row, "entry": Entry(**row["entry"]), "rules": tuple(row["rules"])})
            before[one.key] = one
    for one in told:
        old = before.get(one.key)
        moved = old is not None and (old.answer, old.rules[:1]) != (one.answer, one.rules[:1])
        if one.due and not moved:
            continue
        entry = one.entry
        print(f"\n{entry.kind} {entry.list} {entry.repository} {entry.path}:{entry.name}")
        if moved and old is not None:
            print("  before:", old.answer, *old.rules[:3])
        print("  ", one.answer, *one.rules[:3], f"(due: {entry.rules}; {entry.source})")
        print("  ", one.said[:600])
    if kept:
        whole = before | {one.key: replace(one, seconds=0.0) for one in told}
        rows = (json.dumps(asdict(one)) for one in whole.values())
        kept.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
