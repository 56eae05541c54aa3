"""Compare heads: the same heads in two looks, or all pairs of heads in one look."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .sample import LookError
from .schema import Layer, Look


def differences(one: Look, other: Look) -> tuple[list[dict[str, Any]], int]:
    """Return a row for each head that both looks have, and the number of heads in only one.

    Heads match by module and number. `labels` holds the names of the labels in each look; every
    metric is the difference `other − one`.

    Raises:
        LookError: the looks have no head in common.

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
            f"the two looks have no head in common: one begins with {names[0]}, the other with "
            f"{names[1]}; compare two looks at the same architecture"
        )
    return rows, len(one.rows) + len(other.rows) - 2 * len(rows)


FORMULA = (
    "Σ_{j} √(p_{ij} r_{ij}), mean over the rows i of two heads' maps (Bhattacharyya coefficient): "
    "1 for equal maps, 0 if no key is shared. Heads that read different streams are not compared."
)


MOST_HEADS = 2048
"""The maximum number of heads in the matrix; a larger matrix is unreadable."""


def similarity(layers: Sequence[Layer]) -> np.ndarray | None:
    """Return the similarity `[N, N]` of all heads; `None` for more than `MOST_HEADS`.

    `Σ_j √(p_ij r_ij)`, averaged over rows of the maps (Bhattacharyya 1943): 1 for equal maps, 0
    if no key is shared, NaN for heads whose queries or keys are different streams. The weight on a
    learned sink counts as an additional key.

    >>> from headwise.report.schema import Layer
    >>> maps = np.array([[[1, 0], [0.5, 0.5]], [[1, 0], [0, 1]]], dtype=np.float32)
    >>> rest = np.zeros((2, 2, 1))
    >>> layer = Layer("attn", "self", True, 0, 0, maps, rest, rest, rest[..., 0], rest[..., 0])
    >>> similarity([layer])[0].tolist()  # (1 + √½) / 2
    [1.0, 0.85355...]
    """
    heads = [layer.heads for layer in layers]
    if sum(heads) > MOST_HEADS:
        return None
    starts = np.cumsum([0, *heads])
    found = np.full((sum(heads),) * 2, np.nan, dtype=np.float32)
    alike: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for number, layer in enumerate(layers):
        alike[layer.queries, layer.keys, layer.maps.shape[1:]].append(number)
    for numbers in alike.values():
        roots = np.concatenate([_roots(layers[number].maps) for number in numbers])
        places = np.concatenate([np.arange(starts[n], starts[n + 1]) for n in numbers])
        found[np.ix_(places, places)] = (roots @ roots.T).clip(0, 1)
    np.fill_diagonal(found, 1.0)
    return found


def _roots(maps: np.ndarray) -> np.ndarray:
    """Return `[H, n · (m + 1)]`: square roots of maps and rows' remainders, scaled to norm 1."""
    left = (1 - maps.sum(-1, keepdims=True)).clip(0)
    whole = np.concatenate([maps, left], axis=-1).clip(0)
    return np.sqrt(whole.reshape(len(maps), -1) / maps.shape[1])
