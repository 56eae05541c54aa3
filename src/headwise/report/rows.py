"""The row of a head: its metrics and its labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .catalog import COLUMNS
from .collect import Collected
from .head_labels import derived, label_head
from .schema import Stream

AHEAD = ("next", "ahead_2", "ahead_3")
"""Metrics on keys ahead, which causal attention does not have."""


def rows_of(
    collected: Collected,
    streams: Sequence[Stream],
    effects: Sequence[Sequence[Mapping[str, Any]]],
    *,
    errors: bool,
) -> list[dict[str, Any]]:
    """Return one row per head, in order of layer and head.

    If attention is not causal and the tokenizer added the first token, the weight on it is also the
    weight on the class token, `cls`.

    Args:
        streams: the streams of the first text, which layers refer to by index.
        effects: tables of the effects of heads on a loss, from `importance()` and
            `ablation_scan()`.
    """
    numbers = {name: number for number, name in enumerate(collected.seen.modules)}
    causal = {layer.name for layer in collected.layers if layer.causal}
    classed = {
        layer.name
        for layer in collected.layers
        if layer.kind == "self" and not layer.causal and 0 in streams[layer.keys].special
    }
    random = {(row["module"], row["head"]): row for row in _random(collected)}
    by_head: dict[tuple[str, int], dict[str, Any]] = {}
    for row in (row for table in effects for row in table):
        by_head.setdefault((row["module"], row["head"]), {}).update(row)
    rows = []
    for row in collected.seen.table(texts=errors):
        module = collected.modules[row["module"]]
        unknown = AHEAD if row["module"] in causal else ()
        figures = dict(_figures(row, "", unknown))
        figures |= dict(_figures(random.get((row["module"], row["head"]), {}), "_random", ()))
        figures |= dict(_figures(by_head.get((module, row["head"]), {}), "", ()))
        figures |= derived(figures)
        if row["module"] in classed:
            figures["cls"] = figures.get("first")
        rows.append(
            {
                "layer": numbers[row["module"]],
                "head": row["head"],
                "module": row["module"],
                "labels": [asdict(label) for label in label_head(figures)],
                **figures,
            }
        )
    return rows


def _random(collected: Collected) -> list[dict[str, Any]]:
    return collected.repeats.table() if collected.repeats.modules else []


def _figures(
    row: Mapping[str, Any], ending: str, unknown: Sequence[str]
) -> Iterator[tuple[str, float | None]]:
    """Yield the row's metrics with `ending` added to their names; None if no query has a target."""
    for column in COLUMNS:
        key = column.key.removesuffix(ending) if ending else column.key
        coverage = row.get(f"{key}_coverage")
        there = key in row or coverage is not None
        if column.key != key + ending or not there or key in unknown:
            continue
        yield column.key, row.get(key)
        if coverage is not None:
            yield f"{column.key}_coverage", coverage
        if not ending and f"{key}_se" in row:
            yield f"{column.key}_se", row[f"{key}_se"]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the columns that have a value for any head."""
    return [
        asdict(column) for column in COLUMNS if any(row.get(column.key) is not None for row in rows)
    ]
