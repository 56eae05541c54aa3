"""The base class of statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from ..core.call import BoundedCache
from ..core.reference import Definition
from .plan import Need
from .record import Reading, Record
from .view import Lazy


class Statistic(ABC):
    """A statistic: the names of its metrics, what it needs from a call, and its definition on P.

    `needs` maps the name of each metric to a need, whose answer is `record[need]`. A subclass that
    is `deferred` reads only answers, counts and sizes of the record, each head independently, so
    its metrics can be computed when first read, for many layers at once. Metrics named in `raw` are
    the unchanged answers to their needs, or the first item of an answer. A subclass that is `free`
    holds no tensors and can be compared by `==`, so its plans are cached.
    """

    names: tuple[str, ...] = ()
    needs: Mapping[str, Need] = MappingProxyType({})
    deferred: bool = False
    raw: tuple[str, ...] = ()
    free: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "free" not in vars(cls):  # not inherited: each subclass declares it
            cls.free = False
        if {"metric", "needs"} & vars(cls).keys():
            for name, nothing in (("raw", ()), ("deferred", False)):
                if name not in vars(cls):
                    setattr(cls, name, nothing)

    def metric(self, record: Record) -> dict[str, Reading]:
        """Return the metrics by name. Default: the answers themselves, one value per query."""
        valid, answers = record.view.valid_rows, record.answers
        return {name: Reading(answers[need], valid) for name, need in self.needs.items()}

    @abstractmethod
    def define(self, full: Definition) -> dict[str, Tensor]:
        """Return the same metrics from the whole matrix, by their definition."""


class Statistics:
    """Statistics that are requested together, and their joint properties."""

    def __init__(self, each: Iterable[Statistic]) -> None:
        self.each = tuple(each)

    @classmethod
    def of(cls, statistics: Iterable[Statistic]) -> Statistics:
        """Return the statistics as one object, cached for equal statistics without tensors."""
        if isinstance(statistics, Statistics):
            return statistics
        each = tuple(statistics)
        if torch.compiler.is_compiling():
            return cls(each)
        try:
            known = _KNOWN.get(each)
        except TypeError:  # a custom statistic may not be hashable
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

    @Lazy
    def owner(self) -> dict[str, int]:
        """The index of the statistic that owns each name.

        Raises:
            ValueError: two statistics have the same name.
        """
        numbers: dict[str, int] = {}
        for number, statistic in enumerate(self.each):
            for name in statistic.names:
                if name in numbers:
                    raise ValueError(f"observe(…): the statistic {name!r} is given twice.")
                numbers[name] = number
        return numbers

    @Lazy
    def needs(self) -> tuple[Need, ...]:
        """The needs of all statistics, without duplicates."""
        return tuple(dict.fromkeys(need for one in self.each for need in one.needs.values()))

    @Lazy
    def of_output(self) -> bool:
        """True if one of them reads the heads' outputs."""
        return any(need.output for need in self.needs)

    @Lazy
    def at_once(self) -> tuple[int, ...]:
        """The indices of the statistics whose metrics are computed with the call."""
        return tuple(number for number, one in enumerate(self.each) if not one.deferred)

    @Lazy
    def later(self) -> frozenset[Need]:
        """The needs of the deferred statistics."""
        return frozenset(n for one in self.each if one.deferred for n in one.needs.values())

    @Lazy
    def later_alone(self) -> bool:
        """True if all are deferred and none holds tensors."""
        return self.free and not self.at_once

    @Lazy
    def free(self) -> bool:
        """True if none holds tensors, so that equal statistics have equal needs."""
        return all(isinstance(one, Statistic) and one.free for one in self.each)


_KNOWN: BoundedCache[tuple[Statistic, ...], Statistics] = BoundedCache()
"""The groups of statistics that were requested before."""


def check_statistics(statistics: Sequence[object], function: str) -> None:
    """Raise ValueError for anything that is not a statistic, quoting `function`."""
    for statistic in statistics:
        if not isinstance(statistic, Statistic):
            made = f"{statistic.__name__}()" if isinstance(statistic, type) else "Entropy()"
            raise ValueError(f"{function}(…, {statistic!r}): not a statistic; did you mean {made}?")
