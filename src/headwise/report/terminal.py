"""The terminal output of a look: a table with a few lines above and below."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any

from .._text import escaped
from ..capture.head_address import head_label
from .catalog import COLUMNS, LABEL_STYLES
from .findings import finding, labeled_heads
from .head_labels import NO_LABEL, RULES
from .schema import Look

if TYPE_CHECKING:
    from rich.table import Table

TOP, METRICS = 8, 6
"""The default numbers of heads and metrics in a table."""

# The order in which columns are omitted in a narrow terminal; --json and the page have them.
SPARE = (
    "entropy_gap distance_share near back_3 ahead_3 back_2 ahead_2 ablation_estimate "
    "distance_absolute previous_random same_token_random self entropy_share max_logit distance "
    "delimiters next same_token first separators cls induction"
).split()

UNITS = {
    "text": "tokens",
    "image": "tokens of an image",
    "encoder": "tokens read",
    "decoder": "tokens written",
}
"""The units in which streams are counted."""


def table(
    look: Look, width: int = 120, *, top: int | None = None, columns: int | None = None
) -> tuple[Table, list[str]]:
    """Return the `top` most salient rows as a rich table no wider than `width`, with at most
    `columns` columns of metrics, and the titles of omitted ones."""
    rows = by_salience(look)[:top]
    named = [{**row, "label": [label["label"] for label in row["labels"]]} for row in rows]
    return fit_table(named, width, columns=columns)


def by_salience(look: Look) -> list[dict[str, Any]]:
    """Sort the rows by label, the strongest head of each label first; unlabeled heads are last."""
    heads = labeled_heads(look.rows, rules_of(look))
    places = dict.fromkeys(chain(*heads.values(), range(len(look.rows))))
    return [look.rows[place] for place in places]


def rules_of(look: Look) -> list[dict[str, Any]]:
    """Return the rules of a look, or the current ones if it has none."""
    return look.rules or [vars(rule) for rule in RULES]


def label_lines(look: Look, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each label of these rows: its meaning, and on which tokens it is based."""
    why = {rule["key"]: rule["why"] for rule in rules_of(look)}
    keys = {one["label"]: one.get("key", "") for row in rows for one in row["labels"]}
    return [
        f"{escaped(label)}: {escaped(why.get(key, ''))}"
        + (", on repeated random tokens" if key.endswith("_random") else "")
        for label, key in keys.items()
    ]


def format_metric(value: float) -> str:
    """Format a metric to two decimals, or to one if it is large.

    >>> format_metric(0.126), format_metric(12.34)
    ('0.13', '12.3')
    """
    return f"{value:z.2f}" if abs(value) < 9.995 else f"{value:.1f}"


def format_difference(value: float) -> str:
    """Format a difference with its sign; one that would round to 0, to one significant digit.

    >>> [format_difference(value) for value in (0.126, -0.0021, 3e-7, 0.0)]
    ['+0.13', '-0.002', '+3e-7', '0']
    """
    if value == 0:
        return "0"
    small = abs(value) < 0.005
    return ("+" if value > 0 else "") + (
        f"{value:.1g}".replace("e-0", "e-") if small else format_metric(value)
    )


def fit_table(
    rows: Sequence[Mapping[str, Any]],
    width: int,
    written: Callable[[float], str] = format_metric,
    *,
    columns: int | None = None,
) -> tuple[Table, list[str]]:
    """Return a table of rows whose `label` is a list of names, with metrics formatted by `written`.

    Metrics beyond `columns` are omitted. If the table is too wide, all labels of a head except the
    first are omitted, then more metrics.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = Console(width=1000)
    briefs = {column.key: column for column in COLUMNS}
    keys = [key for key in briefs if any(row.get(key) is not None for row in rows)]
    if "first" in keys and all(row.get("cls") is not None for row in rows):
        keys.remove("first")  # it is the class token in every row
    spare, left_out, whole = [key for key in SPARE if key in keys], list[str](), True

    def omit() -> None:
        gone = spare.pop(0)
        left_out.append(briefs[gone].title)
        keys.remove(gone)

    while columns is not None and len(keys) > columns and spare:
        omit()
    while True:
        drawn = _drawn(rows, keys, whole, written)
        if Measurement.get(console, console.options, drawn).maximum <= width or not spare:
            return drawn, left_out
        if whole:
            whole = False
            continue
        omit()


def _drawn(
    rows: Sequence[Mapping[str, Any]],
    keys: Sequence[str],
    whole: bool,
    written: Callable[[float], str],
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold")
    drawn.add_column("head", justify="right", no_wrap=True)
    drawn.add_column("label", no_wrap=True)
    for key in keys:
        drawn.add_column(_heading(rows, key), justify="right", no_wrap=True)
    styles = {style.label: getattr(style, _theme()) for style in LABEL_STYLES}
    for row in rows:
        labels = [Text(escaped(name), styles.get(name, "")) for name in row["label"] or [NO_LABEL]]
        rest = Text(f" +{len(labels) - 1}" * (len(labels) > 1))
        label = Text(", ").join(labels) if whole else labels[0] + rest
        values = (row.get(key) for key in keys)
        figures = ("–" if v is None or not math.isfinite(v) else written(v) for v in values)
        drawn.add_row(escaped(head_label(row["layer"], row["head"])), label, *figures)
    return drawn


def _theme() -> str:
    """Return `light` or `dark`, according to the environment variable COLORFGBG."""
    ground = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return "light" if ground in ("7", "15") else "dark"


def summary(look: Look, left_out: Sequence[str], *, top: int | None = None) -> tuple[str, str]:
    """Return the lines above and below the table of the `top` most salient heads."""
    facts = look.provenance
    read = " and ".join(
        f"{len(stream.tokens):,} {UNITS[stream.name]}"
        for stream in look.streams
        if stream.name in UNITS
    )
    title = f"{escaped(facts['title'])}: " if facts.get("title") else ""
    before = f"{title}{escaped(facts['model'])} on {escaped(facts['text'])}: {read}"
    if facts["texts"] > 1:
        short = facts.get("too_short", 0)
        passed = f", {short:,} too short and skipped" if short else ""
        before += f" of the first of {facts['texts']:,} texts{passed}"
    losses = []
    if facts.get("loss_text") is not None:
        losses.append(f"{facts['loss_text']:.2f} nats on {facts['loss']}")
    if facts.get("loss_first_copy") is not None:
        losses.append(
            f"on random tokens {facts['loss_first_copy']:.2f}, "
            f"on their repetition {facts['loss_second_copy']:.2f}"
        )
    if losses:
        before += f"\nloss: {'; '.join(losses)}"
    before += f"\n\n{escaped(finding(look.rows, rules_of(look)))}"
    after = [*label_lines(look, by_salience(look)[:top])]
    if after:
        after.append("")
    if top is not None and (len(look.rows) > top or left_out):
        after.append(
            f"{min(top, len(look.rows))} of {len(look.rows)} heads; --all prints every head and "
            "metric, as do the page and --json."
        )
    elif left_out:
        after.append(f"Omitted for width: {'; '.join(left_out)} (see --json).")
    after.append(
        "Metrics are means over queries; a percentage is the share of queries that have such a key."
    )
    if facts["texts"] > 1:
        after.append("Standard errors over texts are on the page and in --json.")
    if facts.get("random_rows"):
        after.append("rand.: on repeated random tokens.")
    after += [f"layer {line}" for line in module_lines(look)]
    if facts["notice"]:
        after.append(facts["notice"])
    return before, "\n".join(after)


def module_lines(look: Look) -> list[str]:
    """Return the modules of the layers by type; an empty list if all have the same type."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for number, layer in enumerate(look.layers):
        kinds.setdefault(re.sub(r"\d+", "*", layer.name), []).append((number, layer.name))
    if len(kinds) == 1:
        return []
    return [
        f"{_ranges([number for number, _ in of])}: {escaped(kind if len(of) > 1 else of[0][1])}"
        for kind, of in kinds.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers, with consecutive ones abbreviated to ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0–2, 5, 7–8'
    """
    parts = []
    for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}")
    return ", ".join(parts)


def _heading(rows: Sequence[Mapping[str, Any]], key: str) -> str:
    """Return the column's name and, if it is the same for all heads, its coverage."""
    lines = next(column.brief for column in COLUMNS if column.key == key).split()
    if key.endswith("_random"):
        lines.append("rand.")
    covered = {row.get(f"{key}_coverage") for row in rows}
    coverage = covered.pop() if len(covered) == 1 else None
    if coverage is not None and coverage < 0.995:
        lines.append(f"{100 * coverage:.0f}%")
    return "\n".join(lines)
