"""Attention to keys that are sharded over ranks: results are merged by their log-sum-exps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..core.mask_algebra import Mask
from ..core.numbers import format_value
from ..stats.distance import Distance
from ..stats.entropy import Entropy
from ..stats.lse import LSE, Sink
from ..stats.mass import Mass
from ..stats.max_logit import MaxLogit, Norms
from ..stats.observe import observe
from ..stats.patterns import First, OfTokens
from ..stats.record import Reading
from ..stats.seen import Seen
from ..stats.segments import Segments
from ..stats.statistic import Statistic
from ..stats.tables import table_rows

_MAXIMA, _LINEAR = (MaxLogit, Norms), (Mass, Segments, Sink, Distance)


@dataclass(frozen=True)
class SeenOfAll:
    """The result of a call whose keys are sharded, the same on every rank.

    `seen[name]` is `[B, H, T]` per query or `[B, H]` per head. No gradient.
    """

    out: Float[Tensor, "B H T Dv"]
    lse: Float[Tensor, "B H T"]
    readings: dict[str, Reading]

    def __getitem__(self, name: str) -> Tensor:
        return self.reading(name).values

    def reading(self, name: str) -> Reading:
        """Return a statistic with the rows that count in its mean.

        Raises:
            KeyError: the statistic was not observed.
        """
        if name not in self.readings:
            raise KeyError(f"{name!r} was not observed; there are: {', '.join(self.readings)}")
        return self.readings[name]

    def table(self) -> list[dict[str, float | int]]:
        """Return a row per head: means over batch and valid queries; the max for `max_logit`."""
        rows = table_rows(self.readings, self.lse.shape[1])
        return [{"head": head, **row} for head, row in enumerate(rows)]


@torch.no_grad()
def observe_split_keys(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S/R D"],
    v: Float[Tensor, "B G S/R Dv"],
    *statistics: Statistic,
    mesh: DeviceMesh,
    first_key: int,
    first_query: int,
    mask: Mask | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    **keywords: Any,
) -> SeenOfAll:
    """Run `hw.observe()` on queries that every rank has, with keys sharded over ranks.

    Use it for a cache too long for one machine. Each rank observes its own keys; two collectives
    merge the results, in at least float32. With `w_r = exp(lse_r − lse)` the output is `Σ w_r·O_r`,
    like every statistic that is linear in P; the entropy is `Σ w_r·H_r + H(w)`.

    Args:
        q: the same on every rank.
        k, v: the keys and values of this rank.
        statistics: `Entropy()`, `LSE()`, `MaxLogit()`, `Norms()`, `Sink()`, `Distance()`, and
            `Mass()` of positions (`First`, `Previous`, `Self`, `At`) or of a mask.
        mesh: the ranks, one axis.
        first_key: the position of this rank's first key.
        first_query: the position of the first query.
        mask: a mask on this rank's keys, by their index on the rank. Masks that depend on positions
            only (`Causal`, `Window`, `ALiBi`) are the same for all ranks, also in `Mass`.
        sinks: learned sinks; they count once.
        keywords: other arguments of `hw.observe`, except `queries`.

    Raises:
        ValueError: for the same reasons as `hw.observe`, or if a statistic cannot be merged, such
            as attention received by keys, which depends on the log-sum-exp of each query over all
            ranks.

    Source: the merge of partial softmaxes, Milakov & Gimelshein 2018; of entropies, Shannon 1948,
    the chain rule.
    """
    own = [_on_own_keys(statistic, first_key) for statistic in statistics]
    some = [statistic for statistic in own if statistic is not None]
    first = first_query - first_key
    seen = observe(q, k, v, *some, mask=mask, first_query=first, gradients=False, **keywords)
    return _merged(seen, list(zip(statistics, own, strict=True)), sinks, mesh)


def _on_own_keys(statistic: Statistic, first_key: int) -> Statistic | None:
    """Return a statistic over the keys of this rank; `None` if it involves none of them.

    Raises:
        ValueError: it cannot be merged.
    """
    mergeable = isinstance(statistic, (*_MAXIMA, *_LINEAR, Entropy, LSE))
    if isinstance(statistic, Mass) and isinstance(statistic.keys, First):
        left = statistic.keys.count - first_key
        return Mass(First(left), name=statistic.names[0]) if left > 0 else None
    if isinstance(statistic, Segments):
        return statistic.among(statistic.first_key + first_key, None)
    if isinstance(statistic, Mass):
        mergeable = not isinstance(statistic.keys, OfTokens)
    if isinstance(statistic, Distance):
        mergeable = not (statistic.spread or statistic.absolute)
    if not mergeable:
        raise ValueError(
            f"observe_split_keys(…, {format_value(statistic)}): the statistic does not merge over "
            f"ranks with different keys; gather the keys (hw.parallel.attend), or omit it."
        )
    return statistic


def _merged(
    seen: Seen,
    statistics: Sequence[tuple[Statistic, Statistic | None]],
    sinks: Tensor | None,
    mesh: DeviceMesh,
) -> SeenOfAll:
    """Merge the results of all ranks; `statistics` pairs each requested one with this rank's."""
    lse = seen.lse.to(torch.promote_types(seen.lse.dtype, torch.float32))
    largest = [name for one, _ in statistics if isinstance(one, _MAXIMA) for name in one.names]
    every, *maxima = _all_gather([lse, *(seen[name].to(lse.dtype) for name in largest)], mesh)
    valid = every.isfinite().any(0)
    if sinks is not None:  # one more outcome, for queries that may attend to any key
        sink = torch.where(valid, sinks.to(lse.dtype)[:, None], -torch.inf)
        every = torch.cat([every, sink[None]])
    total = torch.logsumexp(every, 0)
    base = torch.where(valid, total, 0.0)
    weight = torch.exp(lse - base)  # 0 where no key of this rank is visible
    parts = {"out": weight[..., None] * seen.out, "outcomes": seen.record.counts.expand_as(lse)}
    for one, own in statistics:
        for name in () if isinstance(one, _MAXIMA) else one.names:
            reading = None if own is None else seen.reading(name)
            parts |= _summands(name, reading, seen.rows, weight)
    sums = _all_reduce({name: part.to(lse.dtype) for name, part in parts.items()}, mesh)
    outcomes = sums["outcomes"]
    readings: dict[str, Reading] = {}
    for one, _ in statistics:
        for name in one.names:
            if name in largest:
                readings[name] = Reading(maxima[largest.index(name)].amax(0), largest=True)
            else:
                among = sums[f"{name}, among"] > 0 if isinstance(one, Mass | Segments) else None
                readings[name] = Reading(sums[name], sums[f"{name}, rows"] > 0, among=among)
    if "lse" in readings:
        readings["lse"] = Reading(total, valid)
    if "sink" in readings and sinks is not None:
        readings["sink"] = Reading(torch.exp(every[-1] - base), valid)
    if "entropy" in readings:
        between = torch.special.entr(torch.exp(every - base)).sum(0)
        outcomes = outcomes if sinks is None else outcomes + valid
        entropy, several = readings["entropy"].values + between, outcomes > 1
        normalized = torch.where(several, entropy / outcomes.clamp(min=2).log(), 0.0)
        readings["entropy"] = Reading(entropy, valid)
        readings["entropy_share"] = Reading(normalized, several)
    return SeenOfAll(sums["out"].to(seen.out.dtype), total, readings)


def _summands(
    name: str, reading: Reading | None, valid: Tensor, weight: Tensor
) -> dict[str, Tensor]:
    """Return this rank's summands of a statistic, of its rows, and of the rows in its mean."""
    if reading is None:
        values = rows = torch.zeros_like(weight)
    else:
        assert reading.rows is not None
        values, rows = torch.where(weight > 0, reading.values, 0.0), reading.rows
    among = valid if reading is None or reading.among is None else reading.among
    return {
        name: weight * values,
        f"{name}, rows": rows.expand_as(weight),
        f"{name}, among": among.expand_as(weight),
    }


def _all_gather(parts: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
    """Gather tensors of all ranks, each `[R, …]`, in one collective."""
    packed = torch.cat([part.flatten() for part in parts])
    gathered = [torch.empty_like(packed) for _ in range(mesh.size())]
    dist.all_gather(gathered, packed, group=mesh.get_group())
    every = torch.stack(gathered).split([part.numel() for part in parts], 1)
    return [x.reshape(-1, *part.shape) for x, part in zip(every, parts, strict=True)]


def _all_reduce(parts: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Sum tensors over ranks, in one collective."""
    packed = torch.cat([part.flatten() for part in parts.values()])
    dist.all_reduce(packed, group=mesh.get_group())
    pieces = packed.split([part.numel() for part in parts.values()])
    return {n: x.view(parts[n].shape) for n, x in zip(parts, pieces, strict=True)}
