"""What a statistic is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from ..core.reference import Definition
from .execute import Pass
from .needs import Need
from .results import Reading


@runtime_checkable
class Statistic(Protocol):
    """A statistic: its names, its reading from what a pass gave, and its definition on P.

    It may also have `needs`, a need by the name of each of its figures; what it reads, `found`
    then holds: `found[need]`. With `formula = True` it reads nothing else, and may do so later;
    figures named in `as_found` are the answers of their needs as they stand, or the first part of
    one. With `free = True` it
    can be told from others by `==`, and plans for it are kept.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    def read(self, found: Pass) -> dict[str, Reading]:
        """The exact figures, from identities."""
        ...

    def define(self, full: Definition) -> dict[str, Tensor]:
        """The same from the whole matrix, as the textbook would."""
        ...


def needs_of(statistic: Statistic) -> Mapping[str, Need]:
    """A statistic's needs, by the name of each figure."""
    return getattr(statistic, "needs", {})


def all_needs(statistics: Sequence[Statistic]) -> tuple[Need, ...]:
    """What several statistics need, each need once."""
    return tuple(dict.fromkeys(n for s in statistics for n in needs_of(s).values()))


_STATISTICS: set[type] = set()
"""Types that were found to be statistics: looking a protocol through takes its time."""


def check_statistics(statistics: Sequence[object], function: str) -> None:
    """Raise ValueError for what is no statistic, quoting `function`."""
    for statistic in statistics:
        kind = type(statistic)
        if kind in _STATISTICS:
            continue
        if isinstance(statistic, Statistic) and not isinstance(statistic, type):
            _STATISTICS.add(kind)
        else:
            made = f"{statistic.__name__}()" if isinstance(statistic, type) else "Entropy()"
            raise ValueError(f"{function}(…, {statistic!r}): not a statistic; did you mean {made}?")
