"""What the attention calls of a step add up to, by statistic and layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..stats.max_logit import ABOVE
from .figures import MAXIMUM, MEAN, Figures, Heads, merged, nothing


@dataclass(frozen=True)
class Span:
    """Which heads of a layer there are: `heads` of its `all`, from `first` on."""

    first: int
    heads: int
    all: int


@dataclass(eq=False)
class StepSums:
    """What calls add up to.

    spans: by layer, in the order of their first calls.
    kept: by statistic and layer, `[4, heads]` of means or `[1, heads]` of maxima (`kept_of`).
    looked_at: by statistic, of how many queries there were how many were looked at: `(some, all)`.
    unknown: by layer and statistic, the reason why it cannot be known; nothing is kept of it then.
    """

    spans: dict[str, Span] = field(default_factory=dict)
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    looked_at: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown: dict[str, dict[str, str]] = field(default_factory=dict)

    def know(self, layer: str, span: Span) -> None:
        """Take up a layer.

        Raises:
            ValueError: it has had other heads before.
        """
        if (before := self.spans.setdefault(layer, span)) != span:
            raise ValueError(f"it has {span.heads} heads, and had {before.heads} before")

    def add(self, statistic: str, parts: Mapping[str, Tensor], some: int, every: int) -> None:
        """Take in a call of each of these layers: what is kept of it (`kept_of_each`), and how many
        queries were looked at, of how many."""
        if any(statistic in self.unknown.get(layer, {}) for layer in parts if self.unknown):
            parts = {n: x for n, x in parts.items() if statistic not in self.unknown.get(n, {})}
        if not parts:
            return
        self.kept[statistic] = _together(self.kept.get(statistic, {}), parts)
        before, calls = self.looked_at.get(statistic, (0, 0)), len(parts)
        self.looked_at[statistic] = (before[0] + calls * some, before[1] + calls * every)

    def leave_out(self, statistic: str, layer: str, why: str) -> None:
        """Keep nothing of a statistic that cannot be known for a call of the layer."""
        self.unknown.setdefault(layer, {})[statistic] = why
        kept = self.kept.get(statistic, {})
        kept.pop(layer, None)
        if not kept:
            self.kept.pop(statistic, None)

    def renamed(self, names: Mapping[str, str]) -> StepSums:
        """The same, with other names for the layers."""
        if all(name == other for name, other in names.items()):
            return self
        kept = {s: {names[n]: x for n, x in found.items()} for s, found in self.kept.items()}
        spans = {names[name]: span for name, span in self.spans.items()}
        unknown = {names[name]: dict(reasons) for name, reasons in self.unknown.items()}
        return StepSums(spans, kept, dict(self.looked_at), unknown)

    @property
    def heads(self) -> dict[str, int]:
        """How many heads each layer has in all."""
        return {layer: span.all for layer, span in self.spans.items()}

    def figures(self, heads: Heads) -> dict[str, Figures]:
        """What was added up of whole layers, by statistic, of the layers of `heads`."""
        found = {
            statistic: joined(parts, heads, self.looked_at[statistic])
            for statistic, parts in self.kept.items()
        }
        limited = [name for name in found if name.startswith(ABOVE)]
        for name in sorted(limited, key=lambda name: float(name.removeprefix(ABOVE))):
            found.setdefault("max_logit", found.pop(name))  # −inf where it is not above
        return found


def joined(parts: Mapping[str, Tensor], heads: Heads, looked_at: tuple[int, int]) -> Figures:
    """Return what layers gave as one; layers of `heads` that gave nothing have no figure."""
    rows = len(next(iter(parts.values())))
    columns = [
        parts[name] if name in parts else nothing(rows, number) for name, number in heads.items()
    ]
    data = torch.cat(columns, 1).numpy()
    return Figures(MAXIMUM if rows == 1 else MEAN, data, *looked_at)


def _together(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is kept of the layers of two, by layer."""
    both = [layer for layer in other if layer in one]
    if both:
        parts = [torch.cat([x[layer] for layer in both], 1) for x in (one, other)]
        sizes = [one[layer].shape[1] for layer in both]
        other = {**other, **dict(zip(both, merged(*parts).split(sizes, 1), strict=True))}
    return {**one, **other}
