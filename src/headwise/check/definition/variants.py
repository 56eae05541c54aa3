"""Attention rebuilt from its definition and given weights, with optional mistakes.

A default `Variant` is the textbook's attention and uses `headwise.core.reference`. Every field is a
possible mistake, and each of its other values is one form of it; `faults.toml` describes them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ...core.masks import Dense
from ...core.reference import attention
from ...layers.rope import RoPE
from .projections import Matrix, Projections


@dataclass(frozen=True)
class Variant:
    """One way to compute multi-head attention. The defaults are the textbook's.

    Attributes:
        order: the order of q, k and v in a packed matrix; by default, from its name.
        packing: `p n d` one after the other, `n p d` head by head, `n d p` feature by feature, `d p
            n` with the heads innermost; by default, from its name.
        turned: projections (letters of q, k, v, o) whose square matrix is used transposed.
        unbiased: projections whose bias is omitted.
        roles: the features used as queries, keys and values: `kqv` has q and k swapped, in `qkx`
            the values are the input itself.
        split: the split of q, k and v into heads: `heads`, `view` (no transpose after the view),
            `strided` (the heads are the inner axis), `whole` (one head); or three of these, one for
            each of q, k and v.
        over: attention among `tokens`, or among the `heads` of one token.
        turned_keys: `transposed`, or `reshaped` into the shape of the transposed keys.
        share: how query heads share fewer key/value heads: `repeat`, `tile` (cyclic), `tile keys`
            or `tile values` alone, or all read the `first`, the `first keys` or the `first values`.
        scale: a name for `scale_of`, or a number.
        softcap: `c` makes scores `c · tanh(score / c)`.
        mask: a name in `MASKS`, or `window 4` for the last four keys.
        fill: the value of hidden scores: `-inf` or another number; `after`: hidden weights become 0
            after the softmax; `added 1`: this number is added to visible scores.
        softmax: a name in `SOFTMAXES`.
        values: `weights @ v`, or with the weights `turned`.
        merge: a name in `MERGES`.
        out: the output projection, applied `once` or `twice`, or `left out`.
        residual: the addition at the end: none, `x`, or `x` after a norm as in a whole block;
            `inside`: a norm between the heads and the output projection.
        rope: rotary positions of q and k: dim, base and interleaved of `RoPE`; or None.
        rotated: which of q, k and v are rotated.
        normed: norms of q and k `before` or `after` the rotation.
        turning: the rotation: `rope`; keys `backwards`; along the `heads`; or mixed: angles for
            adjacent pairs but features rotated in `halves`, or the reverse, in `pairs`.
        slopes: the ALiBi slope of each head: slope times distance is subtracted from the scores.
    """

    order: str = ""
    packing: str = ""
    turned: str = ""
    unbiased: str = ""
    roles: str = "qkv"
    split: str | tuple[str, str, str] = "heads"
    over: str = "tokens"
    turned_keys: str = "transposed"
    share: str = "repeat"
    scale: str | float = "√D"
    softcap: float | None = None
    mask: str = "none"
    fill: str = "-inf"
    softmax: str = "keys"
    values: str = "weights"
    merge: str = "heads"
    out: str = "once"
    residual: str = ""
    rope: tuple[int, float, bool] | None = None
    rotated: str = "qk"
    normed: str = "before"
    turning: str = "rope"
    slopes: tuple[float, ...] = ()

    def but(self, **changes: Any) -> Variant:
        """Return a copy with changes, ten times faster than `replace` (searches make many)."""
        other = object.__new__(Variant)
        other.__dict__.update(self.__dict__, **changes)
        return other


MASKS: dict[str, Callable[[Tensor, Tensor, int], Tensor]] = {
    "none": lambda i, j, t: (i >= 0) & (j >= 0),
    "causal": lambda i, j, t: j <= i,
    "itself hidden": lambda i, j, t: j < i,
    "one ahead": lambda i, j, t: j <= i + 1,
    "inverted": lambda i, j, t: j > i,
    "inverted, itself seen": lambda i, j, t: j >= i,
    "itself only": lambda i, j, t: j == i,
    "others": lambda i, j, t: j != i,
    "from the end": lambda i, j, t: i + j < t,
    "from the end, inverted": lambda i, j, t: i + j >= t - 1,
}
"""Masks by name: True if query i may attend to key j, among t tokens."""

SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "keys": lambda s: s.softmax(-1),
    "queries": lambda s: s.softmax(-2),
    "heads": lambda s: s.softmax(1),
    "batch": lambda s: s.softmax(0),
    "heads, NaN to 0": lambda s: s.softmax(1).nan_to_num(),
    "batch, NaN to 0": lambda s: s.softmax(0).nan_to_num(),
    "both": lambda s: s.flatten(-2).softmax(-1).view_as(s),
    "twice": lambda s: s.softmax(-1).softmax(-1),
    "none": lambda s: s.nan_to_num(neginf=0.0),
    "sum": lambda s: (seen := s.nan_to_num(neginf=0.0)) / seen.sum(-1, keepdim=True),
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "log": lambda s: s.log_softmax(-1),
}
"""Weights from scores: a softmax along an axis (NaN if all scores are −inf), two softmaxes over
the keys, or a replacement of the softmax."""

MERGES: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda heads: heads.transpose(1, 2).flatten(2),
    "view": lambda heads: heads.reshape(len(heads), heads.shape[2], -1),
    "strided": lambda heads: heads.permute(0, 2, 3, 1).flatten(2),
    "sum": lambda heads: heads.sum(1),
    "mean": lambda heads: heads.mean(1),
    "first": lambda heads: heads[:, 0],
    "last": lambda heads: heads[:, -1],
    "sum for each": lambda heads: MERGES["heads"](heads.sum(1, keepdim=True).expand_as(heads)),
}
"""Merge heads `[B, H, T, Dv]` to `[B, T, …]`: in three orders, reduced to one, or their sum for
each."""

SPLITS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "heads": lambda x, heads: x.unflatten(-1, (heads, -1)).transpose(1, 2),
    "view": lambda x, heads: x.reshape(len(x), heads, x.shape[1], -1),
    "strided": lambda x, heads: x.unflatten(-1, (-1, heads)).permute(0, 3, 1, 2),
    "whole": lambda x, heads: x[:, None],
}
"""Split `[B, T, heads · width]` into `[B, heads, T, width]`."""

Parts = dict[str, Tensor]
Heads = tuple[Tensor, Tensor, Tensor]

MADE_OF = attrgetter(
    *"order packing turned unbiased roles split rope rotated turning normed residual".split()
)
"""The fields of a variant that its heads depend on."""
WEIGHED_BY = attrgetter(*"over turned_keys share scale softcap mask fill softmax slopes".split())
"""The further fields that its weights depend on."""
ATTENDED = attrgetter(*"over turned_keys share scale fill softmax values slopes".split())
"""The fields, other than mask and softcap, that determine the result of the heads."""
TEXTBOOK = Variant()


def sizes_of(reading: Projections, x: Tensor) -> dict[str, int]:
    """Return the sizes that names of scales refer to, by their letters."""
    sizes = {"H": reading.num_heads, "D": reading.head_dim, "Dv": reading.value_dim}
    return sizes | dict(zip("BTE", x.shape, strict=True))


def scale_of(name: str | float, sizes: Mapping[str, int]) -> float:
    """Return the factor that scales the scores: `√E` means 1 / √E, `times D` means D.

    >>> scale_of("√HD", {"H": 2, "D": 8}), scale_of("D²", {"D": 2}), scale_of("times √D", {"D": 4})
    (0.25, 0.25, 2.0)
    """
    if not isinstance(name, str):
        return name
    scale = math.prod(
        math.prod(sizes[letter] for letter in letters) ** power for letters, power in _powers(name)
    )
    return scale if name.startswith("times") else 1 / scale


@cache
def _powers(name: str) -> list[tuple[list[str], float]]:
    """Return the letters in the name of a scale, and the power of their product."""
    return [
        (re.findall("Dv|.", letters), (2 if square else 1) / 2 ** len(roots))
        for roots, letters, square in re.findall(r"(√*)((?:Dv|[BTEHD])+)(²?)", name)
    ]


def rebuild(
    reading: Projections,
    x: Tensor,
    variant: Variant,
    heads: Heads | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the output `[B, T, …]` of a variant with these weights.

    Args:
        heads: the result of `heads_of`, if available.
        weights: the result of `weights_from`, if available.

    Raises:
        RuntimeError: the shapes do not fit together.
    """
    q, k, v = heads or heads_of(reading, x, variant)
    if weights is None:
        mixed = attend(q, k, v, variant, sizes_of(reading, x))
    else:
        mixed = _weighted(weights, v, q.shape[1], variant)
    out = MERGES[variant.merge](mixed)
    norm = reading.norms.get("x", nn.Identity())
    if variant.residual == "inside":
        out = norm(out)
    if reading.out is not None:
        for _ in range({"left out": 0, "twice": 2}.get(variant.out, 1)):
            out = _linear(reading.out, out, variant)
    if variant.residual.endswith("x"):
        return out + x
    if variant.residual == "x, then norm":
        return norm(out + x)
    return norm(out) if variant.residual == "norm" else out


def heads_of(reading: Projections, x: Tensor, variant: Variant) -> Heads:
    """Return queries `[B, H, T, D]`, keys and values `[B, G, T, …]`, normalized and rotated."""
    before = variant.residual.startswith("before")
    features = _features(reading, reading.norms["x"](x) if before else x, variant)
    if variant.residual.startswith("before queries"):
        features = _features(reading, x, variant) | {"q": features["q"]}
    if variant.residual.startswith("before keys"):
        features |= {"q": _features(reading, x, variant)["q"]}
    splits = (variant.split,) * 3 if isinstance(variant.split, str) else variant.split
    heads = []
    for part, role, split in zip("qkv", variant.roles, splits, strict=True):
        grouped = part != "q" if role == "x" else role != "q"
        number = reading.num_kv_heads if grouped else reading.num_heads
        feature, norm = features[role], reading.norms.get(part)
        if norm is not None and not _is_of_heads(norm, feature.shape[-1] // number):
            feature, norm = norm(feature), None
        rope = _rotation(variant, part) if variant.rope and part in variant.rotated else None
        head = SPLITS[split](feature, number)
        for step in (norm, rope) if variant.normed == "before" else (rope, norm):
            head = head if step is None else step(head)
        heads.append(head)
    q, k, v = heads
    return q, k, v


def _rotation(variant: Variant, part: str) -> Callable[[Tensor], Tensor]:
    """Return the rotation of the heads `[B, H, T, D]` of queries, keys or values."""
    assert variant.rope is not None
    dim, base, pairs = variant.rope
    if variant.turning == "rope" or (variant.turning == "backwards" and part != "k"):
        return RoPE(dim, base, pairs)

    def turned(x: Tensor) -> Tensor:
        x = x.transpose(1, 2) if variant.turning == "heads" else x
        angles = torch.arange(x.shape[-2])[:, None] * base ** -(
            torch.arange(0, dim, 2).double() / dim
        )
        in_pairs = {"halves": False, "pairs": True}.get(variant.turning, pairs)
        both_pairs = in_pairs != (variant.turning in ("halves", "pairs"))
        both = angles.repeat_interleave(2, -1) if both_pairs else torch.cat((angles, angles), -1)
        sign = -1.0 if variant.turning == "backwards" else 1.0
        part, rest = x[..., :dim], x[..., dim:]
        one, two = part.unflatten(-1, (-1, 2)).unbind(-1) if in_pairs else part.chunk(2, -1)
        quarter = (
            torch.stack((-two, one), -1).flatten(-2) if in_pairs else torch.cat((-two, one), -1)
        )
        out = torch.cat((part * both.cos() + sign * quarter * both.sin(), rest), -1).to(x)
        return out.transpose(1, 2) if variant.turning == "heads" else out

    return turned


def weights_of(reading: Projections, x: Tensor, variant: Variant) -> Tensor:
    """Return the weights of the values, `[B, H, T, S]`."""
    q, k, _ = heads_of(reading, x, variant)
    return weights_from(q, k, variant, sizes_of(reading, x))


def _is_of_heads(norm: nn.Module, width: int) -> bool:
    """Return True if a norm is per head: its gains have a head's width or an axis for the heads."""
    gains = [*norm.parameters()]
    return bool(gains) and (gains[0].numel() == width or any(one.ndim >= 2 for one in gains))


def attend(q: Tensor, k: Tensor, v: Tensor, variant: Variant, sizes: Mapping[str, int]) -> Tensor:
    """Attend from `[B, H, T, D]` to keys and values `[B, G, S, …]`; return `[B, H, T, Dv]`."""
    if ATTENDED(variant) != ATTENDED(TEXTBOOK):
        return _weighted(weights_from(q, k, variant, sizes), v, q.shape[1], variant)
    allowed = allowed_of(variant.mask, q.shape[-2], k.shape[-2])
    mask = None if variant.mask == "none" else Dense(allowed[None, None])
    scale = scale_of(variant.scale, sizes)
    return attention(q, k, v, mask=mask, scale=scale, softcap=variant.softcap).out


def weights_from(q: Tensor, k: Tensor, variant: Variant, sizes: Mapping[str, int]) -> Tensor:
    """Return the weights of the values, `[B, H, T, S]`; over heads `[B, T, H, H]`."""
    if q.shape[-1] != k.shape[-1]:
        raise RuntimeError(f"queries of width {q.shape[-1]} and keys of width {k.shape[-1]}")
    if variant.over == "heads":
        k = _shared(k, q.shape[1], variant.share, "keys")
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    allowed = allowed_of(variant.mask, q.shape[-2], k.shape[-2])
    return _weights(q, k, allowed, scale_of(variant.scale, sizes), variant)


def _weighted(weights: Tensor, v: Tensor, heads: int, variant: Variant) -> Tensor:
    """Return the weighted sums of the values, `[B, H, T, Dv]`."""
    v = _shared(v, heads, variant.share, "values")
    v = v.transpose(1, 2) if variant.over == "heads" else v
    out = (weights.mT if variant.values == "turned" else weights) @ v
    return out.transpose(1, 2) if variant.over == "heads" else out


@cache
def allowed_of(mask: str, queries: int, keys: int) -> Tensor:
    """Return a mask `[T, S]`, True where a query may attend to a key."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None]
    if mask.startswith("window "):
        return (j <= i) & (i - j < int(mask.removeprefix("window ")))
    return MASKS[mask](i, j, keys)


def _features(reading: Projections, x: Tensor, variant: Variant) -> Parts:
    """Return q, k and v before they are split into heads, `[B, T, heads · width]` each."""
    features: Parts = {"x": x}
    for source in reading.sources:
        whole = _linear(source, x, variant)
        if len(source.parts) == 1:
            features[source.parts] = whole
        else:
            features |= _unpacked(whole, source.parts, reading, variant)
    return features


def _unpacked(whole: Tensor, parts: str, reading: Projections, variant: Variant) -> Parts:
    heads, groups, dim = reading.num_heads, reading.num_kv_heads, reading.head_dim
    order = [part for part in variant.order or parts if part in parts]
    packing = variant.packing or reading.packing
    width = {part: dim * (heads if part == "q" else groups) for part in parts}
    if packing == "p n d":
        pieces = whole.split([width[part] for part in order], dim=-1)
    elif packing == "n p d":
        shares = [heads // groups if part == "q" else 1 for part in order]
        spread = whole.unflatten(-1, (groups, sum(shares), dim)).split(shares, dim=-2)
        pieces = [piece.flatten(-3) for piece in spread]
    else:
        pieces = rearrange(whole, f"b t ({packing}) -> p b t (n d)", p=len(parts), d=dim)
    return dict(zip(order, pieces, strict=True))


def _linear(matrix: Matrix, x: Tensor, variant: Variant) -> Tensor:
    turned = set(matrix.parts) <= set(variant.turned)
    out = x @ (matrix.weight.mT if turned else matrix.weight)
    if matrix.bias is None or set(matrix.parts) <= set(variant.unbiased):
        return out
    return out + matrix.bias


def _shared(part: Tensor, heads: int, how: str, role: str) -> Tensor:
    groups = part.shape[1]
    if how in ("first", f"first {role}"):
        return part[:, :1].expand(-1, heads, -1, -1)
    if groups == heads:
        return part
    if heads % groups:
        raise RuntimeError(f"{heads} query heads cannot share {groups}")
    if how in ("tile", f"tile {role}"):
        return part.repeat(1, heads // groups, 1, 1)
    return part.repeat_interleave(heads // groups, dim=1)


def _after(variant: Variant) -> bool:
    return isinstance(variant.scale, str) and variant.scale.startswith("after")


def products(q: Tensor, k: Tensor, variant: Variant) -> Tensor:
    """Return queries times keys before any scaling, `[B, H, T, S]`."""
    k = _shared(k, q.shape[1], variant.share, "keys")
    turned = k.reshape(*k.shape[:2], k.shape[3], k.shape[2])
    return q @ (turned if variant.turned_keys == "reshaped" else k.mT)


def _weights(q: Tensor, k: Tensor, allowed: Tensor, scale: float, variant: Variant) -> Tensor:
    """Return the weights of the values, with every deviation of the variant."""
    scores = products(q, k, variant)
    scores = scores if _after(variant) else scores * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if variant.slopes:
        i, j = torch.arange(scores.shape[-2])[:, None], torch.arange(scores.shape[-1])[None]
        slopes = torch.tensor(variant.slopes, dtype=scores.dtype)[:, None, None]
        scores = scores - slopes * (i - j).abs()
    hidden = ~allowed
    if variant.fill.startswith("added "):
        scores = scores + allowed * float(variant.fill.removeprefix("added "))
    elif variant.fill != "after":
        scores = scores.masked_fill(hidden, float(variant.fill))
    weights = SOFTMAXES[variant.softmax](scores)
    if variant.fill == "after":
        weights = weights.masked_fill(hidden, 0.0)
    return weights * scale if _after(variant) else weights


def error(got: Tensor, wanted: Tensor, seen: Tensor | None = None) -> float:
    """Return the largest relative difference; inf if the two cannot be compared.

    Args:
        seen: `[T]`, False for tokens without a visible key, which are not compared.
    """
    if got.shape != wanted.shape:
        return math.inf
    if seen is not None and not bool(seen.all()):
        got, wanted = got[:, seen], wanted[:, seen]
    if not got.numel():
        return 0.0
    top = max(float(got.abs().max()), float(wanted.abs().max()), 1e-30)
    if math.isfinite(top):
        return float((got - wanted).abs().max()) / top
    finite = torch.isfinite(wanted)
    if not torch.equal(torch.isfinite(got), finite) or float(finite.double().mean()) < 0.1:
        return math.inf
    return error(got[finite][None, None], wanted[finite][None, None])
