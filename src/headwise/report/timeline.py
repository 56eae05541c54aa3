"""The recorded history of a run as the timeline shows it, and the comparison of two runs."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._text import Brief, and_more, escaped
from ..telemetry import Alarm, History, Series

Array = npt.NDArray[np.float64]

HISTORY = "monitor.sqlite"
"""The name of the history file in a run's folder."""

_DAMAGE = (sqlite3.Error, zlib.error, ValueError, KeyError, TypeError, OverflowError)
"""The errors that reading a damaged file raises."""


class TimelineError(ValueError):
    """Raised if a history cannot be shown; the message names the file, the reason and a fix."""


class NothingRecordedError(TimelineError):
    """Raised for a history without any steps, such as that of a run that has just started."""


@dataclass(frozen=True, eq=False, repr=False)
class Track(Brief):
    """A statistic of every head over the recorded steps.

    kind: `"mean"` or `"maximum"`.
    values: `[n, N]`; NaN if a head was not captured, infinite if its value was not finite.
    errors: `[n, N]`, the standard errors of sampled means; `None` if there are none.
    sampled: True if queries were sampled at some step; maxima are then lower bounds.
    """

    kind: str
    values: Array
    errors: Array | None
    sampled: bool

    def of_heads(self, places: Sequence[int]) -> Track:
        """Return the track of some heads."""
        errors = None if self.errors is None else self.errors[:, places]
        return replace(self, values=self.values[:, places], errors=errors)


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """The recorded statistics of the heads in a run: n steps, N heads.

    name: the name of the run.
    about: the versions and settings of the monitor.
    heads: the layer and index of each head `[N]`.
    steps: the recorded steps `[n]`, ascending.
    tracks: the values of each statistic, by its name.
    alarms: the alarms, ordered by step.
    scalars: scalars such as the loss, by name and step.
    """

    name: str
    about: dict[str, Any]
    heads: list[tuple[str, int]]
    steps: npt.NDArray[np.int64]
    tracks: dict[str, Track]
    alarms: list[Alarm]
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        return (
            f"<Timeline: {self.name}, {len(self.heads)} heads over {len(self.steps)} steps, "
            f"{len(self.alarms)} alarms; {', '.join(self.tracks)}>"
        )

    @property
    def layers(self) -> dict[str, int]:
        """Return the number of heads of each layer."""
        layers: dict[str, int] = {}
        for layer, _ in self.heads:
            layers[layer] = layers.get(layer, 0) + 1
        return layers

    def rows(self, place: int) -> list[dict[str, Any]]:
        """Return a row for each head, with its values at the recorded step of index `place`."""
        rows: list[dict[str, Any]] = [{"layer": layer, "head": n} for layer, n in self.heads]
        for name, track in self.tracks.items():
            for column, values in ((name, track.values), (f"{name}_se", track.errors)):
                if values is not None:
                    for row, value in zip(rows, values[place].tolist(), strict=True):
                        row[column] = value
        return rows

    def document(self) -> dict[str, Any]:
        """Return the run as a JSON-compatible dict, with every head's values at the last step."""
        return {
            "run": self.name,
            "about": self.about,
            "layers": self.layers,
            "steps": self.steps.tolist(),
            "statistics": {name: track.kind for name, track in self.tracks.items()},
            "unavailable": self.about.get("unavailable", {}),
            "alarms": [asdict(alarm) for alarm in self.alarms],
            "scalars": self.scalars,
            "heads": self.rows(-1),
        }


# --- one run ---------------------------------------------------------------------------------


def read_timeline(run: History | str | os.PathLike[str]) -> Timeline:
    """Read a history, even while training is still writing it.

    Args:
        run: a history, its file, or the folder of a run that contains one.

    Raises:
        FileNotFoundError: there is no history.
        TimelineError: the file is not a history, is damaged, or has no step yet
            (`NothingRecordedError`).
    """
    path = run.path if isinstance(run, History) else file_of(Path(run))
    try:
        return _read(run if isinstance(run, History) else History(path))
    except TimelineError:
        raise
    except _DAMAGE as error:
        message = str(error).removeprefix(f"{path}: ")
        raise TimelineError(f"{path}: cannot be read as a history ({message})") from None


def file_of(path: Path) -> Path:
    """Return the history file at a path, or in the folder at a path.

    Raises:
        FileNotFoundError: there is no history.
        TimelineError: the folder has several.
    """
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"{path}: there is no such file or folder")
        return path
    if (path / HISTORY).is_file():
        return path / HISTORY
    files = sorted(path.glob("*.sqlite"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(one.name for one in files)
        raise TimelineError(f"{path}: the folder has several histories; choose one: {names}")
    raise FileNotFoundError(
        f"{path}: the folder has no history; record one with `headwise train --monitor` or "
        f"hw.Monitor(model, history={HISTORY!r})"
    )


def _read(history: History) -> Timeline:
    """Read the history in its current state."""
    heads, steps = history.heads, np.array(history.steps, dtype=np.int64)
    if not len(steps):
        raise NothingRecordedError(
            f"{history.path}: no step is recorded yet; try again after the first training step"
        )
    about, known, there = history.about, set(heads), set(steps.tolist())
    return Timeline(
        _name(history.path),
        about,
        heads,
        steps,
        {name: _track(history[name], steps, len(heads)) for name in _ordered(history, about)},
        [one for one in history.alarms if one.step in there and (one.layer, one.head) in known],
        history.scalars,
    )


def _ordered(history: History, about: dict[str, Any]) -> list[str]:
    """Return the names of recorded statistics: the monitor's own, its probe's, then the others."""
    first = [str(name) for name in about.get("statistics", [])]
    order = [*first, *(f"probe/{name}" for name in first)]
    recorded = history.statistics
    return [name for name in dict.fromkeys([*order, *recorded]) if name in recorded]


def _track(series: Series, steps: npt.NDArray[np.int64], heads: int) -> Track:
    """Align a series with all recorded steps."""
    there = np.isin(series.steps, steps)
    place = np.searchsorted(steps, series.steps[there])

    def spread(values: Array) -> Array:
        whole = np.full((len(steps), heads), np.nan)
        whole[place] = values[there][:, :heads]
        return whole

    sampled = bool(series.sampled.any())
    errors = spread(series.errors) if sampled and series.kind == "mean" else None
    return Track(series.kind, spread(series.values), errors, sampled)


def _name(path: Path) -> str:
    """Return the name of a run: its folder's if the file has the default name, else the file's."""
    whole = Path(os.path.realpath(path))
    return escaped(whole.parent.name if path.name == HISTORY else path.stem)


# --- two runs --------------------------------------------------------------------------------


def matched(one: Timeline, other: Timeline) -> tuple[Timeline, Timeline, list[str]]:
    """Match two runs: return the heads and statistics that both have, and describe the others.

    Heads match by layer and index.

    Raises:
        TimelineError: the runs have no head or no statistic in common.
    """
    heads = [head for head in one.heads if head in set(other.heads)]
    names = [name for name in one.tracks if name in other.tracks]
    for shared, what in ((heads, "head"), (names, "statistic")):
        if not shared:
            raise TimelineError(
                f"{one.name} and {other.name} have no {what} in common; compare two runs of the "
                f"same model"
            )
    left_out = [
        *_only_in_one("layers", [*one.layers], [*other.layers]),
        *_only_in_one("heads", *(_shared(run, heads) for run in (one, other))),
        *_only_in_one("statistics", [*one.tracks], [*other.tracks]),
    ]
    a, b = (_restricted(run, heads, names) for run in (one, other))
    if a.name == b.name:
        a, b = replace(a, name=f"{a.name} (A)"), replace(b, name=f"{b.name} (B)")
    return a, b, left_out


def _restricted(run: Timeline, heads: list[tuple[str, int]], names: list[str]) -> Timeline:
    """Restrict a run to some of its heads and statistics."""
    place = {head: n for n, head in enumerate(run.heads)}
    places, known = [place[head] for head in heads], set(heads)
    tracks = {name: run.tracks[name].of_heads(places) for name in names}
    alarms = [one for one in run.alarms if (one.layer, one.head) in known]
    return replace(run, heads=heads, tracks=tracks, alarms=alarms)


def _shared(run: Timeline, heads: list[tuple[str, int]]) -> list[str]:
    """Return a run's heads in those layers that both runs have."""
    layers = {layer for layer, _ in heads}
    return [f"{layer} {head}".strip() for layer, head in run.heads if layer in layers]


def _only_in_one(kind: str, one: list[str], other: list[str]) -> list[str]:
    """Describe what only one of two runs has.

    >>> _only_in_one("layers", ["a", "b", "c", "d", "e"], ["a", "f"])
    ['layers only in A: b, c, d and 1 more', 'layers only in B: f']
    """
    parts = []
    for name, mine, theirs in (("A", one, other), ("B", other, one)):
        alone = [escaped(x) or "the model" for x in mine if x not in set(theirs)]
        if alone:
            parts.append(f"{kind} only in {name}: {and_more(alone)}")
    return parts


def differences(one: Timeline, other: Timeline) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the last common step of two matched runs, and B − A for every head at that step.

    Without a common step, return None and no rows. Standard errors assume independent samples.
    """
    common = np.intersect1d(one.steps, other.steps)
    if not len(common):
        return None, []
    step = int(common[-1])
    a, b = (run.rows(int(np.searchsorted(run.steps, step))) for run in (one, other))
    return step, [_difference(*pair) for pair in zip(a, b, strict=True)]


def _difference(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    row = {"layer": a["layer"], "head": a["head"]}
    for name in a:
        if name in row or name not in b:
            continue
        row[name] = float(np.hypot(a[name], b[name])) if name.endswith("_se") else b[name] - a[name]
    return row
