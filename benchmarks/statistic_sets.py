"""The statistics that benchmarks time, by public names that older checkouts have, too."""

from __future__ import annotations

from typing import Any

import torch

import headwise as hw

MAP = 64


def masses() -> list[Any]:
    """Masses of the first, the previous and the own key."""
    return [hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Mass(hw.Self())]


def six() -> list[Any]:
    """Those of small calls."""
    return [hw.Entropy(), hw.MaxLogit(), hw.Distance(), *masses()]


def singles(length: int) -> dict[str, list[Any]]:
    """Each alone, for a text of so many tokens."""
    ids = torch.randint(0, length // 4, (length,), generator=torch.Generator().manual_seed(1))
    return {
        "LSE": [hw.LSE()],
        "Mass: first, previous, self": masses(),
        "Mass: same token": [hw.Mass(hw.SameToken(ids))],
        "Mass: induction": [hw.Mass(hw.Induction(ids))],
        "Mass: window of 128": [hw.Mass(hw.Window(128))],
        "Entropy": [hw.Entropy()],
        "Distance": [hw.Distance()],
        "Distance with spread": [hw.Distance(spread=True)],
        "MaxLogit, flat heads": [hw.MaxLogit()],
        "Received": [hw.Received()],
        "TopKeys(5)": [hw.TopKeys()],
        "OffsetHistogram": [hw.OffsetHistogram()],
        f"Map({MAP})": [hw.Map(MAP)],
        "Similarity, 64 queries": [hw.Similarity()],
        "OutputNorm": [hw.OutputNorm()],
        "Segments, 4": [hw.Segments({str(n): (n * 32, n * 32 + 32) for n in range(4)})],
    }
