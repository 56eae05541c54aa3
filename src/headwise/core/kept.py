"""What is worked out once for all calls of a kind."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Kept(dict[K, V]):
    """A dict that begins anew when it is full, so that ever new kinds of calls take no memory.

    >>> kept = Kept(2)
    >>> for size in (1, 2, 3):
    ...     kept[size] = size**2
    >>> kept
    {3: 9}
    """

    def __init__(self, limit: int = 1024) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, kind: K, value: V) -> None:
        if len(self) >= self.limit:
            self.clear()
        super().__setitem__(kind, value)
