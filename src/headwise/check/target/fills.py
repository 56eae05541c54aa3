"""What arguments of a call get that nobody gave: by their role, in the ways that people want them.

Positions and rotary tables are true ones: neutral tables would hide every mistake about them. A
function of the layer's own file that makes such a table is asked first; then the usual shapes are
tried in turn.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .signatures import entry, signature, source_of

LENGTH = 61
"""Rows of a table that a function of somebody's file makes: a prime that no other axis has."""
WIDTHS = 4
"""How many widths of layers another sequence is tried with."""
BASE = 10000.0


@dataclass(frozen=True)
class Place:
    """Where a call stands: its input `[…, T, E]`, the keys' sequence, and the first position."""

    x: Tensor
    source: Tensor
    start: int = 0
    keys: Tensor | None = None  # the source in the layout of the call

    @property
    def positions(self) -> Tensor:
        """`[T]`: the positions of its tokens."""
        return torch.arange(self.start, self.start + self.x.shape[-2], device=self.x.device)


Fill = Callable[[Place], Any]
Options = Callable[[Any, int], Iterator[Fill]]
"""The fills for a target whose heads are so wide, the likeliest first."""


def _constant(*values: Any) -> Options:
    def options(target: Any, dim: int) -> Iterator[Fill]:
        for value in values:
            yield lambda place, value=value: value

    return options


def _made(*makers: Fill) -> Options:
    return lambda target, dim: iter(makers)


def angles(place: Place, dim: int) -> Tensor:
    """`[T, dim / 2]`: how far each pair of features turns at each position."""
    powers = torch.arange(0, dim, 2, dtype=torch.float64, device=place.x.device) / dim
    return place.positions[:, None].double() * BASE**-powers


PAIRS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda half: torch.cat((half, half), -1),
    lambda half: half,
    lambda half: half.repeat_interleave(2, -1),
    lambda half: half[..., : half.shape[-1] // 2].repeat(*[1] * (half.ndim - 1), 4),
)
"""How the angle of a pair becomes the angles of its features; the last is of two axes, which each
turn one half of a head."""
SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda table: table[None],
    lambda table: table,
    lambda table: table[None, None],
    lambda table: table[None, :, None],
    lambda table: table[:, None],
    lambda table: table[:, None, None],
)
"""Where the axes of batch and heads stand in a table `[T, …]`."""


def _real(table: Tensor, place: Place) -> Tensor:
    return table.to(place.x.dtype if place.x.is_floating_point() else torch.float32)


def _dims(target: Any, dim: int) -> list[int]:
    """Widths that are rotated: those that numbers of the target speak of, and the whole head's."""
    from .introspect import numbers_in  # which imports RoPE

    said: list[int] = []
    if isinstance(target, torch.nn.Module):
        names = r"rot\w*_?dim|rope\w*_dim|rotary_ndims"
        said = [int(n) for n in numbers_in(target, names) if n > 1]
        shares = numbers_in(target, r"partial_rotary_factor|rotary_percent|rope_percent")
        said += [int(n * dim) // 2 * 2 for n in shares if 0 < n < 1]
    return [*dict.fromkeys([*said, dim, dim // 2 // 2 * 2])]


def _shaped(turn: Callable[[Tensor, Place], Any], pairs: bool) -> Options:
    """`turn` of the angles, in every usual shape."""

    def options(target: Any, dim: int) -> Iterator[Fill]:
        for wide in (d for d in _dims(target, dim) if d > 1):
            for pair in PAIRS if pairs else PAIRS[1:2]:
                for shape in SHAPES:
                    yield lambda place, p=pair, s=shape, w=wide: turn(s(p(angles(place, w))), place)

    return options


def _unit(angle: Tensor, place: Place) -> Tensor:
    dtype = torch.complex64 if place.x.dtype.itemsize < 8 else torch.complex128
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


def _rotation(angle: Tensor, place: Place) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    rows = torch.stack((torch.stack((cos, -sin), -1), torch.stack((sin, cos), -1)), -2)
    return _real(rows, place)


_COS = _shaped(lambda a, place: _real(a.cos(), place), True)
_SIN = _shaped(lambda a, place: _real(a.sin(), place), True)
_BOTH = _shaped(lambda a, place: (_real(a.cos(), place), _real(a.sin(), place)), True)
_COMPLEX = _shaped(_unit, False)
_REAL_PAIRS = _shaped(lambda a, place: _real(torch.stack((a.cos(), a.sin()), -1), place), False)
_MATRICES = _shaped(_rotation, False)
_ANGLES = _shaped(_real, True)


def _any_of(*kinds: Options) -> Options:
    def options(target: Any, dim: int) -> Iterator[Fill]:
        for kind in kinds:
            yield from kind(target, dim)

    return options


# --- tables that the file itself makes ------------------------------------------------------------


def _length(dim: int) -> int:
    return LENGTH


_MAKES_TABLES = re.compile(r"rope|rotary|freqs|cos_sin|sin_cos|sincos", re.IGNORECASE)
_SIZES = (
    (re.compile(r"theta|base"), lambda dim: BASE),
    (re.compile(r"len|end|ctx|context|max|seq|pos|^t$"), _length),
    (re.compile(r"dim|elem|head|hidden|width|size|^d$"), lambda dim: dim),
    (re.compile(r"device"), lambda dim: None),
    (re.compile(r"dtype"), lambda dim: torch.float32),
)


def _from_file(which: int | None) -> Options:
    """What functions of the target's own file make, whole or the rows of the call's positions.

    Args:
        which: the first tensor, the second, or all that comes.
    """

    def options(target: Any, dim: int) -> Iterator[Fill]:
        for table in _tables(target, dim):
            parts = list(table) if isinstance(table, (tuple, list)) else [table]
            if which is not None and len(parts) != 2:
                continue
            chosen = table if which is None else parts[which]
            yield lambda place, given=chosen: _rows(given, place)
            yield lambda place, given=chosen: _moved(given, place)

    return options


def _tables(target: Any, dim: int) -> Iterator[Any]:
    home = sys.modules.get(type(target).__module__) or inspect.getmodule(target)
    for name, made in list(vars(home).items()) if home is not None else ():
        if not _MAKES_TABLES.search(name) or not callable(made):
            continue
        if inspect.isclass(made):
            yield from _from_class(made, target)
            continue
        parameters = [p for p in signature(made) if p.kind <= 1]
        sizes = {p.name: _size_of(p.name) for p in parameters}
        if not any(sizes.values()):  # it makes something else: a whole model, by its name
            continue
        wanted = [p.name for p in parameters if p.default is p.empty]
        given = {name: (sizes[name] or _length)(dim) for name in wanted}
        try:
            table = made(**given)
        except Exception:  # somebody's function, called on a guess
            continue
        tensors = table if isinstance(table, (tuple, list)) else [table]
        if tensors and all(isinstance(t, Tensor) and LENGTH in t.shape for t in tensors):
            yield table


def _size_of(name: str) -> Callable[[int], Any] | None:
    return next((size for said, size in _SIZES if said.search(name.lower())), None)


def _from_class(kind: type, target: Any) -> Iterator[Any]:
    """The module of rotary positions that transformers' models call before their layers."""
    config = getattr(target, "config", None)
    if config is None or [p.name for p in signature(kind)][:1] != ["config"]:
        return
    try:
        module = kind(config)
        cos, sin = module(torch.zeros(1, LENGTH, 8), torch.arange(LENGTH)[None])
    except Exception:  # another class, or one for several kinds of layers
        return
    if isinstance(cos, Tensor) and isinstance(sin, Tensor) and LENGTH in cos.shape:
        yield cos, sin


def _rows(given: Any, place: Place) -> Any:
    """The rows of a table that belong to the call's positions."""
    if isinstance(given, (tuple, list)):
        return type(given)(_rows(one, place) for one in given)
    axis = list(given.shape).index(LENGTH)
    return _moved(given.narrow(axis, place.start, place.x.shape[-2]), place)


def _moved(given: Any, place: Place) -> Any:
    if isinstance(given, (tuple, list)):
        return type(given)(_moved(one, place) for one in given)
    given = given.detach().to(place.x.device)
    return given if given.is_complex() else _real(given, place)


def _sinusoids(place: Place) -> Tensor:
    wide = place.x.shape[-1]
    table = torch.cat((angles(place, wide).sin(), angles(place, wide).cos()), -1)[:, :wide]
    return _real(table, place)


def _no_bias(place: Place) -> Tensor:
    """`[T, S]`: nothing is added to the scores."""
    return place.x.new_zeros(place.x.shape[-2], place.source.shape[-2])


def _sides(place: Place) -> tuple[int, int]:
    """Height and width of a map of its tokens, as nearly square as their number allows."""
    tokens = place.x.shape[-2]
    width = max(n for n in range(1, math.isqrt(tokens) + 1) if tokens % n == 0)
    return tokens // width, width


def _distances(place: Place) -> Tensor:
    """`[1, 2 T − 1, E]`: of every distance between two tokens, the largest first."""
    most = place.x.shape[-2] - 1
    around = torch.empty(1, 2 * most + 1, place.x.shape[-1], dtype=place.x.dtype)
    return _sinusoids(Place(around, around, -most)).flip(0)[None].to(place.x.device)


def zeros_of(fill: Fill) -> Fill:
    """The same table with zeros in it, which say nothing."""
    return lambda place: torch.zeros_like(fill(place))


def reversed_rows(fill: Fill) -> Fill:
    """The same table with its rows in the opposite order: other positions."""

    def turned(given: Any, tokens: int) -> Any:
        if isinstance(given, (tuple, list)):
            return type(given)(turned(one, tokens) for one in given)
        axes = [axis for axis, size in enumerate(given.shape) if size == tokens]
        return given.flip(axes[0]) if axes else given

    return lambda place: turned(fill(place), place.x.shape[-2])


def _scales(target: Any, dim: int) -> Iterator[Fill]:
    """What scores are multiplied by, or divided by where the code divides."""
    root = dim**0.5
    divided = re.search(r"/=? *scal(e|ing)\b", source_of(entry(target)))
    for value in (root, 1 / root) if divided else (1 / root, root):
        yield lambda place, value=value: value


def _others(target: Any, dim: int) -> Iterator[Fill]:
    """Another sequence: as wide as x, or as one of the layers takes its input."""
    yield lambda place: place.source if place.keys is None else place.keys
    yield lambda place: place.source[:, None]
    yield lambda place: place.source
    yield lambda place: place.source[:, 0]
    parts = target.modules() if isinstance(target, torch.nn.Module) else ()
    linear = [one for one in parts if isinstance(one, torch.nn.Linear)]
    widths = {getattr(one, "in_features", 1) for one in linear}  # one of its own may have none
    for width in sorted(widths)[:WIDTHS] if len(widths) > 1 else ():
        yield lambda place, width=width: _as_wide(place.source, width)
    yield lambda place: place.source.mT


def _as_wide(source: Tensor, width: int) -> Tensor:
    """The same with so many features, of which some may come again."""
    times = -(-width // source.shape[-1])
    return source.repeat(*[1] * (source.ndim - 1), times)[..., :width]


FILLS: Mapping[str, Options] = {
    **dict.fromkeys(("mask", "nothing", "padding", "cache"), _constant(None)),
    "lengths": _made(
        lambda place: place.x.new_full((len(place.x),), place.source.shape[-2]).long()
    ),
    "documents": _made(  # all of one
        lambda place: place.x.new_zeros(place.x.shape[:-1]).long(),
        lambda place: place.x.new_zeros(place.x.shape[-2]).long(),
    ),
    "residual": _made(lambda place: torch.zeros_like(place.x)),
    **dict.fromkeys(("causal", "use_cache", "weights", "training"), _constant(False)),
    "context": _others,
    "rotary": _any_of(_from_file(None), _BOTH, _REAL_PAIRS, _COMPLEX, _ANGLES, _MATRICES),
    "complex": _any_of(_from_file(None), _COMPLEX, _REAL_PAIRS, _ANGLES),
    "cos": _any_of(_from_file(0), _COS),
    "sin": _any_of(_from_file(1), _SIN),
    "positions": _made(
        lambda place: place.positions[None],
        lambda place: place.positions,
        lambda place: place.positions.expand(len(place.x), -1),
    ),
    "embedding": _made(
        lambda place: _sinusoids(place).expand_as(place.x),
        lambda place: _sinusoids(place)[None],
        lambda place: _distances(place).expand(len(place.x), -1, -1),
        lambda place: _sinusoids(place)[:1].expand(len(place.x), 1, -1),
    ),
    "bias": _made(
        *(lambda place, shape=shape: shape(_no_bias(place)) for shape in SHAPES[1::-1]),
        lambda place: None,
    ),
    "start": _made(
        lambda place: place.start, lambda place: torch.full((len(place.x),), place.start)
    ),
    "packed": _made(
        lambda place: torch.tensor([0, place.x.shape[-2]], dtype=torch.int32, device=place.x.device)
    ),
    "turns": _made(  # of the frame of each residue (Jumper et al. 2021, AlphaFold)
        lambda place: torch.eye(3).to(place.x).expand(*place.x.shape[:-1], 3, 3),
    ),
    "moves": _made(lambda place: place.x.new_zeros(*place.x.shape[:-1], 3)),
    "other": _made(lambda place: torch.zeros_like(place.x)),
    "span": _constant((-1, 0), (-1, -1), None, LENGTH),
    "frames": _constant(1),
    "height": _made(lambda place: _sides(place)[0]),
    "width": _made(lambda place: _sides(place)[1]),
    "grid": _made(_sides),
    "limit": _constant(LENGTH),
    "batch": _made(lambda place: len(place.x)),
    "tokens": _made(lambda place: place.x.shape[-2]),
    "dropout": _constant(0.0),
    "scale": _scales,
}
"""By role, what an argument gets. Roles that are not here have to be asked for."""

SURE = set(
    (
        "mask nothing padding cache lengths documents residual causal use_cache weights training "
        "context positions bias start packed limit batch tokens dropout scale"
    ).split()
)
"""Roles whose first value is the usual one, or says nothing; all others are guesses."""


def left_out(place: Place) -> None:
    """Stand for an argument that is not given."""


def no_value(place: Place) -> None:
    """Make None of an argument that must be given, where nothing is known of it."""


OPTIONAL = ("rotary", "complex", "cos", "sin")
"""Roles of arguments that are filled even where the call could do without."""
