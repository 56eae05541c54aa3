"""Collect the statistics of every attention call in a forward pass, on one rank or several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..capture.call import AttentionCall, ObserveOptions
from ..capture.captured import Watched
from ..capture.catch import CaptureSession, catch
from ..capture.effects import HeadEffects
from ..core.reference import Definition
from ..stats.entropy import Entropy
from ..stats.map import Map
from ..stats.mass import Mass
from ..stats.max_logit import MaxLogit
from ..stats.offsets import OffsetHistogram
from ..stats.patterns import First, Induction, Previous, SameToken
from ..stats.received import Received
from ..stats.record import Reading, Record
from ..stats.statistic import Statistic
from ..stats.top_keys import TopKeys
from .head_labels import naming_statistics
from .sample import LookError, Part, Sample, as_look_error
from .schema import Layer


@dataclass(frozen=True)
class Place:
    """A call to a module in a forward pass; the second and later calls of a module are numbered."""

    name: str
    module: str
    heads: int
    queries: int
    keys: int


@contextmanager
def calls_of(
    model: nn.Module, on_call: Callable[[AttentionCall, Place], None]
) -> Iterator[CaptureSession]:
    """Call `on_call` for every attention call, each with a unique name.

    The second run of a module, as with layers that share weights, counts as a separate layer.
    """
    times: Counter[str] = Counter()

    def listen(call: AttentionCall) -> None:
        if call.heads < call.all_heads:
            raise LookError(
                f"{call.heads} of the {call.all_heads} heads of {call.name!r} are on this rank; "
                f"look at a model that has all of them, or use watch(), which supports this."
            )
        times[call.name] += 1
        again = times[call.name]
        name = call.name if again == 1 else f"{call.name} (call {again})"
        on_call(call, Place(name, call.name, call.heads, call.queries, call.keys))

    with catch(model, listen, function="look") as net:
        yield net


def survey(model: nn.Module, forward: Callable[[], object]) -> list[Place]:
    """List the attention calls of a forward pass, in order.

    Raises:
        LookError: there are none, or the model cannot run on this input.
    """
    places: list[Place] = []

    def on_call(call: AttentionCall, place: Place) -> None:
        call.on_complete(lambda _: places.append(place))

    with calls_of(model, on_call) as net:
        with as_look_error(model):
            forward()
        if not places:
            why = net.names.why_nothing()
            raise LookError(f"{type(model).__name__}: no attention was seen: {why}")
    return places


@dataclass(frozen=True)
class VisibleKeys(Statistic):
    """Count the keys that each query may attend to, `[B, H, T]`."""

    names = ("visible",)

    def metric(self, record: Record) -> dict[str, Reading]:
        extent = record.extent
        return {"visible": Reading(record.counts.expand(extent.batch, extent.heads, -1))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"visible": full.allowed.sum(-1)}


@dataclass(frozen=True)
class Resolution:
    """The resolution of the text that is shown: cells on a side of a map, keys for each query,
    and distance bins, each twice as wide as the one before."""

    map_side: int
    top_keys: int
    bins: int


@dataclass
class Collected:
    """The collected data: sums over all texts, the layers of the first text, and the progress.

    `modules` are the qualified module names of the layers.
    """

    passed: Callable[[], None]
    seen: Watched = field(default_factory=lambda: Watched(running=True))
    repeats: Watched = field(default_factory=lambda: Watched(running=True))
    layers: list[Layer] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)


def collect(
    model: nn.Module,
    sample: Sample,
    collected: Collected,
    forward: Callable[[], object],
    *,
    resolution: Resolution | None,
) -> None:
    """Add the statistics of a text; with a resolution, keep its layers for display."""

    def on_call(call: AttentionCall, place: Place) -> None:
        kind, queries, keys = sample.place(place.module, place.queries, place.keys)
        requested = _figures(kind, sample.parts[keys])
        shown = [] if resolution is None else _drawn(kind, place, resolution)
        readings = call.observe([*requested, *shown], ObserveOptions())
        names = [name for statistic in requested for name in statistic.names]
        _check(readings["entropy"], place, len(collected.seen.modules))
        figures = {name: readings[name] for name in names}
        layer = None
        if resolution is not None:
            layer = _layer(place, kind, queries, keys, readings, resolution)
        looked_at = call.batch * place.queries

        def keep(there: int) -> None:
            counts = looked_at, there
            collected.seen.add(place.name, figures, place.heads, queries=counts)
            collected.modules[place.name] = place.module
            if layer is not None:
                collected.layers.append(layer)
            collected.passed()

        call.on_complete(keep)

    with calls_of(model, on_call) as net:
        forward()
    collected.seen.left_out |= net.names.left_out


def collect_on_repeats(
    model: nn.Module, sample: Sample, collected: Collected, forward: Callable[[], object]
) -> None:
    """Add the statistics of self-attention on repeated random tokens."""

    def on_call(call: AttentionCall, place: Place) -> None:
        kind, _, keys = sample.place(place.module, place.queries, place.keys)
        ids = sample.parts[keys].ids
        if kind == "self" and ids is not None:
            requested = (Mass(Previous()), Mass(SameToken(ids)), Mass(Induction(ids)))
            readings = call.observe(requested, ObserveOptions())
            call.on_complete(lambda _: collected.repeats.add(place.name, readings, place.heads))
        call.on_complete(lambda _: collected.passed())

    with calls_of(model, on_call):
        forward()


def collect_short_repeat(
    model: nn.Module, sample: Sample, collected: Collected, forward: Callable[[], object]
) -> None:
    """Keep the attention weights of self-attention on a short repeated piece."""
    maps: dict[str, np.ndarray] = {}

    def on_call(call: AttentionCall, place: Place) -> None:
        kind, _, keys = sample.place(place.module, place.queries, place.keys)
        if kind == "self" and sample.parts[keys].ids is not None:
            drawn = _first_row(call.observe([Map(place.keys)], ObserveOptions())["map"])
            call.on_complete(lambda _: maps.update({place.name: drawn}))
        call.on_complete(lambda _: collected.passed())

    with calls_of(model, on_call):
        forward()
    collected.layers[:] = [
        replace(layer, repeat=maps.get(layer.name) if layer.kind == "self" else None)
        for layer in collected.layers
    ]


def _figures(kind: str, keys: Part) -> list[Statistic]:
    """List the statistics that are shown as numbers."""
    if kind == "self":
        return [MaxLogit(), *naming_statistics(keys.ids, keys.delimiters, keys.separators)]
    requested: list[Statistic] = [MaxLogit(), Entropy(), Mass(First())]
    named = naming_statistics(None, keys.delimiters, keys.separators)
    wanted = {"delimiters", "separators"}
    return [*requested, *(statistic for statistic in named if wanted & {*statistic.names})]


def _drawn(kind: str, place: Place, resolution: Resolution) -> list[Statistic]:
    """List the statistics that are drawn."""
    requested: list[Statistic] = [Map(_side(place, resolution)), Received(), VisibleKeys()]
    if resolution.top_keys:
        requested.append(TopKeys(resolution.top_keys))
    if kind == "self":
        requested.append(OffsetHistogram(resolution.bins, ahead=True))
    return requested


def bins_of(keys: int) -> int:
    """Return the number of distance bins, each twice as wide as the last, that cover the keys.

    >>> bins_of(2), bins_of(9), bins_of(1024)
    (2, 5, 11)
    """
    return 1 + max(1, (keys - 1).bit_length())


def _side(place: Place, resolution: Resolution) -> int:
    return min(resolution.map_side, max(place.queries, place.keys))


def _layer(
    place: Place,
    kind: str,
    queries: int,
    keys: int,
    readings: Mapping[str, Reading],
    resolution: Resolution,
) -> Layer:
    side = _side(place, resolution)
    maps = _first_row(readings["map"])[:, : min(side, place.queries), : min(side, place.keys)]
    empty = np.zeros((place.heads, place.queries, 0), dtype=np.float32)
    entropy = readings["entropy"]
    assert entropy.rows is not None
    valid = entropy.rows.expand(entropy.values.shape)[0].cpu().numpy()
    causal = kind == "self" and not np.triu(maps, 1).any()
    visible = _first_row(readings["visible"], np.int64).max(0)
    plain = np.arange(place.queries) + 1 if causal else place.keys
    return Layer(
        name=place.name,
        kind="self" if kind == "self" else "cross",
        causal=causal,
        queries=queries,
        keys=keys,
        maps=maps,
        top_keys=_first_row(readings["top_keys"], np.int32) if resolution.top_keys else empty,
        top_weights=_first_row(readings["top_weights"]) if resolution.top_keys else empty,
        entropy=np.where(valid, _first_row(entropy), np.nan),
        received=_first_row(readings["received"]),
        offsets=_offsets(readings) if kind == "self" else None,
        visible=None if np.all(visible == plain) else visible,
    )


def _offsets(readings: Mapping[str, Reading]) -> np.ndarray:
    """Return `[H, 2 · bins − 1]`: keys ahead from far to near, the query itself, keys behind."""
    ahead, behind = (_first_row(readings[name]) for name in ("offsets_ahead", "offsets"))
    return np.concatenate([ahead[:, :0:-1], behind], axis=1)


def behind_only(layers: list[Layer]) -> tuple[list[Layer], list[int]]:
    """Return layers and the first distance of each bin; drop the bins ahead if all are empty."""
    offsets = next((layer.offsets for layer in layers if layer.offsets is not None), None)
    if offsets is None:
        return layers, []
    bins = (offsets.shape[1] + 1) // 2
    distances = first_distances(bins)
    ahead = (layer.offsets[:, : bins - 1] for layer in layers if layer.offsets is not None)
    if any(part.any() for part in ahead):
        return layers, distances
    return [
        layer if layer.offsets is None else replace(layer, offsets=layer.offsets[:, bins - 1 :])
        for layer in layers
    ], distances[bins - 1 :]


def first_distances(bins: int) -> list[int]:
    """Return the first distance of each bin; keys ahead have negative distances.

    >>> first_distances(4)
    [-7, -3, -1, 0, 1, 2, 4]
    """
    return [*(1 - (1 << b) for b in range(bins - 1, 0, -1)), 0, *(1 << b for b in range(bins - 1))]


def _first_row(reading: Reading, dtype: type = np.float32) -> np.ndarray:
    return reading.values[0].detach().cpu().numpy().astype(dtype)


def _check(entropy: Reading, place: Place, layer: int) -> None:
    if not torch.isfinite(entropy.values).all():
        raise LookError(
            f"the attention of layer {layer} ({place.module}) is not finite; the model's weights "
            f"contain NaN or overflow"
        )


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the texts of a look."""

    rank: int = 0
    size: int = 1

    @classmethod
    def over_ranks(cls) -> Ranks:
        """Return the ranks of the default process group."""
        from torch import distributed as dist

        if not (dist.is_available() and dist.is_initialized()):
            return ONE_RANK
        return cls(dist.get_rank(), dist.get_world_size())

    def sums(self, *numbers: float | int) -> list[float | int]:
        """Sum numbers over ranks; a collective call."""
        if self.size == 1:
            return list(numbers)
        from ..parallel.merging import gathered

        return [sum(one) for one in zip(*gathered(numbers), strict=True)]

    def merge(self, collected: Collected) -> None:
        """Merge the data of all ranks into `collected`; the layers shown are those of rank 0."""
        if self.size == 1:
            return
        from ..parallel.merging import gathered

        parts = gathered((collected.seen, collected.layers, collected.modules))
        collected.seen = sum((seen for seen, _, _ in parts), Watched(running=True))
        collected.layers = parts[0][1]
        collected.modules = {k: v for _, _, modules in reversed(parts) for k, v in modules.items()}

    def merged(self, effects: HeadEffects | None) -> HeadEffects:
        """Merge the effects of all ranks; `effects` is `None` on a rank without a text."""
        if self.size == 1:
            assert effects is not None  # without a text, an error was raised earlier
            return effects
        from ..parallel.merging import merged

        whole = merged(effects)
        assert isinstance(whole, HeadEffects)
        return whole


ONE_RANK = Ranks()
