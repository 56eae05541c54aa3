"""Costs and pictures of statistics in `docs/statistics.md`, between marks, from runs on record."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import runs
from .words import and_list, prose, table

PAGE = "statistics.md"
LENGTHS = (512, 2048, 8192)
MARK = re.compile(r"(<!-- costs: ([\w ]+) -->\n).*?(<!-- end of costs -->)", re.DOTALL)


@dataclass(frozen=True)
class Line:
    """What stands in a row: the statistic, its contenders in the benchmark, its picture,
    or the reason why there is none."""

    statistic: str
    contenders: Mapping[str, str]
    picture: str
    without: str = ""


def _line(statistic: str, contender: str, picture: str, without: str = "") -> Line:
    return Line(statistic, {"": contender}, picture, without)


PER_QUERY = (
    _line("`LSE()`", "LSE", "lse"),
    _line("`Entropy()`", "Entropy", "entropy"),
    Line(
        "`MaxLogit()`,<br>flat and<br>peaked heads",
        {"flat": "MaxLogit, flat heads", "peaked": "MaxLogit, peaked heads"},
        "max_logit",
    ),
    _line(
        "`Mass(First())`,<br>`Mass(Previous())`,<br>`Mass(Self())` together",
        "Mass: first, previous, self",
        "masses",
    ),
    _line("`Mass(SameToken(ids))`", "Mass: same token", "same_token"),
    _line("`Mass(Induction(ids))`", "Mass: induction", "induction"),
    _line("`Mass(Window(128))`<br>(picture: 16)", "Mass: window of 128", "near"),
    _line("`Sink()`", "Sink, of learned sinks", "", "the built-in model has no sinks"),
    _line("`Distance()`", "Distance", "distance"),
    _line("`Distance(spread=True)`", "Distance with spread", "distance_spread"),
    _line("`TopKeys(5)`<br>(picture: 3)", "TopKeys(5)", "top_keys"),
    _line("`OutputNorm()`", "OutputNorm", "output_norm"),
    _line("`Segments({…})`, 4 of them", "Segments, 4", "", "the text has no segments"),
)
PER_KEY_AND_HEAD = (
    _line("`Received()`", "Received", "received"),
    _line("`Map(64)`<br>(picture: 16)", "Map(64)", "map"),
    _line("`OffsetHistogram()`<br>(picture: 8 bins)", "OffsetHistogram", "offsets"),
    _line("`Similarity(64)`", "Similarity, 64 queries", "similarity"),
    _line("`Norms()`", "Norms", "norms"),
)
TOGETHER = {
    "LSE, first, previous and self mass": "LSE, masses",
    "the same, entropy and distance": "LSE, masses, entropy, distance",
    "the same and received attention": "… and received",
    "the same on 64 sampled queries": "64 drawn queries of those",
    "the same from materialized weights": "those from materialised weights",
    "the same by a handwritten second pass in blocks": "those by two passes",
    "all but `Sink()`, `Norms()` and `Segments({…})`, in one call": "the full set",
    "FlexAttention, compiled: output only": "FlexAttention",
    "FlexAttention with distance": "FlexAttention, distance",
    "FlexAttention with LSE": "FlexAttention, LSE",
}


@dataclass(frozen=True)
class Costs:
    """The newest run of each length, with what later runs took `--only`, and the newest of the long
    calls."""

    runs: Mapping[int, dict[str, Any]]
    long: dict[str, Any] | None

    def row(self, length: int, contender: str) -> dict[str, Any] | None:
        rows = self.runs[length]["rows"] if length in self.runs else []
        wanted = (length, contender)
        return next((row for row in rows if (row["length"], row["contender"]) == wanted), None)

    def cell(self, length: int, contender: str) -> str:
        """How many times as long as `attend()`; – where it cannot, or was not measured."""
        row = self.row(length, contender)
        return f"{row['beside_attend']['median']:.2f}" if row and "seconds" in row else "–"


def read(folder: Path = runs.RESULTS) -> Costs:
    """What is on record of the backends that calls take of themselves."""
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(folder.glob("every_statistic-*.json")):
        run = json.loads(path.read_text())
        if run["settings"].get("backend", "auto") != "auto":
            continue
        only = run["settings"].get("only")
        for length in {row["length"] for row in run["rows"]}:
            if only is None:
                found[length] = run | {"later": []}
            elif length in found:
                rows = [r for r in run["rows"] if r["length"] == length and r["contender"] in only]
                found[length]["rows"] = rows + found[length]["rows"]
                found[length]["later"].append(run)
    long = [json.loads(p.read_text()) for p in sorted(folder.glob("every_statistic_long-*.json"))]
    return Costs(found, long[-1] if long else None)


def picture(name: str) -> str:
    """Where the picture of a statistic is, from the page."""
    return f"statistics/{name}.svg"


def fill(text: str, costs: Costs) -> str:
    """The page with what stands between its marks written anew.

    Raises:
        ValueError: a mark that is missing or unknown.
    """
    blocks = {
        "per query": _block(PER_QUERY, costs),
        "per key and head": _block(PER_KEY_AND_HEAD, costs),
        "together": _together(costs),
    }
    marks = [name for _, name, _ in MARK.findall(text)]
    if sorted(marks) != sorted(blocks):
        raise ValueError(f"{PAGE}: has the marks {marks}, and needs each of {list(blocks)} once")
    return MARK.sub(lambda found: f"{found[1]}\n{blocks[found[2]]}\n\n{found[3]}", text)


def _block(lines: Sequence[Line], costs: Costs) -> str:
    lengths = [length for length in LENGTHS if length in costs.runs]
    head = ["statistic", *(f"T {length:,}" for length in lengths)]
    rows = []
    for line in lines:
        cells = [
            "<br>".join(
                f"{what} {costs.cell(length, contender)}".strip()
                for what, contender in line.contenders.items()
            )
            for length in lengths
        ]
        image = f"![{line.picture} of every head]({picture(line.picture)})"
        if not line.picture:
            image = line.without
        rows.append([line.statistic, *cells, image])
    return table([*head, "on the built-in model"], rows)


def _together(costs: Costs) -> str:
    """Calls for several statistics, and what else there is."""
    lengths = [length for length in LENGTHS if length in costs.runs]
    attends = {length: costs.row(length, "attend") for length in lengths}
    times = [f"{1e3 * row['seconds']['median']:,.1f} ms" for row in attends.values() if row]
    rows = [["`attend()`", *times]]
    rows += [
        [what, *(costs.cell(length, contender) for length in lengths)]
        for what, contender in TOGETHER.items()
    ]
    parts = [
        prose(" ".join(_taken(costs, lengths))),
        table(["time ÷ `attend()`", *(f"T {length:,}" for length in lengths)], rows),
    ]
    if reasons := _refused(costs, lengths):
        parts.append(prose("Not available: " + "; ".join(reasons) + "."))
    if costs.long:
        parts.append(prose(_long(costs.long)))
    return "\n\n".join(parts)


def _taken(costs: Costs, lengths: Sequence[int]) -> list[str]:
    """Return the conditions of the runs, once for all lengths that share them."""
    found: dict[str, list[str]] = {}
    for length in lengths:
        found.setdefault(_conditions(costs, length), []).append(f"T {length:,}")
    return [f"{and_list(names)}: {words}" for words, names in found.items()]


def _conditions(costs: Costs, length: int) -> str:
    run, attend = costs.runs[length], costs.row(length, "attend") or {}
    machine = run["machine"]
    return (
        f"{run['date'][:10]}, {machine['cpu']}, {machine['threads']} of "
        f"{machine['cores']} cores, {machine['cpu_capability']}, load {machine['load']:.1f} after, "
        f"PyTorch {machine['versions']['torch']}, backend `{attend.get('served_by', 'sdpa')}`, "
        f"medians of {run['settings']['rounds']} rounds"
        + "".join(
            f"; {' and '.join(later['settings']['only'])}: {later['date'][:10]}, "
            f"{later['machine']['cpu']}, {later['machine']['threads']} of "
            f"{later['machine']['cores']} cores, load {later['machine']['load']:.1f} after, "
            f"{later['settings']['rounds']} rounds"
            for later in run["later"]
        )
        + "."
    )


def _refused(costs: Costs, lengths: Sequence[int]) -> list[str]:
    """Why there are dashes, each reason once."""
    found: dict[str, list[str]] = {}
    for what, contender in TOGETHER.items():
        for length in lengths:
            row = costs.row(length, contender)
            if row and "refused" in row:
                names = found.setdefault(row["refused"].rstrip("."), [])
                if what not in names:
                    names.append(what)
    return [f"{', '.join(names)} ({reason})" for reason, names in found.items()]


def _long(run: dict[str, Any]) -> str:
    calls = "; ".join(
        f"{row['call']}: {row['seconds']:.0f} s, "
        f"{row['peak_bytes_above_inputs'] / 2**20:,.0f} MiB above the inputs"
        for row in run["rows"]
    )
    return f"Long calls, each in its own process ({run['date'][:10]}): {calls}."
