"""How alike heads attend, over all layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from .schema import Layer

FORMULA = (
    "Σ_{j} √(p_{ij} r_{ij}), mean over the rows i of two heads' maps (Bhattacharyya coefficient): "
    "1 for equal maps, 0 where no key is shared. Heads that read other streams are not compared."
)


MOST_HEADS = 2048
"""Of more heads, no map of pairs could be read any more."""


def similarity(layers: Sequence[Layer]) -> np.ndarray | None:
    """`[N, N]` over the heads of all layers, in their order; `None` of more than `MOST_HEADS`.

    `Σ_j √(p_ij r_ij)`, the mean over rows of the maps (Bhattacharyya 1943): 1 for equal maps, 0
    where no key is shared, NaN for heads whose queries or keys are other streams. What a learned
    sink takes is one outcome more.

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
    """`[H, n · (m + 1)]`: roots of the maps and of what their rows leave, of length 1."""
    left = (1 - maps.sum(-1, keepdims=True)).clip(0)
    whole = np.concatenate([maps, left], axis=-1).clip(0)
    return np.sqrt(whole.reshape(len(maps), -1) / maps.shape[1])
