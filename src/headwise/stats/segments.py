"""`Segments`: the attention to each part of a context, computed with one-hot values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..core.index import take
from ..core.masks import Dense
from ..core.numbers import as_int
from ..core.reference import Definition
from .blocks import RowFigure, ScoreBlock
from .plan import CALL, ROWS, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic
from .view import View, visible_keys

Range = tuple[int, int]


class Segments(Statistic):
    """The attention to each segment of the keys, by name: `[B, H, T]`, between 0 and 1.

    For a segment J it is `Σ_{j∈J} p_ij`. As for `Mass`, the mean is over the queries that may
    attend to a key of the segment. All segments are computed together: by one extra attention call
    per D segments, or, for few queries, from their rows of P.

    Args:
        segments: maps each name to the positions of its keys: a range `(start, stop)`, a list of
            ranges, or a boolean tensor `[S]` or `[B, S]`, such as `input_ids == image_token`.
            Positions count from the first token of the sequence, so the positions of a segment stay
            valid while a cache grows or drops keys; later keys are in no segment.
        first_key: the position of the call's first key; `watch()` sets it.
        positions: the number of keys that have a position, if keys without one follow them.

    Raises:
        ValueError: there are no segments, a name is not a string, or positions are malformed.

    >>> import headwise as hw
    >>> q, k, v = torch.randn(3, 1, 4, 10, 8)
    >>> segments = hw.Segments({"system": (0, 3), "question": [(3, 5), (7, 10)]})
    >>> seen = hw.observe(q, k, v, segments, mask=hw.Causal())
    >>> seen["system"].shape
    torch.Size([1, 4, 10])
    >>> bool((seen["system"][..., :3] > 0.999).all())  # no other keys are visible yet
    True
    """

    def __init__(
        self,
        segments: Mapping[str, Range | Sequence[Range] | Tensor],
        first_key: int = 0,
        positions: int | None = None,
    ) -> None:
        if not isinstance(segments, Mapping) or not segments:
            raise ValueError(
                f"Segments({segments!r}): segments must be a dict of names and ranges, such as "
                f'{{"image": (4, 580)}}.'
            )
        self.segments = {name: _positions(name, given) for name, given in segments.items()}
        self.first_key, self.positions = first_key, positions
        self.needs = dict.fromkeys(self.segments, _OnSegments(self))

    @classmethod
    def of_tokens(
        cls, inputs: Int[Tensor, "*B S"] | Mapping[str, Any], tokens: Any, runs: bool = False
    ) -> Segments:
        """Return the segments of tokens that represent images, videos or audio, by their ids.

        Args:
            inputs: the inputs of the model: the output of its processor, or the ids in it,
                `[S]` or `[B, S]`, with one token for each part of an image.
            tokens: the id of each kind, such as `{"image": 151655}`; or a model of transformers or
                its config, which has them as `image_token_id` (or `image_token_index`),
                `video_token_id` and `audio_token_id`. Kinds that do not occur are left out.
            runs: make a segment of each run of such tokens, and of each text before, between and
                after them: `text 1`, `image 1`, `text 2`, …; without a number if there is only one
                of its kind.

        Raises:
            ValueError: no such id occurs.

        >>> import headwise as hw
        >>> ids = torch.tensor([[5, 39, 39, 39, 7]])
        >>> hw.Segments.of_tokens(ids, {"image": 39, "audio": 38}).names
        ('image',)
        >>> hw.Segments.of_tokens(ids, {"image": 39}, runs=True).names
        ('text 1', 'image', 'text 2')
        """
        if not isinstance(tokens, Mapping):
            config = getattr(tokens, "config", tokens)
            tokens = {
                kind: value
                for kind in ("image", "video", "audio")
                for name in ("id", "index")
                if isinstance(value := getattr(config, f"{kind}_token_{name}", None), int)
            }
        given = inputs if isinstance(inputs, Mapping) else {"input_ids": inputs}
        ids = torch.as_tensor(given["input_ids"])
        found = {name: mask for name, one in tokens.items() if bool((mask := ids == one).any())}
        if not found:
            raise ValueError(
                f"Segments.of_tokens(…, {tokens}): no such id occurs in input_ids "
                f"{list(ids.shape)}; give ids as the processor gives them."
            )
        if not runs:
            return cls(found)
        text = torch.as_tensor(given.get("attention_mask", torch.ones_like(ids))).bool()
        return cls(_runs({"text": text & ~torch.stack([*found.values()]).any(0), **found}))

    def __repr__(self) -> str:
        return f"Segments({self.segments})"

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.segments)

    def among(self, first_key: int, positions: int | None) -> Segments:
        """Return the segments for a call whose first key has position `first_key` and whose first
        `positions` keys have a position."""
        return Segments(self.segments, first_key, positions)

    def chosen(self, keys: int, device: torch.device) -> Bool[Tensor, "#B S n"]:
        """Return True for the keys in each segment, with one column per segment."""
        place = torch.arange(keys, device=device) + self.first_key
        columns = []
        for given in self.segments.values():
            if isinstance(given, Tensor):
                last = given.shape[-1] - 1
                column = given.to(device)[..., place.clamp(max=last)] & (place <= last)
            else:
                column = torch.zeros_like(place, dtype=torch.bool)
                for start, stop in given:
                    column = column | ((place >= start) & (place < stop))
            columns.append(column if column.dim() == 2 else column[None])
        every = torch.stack(torch.broadcast_tensors(*columns), dim=-1)
        if self.positions is not None:
            every[:, self.positions :] = False
        return every

    def metric(self, record: Record) -> dict[str, Reading]:
        ((mass, targets),) = {record[need] for need in self.needs.values()}
        among = record.view.valid_rows
        return {
            name: Reading(mass[..., number], targets[..., number], among=among)
            for number, name in enumerate(self.names)
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        chosen = self.chosen(full.extent.keys, full.weights.device)
        mass = full.weights @ chosen[:, None].to(full.weights.dtype)
        return dict(zip(self.names, mass.unbind(-1), strict=True))


def _positions(name: object, given: object) -> tuple[Range, ...] | Tensor:
    """Return the positions of a segment as ranges or a boolean tensor.

    Raises:
        ValueError: they are neither.
    """
    if isinstance(name, str) and name and isinstance(given, Tensor):
        if given.dtype is torch.bool and given.dim() in (1, 2) and given.shape[-1]:
            return given
    elif isinstance(name, str) and name and isinstance(given, Sequence):
        ranges = [given] if given and as_int(given[0]) is not None else given
        if all(isinstance(one, Sequence) and len(one) == 2 for one in ranges):
            ends = [(as_int(start), as_int(stop)) for start, stop in ranges]
            if all(a is not None and b is not None and 0 <= a <= b for a, b in ends):
                return tuple(ends)  # type: ignore[return-value]
    shown = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else repr(given)
    raise ValueError(
        f"Segments({{{name!r}: {shown}}}): a segment is a name with a range (start, stop) of "
        f"positions from 0, a list of ranges, or a boolean tensor [S] or [B, S]."
    )


def _runs(masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return each run of True in each mask, `[S]` or `[B, S]`, by name and number, in order."""
    runs = {}
    for name, mask in masks.items():
        before = torch.nn.functional.pad(mask[..., :-1], (1, 0))
        number = (mask & ~before).cumsum(-1) * mask
        last = int(number.max())
        runs |= {f"{name} {n}" if last > 1 else name: number == n for n in range(1, last + 1)}
    begins = {name: int(run.nonzero()[:, -1].min()) for name, run in runs.items()}
    return {name: runs[name] for name in sorted(runs, key=begins.__getitem__)}


class _OnSegments(Need):
    """`Σ_{j∈J} p_ij` per segment, `[B, H, n, segments]`, and the queries that see a key of it."""

    name = "segments"

    def __init__(self, of: Segments) -> None:
        self.of = of

    def route(self, setting: Setting) -> Route:
        if setting.extent.queries * 8 <= setting.extent.keys:
            return Route(ROWS, "for few queries it costs less than a call, which pads all keys")
        calls = -(-len(self.of.names) // setting.dim)
        return Route(CALL) if calls == 1 else Route(f"identity: {calls} more calls")

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor]:
        view = work.view
        chosen = self.of.chosen(view.extent.keys, view.device)
        if len(chosen) not in (1, view.extent.batch):
            raise ValueError(
                f"Segments(…) in a call with {view.extent}: boolean tensors have {len(chosen)} "
                f"rows; give [S], or one row for each text."
            )
        one_hot = chosen.to(view.dtype)[:, None]
        targets = _see(chosen, view)
        if route.kind == ROWS:
            return _of_rows(one_hot, work), targets
        mass, of_keys = work.mean_among_keys(one_hot)
        mass = mass if view.sinks is None else mass * work.left(of_keys)[..., None]
        return torch.where(view.valid_rows[..., None], mass, 0.0), targets


def _of_rows(one_hot: Float[Tensor, "#B 1 S n"], work: Work) -> Tensor:
    """Return the masses from rows of P."""
    shape = work.view.extent.batch, work.view.extent.heads

    def mass(number: int) -> RowFigure:
        def within(block: ScoreBlock) -> Tensor:
            chosen = one_hot[:, :, block.keys, number, None]
            return (block.p.unflatten(0, shape) @ chosen)[..., 0].flatten(0, 1)

        return within

    return torch.stack(work.row_figures([mass(n) for n in range(one_hot.shape[-1])]), dim=-1)


def _see(chosen: Bool[Tensor, "#B S n"], view: View) -> Bool[Tensor, "#B #H t n"]:
    """Return True for queries that may attend to a key of a segment, a column for each segment."""
    if view.ranges is not None:
        before = torch.nn.functional.pad(chosen.long().cumsum(1), (0, 0, 1, 0))
        low, high = (take(before, edge[..., None]).squeeze(3) for edge in view.ranges)
        return high > low
    counts = [
        visible_keys(view.mask & Dense(column[:, None, None]), view.extent, view.device)
        for column in chosen.unbind(-1)
    ]
    return torch.stack(torch.broadcast_tensors(*counts), dim=-1) > 0
