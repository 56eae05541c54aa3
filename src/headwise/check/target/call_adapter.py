"""Calling what is to be checked, however its `forward` wants to be called.

The parameters of the call are taken by their names (`names.calling_role`): the input once, or as
query, key and value; masks in the form that they are understood in; positions that say nothing;
the attention weights where they come back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...masks import Causal, Dense, Mask
from .construct import signature
from .names import calling_role

SHAPES = ("[T, S]", "[1, 1, T, S]", "[B, 1, T, S]", "[B, T, S]", "[1, T, S]", "[B, H, T, S]")
KINDS = {
    "may": "True where a query may attend",
    "hidden": "True where a key is hidden",
    "added": "0 where a query may attend and −inf elsewhere, added to the scores",
    "ones": "1 where a query may attend and 0 elsewhere",
    "later": "1 where a key is hidden and 0 elsewhere",
    "headwise": "a mask of headwise",
    "flag": "True for causal attention",
    "lengths": "how many tokens of each sequence are real",
}


@dataclass(frozen=True)
class MaskForm:
    """How a mask is understood: by which argument, as what, in which shape.

    `token` forms are for padding: `[B, S]`, or broadcast over the queries.
    """

    argument: str
    kind: str
    shape: str = "[T, S]"

    def make(self, allowed: Tensor, dtype: torch.dtype, heads: int = 1) -> Any:
        """The argument for `allowed`, `[B, T, S]`, True where a query may attend."""
        if self.kind == "flag":
            return True
        if self.kind == "headwise":
            return _as_value(allowed)
        given = self._kind(self._shape(allowed, heads), dtype)
        return given.contiguous()

    def _kind(self, allowed: Tensor, dtype: torch.dtype) -> Tensor:
        if self.kind == "may":
            return allowed
        if self.kind == "hidden":
            return ~allowed
        if self.kind == "added":
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            return zeros.masked_fill(~allowed, -torch.inf)
        return (allowed if self.kind == "ones" else ~allowed).to(dtype)

    def _shape(self, allowed: Tensor, heads: int) -> Tensor:
        if self.shape == "[T, S]":
            return allowed[0]
        if self.shape == "[1, 1, T, S]":
            return allowed[:1, None]
        if self.shape == "[1, T, S]":
            return allowed[:1]
        if self.shape == "[B, T, S]":
            return allowed
        if self.shape == "[B, S]":
            return allowed[:, 0]
        if self.shape == "[B, 1, 1, S]":
            return allowed[:, None, :1]
        if self.shape == "[B, 1, S]":
            return allowed[:, :1]
        return allowed[:, None].expand(-1, heads if self.shape == "[B, H, T, S]" else 1, -1, -1)

    def __str__(self) -> str:
        shape = "" if self.kind in ("flag", "headwise", "lengths") else f", {self.shape}"
        return f"{self.argument} ({KINDS[self.kind]}{shape})"


def _as_value(allowed: Tensor) -> Mask:
    queries, keys = allowed.shape[-2:]
    causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    if torch.equal(allowed.cpu(), causal.expand(allowed.shape)):
        return Causal()
    return Dense(allowed[:, None])


@dataclass(frozen=True)
class Result:
    """What a call gave: the output, the attention weights if there are any, and everything."""

    out: Tensor
    weights: Tensor | None
    raw: Any


class Unusable(Exception):
    """A call went through, but nothing in what it returned can be the output."""


@dataclass
class Caller:
    """One way to call a target on x.

    `layout`: "batch" `[B, T, E]`, "time" `[T, B, E]`, or "single" `[T, E]`, one sequence at a time.
    """

    target: Callable[..., Any]
    extra: dict[str, Any] = field(default_factory=dict)
    head_dim: int = 1
    heads: int = 1
    layout: str = "batch"
    custom: Callable[[Any, Tensor], Any] | None = None
    function: bool = False

    def __post_init__(self) -> None:
        forward = getattr(self.target, "forward", self.target)
        parameters = signature(forward)
        self.parameters = {p.name: p for p in parameters}
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self.positional = [p.name for p in positional if p.name not in self.extra]
        self.roles = {name: calling_role(name) for name in self.parameters}
        self.inputs = self._inputs(positional)

    def _inputs(self, positional: list[inspect.Parameter]) -> list[str]:
        """The parameters that take x: one, or query, key and value."""
        if not self.parameters:
            return []
        names = self.positional
        first = [self.roles[name] for name in names[:3]]
        if self.function and (not names or first[0] is None):
            required = [p.name for p in positional if p.default is p.empty]
            return (required or ["q", "k", "v"])[:3]
        if first[:3] == ["query", "key", "value"]:
            return names[:3]
        if len(first) == 3 and first[1:] == ["key", "value"]:  # (x, key=None, value=None)
            return names[:3]
        if first[1:2] == ["value"] and first[2:] == ["key"]:  # (query, value, key)
            return names[:3]
        if first and set(first) == {"query", "key", "value"}:
            return sorted(names[:3], key=lambda n: ("query", "key", "value").index(self.role(n)))
        return names[:1]

    def role(self, name: str) -> str:
        return self.roles.get(name) or ""

    def named(self, role: str) -> list[str]:
        """The parameters of one role, in order."""
        return [name for name, its in self.roles.items() if its == role]

    def required(self, name: str) -> bool:
        parameter = self.parameters[name]
        return parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )

    def takes_values(self, name: str) -> bool:
        """Whether a mask of headwise goes there."""
        return "Mask" in str(self.parameters[name].annotation)

    @property
    def separate(self) -> bool:
        """Whether queries, keys and values are given apart."""
        return len(self.inputs) == 3

    def missing(self) -> list[str]:
        """Required parameters that nothing is known about."""
        known = {*self.inputs, *self.extra}
        filled = {"mask", "padding", "lengths", "causal", "context", "cache", "use_cache"}
        filled |= {"weights", "rotary", "complex", "positions", "start", "training", "dropout"}
        return [
            name
            for name in self.parameters
            if name not in known and self.required(name) and self.role(name) not in filled
        ]

    def __call__(self, x: Tensor, source: Tensor | None = None, **keywords: Any) -> Result:
        """The result on x `[B, T, E]`; keys and values from `source` `[B, S, E]` if it is given.

        `keywords` are further arguments of the call, masks among them.
        """
        if self.custom is not None:
            return self.read(self.custom(self.target, x), x, x)
        if self.layout == "single":
            return self._one_by_one(x, source, keywords)
        memory = x if source is None else source
        swap = self.layout == "time"
        feed, other = (t.transpose(0, 1) if swap else t for t in (x, memory))
        raw = self.raw(feed, other, cross=source is not None, **keywords)
        return self.read(raw, x, memory)

    def raw(self, x: Tensor, source: Tensor, cross: bool = False, **keywords: Any) -> Any:
        """What the target returns, as it is, for input x with keys and values from `source`."""
        return self.feed((x, source, source), cross, **keywords)

    def feed(self, feeds: tuple[Tensor, Tensor, Tensor], cross: bool, **keywords: Any) -> Any:
        """What the target returns for these inputs of queries, keys and values.

        With `cross`, keys and values are given even where the call could do without.
        """
        given = {**self.extra, **keywords}
        values = dict(given)
        if self.separate:
            wanted = {n for n in self.inputs if cross or n == self.inputs[0] or self.required(n)}
            pairs = zip(self.inputs, feeds, strict=True)
            values |= {name: tensor for name, tensor in pairs if name in wanted}
        elif self.inputs:
            values[self.inputs[0]] = feeds[0]
        for name in self.parameters:
            role = self.role(name)
            if name not in values and (self.required(name) or role == "rotary"):
                values[name] = self._filler(role, feeds[0], feeds[1])
        if cross and not self.separate:
            values |= dict.fromkeys(self.named("context")[:1], feeds[1])
        if not self.inputs:  # nothing is known of the signature
            return self.target(*(feeds if self.function else feeds[:1]), **values)
        args: list[Tensor] = []
        for name in self.positional:
            if name not in self.inputs or name not in values:
                break
            args.append(values.pop(name))
        return self.target(*args, **values)

    def _filler(self, role: str, x: Tensor, source: Tensor) -> Any:
        """A required argument that has nothing to say."""
        tokens, device = x.shape[-2], x.device
        if role == "context":
            return source
        if role == "rotary":
            ones = torch.ones(1, tokens, self.head_dim, dtype=x.dtype, device=device)
            return ones, torch.zeros_like(ones)
        if role == "complex":
            return torch.ones(tokens, self.head_dim // 2, dtype=torch.complex64, device=device)
        if role == "positions":
            return torch.arange(tokens, device=device)[None]
        fillers = {"start": 0, "training": False, "dropout": 0.0, "causal": False}
        return fillers.get(role, False if role in ("use_cache", "weights") else None)

    def _one_by_one(self, x: Tensor, source: Tensor | None, keywords: dict[str, Any]) -> Result:
        rows = [
            self.raw(
                row, row if source is None else source[b], cross=source is not None, **keywords
            )
            for b, row in enumerate(x)
        ]
        memory = x if source is None else source
        read = [self.parts(row, x.shape[1:], memory.shape[1:]) for row in rows]
        outs = torch.stack([out for out, _ in read])
        weights = [weights for _, weights in read if weights is not None]
        return Result(outs, torch.stack(weights) if len(weights) == len(rows) else None, rows)

    def read(self, raw: Any, x: Tensor, source: Tensor) -> Result:
        """The output and the weights among what was returned."""
        shape, memory = x.shape[:-1], source.shape[:-1]
        if self.layout == "time":
            out, weights = self.parts(raw, (shape[1], shape[0], 0), (memory[1], memory[0], 0))
            return Result(out.transpose(0, 1), weights, raw)
        out, weights = self.parts(raw, (*shape, 0), (*memory, 0))
        return Result(out, weights, raw)

    def parts(
        self, raw: Any, shape: tuple[int, ...], memory: tuple[int, ...]
    ) -> tuple[Tensor, Tensor | None]:
        tensors = [t for t in tensors_in(raw) if t.is_floating_point()]
        if not tensors:
            raise Unusable(f"returns {_kind(raw)}")
        lead = tuple(shape[:-1])
        fits = [t for t in tensors if t.ndim == len(shape) and tuple(t.shape[:-1]) == lead]
        if not fits:
            raise Unusable(f"returns a tensor of shape {list(tensors[0].shape)}")
        queries = lead[0] if self.layout == "time" else lead[-1]
        keys = memory[0] if self.layout == "time" else memory[-2]
        square = [
            t
            for t in tensors
            if t.ndim >= 2 and tuple(t.shape[-2:]) == (queries, keys) and t is not fits[0]
        ]
        if len(fits) > 1 and tuple(fits[0].shape[-2:]) == (queries, keys):  # (weights, output)
            other = [t for t in fits[1:] if tuple(t.shape[-2:]) != (queries, keys)]
            if other:
                return other[0], fits[0]
        return fits[0], square[0] if square else None


def tensors_in(raw: Any) -> Iterator[Tensor]:
    """The tensors of a result, first come first."""
    if isinstance(raw, Tensor):
        yield raw
    elif isinstance(raw, Mapping):
        for value in raw.values():
            yield from tensors_in(value)
    elif isinstance(raw, (tuple, list)):
        for value in raw:
            yield from tensors_in(value)
    elif hasattr(raw, "__dataclass_fields__"):
        for name in raw.__dataclass_fields__:
            yield from tensors_in(getattr(raw, name))


def _kind(raw: Any) -> str:
    if raw is None:
        return "None (is a `return` missing?)"
    return f"a {type(raw).__name__} without a tensor"
