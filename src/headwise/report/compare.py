"""Two looks side by side: the same heads, and how their figures differ."""

from __future__ import annotations

from typing import Any

from .sample import LookError
from .schema import Look


def differences(one: Look, other: Look) -> tuple[list[dict[str, Any]], int]:
    """A row for each head that is in both, by module and number; and how many are in one alone.

    `labels` are those of either as names, and every other figure that both have is the other's less
    the one's.

    Raises:
        LookError: no head is in both.

    >>> row = {"layer": 0, "head": 1, "module": "attn", "labels": [], "first": 0.25}
    >>> a, b = (
    ...     Look([row | {"first": mass}], [], [], {}, columns=[{"key": "first"}])
    ...     for mass in (0.25, 0.75)
    ... )
    >>> differences(a, b)
    ([{'layer': 0, 'head': 1, 'module': 'attn', 'labels': [[], []], 'first': 0.5}], 0)
    """
    keys = [column["key"] for column in one.columns]
    there = {(row["module"], row["head"]): row for row in other.rows}
    rows = []
    for row in one.rows:
        match = there.get((row["module"], row["head"]))
        if match is None:
            continue
        both = {k: (row.get(k), match.get(k)) for k in keys}
        rows.append(
            {
                **{key: row[key] for key in ("layer", "head", "module")},
                "labels": [[label["label"] for label in of["labels"]] for of in (row, match)],
                **{k: b - a for k, (a, b) in both.items() if a is not None and b is not None},
            }
        )
    if not rows:
        names = [look.rows[0]["module"] if look.rows else "nothing" for look in (one, other)]
        raise LookError(
            f"these two have no head in common: one begins with {names[0]}, the other with "
            f"{names[1]}; compare two looks at one architecture"
        )
    return rows, len(one.rows) + len(other.rows) - 2 * len(rows)
