"""How much of what heads did is kept, so that a page stays below 5 MB."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAP_SIDE = 256  # the most cells on a side of a map
MAP_CELLS = 800_000  # of all maps together: 27 × 27 for each of 1,024 heads
TOP_ENTRIES = 600_000  # of all heads together: one a query for 1,024 heads on 512 tokens
MOST_KEYS = 8
SHORT_PERIOD = 14  # random tokens that come twice, of the piece that is shown
POSITIONS = 50_000


@dataclass(frozen=True)
class Budget:
    """How fine a look is, so that its page stays below 5 MB.

    map_side: the most cells on a side of a map. top_keys: how many keys a query keeps.
    positions: the most entries of `entropy` and `received` of a head.
    """

    map_side: int
    top_keys: int
    positions: int


def short_period(heads: int) -> int:
    """Of how many tokens the short piece that comes twice is, for a model of so many heads.

    >>> short_period(16), short_period(1024), short_period(4096)
    (14, 13, 6)
    """
    return max(2, min(SHORT_PERIOD, math.isqrt(MAP_CELLS // heads) // 2))


def budget(heads: int, tokens: int) -> Budget:
    """What can be kept of each of `heads` heads (of all layers together) on `tokens` tokens.

    >>> budget(12, 128)
    Budget(map_side=128, top_keys=8, positions=128)
    >>> budget(12 * 12, 1024), budget(32 * 32, 512)
    (Budget(map_side=74, top_keys=4, positions=347), Budget(map_side=27, top_keys=1, positions=48))
    """
    most = max(2, min(MAP_SIDE, math.isqrt(MAP_CELLS // heads)))
    side = math.ceil(tokens / math.ceil(tokens / most))  # blocks of sizes as equal as can be
    keys = min(MOST_KEYS, TOP_ENTRIES // (heads * tokens))
    return Budget(side, keys, max(2, min(tokens, POSITIONS // heads)))
