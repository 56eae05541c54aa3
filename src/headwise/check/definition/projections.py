"""Find the projections of a module: by their names, else by shapes and order.

Projections may be Linear, Conv1D or raw parameters, one matrix for q, k and v or one for each head.
They are returned as matrices `[inputs, features]` used as `x @ weight + bias`, with the features in
the order in which they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..names import parts_of

HEAD_BY_HEAD = {"query_key_value", "wqkv"}
"""Names of projections that are packed head by head (layouts `neox`, `internlm2`)."""
IN_TURNS = {"to_q", "to_k", "to_v", "to_out"}
"""Names in a library whose query heads use key/value heads in turn (`x_transformers`)."""
LONG = {"q": "queries", "k": "keys", "v": "values"}


@dataclass(frozen=True)
class Matrix:
    """One stored projection.

    Attributes:
        name: its name in the code, `W_query` or `heads.*.W_query`.
        parts: letters of q, k, v in order; `o`; or "" if the name is not clear.
        weight: `[inputs, features]`.
        bias: `[features]`, or None.
        sure: True if its type determines the axes; a raw square parameter does not.
        heads: the number of tensors it was joined from, if heads have their own; else 0.
        named: True if its name determines its parts.
        keys: identities of its parameters.
    """

    name: str
    parts: str
    weight: Tensor
    bias: Tensor | None = None
    sure: bool = True
    heads: int = 0
    named: bool = True
    keys: tuple[int, ...] = ()

    @property
    def shared(self) -> bool:
        """Return True if heads share a projection of which each should have its own."""
        return self.heads > 1 and len(set(self.keys)) < len(self.keys)


@dataclass(frozen=True)
class Projections:
    """A module's projections, and the sizes that they and the head count imply.

    Attributes:
        sources: the matrices of q, k and v, packed or not.
        out: the output projection, or None.
        norms: norms by their part: `q`, `k`, or `x` for the others.
        extras: names of all other parameters.
    """

    sources: tuple[Matrix, ...]
    out: Matrix | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    embed_dim: int
    norms: dict[str, nn.Module] = field(default_factory=dict)
    extras: tuple[str, ...] = ()

    @property
    def packing(self) -> str:
        """The order of the features of a packed matrix, from its names: `p n d` or `n p d`."""
        return "n p d" if self._names & HEAD_BY_HEAD else "p n d"

    @property
    def turns(self) -> bool:
        """Return True if the names are those of a library that shares keys and values in turn."""
        return self._names >= IN_TURNS

    @property
    def _names(self) -> set[str]:
        return {matrix.name.split(".")[-1] for matrix in self.matrices}

    @property
    def named(self) -> bool:
        """Return True if names, not only shapes, identify the projections."""
        return all(source.named for source in self.sources)

    @property
    def style(self) -> str:
        """The style of the projections: `per head`, `fused` or `split`."""
        if any(source.heads for source in self.sources):
            return "per head"
        return "fused" if any(len(source.parts) > 1 for source in self.sources) else "split"

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The sources, and the output projection if there is one."""
        return self.sources if self.out is None else (*self.sources, self.out)

    def name(self, part: str) -> str:
        """Return the name of the projection of `q`, `k`, `v` or `o` in the code."""
        if part == "o":
            return self.out.name if self.out is not None else "the output projection"
        return next(source.name for source in self.sources if part in source.parts)


class Unreadable(Exception):
    """The projections cannot be read, for the reason in the message."""


def read(
    module: nn.Module,
    embed_dim: int,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    idle: Collection[str] = (),
) -> Projections:
    """Find q, k, v and the output projection of a module.

    Args:
        module: anything with parameters.
        embed_dim: the width of its input.
        num_heads: query heads; optional if heads have their own tensors.
        num_kv_heads: key/value heads; by default from the shapes.
        idle: names of unused parameters, which are ignored.

    Raises:
        Unreadable: the projections cannot be read.

    >>> reading = read(nn.MultiheadAttention(24, 3), embed_dim=24, num_heads=3)
    >>> reading.style, reading.name("q"), reading.name("o"), reading.head_dim
    ('fused', 'in_proj_weight', 'out_proj', 8)
    """
    unread = {id(one) for name, one in module.named_parameters() if name in idle}
    stored = (one for one in _stores(module, embed_dim) if not unread & set(one.keys))
    matrices = _heads_together(list(stored))
    biases = [matrix for matrix in matrices if matrix.bias is None and matrix.weight.ndim == 1]
    sources, out = _assigned([m for m in matrices if m.weight.ndim == 2], embed_dim)
    sources = tuple(_with_bias(source, biases) for source in sources)
    out = None if out is None else _with_bias(out, biases)
    sizes = _sizes(sources, out, embed_dim, num_heads, num_kv_heads)
    joined = sizes[0] * sizes[3]
    if out is not None and not out.sure and out.weight.shape[0] != joined == out.weight.shape[1]:
        out = replace(out, weight=out.weight.T)
    norms = _norms(module)
    reading = Projections(sources, out, *sizes, embed_dim, norms)
    used = unread | {key for matrix in reading.matrices for key in matrix.keys}
    used |= {id(parameter) for norm in norms.values() for parameter in norm.parameters()}
    extras = (name for name, one in module.named_parameters() if id(one) not in used)
    return replace(reading, extras=tuple(extras))


def _stores(module: nn.Module, embed_dim: int) -> Iterator[Matrix]:
    """Yield all tensors that may be a projection, or the bias of one, under their full names."""
    for path, owner in module.named_modules(remove_duplicate=False):
        if isinstance(owner, nn.Embedding) or is_norm(owner):
            continue
        own = dict(owner.named_parameters(recurse=False))
        weight, bias = own.get("weight"), own.get("bias")
        if path and weight is not None and set(own) <= {"weight", "bias"}:
            if not any(True for _ in owner.children()) and (turned := _linear(owner)) is not None:
                keys = tuple(id(tensor) for tensor in own.values())
                bias = None if bias is None else bias.detach()
                yield Matrix(path, _parts_named(path), turned, bias, keys=keys)
            continue
        for name, tensor in own.items():
            full = f"{path}.{name}" if path else name
            yield from _raw(full, tensor, embed_dim)


def is_norm(module: nn.Module) -> bool:
    """Return True for norms, by the name of the class."""
    return "norm" in type(module).__name__.lower()


def _linear(owner: nn.Module) -> Tensor | None:
    """Return the weight of a module that computes `x @ weight + bias`, transposed if necessary."""
    weight = dict(owner.named_parameters(recurse=False))["weight"].detach()
    if isinstance(owner, nn.Linear):
        return weight.T
    if weight.ndim == 3 and weight.shape[2] == 1:
        return weight[..., 0].T  # a convolution of width 1
    if weight.ndim != 2:
        return None
    if type(owner).__name__.lower().startswith("conv1d"):
        return weight
    bias = getattr(owner, "bias", None)
    for turned in (weight, weight.T):
        x = torch.randn(2, turned.shape[0], dtype=weight.dtype, device=weight.device)
        try:
            wanted = x @ turned if bias is None else x @ turned + bias
            if torch.allclose(owner(x), wanted, rtol=1e-4, atol=1e-5):
                return turned
        except Exception:  # user code may raise anything
            continue
    return None


def _raw(name: str, tensor: Tensor, embed_dim: int) -> Iterator[Matrix]:
    """Yield a bare parameter as a matrix, one with an axis for the heads, or a bias."""
    parts, keys, tensor = _parts_named(name), (id(tensor),), tensor.detach()
    last = name.split(".")[-1].lower()
    if tensor.ndim == 1 or re.search(r"bias|^b_|_b$|^b[qkvo]", last):
        if parts and tensor.ndim <= 2:
            yield Matrix(name, parts, tensor.flatten(), keys=keys)
    elif tensor.ndim == 2:
        sure = last.endswith("proj_weight")  # [features, inputs], as in PyTorch's functions
        rows, columns = tensor.shape
        alone = (rows == embed_dim) != (columns == embed_dim)
        if sure or (parts != "o" and alone and columns == embed_dim):
            tensor = tensor.T
        yield Matrix(name, parts, tensor, sure=sure or (alone and parts != "o"), keys=keys)
    elif tensor.ndim == 3 and parts:
        if parts == "o":  # [heads, features, outputs]
            yield Matrix(name, parts, tensor.flatten(0, 1), keys=keys)
        elif embed_dim in tensor.shape:
            inputs = tensor.movedim(tensor.shape.index(embed_dim), 0)
            yield Matrix(name, parts, inputs.flatten(1), keys=keys)


def _parts_named(path: str) -> str:
    """Return the parts that the last meaningful word of a path names."""
    for name in reversed([part for part in path.split(".") if not part.isdigit()]):
        if parts := parts_of(name):
            return parts
    return ""


def _heads_together(matrices: list[Matrix]) -> list[Matrix]:
    """Join matrices that differ only in one number, such as `heads.0.query` and `heads.1.query`."""
    groups: dict[str, list[Matrix]] = {}
    for matrix in matrices:
        stem = matrix.name
        if matrix.parts not in ("", "o"):
            stem = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", stem, count=1)
        groups.setdefault(stem, []).append(matrix)
    together = []
    for stem, group in groups.items():
        alone = len(group) == 1 or len({matrix.weight.shape for matrix in group}) > 1
        if "*" not in stem or alone:
            together += group
            continue
        biases = [matrix.bias for matrix in group if matrix.bias is not None]
        joined = replace(
            group[0],
            name=stem,
            weight=torch.cat([matrix.weight for matrix in group], -1),
            bias=torch.cat(biases) if biases else None,
            sure=all(matrix.sure for matrix in group),
            heads=len(group),
            keys=tuple(key for matrix in group for key in matrix.keys),
        )
        together.append(joined)
    return together


def _assigned(
    matrices: Sequence[Matrix], embed_dim: int
) -> tuple[tuple[Matrix, ...], Matrix | None]:
    """Assign the matrices to q, k, v and output: by names first, the rest by shapes and order."""
    outs = [matrix for matrix in matrices if matrix.parts == "o"]
    silent = [matrix for matrix in matrices if not matrix.parts]
    if len(outs) > 1 and not silent:
        named = any(set(matrix.parts) & set("qkv") for matrix in matrices)
        outs, silent = (outs[-1:], []) if named else ([], outs)
    out = outs[-1] if outs else None
    sources = [matrix for matrix in matrices if matrix.parts and matrix.parts != "o"]
    held = "".join(source.parts for source in sources)
    if sources and set(held) == set("kqv") and len(held) > 3:
        # GPT-2's cross-attention: beside q_attn, c_attn holds only k and v
        sources = [replace(one, parts="kv") if one.parts == "qkv" else one for one in sources]
        held = "".join(source.parts for source in sources)
    if len(set(held)) != len(held):
        raise Unreadable(f"several parameters look like the same projection ({_names(sources)})")
    missing = [part for part in "qkv" if part not in held]
    readers = [one for one in silent if one.weight.shape[0] == embed_dim]
    if len(missing) == 3 and readers and (packed := _packed(readers)) is not None:
        sources, missing = [replace(packed, parts="qkv", named=False)], []
        readers = [one for one in silent if one is not packed]
    elif missing and len(readers) >= len(missing):
        chosen = readers[: len(missing)]
        for part, one in zip(missing, chosen, strict=True):
            sources.append(replace(one, parts=part, named=len(missing) == 1))
        missing, readers = [], [one for one in silent if one not in chosen]
    if missing:
        lacking = ", ".join(LONG[part] for part in missing)
        raise Unreadable(f"no parameter looks like the projection of the {lacking}")
    if out is None and len(readers) == 1:
        out = replace(readers[0], parts="o", named=False)
    return tuple(sorted(sources, key=lambda one: "qkv".index(one.parts[0]))), out


def _packed(readers: Sequence[Matrix]) -> Matrix | None:
    """Return the widest matrix, if there are at most two and its width is a multiple of 3."""
    widest = max(one.weight.shape[1] for one in readers)
    fits = (one for one in readers if one.weight.shape[1] == widest)
    return next(fits, None) if len(readers) <= 2 and widest % 3 == 0 else None


def _with_bias(matrix: Matrix, biases: Sequence[Matrix]) -> Matrix:
    """Return a bare matrix with its bare bias, if there is one."""
    for bias in biases if matrix.bias is None else ():
        fits = set(bias.parts) == set(matrix.parts)
        if fits and len(bias.weight) == matrix.weight.shape[1]:
            return replace(matrix, bias=bias.weight, keys=matrix.keys + bias.keys)
    return matrix


def _norms(module: nn.Module) -> dict[str, nn.Module]:
    """Return the first norm of each part."""
    norms: dict[str, nn.Module] = {}
    for path, owner in module.named_modules():
        if path and is_norm(owner):
            parts = parts_of(path.split(".")[-1])
            norms.setdefault(parts if parts in ("q", "k") else "x", owner)
    return norms


def _sizes(
    sources: Sequence[Matrix],
    out: Matrix | None,
    embed_dim: int,
    num_heads: int | None,
    num_kv_heads: int | None,
) -> tuple[int, int, int, int]:
    """Return the numbers of query and key/value heads, and their widths."""
    for one in sources:
        if one.weight.shape[0] != embed_dim:
            raise Unreadable(f"{one.name} takes {one.weight.shape[0]} features, not {embed_dim}")
    heads = max((source.heads for source in sources), default=0) or num_heads
    if heads is None:
        raise Unreadable("the number of heads is unknown; pass num_heads")
    width = {source.parts: source.weight.shape[1] for source in sources}
    if "q" in width:
        dim = _share(width.pop("q"), heads, "queries")
        if "k" in width:
            kv_heads = _share(width["k"], dim, "keys")
            return heads, kv_heads, dim, _share(width["v"], kv_heads, "values")
        (both,) = width.values()
        return heads, _share(both, 2 * dim, "keys and values"), dim, dim
    if len(width) > 1:
        raise Unreadable(f"queries are packed with others ({_names(sources)})")
    (total,) = width.values()
    if num_kv_heads not in (None, heads):
        dim = _share(total, heads + 2 * num_kv_heads, "queries, keys and values")
        return heads, num_kv_heads, dim, dim
    alike = total % (3 * heads) == 0
    if alike and (num_kv_heads or out is None or total == 3 * len(out.weight)):
        return heads, heads, total // (3 * heads), total // (3 * heads)
    if out is None:
        name = sources[0].name
        raise Unreadable(f"the {total} features of {name} are not a multiple of 3·{heads}")
    dim = _share(len(out.weight), heads, "the output projection's inputs")
    rest = total - heads * dim
    if rest <= 0 and alike:  # a smaller input: the heads were not joined
        return heads, heads, total // (3 * heads), total // (3 * heads)
    return heads, _share(rest, 2 * dim, "keys and values"), dim, dim


def _share(width: int, among: int, quantity: str) -> int:
    if width < among or width % among:
        raise Unreadable(f"{width} features of {quantity} are not a multiple of {among}")
    return width // among


def _names(matrices: Sequence[Matrix]) -> str:
    return ", ".join(matrix.name for matrix in matrices)
