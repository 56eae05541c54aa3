"""The weights of one attention layer as parts, and the stored tensors that hold them.

Parts are always `q.weight`, `k.weight`, `v.weight` `[n, d, i]`, their biases `[n, d]`, `out.weight`
`[o, n, d]`, `out.bias` `[o]` and the norms' weights `[d]`, with rotated features in halves. The
letters are those of `headwise.weights.layout_table`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from math import prod

import torch
from einops import rearrange
from torch import Tensor

from .layout_types import LayerForm, LayerSizes, Layout

Parts = dict[str, Tensor]

CANON = {"weight": "n d i", "bias": "n d"}
ROTATED = ("q.weight", "q.bias", "k.weight", "k.bias", "q_norm.weight", "k_norm.weight")


def sizes_of(
    tensors: Mapping[str, Tensor],
    patterns: Mapping[str, tuple[str, str]],
    num_heads: int | None,
    num_kv_heads: int | None,
    call: str,
) -> LayerSizes:
    """Return the sizes that follow from shapes and head counts.

    Raises:
        ValueError: the shapes are inconsistent or do not determine the sizes.
    """
    axes: dict[tuple[str, ...], tuple[int, str]] = {}  # (part, letters…) -> length, name
    for name, (parts, pattern) in patterns.items():
        if parts.endswith(".weight"):
            for letters, size in zip(axes_of(pattern), tensors[name].shape, strict=True):
                axes[(parts.split(".")[0], *letters)] = size, name

    def length(*key: str) -> int | None:
        return axes[key][0] if key in axes else None

    def share(rows: int, of: int, key: tuple[str, ...], argument: str) -> int:
        if of < 1 or rows % of:
            name = axes[key][1]
            raise ValueError(
                f"{call}: {name} {list(tensors[name].shape)} does not fit {argument}={of}: "
                f"{rows} rows are not a multiple of it"
            )
        return rows // of

    stored_heads = length("q", "n")
    if stored_heads is not None and num_heads not in (None, stored_heads):
        raise ValueError(
            f"{call}: the weights have {stored_heads} heads, but num_heads={num_heads}"
        )
    heads = num_heads if stored_heads is None else stored_heads
    if heads is None:
        raise ValueError(f"{call}: the shapes do not determine the number of heads; pass num_heads")

    packed = next((key for key in axes if "p" in key), None)
    rows = {
        part: length(part, "n", "d") or prod(length(part, x) or 0 for x in "nd")
        for part in ("q", "k", "v", "out")
    }
    if rows["q"]:
        dim = (
            share(rows["q"], heads, ("q", "n", "d"), "num_heads")
            if stored_heads is None
            else rows["q"] // heads
        )
    elif rows["out"]:
        dim = share(rows["out"], heads, ("out", "n", "d"), "num_heads")
    else:
        assert packed is not None
        dim = share(axes[packed][0], 3 * heads, packed, "3 · num_heads")
    if packed is not None:
        total = axes[packed][0] - (0 if rows["q"] else heads * dim)
        kv_heads = share(total, 2 * dim, packed, "2 · head_dim")
        value_dim = dim
    else:
        bare = length("k", "n")
        kv_heads = bare if bare is not None else share(rows["k"], dim, ("k", "n", "d"), "head_dim")
        value_dim = length("v", "d") or share(rows["v"], kv_heads, ("v", "n", "d"), "num_kv_heads")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(
            f"{call}: the shapes make {kv_heads} key/value heads of width {dim}, which "
            f"num_heads={heads} cannot share"
        )
    if num_kv_heads not in (None, kv_heads):
        raise ValueError(
            f"{call}: the shapes make {kv_heads} key/value heads of width {dim}, and "
            f"num_kv_heads={num_kv_heads}"
        )

    def inputs(part: str) -> int:
        return next(size for key, (size, _) in axes.items() if part in key[0] and key[1:] == ("i",))

    out_width = length("out", "o") or heads * value_dim
    return LayerSizes(
        heads, kv_heads, dim, value_dim, inputs("q"), inputs("k"), inputs("v"), out_width
    )


def unpack(parts: str, pattern: str, tensor: Tensor, sizes: LayerSizes) -> Parts:
    """Return the parts in one stored tensor."""
    held, kind = parts.split(".")
    if kind == "weight" and held == "out":
        return {parts: _arranged(tensor, pattern, "o n d", held, sizes)}
    if held == "out" or "norm" in held:
        return {parts: tensor}
    if "p" not in pattern:
        return {parts: _arranged(tensor, pattern, CANON[kind], held, sizes)}
    axis = next(index for index, letters in enumerate(axes_of(pattern)) if "p" in letters)
    order, alone = _order(pattern)
    if order == ("p", "n", "d"):
        pieces = tensor.split([sizes.heads_of(x) * sizes.dim_of(x) for x in held], axis)
    elif order == ("n", "p", "d"):
        group = sizes.num_heads // sizes.num_kv_heads
        spread = tensor.unflatten(axis, (sizes.num_kv_heads, group + 2, sizes.head_dim))
        pieces = [piece.flatten(axis, axis + 2) for piece in spread.split([group, 1, 1], axis + 1)]
    else:
        pieces = [x.contiguous() for x in tensor.unflatten(axis, (-1, len(held))).unbind(axis + 1)]
    return {
        f"{part}.{kind}": _arranged(piece, alone, CANON[kind], part, sizes)
        for part, piece in zip(held, pieces, strict=True)
    }


def write(
    parts: Parts,
    sizes: LayerSizes,
    target: Layout,
    origins: Mapping[str, str],
    prefix: str,
    call: str,
) -> Iterable[tuple[str, Tensor]]:
    """Return the parts in the first of the target's forms that can hold them.

    Raises:
        ValueError: no form can hold them; the message lists the unsupported parts.
    """
    refused: list[str] = []
    for form in forms_at(target, prefix):
        refused = refusals(parts, sizes, form, origins)
        if not refused:
            return written(parts, sizes, form)
    raise ValueError(f"{call}: layout {target.name!r} cannot hold {'; nor '.join(refused)}")


def forms_at(layout: Layout, prefix: str) -> list[LayerForm]:
    """Return the forms in which a layer with that prefix can be written, the most likely first."""
    name = prefix.rstrip("./")
    at_home = [form for form in layout.forms if form.home and name.endswith(form.home)]
    return at_home + [form for form in layout.forms if form.home is None]


def refusals(
    parts: Parts, sizes: LayerSizes, form: LayerForm, origins: Mapping[str, str] | None = None
) -> list[str]:
    """Return phrases for all parts that a form cannot hold; `origins` are the original names."""
    refused = [phrase for rule in form.rules if (phrase := rule.refusal(sizes)) is not None]
    places = {part for held, _ in form.tensors.values() for part in parts_of(held)}
    for part, tensor in parts.items():
        if part not in places and not _is_neutral(part, tensor):
            refused.append(f"{_long(part)} ({(origins or {}).get(part, part)})")
    return refused


def _is_neutral(part: str, tensor: Tensor) -> bool:
    """Return True if adding or removing a part changes nothing."""
    if part.endswith(".bias"):
        return _empty_bias(part, tensor)
    if part != "out.weight" or tensor.shape[0] != tensor.shape[1] * tensor.shape[2]:
        return False
    if tensor.is_meta:
        return False
    return torch.equal(tensor.flatten(1), torch.eye(len(tensor)).to(tensor))


def _empty_bias(part: str, tensor: Tensor) -> bool:
    return part.endswith(".bias") and not tensor.is_meta and not tensor.any()


def _long(part: str) -> str:
    which, kind = part.split(".")
    if part == "out.weight":
        return "an output projection"
    if "norm" in which:
        return f"a norm of {'queries' if which[0] == 'q' else 'keys'}"
    owner = {"q": "queries", "k": "keys", "v": "values", "out": "the output"}[which]
    return f"the {kind} of {owner}"


def written(parts: Parts, sizes: LayerSizes, form: LayerForm) -> Iterable[tuple[str, Tensor]]:
    """Yield every tensor of a form; optional groups only if at least one of their parts exists."""
    for name, (held, pattern) in form.tensors.items():
        group = next((group for group in form.optional if name in group), None)
        if group is not None and not any(
            part in parts for other in group for part in parts_of(form.tensors[other][0])
        ):
            continue
        if "{n}" in name:
            whole = packed(held, f"n {pattern.replace('(n d)', 'd')}", parts, sizes)
            for head, tensor in enumerate(whole):
                yield name.replace("{n}", str(head)), _own(tensor)
        else:
            yield name, _own(packed(held, pattern, parts, sizes))


def packed(held: str, pattern: str, parts: Parts, sizes: LayerSizes) -> Tensor:
    """Return one stored tensor, packed from its parts."""
    which, kind = held.split(".")
    if which == "out" or "norm" in which:
        if held not in parts:
            parts = parts | {held: _neutral(held, parts, sizes)}
        return (
            _arranged(parts[held], "o n d", pattern, "out", sizes)
            if held == "out.weight"
            else parts[held]
        )
    order, alone = _order(pattern)
    pieces = []
    for part in which:
        name = f"{part}.{kind}"
        tensor = parts[name] if name in parts else _neutral(name, parts, sizes)
        pieces.append(_arranged(tensor, CANON[kind], alone, part, sizes))
    if len(which) == 1:
        return pieces[0]
    axis = next(index for index, letters in enumerate(axes_of(pattern)) if "p" in letters)
    if order == ("p", "n", "d"):
        return torch.cat(pieces, axis)
    if order == ("n", "p", "d"):
        groups = [
            piece.unflatten(axis, (sizes.num_kv_heads, -1, sizes.head_dim)) for piece in pieces
        ]
        return torch.cat(groups, axis + 1).flatten(axis, axis + 2)
    return torch.stack(pieces, axis + 1).flatten(axis, axis + 1)


def subset(
    held: str, pattern: str, tensor: Tensor, sizes: LayerSizes, heads: Tensor, groups: Tensor
) -> Tensor:
    """Return a stored tensor with only the given heads and key/value heads."""
    parts = unpack(held, pattern, tensor, sizes)
    for name, part in parts.items():
        which = name.split(".")[0]
        if name == "out.weight":
            parts[name] = part.index_select(1, heads)
        elif which in ("q", "k", "v"):
            parts[name] = part.index_select(0, heads if which == "q" else groups)
    fewer = replace(sizes, num_heads=len(heads), num_kv_heads=len(groups))
    return _own(packed(held, pattern, parts, fewer))


def per_head(held: str, pattern: str, factors: Mapping[str, Tensor], sizes: LayerSizes) -> Tensor:
    """Return a factor for each head in a stored tensor; it broadcasts to the tensor.

    `factors` are `[n]`, by part; parts without a factor are not scaled.
    """
    which, kind = held.split(".")
    if held == "out.weight":
        wide = factors["out"][None, :, None].expand(1, -1, sizes.value_dim)
        return packed(held, pattern, {held: wide}, replace(sizes, out_width=1))
    parts: Parts = {}
    for part in which:
        one = factors.get(part, torch.ones(sizes.heads_of(part)))
        wide = one[:, None].expand(-1, sizes.dim_of(part))
        parts[f"{part}.{kind}"] = wide[..., None] if kind == "weight" else wide
    return packed(held, pattern, parts, sizes)


def _neutral(part: str, parts: Parts, sizes: LayerSizes) -> Tensor:
    """Return the bias or output projection that has no effect."""
    like = parts["q.weight"]
    if part == "out.weight":
        square = torch.eye(sizes.out_width, dtype=like.dtype, device=like.device)
        return square.unflatten(1, (sizes.num_heads, sizes.value_dim))
    if part == "out.bias":
        return like.new_zeros(sizes.out_width)
    which = part.split(".")[0]
    return like.new_zeros(sizes.heads_of(which), sizes.dim_of(which))


def _own(tensor: Tensor) -> Tensor:
    """Return a dense copy with its own memory."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def with_bias(parts: Parts, sizes: LayerSizes, bias: bool) -> Parts:
    """Add zeros for every missing bias, or remove biases of zeros."""
    if not bias:
        return {name: tensor for name, tensor in parts.items() if not _empty_bias(name, tensor)}
    names = (f"{part}.bias" for part in ("q", "k", "v", "out"))
    return parts | {name: _neutral(name, parts, sizes) for name in names if name not in parts}


def reorder(parts: Parts, old: str | None, new: str | None, rotated: int | None, call: str) -> None:
    """Reorder the features of q and k for the target's rotation; None is `half`.

    The first `rotated` features of each head are rotated, by default all; the others stay.

    Raises:
        ValueError: the number of rotated features is odd or exceeds the width of the heads.
    """
    before, after = (order or "half" for order in (old, new))
    if before == after:
        return
    pattern = "(pair two)" if before == "interleaved" else "(two pair)"
    wanted = "(two pair)" if before == "interleaved" else "(pair two)"
    for name in ROTATED:
        if name in parts:
            lead, rest = ("", "") if "norm" in name else ("n ", " i" if "weight" in name else "")
            axis = len(lead.split())
            dim = parts[name].shape[axis]
            turned = dim if rotated is None else rotated
            if turned % 2:
                raise ValueError(f"{call}: heads of width {turned} cannot be rotated in pairs")
            if turned > dim:
                raise ValueError(f"{call}: {turned} features cannot rotate in heads of width {dim}")
            moved, kept = parts[name].split([turned, dim - turned], axis)
            moved = rearrange(moved, f"{lead}{pattern}{rest} -> {lead}{wanted}{rest}", two=2)
            parts[name] = torch.cat([moved, kept], axis)


def regroup(parts: Parts, sizes: LayerSizes, old: bool, new: bool) -> None:
    """Reorder the query heads to match how the target shares keys and values.

    `old` and `new` are the `turns` of the source and target layouts.
    """
    groups, shared = sizes.num_kv_heads, sizes.num_heads // sizes.num_kv_heads
    if old == new or 1 in (groups, shared):
        return
    before = (shared, groups) if old else (groups, shared)
    for name, axis in (("q.weight", 0), ("q.bias", 0), ("out.weight", 1)):
        if name in parts:
            split = parts[name].unflatten(axis, before)
            parts[name] = split.transpose(axis, axis + 1).flatten(axis, axis + 1)


@cache
def axes_of(pattern: str) -> list[tuple[str, ...]]:
    """Return the letters of each axis: `i (p n d)` is `[("i",), ("p", "n", "d")]`."""
    return [tuple((a or b).split()) for a, b in re.findall(r"\(([^)]*)\)|(\w+)", pattern)]


def _order(pattern: str) -> tuple[tuple[str, ...] | None, str]:
    """Return the letters of the axis that packs q, k and v, and the pattern of each part."""
    order = next((letters for letters in axes_of(pattern) if "p" in letters), None)
    return order, pattern if order is None else pattern.replace(" ".join(order), "n d")


def parts_of(held: str) -> list[str]:
    which, kind = held.split(".")
    return [held] if which == "out" or "norm" in which else [f"{part}.{kind}" for part in which]


def _arranged(tensor: Tensor, pattern: str, wanted: str, part: str, sizes: LayerSizes) -> Tensor:
    lengths = {"n": sizes.heads_of(part), "d": sizes.dim_of(part)}
    return rearrange(tensor, f"{pattern} -> {wanted}", **lengths)


def shape_of(parts: str, pattern: str, sizes: LayerSizes) -> tuple[int, ...]:
    """Return the shape that a stored tensor must have."""
    held = parts.split(".")[0]
    which = ("q",) if "norm" in held else ("out",) if held == "out" else tuple(held)
    first, lengths = which[0], []
    for letters in axes_of(pattern):
        if "p" in letters:
            lengths.append(sum(sizes.heads_of(x) * sizes.dim_of(x) for x in which))
        else:
            one = {"n": sizes.heads_of(first), "d": sizes.dim_of(first), "o": sizes.out_width}
            if first != "out":
                one["i"] = sizes.input_of(first)
            lengths.append(prod(one[letter] for letter in letters))
    return tuple(lengths)
