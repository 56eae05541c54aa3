"""The target of a check, as a callable on x `[B, T, E]`.

A `Target` holds a private copy of a layer, its sizes and its call. Inputs besides x have the same
five names in users' calls and probes: `memory` `[B, S, E]`, `keep` `[B, S]` (True = real token),
`allow` `[T, S]` (True = may attend), `start` (position of the first token) and `past` (the result
of the previous call).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from .code import set_dropout

BATCH, TOKENS = 2, 7
NAMED = ("memory", "keep", "allow", "start", "past")

CausalFrom = Literal["given", "seen", "named", "mask", "unknown"]


class Question(ValueError):
    """A required argument or call is missing and cannot be guessed."""


@dataclass(frozen=True)
class Result:
    """The output `[B, T, out_dim]` of a call, its attention weights if any, and its full result."""

    out: Tensor
    weights: Tensor | None
    raw: Any


class Unusable(Exception):
    """A call returned nothing that can be the output."""


@runtime_checkable
class LayerCall(Protocol):
    """One way to call a layer on x and named inputs."""

    @property
    def takes(self) -> frozenset[str]:
        """The names in `NAMED` that the call accepts."""
        ...

    def __call__(self, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Any: ...


@dataclass
class Target:
    """One attention layer, ready to be called.

    Attributes:
        name: the call that builds it.
        layer: a private copy.
        call: calls the layer on x and named inputs.
        out_dim: the width of the output.
        causal, causal_from: whether later tokens must be hidden, and the reason: "given" by the
            caller, "seen" in the outputs, "named" (a flag, a triangular buffer, "causal" in the
            class name), a "mask" that is passed, or "unknown".
        roles: sizes by role, as given or as read from the layer.
        arguments: the arguments of its constructor.
        rebuild: builds the layer again with other arguments; None for instances.
        shown: True if the user gave the call.
        observed: phrases that describe observed behavior.
    """

    name: str
    layer: nn.Module
    call: LayerCall
    embed_dim: int
    num_heads: int = 1
    num_kv_heads: int | None = None
    head_dim: int | None = None
    out_dim: int = 0
    context_length: int | None = None
    causal: bool = False
    causal_from: CausalFrom = "unknown"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    roles: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    rebuild: Callable[..., Target] | None = None
    shown: bool = False
    given_causal: bool | None = None
    observed: list[str] = field(default_factory=list)

    # --- calling ----------------------------------------------------------------------------------

    @property
    def takes(self) -> frozenset[str]:
        return self.call.takes

    def __call__(self, x: Tensor, **given: Any) -> Tensor:
        """Return the output `[B, T, out_dim]` for x `[B, T, embed_dim]`."""
        return self.result(x, **given).out

    def result(self, x: Tensor, **given: Any) -> Result:
        """Return output and weights. x is copied first, so the layer cannot change it.

        A required causal mask is passed, unless `allow` is given.
        """
        if self.causal and self.causal_from == "mask":
            given.setdefault("allow", causal_mask(x.shape[1], x.shape[1]))
        raw = self.call(self.layer, x.clone(), given)
        keys = given["memory"].shape[1] if "memory" in given else x.shape[1]
        return read(raw, x, keys)

    def input(
        self, tokens: int = TOKENS, batch: int = BATCH, seed: int = 0, beyond: bool = False
    ) -> Tensor:
        """Return random x `[batch, tokens, embed_dim]` in the target's dtype, the same each time.

        It has at most context_length tokens, unless `beyond`.
        """
        if self.context_length and not beyond:
            tokens = min(tokens, self.context_length)
        draw = torch.Generator().manual_seed(seed)
        shape = (batch, tokens, self.embed_dim)
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(self.dtype)

    def source(self, tokens: int = 3, batch: int = 1) -> str:
        """Return Python code that creates such an input."""
        shape = f"{batch}, {tokens}, {self.embed_dim}"
        return f"torch.manual_seed(0); x = torch.randn({shape}, dtype=torch.float64)"

    def influence(self, x: Tensor, **given: Any) -> Tensor:
        """Return `[T, S]`: how strongly output token i depends on input token j."""
        x = x[:1].detach()
        base = self(x, **given).detach()
        found = torch.zeros(base.shape[1], x.shape[1], dtype=torch.float64)
        draw = torch.Generator().manual_seed(self.seed + 1)
        step = torch.randn(x.shape[-1], generator=draw, dtype=torch.float64).to(x.dtype)
        for j in range(x.shape[1]):
            moved = x.clone()
            moved[:, j] += 0.5 * step
            gap = (self(moved, **given).detach() - base)[0].double().norm(dim=-1)
            found[:, j] = gap
        return found

    # --- copies -----------------------------------------------------------------------------------

    def fresh(self) -> Target:
        """Return an independent copy."""
        return replace(self, layer=copied(self.layer))

    def double(self) -> Target:
        """Return a copy in float64; in its own dtype if only float64 fails or is not finite."""
        wide = replace(self, layer=to_dtype(copied(self.layer), torch.float64), dtype=torch.float64)
        try:
            finite = bool(wide(wide.input()).isfinite().all())
        except Exception:
            return self.fresh()
        return wide if finite or not bool(self(self.input()).isfinite().all()) else self.fresh()

    def randomised(self, seed: int = 1) -> Target:
        """Return a copy with new random parameters, so that zeros do not hide mistakes."""
        own = self.fresh()
        randomise(own.layer, seed)
        return own

    def with_dropout(self, p: float, training: bool) -> Target | None:
        """Return a copy with dropout p, in training or eval mode; None if it has no dropout."""
        own = self.fresh()
        if not set_dropout(own.layer, p):
            return None
        own.layer.train(training)
        return own


def causal_mask(queries: int, keys: int) -> Tensor:
    """Return `[T, S]`, True where a query may attend; the last query sees the last key."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def read(raw: Any, x: Tensor, keys: int) -> Result:
    """Find the output `[B, T, …]` and the weights `[…, T, S]` in the result of a call.

    Raises:
        Unusable: the result contains no such output.
    """
    found = [one for one in tensors_in(raw) if one.is_floating_point()]
    if not found:
        none = "None (is a `return` missing?)"
        message = none if raw is None else f"a {type(raw).__name__} without a tensor"
        raise Unusable(f"it returns {message}")
    lead = tuple(x.shape[:2])
    fits = [one for one in found if one.ndim == 3 and tuple(one.shape[:2]) == lead]
    square = (x.shape[1], keys)
    outs = [one for one in fits if tuple(one.shape[-2:]) != square] or fits
    if not outs:
        raise Unusable(f"it returns a tensor of shape {list(found[0].shape)}")
    weights = (one for one in found if one is not outs[0] and tuple(one.shape[-2:]) == square)
    return Result(outs[0], next(weights, None), raw)


def tensors_in(raw: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    parts: Sequence[Any] = ()
    if isinstance(raw, Tensor):
        yield raw
    elif isinstance(raw, Mapping):
        parts = list(raw.values())
    elif isinstance(raw, (tuple, list)):
        parts = raw
    elif hasattr(raw, "__dataclass_fields__"):
        parts = [getattr(raw, name) for name in raw.__dataclass_fields__]
    for part in parts:
        yield from tensors_in(part)


# --- copies and weights ---------------------------------------------------------------------------


def copied(layer: nn.Module) -> nn.Module:
    """Return a copy that shares no weights; attributes that cannot be copied are shared."""
    try:
        return copy.deepcopy(layer)
    except Exception:  # locks, generators and non-leaf tensors cannot be deep-copied
        return _copied(layer, {})


def _copied(module: nn.Module, done: dict[int, Any]) -> nn.Module:
    if id(module) in done:
        return done[id(module)]
    new = done[id(module)] = copy.copy(module)
    for table in ("_parameters", "_buffers"):
        new.__dict__[table] = {
            name: value if value is None else done.setdefault(id(value), _own(value))
            for name, value in getattr(module, table).items()
        }
    new.__dict__["_modules"] = {
        name: child if child is None else _copied(child, done)
        for name, child in module._modules.items()
    }
    return new


def _own(value: Tensor) -> Tensor:
    own = value.detach().clone()
    return nn.Parameter(own, value.requires_grad) if isinstance(value, nn.Parameter) else own


def to_dtype(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast parameters, buffers and plain tensor attributes; complex ones stay complex."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(value: Tensor) -> Tensor:
        if value.is_complex():
            return value.to(wide)
        return value.to(dtype) if value.is_floating_point() else value

    layer._apply(cast)
    for child in layer.modules():
        for name, value in list(vars(child).items()):
            if isinstance(value, Tensor):
                setattr(child, name, cast(value))
            elif isinstance(value, list | tuple) and all(isinstance(v, nn.Module) for v in value):
                for one in value:  # not registered with PyTorch; another rule reports it
                    to_dtype(one, dtype)
    return layer


def randomise(layer: nn.Module, seed: int) -> None:
    """Give every parameter random values: matrices roughly preserve the scale of their inputs,
    biases are not zero, and gains stay near 1."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            if parameter.ndim >= 2:
                single = parameter.shape[-1] == 1  # a convolution of width 1
                inputs = parameter[0].numel() if single else parameter.shape[-1]
                noise = noise * (1.5 / max(1, inputs) ** 0.5)
            elif bool((parameter == 1).all()):
                noise = 1 + 0.2 * noise
            else:
                noise = 0.5 * noise
            parameter.copy_(noise.to(parameter.dtype))
