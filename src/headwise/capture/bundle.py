"""Observe small calls of equal form together, as one call that has all their heads.

For a small call, the kernel takes less time than the Python code around it. If a call of the same
form was observed before, its queries and keys are therefore copied, and observed together with
those of other layers: on first access, at the end of a watch, or when enough calls are collected.
"""

from __future__ import annotations

from collections.abc import Hashable, ItemsView, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..core.call import BoundedCache, Call, unfollowed
from ..core.mask_algebra import Mask
from ..core.modes import no_graph
from ..stats.observe import read
from ..stats.record import TOGETHER, Reading
from ..stats.seen import Readings
from ..stats.statistic import Statistics
from .call import AttentionCall, ObserveOptions

LARGEST = 1 << 16
"""The maximum number of elements in queries and keys of a call that is observed with others."""

_OBSERVED: BoundedCache[Hashable, bool] = BoundedCache()
"""By form: True if a one-pass backend supports such calls directly."""


class Bundles:
    """Observe calls; small calls of equal form are observed together."""

    def __init__(self) -> None:
        self._open: dict[Hashable, Bundle] = {}

    def observe(
        self, call: AttentionCall, statistics: Statistics, looking: ObserveOptions
    ) -> Mapping[str, Reading]:
        """Return `call.observe(statistics, looking)`, computed now or on first access."""
        form = _form(call, statistics, looking)
        if form is None or not _OBSERVED.get(form):
            found = call.observe(statistics, looking)
            if form is not None:
                record = getattr(found, "record", None)
                _OBSERVED[form] = record is not None and record.direct
            return found
        bundle = self._open.get(form)
        if bundle is None or bundle.full:
            bundle = self._open[form] = Bundle(call, statistics)
        return bundle.add(call)

    def close(self) -> None:
        """Observe all pending calls and free their tensors."""
        for bundle in self._open.values():
            _ = bundle.readings
        self._open.clear()


def _form(call: AttentionCall, statistics: Statistics, looking: ObserveOptions) -> Hashable:
    """Return a key that is equal for calls that may be observed together, or `None`."""
    q, k, keywords = call.q, call.k, call.keywords
    mask = keywords.get("mask")
    if looking.queries is not None or looking.gradients or not isinstance(mask, Mask):
        return None
    if not (mask.free and statistics.later_alone and q.is_cpu and type(q) is type(k) is Tensor):
        return None
    if call.behind or call.hidden or call.own_positions or call.waiting or call.one_pass:
        return None
    if len(keywords) != 4 or keywords.get("sinks") is not None or not unfollowed():
        return None
    if q.numel() + k.numel() > LARGEST:
        return None
    scores = keywords["scale"], keywords["softcap"]
    return statistics, q.shape, k.shape, q.dtype, mask, *scores, torch.is_inference_mode_enabled()


class Bundle:
    """Calls of one form, and the readings of all their heads, computed on demand."""

    def __init__(self, call: AttentionCall, statistics: Statistics) -> None:
        self.statistics, self.heads = statistics, call.q.shape[1]
        self._keywords, self._numbers = call.keywords, 0
        self._tensors: list[tuple[Tensor, ...]] = []
        self._readings: Readings | None = None

    @property
    def full(self) -> bool:
        """True if no more calls can be added."""
        return self._readings is not None or self._numbers > TOGETHER

    def add(self, call: AttentionCall) -> BundledCall:
        """Copy the tensors of a call that the statistics read."""
        given = (call.q, call.k, call.out) if self.statistics.of_output else (call.q, call.k)
        first = len(self._tensors) * self.heads
        self._tensors.append(tuple([x.detach().clone() for x in given]))
        self._numbers += sum([x.numel() for x in given])
        return BundledCall(self, slice(first, first + self.heads))

    @property
    def readings(self) -> Readings:
        """The readings of all heads, those of the first call first."""
        if self._readings is None:
            with no_graph():
                q, k, *out = (torch.cat(each, 1) for each in zip(*self._tensors, strict=True))
                call = Call.of(q, k, k, function="observe", **self._keywords)
                whole = out[0] if out else False
                _, found = read(call, self.statistics, output=whole, gradients=False, strict=False)
            self._readings = found.let_go()
            self._tensors.clear()
        return self._readings


class BundledCall(Mapping[str, Reading]):
    """The readings of some heads of a bundle: those of one call or of several consecutive calls."""

    def __init__(self, bundle: Bundle, heads: slice) -> None:
        self.bundle, self.heads = bundle, heads

    def __getitem__(self, name: str) -> Reading:
        return self._of(self.bundle.readings[name])

    def items(self) -> ItemsView[str, Reading]:
        """Return the readings by name."""
        return {name: self._of(x) for name, x in self.bundle.readings.items()}.items()

    def _of(self, reading: Reading) -> Reading:
        whole = self.heads.stop - self.heads.start == reading.values.shape[1]
        return reading if whole else reading.of(self.heads)

    def __iter__(self) -> Iterator[str]:
        return iter(self.bundle.statistics.owner)

    def __len__(self) -> int:
        return len(self.bundle.statistics.owner)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the readings without a graph."""
        return dict, ({name: reading.detached() for name, reading in self.items()},)


def together(
    each: Sequence[Sequence[Mapping[str, Reading]]],
) -> Iterator[tuple[list[int], Sequence[Mapping[str, Reading]]]]:
    """Yield the indices of modules observed in the same form, and their calls, joined along heads.

    Reductions over many layers then take as few operations as over a single one.
    """
    if len(each) == 1:
        yield [0], each[0]
        return
    alike: dict[object, list[int]] = {}
    for place, calls in enumerate(each):
        alike.setdefault(tuple([_form_of(one) or object() for one in calls]), []).append(place)
    for places in alike.values():
        calls: Any = zip(*(each[place] for place in places), strict=True)
        joined = [_beside(parts) for parts in calls] if len(places) > 1 else [None]
        if None in joined:
            yield from (([place], each[place]) for place in places)
        else:
            yield places, [one for one in joined if one is not None]


def _form_of(readings: Mapping[str, Reading]) -> object | None:
    """Return a key that is equal for readings that can be joined, or `None`."""
    if isinstance(readings, BundledCall):
        return readings.bundle
    return readings.form if isinstance(readings, Readings) else None


def _beside(parts: Sequence[Any]) -> Mapping[str, Reading] | None:
    """Join readings of one form; return `None` if they are not consecutive."""
    first, *others = parts
    if not isinstance(first, BundledCall):
        return first.beside(*others)
    if any(one.heads.stop != other.heads.start for one, other in pairwise(parts)):
        return None
    return BundledCall(first.bundle, slice(first.heads.start, parts[-1].heads.stop))
