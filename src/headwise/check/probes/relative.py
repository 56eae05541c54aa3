"""Probe relative positions of the layer's own: what they add to a score, and of what it is made.

Scores are compared with those of the same layer whose relative positions are zeros, so that all
else that knows positions is left out of it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..diagnosis.call_lines import FUSED, bare_name, softmax_input
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from ..target.checked_target import Broken, Target
from ..target.fills import Fill, Place
from ..target.introspect import names_called
from ..target.names import parts_of
from .probe_context import ProbeContext

SAYS = re.compile(r"relativ|rel_|rel(?=[.]|$)|relpos|relemb|skew|distance|alibi")
"""Names of tables and modules that hold relative positions."""
OF_CLASS = re.compile(r"[Rr]elativ|Rel(?=[A-Z]|$)|A[Ll]i[Bb]i|Distance|Skew")
"""Names of classes that say so."""
TURNS = re.compile(r"(rel\w*_?|pos\w*_?)shift|skew|rel_to_abs")
"""Names of functions that move the scores of each query to their keys."""
POSITIONS = re.compile(r"pos|(^|\.)er?$|emb")
"""Names of what holds positions, where the layer says that its own are relative."""
OTHERWISE = re.compile(r"abs|contextual|cope|fire|token|word|segment|type")
"""Names of other embeddings, and of positions that count by more than a distance."""
HIDDEN = -1e4
"""Scores below this are hidden by a mask."""
MOST = 80
"""Of more tokens than these, scores are not compared."""
SLIGHT = 1e-3
"""Share of what positions do to the scores by which two that should be equal may differ."""


def relative(ctx: ProbeContext) -> Finding | None:
    """Relative positions count, and only by the distance of two tokens."""
    if ctx.exact.module is None or not 4 <= ctx.tokens <= MOST:
        return None
    subject = ctx.exact
    if subject.causal_from == "mask" and subject.open_form is None:  # it can do without
        subject = replace(subject, causal=False)
    for pair in _pairs(subject):
        equal = ctx.x[:, :1].expand_as(ctx.x)
        looked = _compared(pair, equal)
        if looked is None or not looked.plain or not looked.differ:
            continue
        if not looked.fits:
            return _apart(looked)
        return _of_another(pair, ctx.x) or _table(pair, looked) or passed("relative")
    return None


# --- the same layer with and without its relative positions ---------------------------------------


@dataclass(frozen=True)
class _Pair:
    """A layer, the same without its relative positions, and the tables in it that hold them."""

    layer: Target
    without: Target
    tables: tuple[str, ...] = ()


def _pairs(subject: Target) -> Iterator[_Pair]:
    """What may be compared, the surest first."""
    tables = _own_tables(subject)
    if tables:
        yield _Pair(subject, _zeroed(subject, tables), tables)
        return
    names = list(_handed_in(subject))
    if not names or not _says_relative(subject):
        return
    place = Place(subject.input(), subject.input())
    for kind in (_by_distance, _far_and_wide, _rows):
        fills = {name: kind(subject, name, place) for name in names}
        if any(fill is None for fill in fills.values()):
            continue
        given = {name: fill for name, fill in fills.items() if fill is not None}
        layer = _with(subject, given)
        if all(_runs(layer, *sizes) for sizes in ((7, 2), (5, 4))):
            yield _Pair(layer, _with(subject, {n: _silent(fill) for n, fill in given.items()}))


def _own_tables(subject: Target) -> tuple[str, ...]:
    """Names of the parameters and buffers that hold relative positions."""
    module = subject.module
    assert module is not None
    kinds = {path: type(child).__name__ for path, child in module.named_modules() if path}
    numbers = [n for n, one in _numbers(module) if not OTHERWISE.search(n.lower())]

    def says(name: str) -> bool:
        holders = (kind for path, kind in kinds.items() if name.startswith(f"{path}."))
        return bool(SAYS.search(name.lower())) or any(OF_CLASS.search(kind) for kind in holders)

    surely = tuple(name for name in numbers if says(name) and not parts_of(_layer(name)))
    if surely or not _says_relative(subject) or any(True for _ in _handed_in(subject)):
        return surely
    if len(numbers) < sum(1 for _ in _numbers(module)):
        return ()
    return tuple(name for name in numbers if POSITIONS.search(_layer(name).lower()))


def _layer(name: str) -> str:
    """A parameter's path without the name of its kind."""
    return re.sub(r"\.(weight|bias)$", "", name)


def _numbers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    pairs = itertools.chain(module.named_parameters(), module.named_buffers())
    return ((name, one) for name, one in pairs if one.is_floating_point())


def _says_relative(subject: Target) -> bool:
    """Whether a class of the layer says so, or one of its methods moves scores to their keys."""
    module = subject.module
    assert module is not None
    kinds = (type(child).__name__ for child in module.modules())
    return any(OF_CLASS.search(kind) for kind in kinds) or _turns(module)


def _turns(module: nn.Module) -> bool:
    return any(TURNS.search(name) for name in names_called(module))


def _zeroed(subject: Target, names: Sequence[str]) -> Target:
    own = subject.fresh()
    assert own.module is not None
    with torch.no_grad():
        for name, one in _numbers(own.module):
            if name in names:
                one.zero_()
    return own


def _handed_in(subject: Target) -> Iterator[str]:
    """Names of arguments that get tables of positions."""
    caller = subject.caller
    for name in () if caller.custom is not None or not subject.bare else caller.parameters:
        said = name not in caller.inputs and name not in caller.extra
        if said and re.search("pos|rel|dist", name.lower()) and "mask" not in name.lower():
            value = caller.fill(name)(Place(subject.input(), subject.input()))
            if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1:
                yield name


def _with(subject: Target, fills: dict[str, Fill]) -> Target:
    caller = replace(subject.caller, fills={**subject.caller.fills, **fills})
    return replace(subject, caller=caller).fresh()


def _runs(subject: Target, tokens: int, batch: int) -> bool:
    try:
        with torch.no_grad():
            subject(subject.input(tokens, batch))
    except Exception:  # whatever a table of the wrong shape raises
        return False
    return True


def _silent(fill: Fill) -> Fill:
    return lambda place: torch.zeros_like(fill(place))


def _waves(turn: Tensor, width: int) -> Tensor:
    """Numbers `[…, width]` that differ for each number of another, as random ones would."""
    draw = torch.Generator().manual_seed(4)
    speeds, starts = (torch.rand(width, generator=draw, dtype=turn.dtype) * 6 for _ in "ab")
    return (turn[..., None] * speeds + starts).sin()


def _by_distance(subject: Target, name: str, place: Place) -> Fill | None:
    """`[T, S, E]`, or of another width, where each pair of tokens has a row of its distance."""
    value: Tensor = subject.caller.fill(name)(place)
    square = value.ndim > 2 and value.shape[-3:-1] == (place.x.shape[-2], place.source.shape[-2])
    width, lead = value.shape[-1], value.ndim - 3 if square else 0

    def fill(place: Place) -> Tensor:
        away = place.positions[:, None] - place.positions
        table = _waves(away.to(place.x.dtype), width)
        return table[(None,) * lead]

    return fill


def _far_and_wide(subject: Target, name: str, place: Place) -> Fill | None:
    """A row for each distance of two tokens, `[1, 2 T − 1, E]` or as it stands now."""
    value: Tensor = subject.caller.fill(name)(place)
    axis = next((n for n, size in enumerate(value.shape[:-1]) if size == _distances(place)), -1)
    lead, between = (1, 0) if axis < 0 else (axis, value.ndim - axis - 2)

    def fill(place: Place) -> Tensor:
        rows = torch.arange(_distances(place), dtype=place.x.dtype)
        table = _waves(rows, value.shape[-1])
        return table.reshape(*[1] * lead, len(rows), *[1] * between, -1)

    return fill


def _distances(place: Place) -> int:
    return place.x.shape[-2] + place.source.shape[-2] - 1


def _rows(subject: Target, name: str, place: Place) -> Fill | None:
    """The table as it was found, where the layer says that it moves the scores itself."""
    return subject.caller.fill(name) if subject.module and _turns(subject.module) else None


# --- scores ---------------------------------------------------------------------------------------


class _Scores(TorchFunctionMode):
    """Keeps what the first softmax over `[…, T, T]` is taken of, with what is added to it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens, self.first = tokens, None

    first: Tensor | None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = bare_name(func), kwargs or {}
        scores = softmax_input(name, args, kwargs) if self.first is None else None
        if scores is not None and scores.shape[-2:] == (self.tokens, self.tokens):
            bias = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
            if name == FUSED and isinstance(bias, Tensor):
                added = bias if bias.is_floating_point() else torch.where(bias, 0.0, -torch.inf)
                scores = scores + added
            self.first = scores
        return func(*args, **kwargs)


def _scores(subject: Target, x: Tensor) -> Tensor | None:
    """`[n, T, T]`, of all heads and sequences; None where none are seen."""
    seen = _Scores(x.shape[1])
    try:
        with seen:
            subject(x)
    except Exception:  # whatever it raises, another probe says so
        return None
    return None if seen.first is None else seen.first.flatten(0, -3)


@dataclass(frozen=True)
class _Compared:
    """Scores of equal tokens, of a layer with and without its relative positions, less each query's
    score for itself."""

    scores: Tensor
    without: Tensor
    seen: Tensor

    @property
    def slight(self) -> float:
        return SLIGHT * float((self.scores - self.without)[:, self.seen].abs().max())

    @property
    def differ(self) -> bool:
        """Whether positions change scores at all."""
        return self.slight > 1e-6 * SLIGHT and self.slight > 1e-6 * float(
            self.scores[:, self.seen].abs().max()
        )

    @property
    def plain(self) -> bool:
        """Whether there are no positions but those."""
        return any(self.by_place(self.without, sides) for sides in self.layouts())

    @property
    def fits(self) -> bool:
        return any(self.by_place(self.scores, sides) for sides in self.layouts())

    def layouts(self) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Which tokens stand in a row, a map or a room, and its sides: all, or all but one."""
        tokens = torch.arange(len(self.seen))
        for part in (tokens, tokens[1:], tokens[:-1]):
            for sides in _factors(len(part)):
                yield part, sides

    def by_place(self, scores: Tensor, layout: tuple[Tensor, tuple[int, ...]]) -> bool:
        """Whether scores are settled by the difference of two places."""
        return self.parted(scores, layout) is None

    def parted(
        self, scores: Tensor, layout: tuple[Tensor, tuple[int, ...]]
    ) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Two pairs of tokens of one difference whose scores are not the same."""
        part, sides = layout
        first: dict[tuple[int, ...], tuple[int, int]] = {}
        places = list(itertools.product(*map(range, sides)))
        for (i, here), (j, there) in itertools.product(zip(part.tolist(), places), repeat=2):
            if not self.seen[i, j]:
                continue
            away = tuple(a - b for a, b in zip(here, there, strict=True))
            a, b = first.setdefault(away, (i, j))
            if float((scores[:, i, j] - scores[:, a, b]).abs().max()) > self.slight:
                return (a, b), (i, j)
        return None


def _factors(number: int, most: int = 3) -> Iterator[tuple[int, ...]]:
    """Sides of a row, a map or a room of so many places.

    >>> list(_factors(4))
    [(4,), (2, 2)]
    """
    yield (number,)
    for side in range(2, number // 2 + 1) if most > 1 else ():
        if number % side == 0:
            yield from ((side, *rest) for rest in _factors(number // side, most - 1))


def _compared(pair: _Pair, x: Tensor) -> _Compared | None:
    with torch.no_grad():
        both = [_scores(subject, x) for subject in (pair.layer.fresh(), pair.without.fresh())]
    scores, without = both
    if scores is None or without is None or scores.shape != without.shape:
        return None
    seen = _seen(pair, scores, without)
    apart = (one - one.diagonal(0, -2, -1)[..., None] for one in (scores, without))
    return _Compared(*(one.double() for one in apart), seen) if seen.diagonal().all() else None


def _seen(pair: _Pair, *scores: Tensor) -> Tensor:
    """`[T, T]`: which keys a query sees."""
    fine = torch.stack([(one > HIDDEN).all(0) & one.isfinite().all(0) for one in scores]).all(0)
    return fine.tril() if pair.layer.causal else fine


def _apart(looked: _Compared) -> Finding | None:
    straight = next(looked.layouts())
    where = looked.parted(looked.scores, straight)
    assert where is not None
    (i, j), (a, b) = where
    return found("relative", "distance", i=i, j=j, a=a, b=b)


# --- of which token it is made ---------------------------------------------------------------------


def _added(pair: _Pair, x: Tensor) -> Tensor | None:
    """`[T, T]`: what relative positions add to the scores, with gradients; NaN where hidden."""
    both = [_scores(subject, x) for subject in (pair.layer, pair.without)]
    scores, without = both
    if scores is None or without is None or scores.shape != without.shape:
        return None
    draw = torch.Generator().manual_seed(6)
    share = torch.rand(len(scores), 1, 1, generator=draw, dtype=torch.float64).to(scores)
    added = ((scores - without).nan_to_num(0.0) * share).sum(0)
    return added.where(_seen(pair, scores, without), torch.nan)


def _of_another(pair: _Pair, x: Tensor) -> Finding | None:
    """What positions add to the score of query i is made of another token than i."""
    x = x.detach().clone().requires_grad_(True)
    added = _added(pair, x)
    if added is None or not added.requires_grad:
        return None
    tokens = len(added)
    slopes = torch.zeros(tokens, tokens, tokens, dtype=torch.float64)
    for i, j in itertools.product(range(tokens), repeat=2):
        slope = None
        if not added[i, j].isnan():
            slope = torch.autograd.grad(added[i, j], x, retain_graph=True, allow_unused=True)[0]
        if slope is not None:
            slopes[i, j] = slope.detach().double().norm(dim=-1).norm(dim=0)
    made = slopes > 1e-6 * slopes.max()
    pairs = [(i, j) for i, j in itertools.product(range(tokens), repeat=2) if made[i, j].any()]
    if not pairs or any(int(made[i, j].sum()) > 1 for i, j in pairs):
        return None
    of = {(i, j): int(made[i, j].nonzero()) for i, j in pairs}
    others = [(i, j) for (i, j), k in of.items() if k not in (i, j)]
    if others:
        i, j = others[0]
        following = all(j > i + 1 and of[i, j] == i + 1 for i, j in others)
        masked = any(pair.layer.caller.named(role) for role in ("mask", "causal", "padding"))
        way = "next" if following and masked else "other"
        return found("relative", way, i=i, j=j, k=of[i, j])
    if all(k == j for (_, j), k in of.items()) and _is_query(pair, added):
        i, j = next((i, j) for i, j in pairs if i != j)
        return found("relative", "key", i=i, j=j)
    return None


def _is_query(pair: _Pair, added: Tensor) -> bool:
    """Whether it is made with the projection of queries, and not with that of keys."""
    weights = [dict(one.module.named_parameters()) for one in (pair.layer, pair.without) if one.module]
    total, moved = added.nan_to_num(0.0).sum(), dict[str, list[bool]]()
    for name in weights[0]:
        if part := parts_of(_layer(name).split(".")[-1]):
            own = [one[name] for one in weights]
            slopes = torch.autograd.grad(total, own, retain_graph=True, allow_unused=True)
            sizes = [slope for slope in slopes if slope is not None]
            both = sum(sizes, torch.zeros(()))  # what does not come of positions cancels
            largest = max((float(one.abs().max()) for one in sizes), default=0.0)
            moved.setdefault(part, []).append(float(both.abs().max()) > 1e-9 * largest)
    return any(moved.get("q", ())) and "k" in moved and not any(moved["k"])


# --- tables of a window ----------------------------------------------------------------------------


def _table(pair: _Pair, looked: _Compared) -> Finding | None:
    """A table of a window that has a row for each difference of two places must use all of them."""
    seen = _unused(pair, looked)
    if seen is None:
        return None
    for name, value in pair.layer.arguments.items():
        if not isinstance(value, tuple) or len(set(value)) < 2 or math.prod(value) < 4:
            continue
        try:
            even = pair.layer.rebuilt(**{name: (2,) * len(value)})
        except (Broken, ValueError, TypeError):
            continue
        if even is not None and even.module is not None:
            even = even.randomised().double()
            other = _Pair(even, _zeroed(even, pair.tables), pair.tables)
            again = _compared(other, even.input()[:, :1].expand(-1, even.input().shape[1], -1))
            if again is not None and _unused(other, again) is None:
                return replace(seen, severity="warning")
    return seen


def _unused(pair: _Pair, looked: _Compared) -> Finding | None:
    """The finding on a table some of whose rows no two places of the window take."""
    module = pair.layer.module
    assert module is not None
    own = dict(module.named_parameters())
    for name in pair.tables:
        if name not in own or own[name].ndim != 2:
            continue
        windows = [
            (axis, layout[1])
            for axis in (0, 1)
            for layout in looked.layouts()
            if len(layout[1]) > 1 and _as_many(layout, own[name].shape[axis], looked)
        ]
        used = _rows_used(pair, name) if windows else None
        for axis, sides in windows if used is not None else ():
            assert used is not None
            taken, rows = int(used.any(1 - axis).sum()), own[name].shape[axis]
            if taken < math.prod(2 * side - 1 for side in sides):
                window = " by ".join(map(str, sides))
                return found("relative", "shared", name=name, rows=rows, used=taken, window=window)
    return None


def _as_many(layout: tuple[Tensor, tuple[int, ...]], rows: int, looked: _Compared) -> bool:
    """Whether a table has a row for each difference, and three more where one token stands apart."""
    part, sides = layout
    more = 0 if len(part) == len(looked.seen) else 3
    every = bool(looked.seen.all()) and looked.by_place(looked.scores, layout)
    return every and rows == math.prod(2 * side - 1 for side in sides) + more


def _rows_used(pair: _Pair, name: str) -> Tensor | None:
    """Which numbers of a table any score takes."""
    layer = pair.layer.fresh()
    assert layer.module is not None
    one = dict(layer.module.named_parameters())[name].requires_grad_(True)
    scores = _scores(layer, layer.input())
    if scores is None or not scores.requires_grad:
        return None
    draw = torch.Generator().manual_seed(7)
    share = torch.rand(scores.shape, generator=draw, dtype=torch.float64).to(scores)
    slope = torch.autograd.grad((scores * share).sum(), one, allow_unused=True)[0]
    return None if slope is None else slope != 0
