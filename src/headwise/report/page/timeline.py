"""The timeline: the history of a run as one self-contained HTML file.

The page is `timeline.html`, which `make page` builds from `src/`, with packed values inserted. It
is drawn on a canvas, without Plotly, because it may have a million cells and is reloaded during
training.
"""

from __future__ import annotations

import html
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headwise._text import and_more, escaped
from headwise.report.catalog import COLUMNS
from headwise.report.codec import finite, pack_float
from headwise.report.timeline import Array, Timeline, Track, matched, read_timeline
from headwise.telemetry import History

from .parts import check_out, fill, packed, part, version, write_html

LARGEST = 4_600_000
"""The maximum number of characters of packed values: a page of 5 MB."""

ROOM = LARGEST * 3 // 4
"""The same limit in bytes before base64, which encodes three bytes as four characters."""

MOST_POINTS = 2000
"""The maximum number of values of a scalar, such as the loss, on a page."""

_TITLES = {
    "lse": ("Log of the softmax denominator", "logit", "ln Σ exp of a query's scores."),
    "output_norm": (
        "Norm of its output",
        "",
        "The norm of the head's output before the output projection. For a dead head it is 0.",
    ),
    "query_norm": ("Largest query", "", "The largest norm of a query. It grows with the logits."),
    "key_norm": ("Largest key", "", "The largest norm of a key. It grows with the logits."),
    "sink": ("Learned sink", "share", "The weight on the learned sink instead of a key."),
}
"""The title, unit and meaning of statistics that `headwise look` does not show."""


@dataclass(frozen=True)
class Coding:
    """The encoding of a page: bytes per value, with or without errors, steps per column."""

    planes: int
    errors: bool
    steps: int


def timeline(
    run: History | str | os.PathLike[str],
    path: str | os.PathLike[str] = "headwise-timeline.html",
    *,
    compare: History | str | os.PathLike[str] | None = None,
) -> Path:
    """Write the timeline of a run: heads by steps, alarms, each head's curve, in one HTML file.

    Args:
        run: a `History`, its file, or a folder with `monitor.sqlite`, as written by
            `headwise train --monitor`. Training may still be running.
        path: the path of the page; an existing file is replaced in one step.
        compare: another run of the same model, B; the page then shows both and B − A.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: there is no history.
        ValueError: the history is damaged or has no step yet, the two runs have no head in common,
            or the page cannot be written.

    >>> import tempfile, torch, headwise as hw
    >>> model = hw.MultiHeadAttention(24, num_heads=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hw.Monitor(model, every=1, history=f"{folder}/monitor.sqlite") as monitor:
    ...         for _ in range(3):
    ...             out = model(torch.randn(2, 7, 24), mask=hw.Causal())
    ...             alarms = monitor.step()
    ...     hw.timeline(folder, f"{folder}/timeline.html").stat().st_size < 100_000
    True
    """
    path = check_out(path)
    other = None if compare is None else read_timeline(compare)
    return write_timeline(read_timeline(run), path, other=other)


def write_timeline(
    run: Timeline,
    path: str | os.PathLike[str],
    *,
    other: Timeline | None = None,
    reread: float | None = None,
) -> Path:
    """Write a timeline as one HTML file; an existing file is replaced in one step.

    With `other`, the page shows the matching heads of both and their difference. With `reread`, an
    open page reloads its file after this number of seconds.

    Raises:
        PageError: the folder does not exist or cannot be written.
        TimelineError: the two runs have nothing in common.
    """
    path = check_out(path)
    return write_html(path, render_timeline(run, other=other, reread=reread))


def render_timeline(
    run: Timeline, *, other: Timeline | None = None, reread: float | None = None
) -> str:
    """Return the page as a string. Without `reread`, the same runs give the same string."""
    runs, left_out = ([run], []) if other is None else _pair(run, other)
    coding = _coding(runs)
    while len(results := _packed(runs, left_out, coding, reread)) > LARGEST:
        coding = Coding(2, False, coding.steps + 1)
    parts = {"title": html.escape(" and ".join(one.name for one in runs)), "results": results}
    return fill(part("timeline.html"), parts)


def _pair(one: Timeline, other: Timeline) -> tuple[list[Timeline], list[str]]:
    a, b, left_out = matched(one, other)
    return [a, b], left_out


def _coding(runs: Sequence[Timeline]) -> Coding:
    """Return the finest encoding that fits, by the worst-case compressed size."""
    tracks = [track for run in runs for track in run.tracks.values()]
    values = sum(track.values.size for track in tracks)
    errors = sum(track.errors.size for track in tracks if track.errors is not None)
    for coding in (Coding(4, True, 1), Coding(2, True, 1), Coding(2, False, 1)):
        bytes_each = {4: 3.8, 2: 1.5}[coding.planes]
        if values * bytes_each + errors * coding.errors * 1.5 <= ROOM:
            return coding
    return Coding(2, False, -(-int(values * 1.5) // ROOM))


def _packed(
    runs: Sequence[Timeline], left_out: list[str], coding: Coding, reread: float | None
) -> str:
    """Return the data that the page's script reads."""
    first = runs[0]
    found = {
        "layers": list(first.layers.items()),
        "statistics": [
            _described(name, [run.tracks[name] for run in runs]) for name in first.tracks
        ],
        "runs": [_run(run, coding) for run in runs],
        "left_out": left_out,
        "digits": 3 if coding.planes == 2 else 4,
        "reread": reread and {"every": reread, "written": round(time.time(), 3)},
    }
    return packed(finite(found))


# --- a statistic -----------------------------------------------------------------------------


def _described(name: str, tracks: Sequence[Track]) -> dict[str, Any]:
    """Describe a statistic and its values."""
    bare = name.removeprefix("probe/")
    known = next((column for column in COLUMNS if column.key == bare), None)
    if known is not None:
        title, short, unit, meaning = known.title, known.short, known.unit, known.meaning
    else:
        title, unit, meaning = _TITLES.get(bare, (bare.replace("_", " "), "", ""))
        short = bare.replace("_", " ")
    if bare != name:
        title, short = f"{title}, on the probe", f"{short} (probe)"
    sampled = any(track.sampled for track in tracks)
    kind = tracks[0].kind
    of = "The maximum over all queries."
    if kind == "mean":
        of = "A mean over sampled queries." if sampled else "A mean over queries."
    elif sampled:
        of = "Over sampled queries only: a lower bound."
    described = {"key": name, "title": title, "short": short, "unit": unit}
    return described | {"kind": kind, "meaning": f"{meaning} {of}".strip()}


# --- a run -----------------------------------------------------------------------------------


def _run(run: Timeline, coding: Coding) -> dict[str, Any]:
    starts = np.arange(0, len(run.steps), coding.steps)
    ends = np.append(starts[1:], len(run.steps)) - 1
    pooled = {name: _pooled(track, starts) for name, track in run.tracks.items()}
    errors = {
        name: pack_float(track.errors.T, 2)
        for name, track in run.tracks.items()
        if coding.errors and track.errors is not None
    }
    return {
        "name": run.name,
        "first": run.steps[starts].tolist(),
        "last": run.steps[ends].tolist(),
        "count": (ends - starts + 1).tolist(),
        "values": {name: pack_float(found.T, coding.planes) for name, found in pooled.items()},
        "errors": errors,
        "crowd": {name: _crowd(found) for name, found in pooled.items()},
        "alarms": _alarms(run),
        "scalars": {name: _thinned(values) for name, values in run.scalars.items()},
        "made": _provenance_lines(run, coding),
    }


def _thinned(values: Mapping[int, float]) -> list[list[Any]]:
    """Return at most `MOST_POINTS` steps and values, which are means over consecutive steps.

    >>> _thinned({1: 4.0, 2: 3.0, 5: float("nan")})
    [[1, 2, 5], [4.0, 3.0, nan]]
    """
    size = -(-len(values) // MOST_POINTS) or 1
    steps, numbers = np.array([*values]), np.array([*values.values()], dtype=float)
    starts = np.arange(0, len(steps), size)
    counts = np.diff(np.append(starts, len(steps)))
    means = np.add.reduceat(numbers, starts) / counts
    return [steps[starts].tolist(), [float(f"{mean:.6g}") for mean in means]]


def _pooled(track: Track, starts: np.ndarray) -> Array:
    """Return values `[columns, N]`: means or maxima over the steps from each start to the next."""
    if len(starts) == len(track.values):
        return track.values
    if track.kind == "maximum":
        return np.fmax.reduceat(track.values, starts, axis=0)
    known = ~np.isnan(track.values)
    total = np.add.reduceat(np.where(known, track.values, 0.0), starts, axis=0)
    count = np.add.reduceat(known, starts, axis=0, dtype=np.int64)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _crowd(values: Array) -> list[list[float]]:
    """Return the quartiles of finite values over the heads, `[3, columns]`, to five digits."""
    filled = np.where(np.isfinite(values), values, np.nan)
    there = ~np.isnan(filled).all(axis=1)
    found = np.full((3, len(values)), np.nan)
    found[:, there] = np.nanquantile(filled[there], (0.25, 0.5, 0.75), axis=1)
    return [[float(f"{value:.5g}") for value in line] for line in found]


def _alarms(run: Timeline) -> dict[str, list[Any]]:
    """Return alarms as columns; heads by index, values that are not finite as `null`."""
    place = {head: n for n, head in enumerate(run.heads)}
    return {
        "step": [one.step for one in run.alarms],
        "head": [place[one.layer, one.head] for one in run.alarms],
        "rule": [one.rule for one in run.alarms],
        "statistic": [one.statistic for one in run.alarms],
        "value": [one.value for one in run.alarms],
    }


def _provenance_lines(run: Timeline, coding: Coding) -> list[tuple[str, str]]:
    """Describe how the values were recorded, as names and values."""
    about = run.about
    queries = about.get("queries")
    means = "all queries" if queries is None else f"{queries} sampled queries of each call"
    entries = [
        ("Run", run.name),
        ("Model", f"{about.get('model', 'unnamed')}: {_counted(run)}"),
        ("Recorded", f"{len(run.steps):,} steps, {run.steps[0]:,} to {run.steps[-1]:,}"),
        ("Figures", f"means over {means}, maxima over all queries and micro-batches of a step"),
        ("Rules", ", ".join(map(str, about.get("rules", []))) or "none"),
        ("Not recorded", "; ".join(_unavailable(about.get("unavailable", {})))),
        ("In this page", _rounding(coding)),
        ("Versions", f"headwise {version('headwise')}, torch {about.get('torch', 'unknown')}"),
    ]
    return [(name, value) for name, value in entries if value]


def _unavailable(reasons: Mapping[str, Mapping[str, str]]) -> list[str]:
    """List the metrics that layers lack, with reasons; group layers by metric and reason.

    >>> _unavailable({"h.0": {"key_norm": "hidden"}, "h.1": {"key_norm": "hidden"}})
    ['key_norm of h.0, h.1: hidden']
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for layer, metrics in reasons.items():
        for metric, why in metrics.items():
            layers.setdefault((metric, why), []).append(escaped(layer) or "the model")
    return [f"{metric} of {and_more(of)}: {why}" for (metric, why), of in layers.items()]


def _counted(run: Timeline) -> str:
    heads, layers = len(run.heads), len(run.layers)
    return f"{heads:,} head{'s' * (heads != 1)} in {layers:,} layer{'s' * (layers != 1)}"


def _rounding(coding: Coding) -> str:
    """Describe the precision of the values in the page."""
    if coding.planes == 4:
        return "values are stored in single precision and shown with four digits"
    text = "values are stored with eleven bits and shown with three digits"
    if not coding.errors:
        text += "; standard errors are left out because there are too many values"
    if coding.steps > 1:
        text += (
            f"; a column covers {coding.steps} recorded steps, with their mean, or the maximum for "
            "maxima"
        )
    return f"{text}; the history has the complete values"
