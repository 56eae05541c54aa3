"""What a statistic is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.kept import Kept
from ..core.reference import Definition
from .execute import Pass
from .lazy import Lazy
from .needs import HEAD_OUTPUT, Need
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


class Statistics:
    """Statistics that are asked for together, and what is known of all of them."""

    def __init__(self, each: Iterable[Statistic]) -> None:
        self.each = tuple(each)

    @classmethod
    def of(cls, statistics: Iterable[Statistic]) -> Statistics:
        """Return the statistics as one: equal ones that hold no tensors are the same object."""
        if isinstance(statistics, Statistics):
            return statistics
        each = tuple(statistics)
        if torch.compiler.is_compiling():
            return cls(each)
        try:
            known = _KNOWN.get(each)
        except TypeError:  # one of somebody's own has no hash
            return cls(each)
        if known is None:
            known = cls(each)
            if known.free:
                _KNOWN[each] = known
        return known

    def __iter__(self) -> Iterator[Statistic]:
        return iter(self.each)

    def __len__(self) -> int:
        return len(self.each)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Statistics) and self.each == other.each

    def __hash__(self) -> int:
        return self._hash

    @Lazy
    def _hash(self) -> int:
        return hash(self.each)

    @Lazy
    def owner(self) -> dict[str, int]:
        """Return the number of the statistic that each name is of.

        Raises:
            ValueError: two have the same name.
        """
        found: dict[str, int] = {}
        for number, statistic in enumerate(self.each):
            for name in statistic.names:
                if name in found:
                    raise ValueError(f"observe(…): the statistic {name!r} was asked for twice.")
                found[name] = number
        return found

    @Lazy
    def needs(self) -> tuple[Need, ...]:
        """Return what they need, each need once."""
        return tuple(dict.fromkeys(n for s in self.each for n in needs_of(s).values()))

    @Lazy
    def free(self) -> bool:
        """Return True if none holds tensors, as each says: equal ones then need the same."""
        return all("free" in vars(type(s)) and s.free for s in self.each)  # type: ignore[attr-defined]

    @Lazy
    def formulas(self) -> tuple[bool, ...]:
        """Tell which of them are formulas on what they need, and may be worked out later."""
        return tuple(getattr(statistic, "formula", False) for statistic in self.each)

    @Lazy
    def output_later(self) -> bool:
        """Return True if one that is worked out later reads the heads' outputs."""
        each = zip(self.each, self.formulas, strict=True)
        return any(later and HEAD_OUTPUT in needs_of(one).values() for one, later in each)


_KNOWN: Kept[tuple[Statistic, ...], Statistics] = Kept()
"""Those that were asked for before."""
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
