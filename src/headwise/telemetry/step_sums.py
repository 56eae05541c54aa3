"""Sums of the attention calls of a step, by statistic and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..stats.max_logit import ABOVE
from .figures import MAXIMUM, MEAN, HeadMetrics, Heads, merged, nothing


@dataclass(frozen=True)
class Span:
    """The heads of a layer in a call: `heads` of the `all` heads, starting at `first`."""

    first: int
    heads: int
    all: int


@dataclass(eq=False)
class StepSums:
    """Sums of attention calls.

    spans: the heads of each layer, in the order of the layers' first calls.
    parts: by statistic and layer, `[4, heads]` of means or `[1, heads]` of maxima (`sums_of_each`).
    looked_at: by statistic, the numbers of sampled and of all queries.
    unknown: by layer and statistic, the reason why a statistic is unavailable.
    """

    spans: dict[str, Span] = field(default_factory=dict)
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    looked_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown: dict[str, dict[str, str]] = field(default_factory=dict)

    def know(self, layer: str, span: Span) -> None:
        """Add a layer.

        Raises:
            ValueError: the layer had other heads before.
        """
        if (before := self.spans.setdefault(layer, span)) != span:
            raise ValueError(f"it has {span.heads} heads, but had {before.heads} before")

    def add(self, statistic: str, parts: Mapping[str, Tensor], some: int, every: int) -> None:
        """Add one call of each of these layers: its sums, and its numbers of sampled and of all
        queries."""
        if any(statistic in self.unknown.get(layer, {}) for layer in parts if self.unknown):
            parts = {n: x for n, x in parts.items() if statistic not in self.unknown.get(n, {})}
        if not parts:
            return
        self.parts[statistic] = _together(self.parts.get(statistic, {}), parts)
        before, calls = self.looked_at.get(statistic, (0, 0)), len(parts)
        self.looked_at[statistic] = (before[0] + calls * some, before[1] + calls * every)

    def leave_out(self, statistic: str, layer: str, why: str) -> None:
        """Drop a statistic that is unavailable for a call of the layer."""
        self.unknown.setdefault(layer, {})[statistic] = why
        parts = self.parts.get(statistic, {})
        parts.pop(layer, None)
        if not parts:
            self.parts.pop(statistic, None)

    def renamed(self, names: Mapping[str, str]) -> StepSums:
        """Return the same sums under other layer names."""
        if all(name == other for name, other in names.items()):
            return self
        parts = {s: {names[n]: x for n, x in found.items()} for s, found in self.parts.items()}
        spans = {names[name]: span for name, span in self.spans.items()}
        unknown = {names[name]: dict(reasons) for name, reasons in self.unknown.items()}
        return StepSums(spans, parts, dict(self.looked_at), unknown)

    @property
    def heads(self) -> dict[str, int]:
        """The number of heads of each whole layer."""
        return {layer: span.all for layer, span in self.spans.items()}

    def figures(self, heads: Heads) -> dict[str, HeadMetrics]:
        """Return the metrics of the layers in `heads`, by statistic."""
        found = {
            statistic: joined(parts, heads, self.looked_at[statistic])
            for statistic, parts in self.parts.items()
        }
        limited = [name for name in found if name.startswith(ABOVE)]
        for name in sorted(limited, key=lambda name: float(name.removeprefix(ABOVE))):
            found.setdefault("max_logit", found.pop(name))  # −inf for heads below the limit
        return found


def joined(parts: Mapping[str, Tensor], heads: Heads, looked_at: tuple[int, int]) -> HeadMetrics:
    """Join the sums of layers; layers of `heads` without sums get missing values."""
    rows = len(next(iter(parts.values())))
    columns = [
        parts[name] if name in parts else nothing(rows, number) for name, number in heads.items()
    ]
    data = torch.cat(columns, 1).numpy()
    return HeadMetrics(MAXIMUM if rows == 1 else MEAN, data, *looked_at)


def _together(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge two sets of sums, layer by layer."""
    both = [layer for layer in other if layer in one]
    if both:
        parts = [torch.cat([x[layer] for layer in both], 1) for x in (one, other)]
        sizes = [one[layer].shape[1] for layer in both]
        other = {**other, **dict(zip(both, merged(*parts).split(sizes, 1), strict=True))}
    return {**one, **other}
