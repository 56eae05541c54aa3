"""Distributed training: metrics cover all ranks, and all ranks clip and stop together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count

import torch
from torch import Tensor
from torch import distributed as dist

from ..capture.private_torch import store_of_group
from ..capture.ranks import rank_of_all
from .figures import merged, nothing
from .step_sums import Span, StepSums


def several() -> bool:
    """Return True if this process is one of several that train together."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_first() -> bool:
    """Return True if this process is the one that records."""
    return rank_of_all() == 0


def any_of_all(here: bool, device: torch.device) -> bool:
    """Return True if the value is True on any rank; every rank must call this."""
    if not several():
        return here
    flag = torch.tensor(int(here), device=_reachable(device))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


@dataclass(frozen=True)
class _Holding:
    """The heads by layer and rows by statistic for which a rank has sums."""

    spans: Mapping[str, Span]
    rows: Mapping[str, int]

    @classmethod
    def of(cls, sums: StepSums) -> _Holding:
        rows = {name: len(next(iter(parts.values()))) for name, parts in sums.parts.items()}
        return cls(dict(sums.spans), rows)

    def has(self, other: _Holding) -> bool:
        """Return True if this contains everything in `other`."""
        return other.spans.items() <= self.spans.items() and other.rows.items() <= self.rows.items()

    def with_more(self, other: _Holding) -> _Holding:
        return _Holding({**self.spans, **other.spans}, {**self.rows, **other.rows})

    @property
    def heads(self) -> int:
        return sum(span.heads for span in self.spans.values())

    @property
    def share(self) -> float:
        """The fraction held of its layers' heads; ranks with other heads see the same queries."""
        return self.heads / max(1, sum(span.all for span in self.spans.values()))


_NUMBERS = count()
PATIENCE = timedelta(seconds=120)
"""The time that a rank waits for the monitors of other ranks."""


class MonitorRanks:
    """The ranks that train together, each with a part of the data, heads or layers.

    When any rank has a new layer, ranks exchange their layers; then one collective exchanges the
    metrics of a step. Every rank takes part in each exchange, with or without metrics of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._number = next(_NUMBERS)
        self._met: bool | None = None
        self._figures: list[_Holding] = []
        self._maxima: list[_Holding] = []

    def sums(self, here: StepSums) -> StepSums:
        """Return the sums of all ranks over whole layers, on every rank.

        Raises:
            ValueError: ranks have different numbers of heads for a layer; all ranks raise it.
        """
        if not several():
            return here
        self._meet()
        while True:
            held = self._figures[dist.get_rank()] if self._figures else None
            own = _Holding.of(here)
            fits = held is not None and held.has(own)
            if self._figures:
                gathered = self._gathered(here if fits else StepSums(), fits)
                if bool((gathered[:, 0] == 1).all()):
                    return replace(self._merged(gathered), unknown=here.unknown)
            self._figures = _exchanged(own if held is None else held.with_more(own))

    def _meet(self) -> None:
        """Check once that all ranks have a monitor; otherwise, those with one would wait forever.

        Raises:
            ValueError: a rank has no monitor.
        """
        if self._met is None:
            store, name = store_of_group(), f"headwise monitor {self._number}"
            names = [f"{name}: {rank}" for rank in range(dist.get_world_size())]
            store.set(names[dist.get_rank()], "")
            with suppress(dist.DistStoreError):
                store.wait(names, PATIENCE)
            lacking = [str(rank) for rank, one in enumerate(names) if not store.check([one])]
            if lacking:
                store.set(f"{name}: given up", "")
            self._met = not store.check([f"{name}: given up"])
            self._lacking = ", ".join(lacking)
        if not self._met:
            raise ValueError(
                f"Monitor(…): rank {self._lacking} has no monitor; metrics cover all ranks, so "
                f"every rank must create one with the same settings."
            )

    def _gathered(self, here: StepSums, fits: bool) -> Tensor:
        """Gather the data of all ranks, `[R, numbers]`: a flag, query counts, and sums."""
        own = self._figures[dist.get_rank()]
        queries = [number for name in own.rows for number in here.looked_at.get(name, (0, 0))]
        parts = [torch.tensor([float(fits), *map(float, queries)], dtype=torch.float64)]
        for name, rows in own.rows.items():
            sums = here.parts.get(name, {})
            blocks = [
                sums[layer].cpu() if layer in sums else nothing(rows, span.heads)
                for layer, span in own.spans.items()
            ]
            parts.append(torch.cat(blocks, 1).flatten() if blocks else torch.empty(0))
        packed = torch.cat(parts)
        longest = max(
            1 + 2 * len(one.rows) + one.heads * sum(one.rows.values()) for one in self._figures
        )
        device = _reachable(self._device)
        packed = torch.nn.functional.pad(packed, (0, longest - len(packed))).to(device)
        gathered = [torch.empty_like(packed) for _ in self._figures]
        dist.all_gather(gathered, packed)
        return torch.stack(gathered).cpu()

    def _merged(self, gathered: Tensor) -> StepSums:
        """Merge the data that ranks have sent."""
        heads, total = _whole_layers(self._figures), StepSums()
        queries: dict[str, Tensor] = {}
        firsts, count = {}, 0
        for layer, every in heads.items():
            firsts[layer], count = count, count + every
            total.spans[layer] = Span(0, every, every)
        sums: dict[str, Tensor] = {}
        for own, row in zip(self._figures, gathered, strict=True):
            spans = [(firsts[n] + span.first, span.heads) for n, span in own.spans.items()]
            where = torch.cat([torch.arange(a, a + n) for a, n in spans]) if spans else None
            at = 1 + 2 * len(own.rows)
            for number, (name, rows) in enumerate(own.rows.items()):
                looked_at = row[1 + 2 * number : 3 + 2 * number] * own.share
                queries[name] = queries.get(name, torch.zeros(2)) + looked_at
                block, at = row[at : at + rows * own.heads], at + rows * own.heads
                here = sums.setdefault(name, nothing(rows, count))
                if where is not None:
                    here[:, where] = merged(here[:, where], block.view(rows, -1))
        for name, x in sums.items():
            if not bool(queries[name].any()):
                continue  # no rank has seen a call in this step
            parts = x.split(list(heads.values()), 1)
            total.parts[name] = dict(zip(heads, parts, strict=True))
            total.looked_at[name] = tuple(queries[name].round().long().tolist())
        return total

    def largest(self, here: StepSums, statistic: str | None) -> dict[str, Tensor]:
        """Return the largest scores `[H]` of whole layers over all ranks, by layer.

        `statistic` is the name of the metric that holds them on this rank. The scores are float32;
        NaN counts as infinite.
        """
        maxima = {} if statistic is None else here.parts.get(statistic, {})
        if not several():
            return {layer: x[0] for layer, x in maxima.items()}
        self._meet()
        own = _Holding(dict(here.spans), {})
        while True:
            held = self._maxima[dist.get_rank()] if self._maxima else None
            fits = held is not None and held.has(own)
            if self._maxima:
                gathered = self._reduced(here.spans, maxima) if fits else self._reduced({}, {}, 1.0)
                if gathered is not None:
                    return gathered
            self._maxima = _exchanged(own if held is None else held.with_more(own))

    def _reduced(
        self, spans: Mapping[str, Span], maxima: Mapping[str, Tensor], new: float = 0.0
    ) -> dict[str, Tensor] | None:
        """Return the maxima of all ranks; `None` if a rank has a layer not yet exchanged."""
        heads = _whole_layers(self._maxima)
        parts = {layer: torch.full((every,), -torch.inf) for layer, every in heads.items()}
        for layer, x in maxima.items():
            first = spans[layer].first
            parts[layer][first : first + x.shape[1]] = torch.nan_to_num(
                x[0].float().cpu(), nan=torch.inf, posinf=torch.inf, neginf=-torch.inf
            )
        packed = torch.cat([torch.tensor([new]), *parts.values()]).to(_reachable(self._device))
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        flag, *gathered = packed.cpu().split([1, *heads.values()])
        return None if bool(flag > 0) else dict(zip(heads, gathered, strict=True))


def _exchanged(own: _Holding) -> list[_Holding]:
    """Gather the holdings of all ranks, in order."""
    gathered: list[_Holding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return [one for one in gathered if one is not None]


def _whole_layers(ranks: list[_Holding]) -> dict[str, int]:
    """Return the number of heads of each layer, in the order of their first calls.

    Raises:
        ValueError: ranks have different numbers of heads in one layer.
    """
    heads: dict[str, int] = {}
    for one in ranks:
        for layer, span in one.spans.items():
            if heads.setdefault(layer, span.all) != span.all:
                raise ValueError(
                    f"{layer or 'the model'} has {heads[layer]} heads on one rank and {span.all} "
                    f"on another"
                )
    return heads


def _reachable(device: torch.device) -> torch.device:
    """Return a device on which ranks can exchange tensors: this one, or one the group supports."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return device if device.type in kinds else torch.device(kinds[0])
