"""Probe relative positions of the layer's own: what they add to a score, and of what it is made.

Scores are compared with those of the same layer whose relative positions are zeros, so that all
else that knows positions is left out of it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..diagnosis.call_lines import FUSED, bare_name, softmax_input
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from ..target.checked_target import Target
from ..target.errors import Broken
from ..target.fills import FILLS
from ..target.introspect import is_called, names_called, names_in
from ..target.names import parts_of
from .probe_context import ProbeContext
from .relative_tables import Pair, does_without_shift, layer_of, pairs, zeroed

HIDDEN = -1e4
"""Scores below this are hidden by a mask."""
MOST = 80
"""Of more tokens than these, scores are not compared."""
FEW = 16
"""Of more tokens than these, it is not asked of which token each score is made."""
SLIGHT = 1e-3
"""Share of what positions do to the scores by which two that should be equal may differ."""
HELD = re.compile(
    r"rel(ative)?_?(pos|att|bias|emb|table|key)|pos(ition)?_?bias|(^|_)alibi|bias_table"
)
"""Names of tables of relative positions."""
LINEAR = re.compile(r"alibi|(?<!negative_)slopes?($|_)")
"""Names of what makes biases that grow with the distance (Press et al. 2022, ALiBi)."""
Layout = tuple[Tensor, tuple[int, ...]]
"""Tokens that stand in a row, a map or a room, and its sides."""


def relative(ctx: ProbeContext) -> Finding | None:
    """Relative positions count, and only by the distance of two tokens."""
    subject = ctx.exact
    if subject.module is None or not 4 <= ctx.tokens <= MOST or does_without_shift(subject):
        return None
    window = subject.roles.get("window")
    if subject.only and isinstance(window, tuple) and ctx.tokens - math.prod(window) not in (0, 1):
        return None  # another window is meant
    seen = [_looked_at(pair, ctx.x) for pair in pairs(subject)]
    results = [one for one in seen if one is not None]
    right = (one for one in results if one.severity == "passed")  # with a table as it is meant
    return next(right, results[0] if results else _rising(ctx) or _idle(ctx) or _alike(ctx))


def _rising(ctx: ProbeContext) -> Finding | None:
    """That ALiBi's biases favour what is far away: where all tokens are equal, each key has a
    higher score than the one behind it, in all heads."""
    module = ctx.exact.module
    if module is None or not any(LINEAR.search(name.lower()) for name in names_in(module)):
        return None
    scores = _scores(ctx.exact, ctx.x[:, :1].expand_as(ctx.x))
    last = None if scores is None else scores[:, -1].detach()
    if last is None or not bool(last.isfinite().all()):
        return None
    steps = last[:, :-1] - last[:, 1:]
    return found("relative", "rises") if bool((steps > SLIGHT * last.abs().max()).all()) else None


def _idle(ctx: ProbeContext) -> Finding | None:
    """That the order of the tokens counts for nothing, though relative positions are held."""
    subject, module = ctx.exact, ctx.exact.module
    if module is None or subject.guesses or subject.made_up or subject.caller.custom is not None:
        return None
    tables = {layer_of(name): name for name, _ in module.named_parameters()}
    name = next((one for one in tables if HELD.search(one.split(".")[-1].lower())), None)
    if name is None or not is_called(module, name, {*names_called(module)}):
        return None
    others = ctx.call(torch.cat((ctx.x[:, :-1].flip(-1), ctx.x[:, -1:]), 1))[:, -1]
    idle = ctx.orderless and not ctx.near(others, ctx.out[:, -1])
    return found("relative", "idle", name=name) if idle else None


def _alike(ctx: ProbeContext) -> Finding | None:
    """That positions which are handed in go in with no row for each token, and are the same for all
    keys: the order of the tokens counts for nothing."""
    subject, caller = ctx.exact, ctx.exact.caller
    names = [name for name in caller.named("embedding") if name in caller.made_up]
    if len(names) != 1 or not ctx.orderless:
        return None
    *every, _ = FILLS["embedding"](caller.target, caller.head_dim)  # the last has a single row
    for fill in every:
        own = replace(caller, fills={**caller.fills, names[0]: fill})
        with contextlib.suppress(Exception):  # whatever somebody's code raises
            replace(subject, caller=own)(ctx.x)
            return None
    return found("relative", "alike", name=names[0])


def _looked_at(pair: Pair, x: Tensor) -> Finding | None:
    """What its positions do; None where they do nothing, or others do, too."""
    looked = _compared(pair)
    if looked is None or not looked.plain or not looked.differ:
        return None
    if not looked.fits:
        return _apart(looked)
    return _of_another(pair, x) or _table(pair) or passed("relative")


# --- scores ---------------------------------------------------------------------------------------


class _Scores(TorchFunctionMode):
    """Keeps what the first softmax over `[…, T, T]` is taken of, with what is added to it."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.first: Tensor | None = None

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
        most = float(self.scores[:, self.seen].abs().max())
        return self.slight > 1e-6 * SLIGHT * max(1.0, most)

    @property
    def plain(self) -> bool:
        """Whether there are no positions but those."""
        return any(self.by_place(self.without, sides) for sides in self.layouts())

    @property
    def fits(self) -> bool:
        return any(self.by_place(self.scores, sides) for sides in self.layouts())

    def layouts(self) -> Iterator[Layout]:
        """Which tokens stand in a row, a map or a room, and its sides: all, or all but one."""
        tokens = torch.arange(len(self.seen))
        for part in (tokens, tokens[1:], tokens[:-1]):
            for sides in _factors(len(part)):
                yield part, sides

    def by_place(self, scores: Tensor, layout: Layout) -> bool:
        """Whether scores are settled by the difference of two places."""
        part, sides = layout
        away, seen = _differences(sides), self.seen[part][:, part]
        own = scores[:, part][:, :, part][:, seen]
        groups = away[seen].expand_as(own)
        ends = [own.new_zeros(len(own), int(away.max()) + 1) for _ in range(2)]
        low, high = (
            one.scatter_reduce(1, groups, own, how, include_self=False)
            for one, how in zip(ends, ("amin", "amax"), strict=True)
        )
        return float((high - low).max()) <= self.slight

    def parted(self) -> tuple[int, int, int, int]:
        """Two pairs of tokens that stand in one distance, and whose scores are not the same."""
        first = dict[int, tuple[int, int]]()
        for i, j in self.seen.nonzero().tolist():
            a, b = first.setdefault(i - j, (i, j))
            if float((self.scores[:, i, j] - self.scores[:, a, b]).abs().max()) > self.slight:
                return a, b, i, j
        raise AssertionError("all pairs of one distance have the same scores")


def _differences(sides: tuple[int, ...]) -> Tensor:
    """`[n, n]`: a number for each difference of two places among sides of these lengths.

    >>> _differences((2, 2))[0].tolist()
    [4, 3, 1, 0]
    """
    away = torch.zeros((), dtype=torch.long)
    places = torch.tensor([*itertools.product(*map(range, sides))])
    for axis, side in enumerate(sides):
        gap = places[:, None, axis] - places[:, axis]
        away = away * (2 * side - 1) + gap + side - 1
    return away


def _factors(number: int, most: int = 3) -> Iterator[tuple[int, ...]]:
    """Sides of a row, a map or a room of so many places.

    >>> list(_factors(4))
    [(4,), (2, 2)]
    """
    yield (number,)
    for side in range(2, number // 2 + 1) if most > 1 else ():
        if number % side == 0:
            yield from ((side, *rest) for rest in _factors(number // side, most - 1))


def _compared(pair: Pair) -> _Compared | None:
    """The scores of a layer for equal tokens; None where none are seen."""
    x = pair.layer.input()
    x = x[:, :1].expand_as(x)
    with torch.no_grad():
        both = [_scores(subject, x) for subject in (pair.layer.fresh(), pair.without.fresh())]
    scores, without = both
    if scores is None or without is None or scores.shape != without.shape:
        return None
    seen = _seen(pair, scores, without)
    one, two = (part - part.diagonal(0, -2, -1)[..., None] for part in (scores, without))
    return _Compared(one.double(), two.double(), seen) if seen.diagonal().all() else None


def _seen(pair: Pair, *scores: Tensor) -> Tensor:
    """`[T, T]`: which keys a query sees."""
    fine = torch.stack([(one > HIDDEN).all(0) & one.isfinite().all(0) for one in scores]).all(0)
    return fine.tril() if pair.layer.causal else fine


def _apart(looked: _Compared) -> Finding:
    """The finding on scores that are not settled by a distance."""
    i, j, a, b = looked.parted()
    return found("relative", "distance", i=i, j=j, a=a, b=b)


# --- of which token it is made --------------------------------------------------------------------


def _added(pair: Pair, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """`[T, T]`: what relative positions add to the scores, with gradients, and those without them;
    NaN where hidden."""
    both = [_scores(subject, x) for subject in (pair.layer, pair.without)]
    scores, without = both
    if scores is None or without is None or scores.shape != without.shape:
        return None
    draw = torch.Generator().manual_seed(6)
    share = torch.rand(len(scores), 1, 1, generator=draw, dtype=torch.float64).to(scores)
    added = ((scores - without).nan_to_num(0.0) * share).sum(0)
    seen = _seen(pair, scores, without)
    return added.where(seen, torch.nan), (without.nan_to_num(0.0) * share).sum(0)


def _of_another(pair: Pair, x: Tensor) -> Finding | None:
    """What positions add to the score of query i is made of another token than i."""
    x = x.detach().clone().requires_grad_(True)
    both = _added(pair, x) if x.shape[1] <= FEW else None
    if both is None or not both[0].requires_grad:
        return None
    added, without = both
    of = dict[tuple[int, int], int]()
    for i, j in itertools.product(range(len(added)), repeat=2):
        made = _made_of(added[i, j], x)
        if len(made) > 1:  # of both, or of all, as some mean it
            return None
        if made:
            of[i, j] = made[0]
    others = [(i, j) for (i, j), k in of.items() if k not in (i, j)]
    keys = [(i, j) for i, j in of if i != j] if all(k == j for (_, j), k in of.items()) else []
    for i, j in [*others, *keys][:1]:
        apart = set(_made_of(without[i, j], x)) - {i, j, of[i, j]}
        if apart or not (others or _is_query(pair, added)):
            return None
        following = all(j > i + 1 and of[i, j] == i + 1 for i, j in others)
        masked = any(pair.layer.caller.named(role) for role in ("mask", "causal", "padding"))
        way = "key" if not others else "next" if following and masked else "other"
        return found("relative", way, i=i, j=j, k=of[i, j])
    return None


def _made_of(score: Tensor, x: Tensor) -> list[int]:
    """The tokens that a score depends on."""
    if score.isnan() or not score.requires_grad:
        return []
    slope = torch.autograd.grad(score, x, retain_graph=True, allow_unused=True)[0]
    size = slope.norm(dim=-1).norm(dim=0) if slope is not None else torch.zeros(x.shape[1])
    return (size > 1e-6 * float(size.max().clamp(min=1e-6))).nonzero().flatten().tolist()


def _is_query(pair: Pair, added: Tensor) -> bool:
    """Whether it is made with the projection of queries, and not with that of keys."""
    weights = [
        dict(one.module.named_parameters()) for one in (pair.layer, pair.without) if one.module
    ]
    total, moved = added.nan_to_num(0.0).sum(), dict[str, list[bool]]()
    for name in weights[0]:
        if part := parts_of(layer_of(name).split(".")[-1]):
            own = [one[name] for one in weights]
            slopes = torch.autograd.grad(total, own, retain_graph=True, allow_unused=True)
            sizes = [slope for slope in slopes if slope is not None]
            both = sum(sizes, torch.zeros(()))  # what does not come of positions cancels
            largest = max((float(one.abs().max()) for one in sizes), default=0.0)
            moved.setdefault(part, []).append(float(both.abs().max()) > 1e-9 * largest)
    return any(moved.get("q", ())) and "k" in moved and not any(moved["k"])


# --- tables of a window ---------------------------------------------------------------------------


def _table(pair: Pair) -> Finding | None:
    """A table of a window that has a row for each difference of two places must use all of them."""
    layer = pair.layer
    if not pair.tables or (seen := _unused(layer, pair.tables)) is None:
        return None
    for name, value in layer.arguments.items():
        if not isinstance(value, tuple) or len(set(value)) < 2:
            continue
        try:
            even = layer.rebuilt(**{name: (2,) * len(value)})
        except (Broken, ValueError, TypeError):
            continue
        if even is not None and _unused(even.randomised().double(), pair.tables) is None:
            return None  # windows that are as wide as high are meant
    return seen


def _unused(layer: Target, tables: Sequence[str]) -> Finding | None:
    """The finding on a table some of whose rows no two places of the window take."""
    if layer.causal_from == "mask" and layer.open_form is None:  # it can do without
        layer = replace(layer, causal=False)
    looked = _compared(Pair(layer, zeroed(layer, tables)))
    own = dict(layer.module.named_parameters()) if layer.module is not None else {}
    for name, axis in itertools.product(tables, (0, 1)) if looked is not None else ():
        if looked is None or name not in own or own[name].ndim != 2:
            continue
        rows = own[name].shape[axis]
        window = next((one[1] for one in looked.layouts() if _as_many(one, rows, looked)), None)
        used = _used(layer, name) if window is not None else None
        if window is None or used is None:
            continue
        taken = int(used.any(1 - axis).sum())
        if taken < math.prod(2 * side - 1 for side in window):
            said = " by ".join(map(str, window))
            return found("relative", "shared", name=name, rows=rows, used=taken, window=said)
    return None


def _as_many(layout: Layout, rows: int, looked: _Compared) -> bool:
    """Whether a table has a row for each difference; three more where a token stands apart."""
    part, sides = layout
    more = 0 if len(part) == len(looked.seen) else 3
    every = bool(looked.seen.all()) and looked.by_place(looked.scores, layout)
    return len(sides) > 1 and every and rows == math.prod(2 * side - 1 for side in sides) + more


def _used(subject: Target, name: str) -> Tensor | None:
    """Which numbers of a table any score takes."""
    layer = subject.fresh()
    assert layer.module is not None
    one = dict(layer.module.named_parameters())[name].requires_grad_(True)
    scores = _scores(layer, layer.input())
    if scores is None or not scores.requires_grad:
        return None
    draw = torch.Generator().manual_seed(7)
    share = torch.rand(scores.shape, generator=draw, dtype=torch.float64).to(scores)
    slope = torch.autograd.grad((scores * share).sum(), one, allow_unused=True)[0]
    return None if slope is None else slope != 0
