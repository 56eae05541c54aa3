"""Judge what turns queries and keys by itself: a module or function of rotary positions.

All tokens are made equal, once as queries and once as keys. What is turned well then has products
in which only the distance of two tokens counts (Su et al. 2021, RoFormer, eq. 16).
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding, Verdict
from ..target.call_adapter import Caller, tensors_in
from ..target.checked_target import BATCH, TOKENS
from ..target.construct import build, name_of
from ..target.copies import copied
from ..target.errors import is_users, told
from ..target.introspect import IS_MORE, TURNS
from ..target.names import calling_role
from ..target.signatures import source_of, with_forward
from ..target.sizes import BuildSizes, flat, shown
from .devices import Elsewhere, everything

HEADS, WIDTH, WIDTHS = 3, 24, (8, 16, 24, 64, 128)
"""How many heads a tensor has that is turned, how wide x is in a call that is shown, and how wide
heads may be where no argument tells."""
LAYOUTS = {
    "[B, H, T, D]": lambda row: row.expand(BATCH, HEADS, TOKENS, -1),
    "[B, T, H, D]": lambda row: row.expand(BATCH, TOKENS, HEADS, -1),
    "[B, T, D]": lambda row: row.expand(BATCH, TOKENS, -1),
    "[T, B, H, D]": lambda row: row.expand(TOKENS, BATCH, HEADS, -1),
    "[T, D]": lambda row: row.expand(TOKENS, -1),
}
"""The shapes in which queries may go in, all of them the same row `[D]`."""
SHOWN = ("[B, T, D]",)
"""In which of them a call gets them that is shown."""
OF_MAPS = re.compile(
    r"(?<![a-z])(2d|3d|axial|height|grid|patch|image|frames|vision|spatial|mrope)", re.I
)
"""Names of positions in more than one dimension."""
OF_LENGTHS = re.compile(r"xpos|scale_base|downscale|decay", re.I)
"""Names of lengths that change on purpose."""
GATHERS = re.compile(r"softmax|scaled_dot_product|nn\.Linear|MultiheadAttention")
"""Code that does more than turn."""
SAID = "Only the distance of two tokens counts in products of what it turned."
NEAR = 1e-3
"""Of the product of two vectors of length 1."""


def judge_rotary(
    thing: Any,
    arguments: dict[str, Any],
    sizes: BuildSizes,
    call: Callable[[Any, Tensor], Any] | None = None,
) -> Verdict | None:
    """The verdict on what only turns queries and keys; None for anything else.

    Args:
        call: how somebody showed that it is called, on queries `[B, T, D]`.

    Raises:
        ValueError: it is such, and how to build or to call it cannot be worked out, or it is right
            to turn in another way.
    """
    if not _turns(thing) or (arguments and not inspect.isclass(thing)):
        return None
    try:
        target, named = _made(thing, arguments, sizes)
    except Exception as error:
        raise ValueError(
            f"check({name_of(thing)}): it turns queries and keys, and I do not know how to build "
            f"it: {type(error).__name__}: {error}"
        ) from error
    name = f"{name_of(thing)}({shown(named)})" if inspect.isclass(thing) else f"{name_of(thing)}(…)"
    target = target if call is None else _Shown(target, call)
    widths = [sizes.embed_dim or WIDTH] if call else _widths(named)
    ways = [one for width in widths for one in _ways(target, width)]
    right = next((one for one in ways if one[1][0].severity == "passed"), None)
    words = " ".join(_names(thing))
    of_maps, of_lengths = OF_MAPS.search(words), OF_LENGTHS.search(words)
    said = of_maps or of_lengths
    if said and (right is None or (of_maps and call is None)):
        raise ValueError(
            f"check({name}): it turns queries and keys, and its code speaks of {said[0]!r}: only "
            "positions in one dimension that keep lengths are judged; check the layer that calls it"
        )
    if not ways and call is not None:
        x = [BATCH, TOKENS, widths[0]]
        raise ValueError(
            f"check({name}): it turns queries and keys, and the call that you show does not give "
            f"back x {x} (sequences, tokens, features) turned: it must do for queries and for "
            f"keys, each token in its place{_why_not(target, widths[0])}"
        )
    if not ways:
        raise ValueError(
            f"check({name}): it turns queries and keys, and I do not know how to call it: show me "
            'one call that gives x, queries or keys [B, T, D], back turned, --call "lambda rope, '
            'x: rope(x, …)"; or check the layer that calls it'
        )
    layout, results = right or ways[0]
    note = f"it is judged as what turns queries and keys, {layout}; no attention was looked at"
    wrong = (one for one in results if one.severity == "error")
    return Verdict(name, (*wrong, *(one for one in results if one.severity != "error")), (note,))


class _Shown:
    """What turns queries, in the call that somebody showed."""

    def __init__(self, target: Any, call: Callable[[Any, Tensor], Any]) -> None:
        self.target, self.call = target, call

    def __call__(self, x: Tensor) -> Any:
        return self.call(self.target, x)


def _own(target: Any) -> Any:
    """What turns, by itself."""
    return target.target if isinstance(target, _Shown) else target


def _why_not(target: _Shown, width: int) -> str:
    """The error of a call that is shown, if there is one."""
    try:
        target(torch.zeros(BATCH, TOKENS, width))
    except Exception as error:  # whatever somebody's code raises
        return f": {told(error)}"
    return ""


def _turns(thing: Any) -> bool:
    """Whether it goes by the name of a rotation, and does no more."""
    kind = _kind(thing)
    said = (kind.__name__, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__))
    named = any(TURNS.search(one.lower()) for one in said) and is_users(_file_of(kind))
    if not named or IS_MORE.search(kind.__name__.lower()):
        return False
    return bool((code := _code(thing)) and not GATHERS.search(code))


def _kind(thing: Any) -> Any:
    return thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)


def _code(thing: Any) -> str:
    """What somebody wrote of it, and of the classes that it derives from."""
    family = getattr(kind := _kind(thing), "__mro__", [kind])
    return "".join(textwrap.dedent(source_of(one)) for one in family if is_users(_file_of(one)))


def _names(thing: Any) -> set[str]:
    """The names in its code, its own among them."""
    tree = ast.parse(_code(thing))
    every = {getattr(one, field, None) for one in ast.walk(tree) for field in ("id", "attr", "arg")}
    return {one for one in every if one} | {_kind(thing).__name__}


def _file_of(kind: Any) -> str:
    """The file that a class or function stands in; one of Python's own where that is not known."""
    return getattr(inspect.getmodule(kind), "__file__", None) or inspect.__file__


def _made(thing: Any, arguments: dict[str, Any], sizes: BuildSizes) -> tuple[Any, dict[str, Any]]:
    if not inspect.isclass(thing):
        target = copied(thing)
        return target.eval() if isinstance(target, nn.Module) else target, {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target, named, *_ = build(thing, (), arguments, sizes)
    if isinstance(target, nn.Module):
        with_forward(target)
        target.eval()
    return target, named


def _widths(named: dict[str, Any]) -> list[int]:
    """How wide what it turns may be: the even numbers among its arguments, the smallest first."""
    told = {one for _, one in flat(named) if type(one) is int and one % 2 == 0 and 2 <= one <= 512}
    return [*dict.fromkeys((*sorted(told), *WIDTHS))]


def _ways(target: Any, width: int) -> Iterator[tuple[str, list[Finding]]]:
    """The shapes in which queries and keys go in and come out turned, and what is found then: of
    the turns, of what went in, and of another device."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(2, width, generator=draw)
    q, k = rows / rows.norm(dim=-1, keepdim=True)
    caller = Caller(copied(target), head_dim=width, heads=HEADS)
    pair = [name for name in caller.parameters if calling_role(name) in ("query", "key")]
    pair = pair if len(pair) == 2 else caller.positional[:1]
    beside = [n for n in caller.parameters if caller.required(n) and n not in pair]
    if not pair or any(caller.roles[name] != "positions" for name in beside):
        return  # tables of ours would be judged, too
    shown = isinstance(target, _Shown)
    for layout, shaped in ((one, two) for one, two in LAYOUTS.items() if one in SHOWN or not shown):
        axis = layout[1:-1].split(", ").index("T")
        given = shaped(q).clone(), shaped(k).clone()
        with contextlib.suppress(Exception), torch.no_grad():  # it goes in otherwise
            places = {name: torch.arange(TOKENS) for name in beside}
            gave = _turned(caller.target, pair, given, places)
            back = _turned(caller.target, pair, (-shaped(q), -shaped(k)), places)
            tables = any(map(torch.allclose, gave, back))  # they do not hang on what is turned
            scores = None if tables else _scores(*gave, axis)
            if scores is not None:
                turned = _fault(scores, gave, axis, name_of(_own(target))) or passed("rotary", SAID)
                kept = torch.equal(given[0], shaped(q)) and torch.equal(given[1], shaped(k))
                input_kept = () if kept else (found("input-kept", "other", name="what it turns"),)
                yield layout, [turned, *input_kept, _moved(target, pair, given, places)]


def _moved(
    target: Any, names: list[str], given: tuple[Tensor, Tensor], more: dict[str, Any]
) -> Finding:
    """Whether it turns on another device what lies there, with what moves with it; its tables are
    made there, as nothing was called before."""
    if "cuda" in _code(_own(target)):
        return skipped("move", "Its code speaks of a GPU, which is not here.")
    own = copied(target)
    held = _own(own)
    there = [*given, *more.values(), *(everything(held) if isinstance(held, nn.Module) else ())]
    try:
        with Elsewhere(there):
            _turned(own, names, given, more)
    except Exception as error:  # only another device is a fault
        if "device" in str(error):
            return found("move", "device", error=told(error))
    return passed("move")


def _turned(
    target: Any, names: list[str], given: tuple[Tensor, Tensor], more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Queries and keys as they come out, from one call or from two."""
    calls = [given] if len(names) == 2 else [given[:1], given[1:]]
    gave: list[Tensor] = []
    for feeds in calls:
        raw = target(**dict(zip(names, feeds, strict=True)), **more)
        same = [one for one in tensors_in(raw) if one.shape == feeds[0].shape]
        gave += same[: len(feeds)]
    one, two = gave
    return one, two


def _scores(q: Tensor, k: Tensor, axis: int) -> Tensor | None:
    """`[N, T, T]`: the products of each query with each key, for all heads and sequences; None
    where the order of the tokens counts for nothing."""
    rows = [one.movedim(axis, -2).reshape(-1, TOKENS, one.shape[-1]).double() for one in (q, k)]
    scores = rows[0] @ rows[1].mT
    still = (scores - scores[:, :1, :1]).abs().max() <= NEAR
    return None if still or not bool(scores.isfinite().all()) else scores


def _fault(scores: Tensor, gave: tuple[Tensor, Tensor], axis: int, name: str) -> Finding | None:
    """What is wrong with products that do not hang on the distance alone."""
    apart = (scores[:, 1:, 1:] - scores[:, :-1, :-1]).abs()
    most = scores.abs().max().clamp(min=1.0)
    if bool(apart.max() <= NEAR * most):
        return None
    _, i, j = (int(n) for n in torch.unravel_index(apart.argmax(), apart.shape))
    lengths = gave[0].movedim(axis, -2).norm(dim=-1)
    longer = bool((lengths - lengths[..., :1]).abs().max() > NEAR)
    which = int(apart.flatten(1).amax(1).argmax())
    one, two = (float(scores[which, i + n, j + n]) for n in (0, 1))
    way = "pairs" if longer else "absolute"
    words = {"i": i, "j": j, "one": f"{one:.3f}", "two": f"{two:.3f}", "a": i + 1, "b": j + 1}
    return found("rotary", way, name=name, **words)
