"""What a whole run of each file counts, and the table that says what it should."""

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("counts.toml")
# Cases that transformers calls flaky run their forwards again when they fail at first.
AT_LEAST = {"forwards", "layers compared", "queries compared"}

Counts = dict[str, Counter[str]]


def found(reporter: Any) -> Counts:
    """What each file's tests counted; a skip under what it says."""
    files: Counts = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in reporter.getreports(outcome):
            if outcome != "skipped" and report.when != "call":
                continue
            file = files.setdefault(Path(report.nodeid.partition("::")[0]).stem, Counter())
            said = report.longrepr[2].removeprefix("Skipped: ") if outcome == "skipped" else ""
            file[f"skipped: {said}" if said else outcome] += 1
            for name, number in report.user_properties:
                file[name] += number
    return files


def lines(found: Counts) -> list[str]:
    """A line for each file, with all skips as one number."""
    texts = []
    for file, numbers in sorted(found.items()):
        plain: Counter[str] = Counter()
        for name, number in numbers.items():
            plain[name.partition(": ")[0]] += number
        texts.append(
            f"{file}: " + ", ".join(f"{number:,} {name}" for name, number in plain.items())
        )
    return texts


def wrong(found: Counts) -> list[str]:
    """How those counts differ from the table's, for the files that ran."""
    table = tomllib.loads(TABLE.read_text())
    differences = []
    for file, numbers in found.items():
        skips = table.get(file, {}).get("skipped", [])
        wanted = Counter({n: c for n, c in table.get(file, {}).items() if n != "skipped"})
        wanted |= Counter({f"skipped: {skip['says']}": skip["count"] for skip in skips})
        ours: Counter[str] = Counter()
        for name, number in numbers.items():
            ours[next((known for known in wanted if is_skip(name, known)), name)] += number
        for name in wanted.keys() | ours.keys():
            enough = name in AT_LEAST and ours[name] > wanted[name]
            if ours[name] != wanted[name] and not enough:
                differences.append(f"{file}: {ours[name]:,} {name} for {wanted[name]:,}")
    return sorted(differences)


def is_skip(name: str, known: str) -> bool:
    """Whether a skip says what one in the table says; the rest names a model."""
    start = "skipped: "
    both = name.startswith(start) and known.startswith(start)
    return both and known.removeprefix(start) in name
