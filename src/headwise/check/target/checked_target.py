"""Whatever is to be checked, as one callable on x `[B, T, E]`.

A `Target` knows its sizes, whether it is causal, and how it wants to be called; `resolve` makes
one. What the user gave is never written to; everything runs on copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .call_adapter import USUAL, Caller, MaskForm, Result, stacked, tensors_in
from .copies import copied, randomise
from .errors import Broken
from .fills import Fill
from .introspect import is_called, layer_of, names_called, own_backwards, set_dropout
from .names import is_known
from .signatures import signature

ENOUGH = 64
"""More tokens than these are not given to see what is used."""
BATCH, TOKENS = 2, 7

CausalFrom = Literal["given", "seen", "named", "mask", "unknown"]


@dataclass
class Target:
    """One attention, ready to be called; `resolve` makes it.

    Attributes:
        name: as a call, for people.
        embed_dim, out_dim: widths of input and output.
        num_heads, num_kv_heads, head_dim, context_length: None where not known.
        causal: what it is taken for, through its mask argument where it has one.
        causal_from: why: "given" by the caller, "seen" in its outputs, "named" so (class name,
            context length, a triangular buffer), by a "mask" that is passed, or "unknown": all
            tokens see each other, and nothing says that they should not.
        module: a private copy; None for functions.
        projections: only for functions: the weights `q`, `k`, `v` `[heads · D, E]` that the
            subject itself applies before it.
        roles: the constructor's arguments, as given or worked out, by role.
        arguments: what its constructor was given, by name.
        mask_form: how a causal mask is passed; None where none is.
        open_form: how a mask is passed that hides nothing, for calls that insist on one.
        uncalled: the module as it was before its first call, which may leave something behind.
        made_up: what was guessed to build it, by name.
        absent: what its code speaks of and could not be imported, for people.
        unset: parameters that its constructor leaves as they lay in memory.
        notes: what was worked out, for people.
    """

    name: str
    caller: Caller
    embed_dim: int
    out_dim: int = 0
    num_heads: int = 1
    num_kv_heads: int | None = None
    head_dim: int | None = None
    context_length: int | None = None
    causal: bool = False
    causal_from: CausalFrom = "unknown"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    projections: dict[str, Tensor] | None = None
    roles: dict[str, Any] = field(default_factory=dict)
    mask_form: MaskForm | None = None
    open_form: MaskForm | None = None
    axes: str = "heads"  # of a function's tensors, a name of `functions.AXES`
    factory: Callable[..., Target] | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    room: int | None = None  # the most tokens that went in, where a usual input did not
    only: bool = False  # whether no other number of tokens than `room` goes in
    told: bool = False  # whether that is a number of its own
    vectors: bool = False  # whether its tokens are samples, of which each has one vector
    uncalled: nn.Module | None = None
    made_up: dict[str, Any] = field(default_factory=dict)
    unset: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    # --- calling ----------------------------------------------------------------------------------

    @property
    def most_tokens(self) -> int:
        """Tokens of a call that fits the context; `TOKENS` where the context is not known."""
        return self.room or self.context_length or TOKENS

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of its constructor by name: as given, else by default."""
        return {one.name: one.default for one in signature(type(self.module))} | self.arguments

    @property
    def guesses(self) -> list[str]:
        """What was guessed to call it, for people; nothing in the usual call, or in one that was
        given."""
        caller = self.caller
        if caller.custom is not None:
            return []
        axes = [f"x as {caller.layout}"] * (caller.layout is not caller.usual)
        told = self.told or self.room in (None, self.context_length)  # as its constructor was
        tokens = [] if told else [f"{self.room} tokens"]
        form = [self.open_form.argument] if self.open_form else []
        form = [name for name in form if not is_known(name)]  # one of a usual name hides nothing
        return [*dict.fromkeys([*axes, *tokens, *form, *caller.guesses])]

    @property
    def module(self) -> nn.Module | None:
        """The private copy that is called; None for functions."""
        return self.caller.target if isinstance(self.caller.target, nn.Module) else None

    def __call__(self, x: Tensor) -> Tensor:
        """The output `[B, T, out_dim]` for x `[B, T, embed_dim]`."""
        return self.result(x).out

    def weights(self, x: Tensor) -> Tensor | None:
        """The attention weights as they come back, `[B, H, T, T]` or `[B, T, T]`, or None."""
        return self.result(x).weights

    def result(self, x: Tensor, source: Tensor | None = None, /, **keywords: Any) -> Result:
        """Output and weights, with keys and values from `source`, and the mask that is passed.

        x itself is not handed on, so that nothing can write to it.
        """
        x = x.clone()
        keywords = {**self.mask_for(x, source), **keywords}
        if self.projections is None:
            return self.caller(x, source, **keywords)
        return self._function(x, x if source is None else source, keywords)

    def mask_for(self, x: Tensor, source: Tensor | None = None) -> dict[str, Any]:
        """The mask that a call on x wants, by its argument's name; nothing where it wants none."""
        form = (self.mask_form if self.causal else None) or self.open_form
        if form is None:
            return {}
        keys = x.shape[1] if source is None else source.shape[1]
        allowed = torch.ones(len(x), x.shape[1], keys, dtype=torch.bool, device=x.device)
        if self.causal and "T" in form.shape:  # one of padding has no place for later tokens
            allowed = allowed.tril(keys - x.shape[1])
        return {form.argument: form.make(allowed, x.dtype, self.num_heads)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Result:
        """A function's own result on q `[B, H, T, D]`, k and v `[B, G, S, D]`."""
        turned = {"tokens": lambda t: t.transpose(1, 2), "heads": lambda t: t}
        feeds = [turned.get(self.axes, lambda t: t.squeeze(1))(t) for t in (q, k, v)]
        if self.axes == "single":
            rows = zip(*feeds, strict=True)
            result = stacked(self._fed(row, keywords) for row in rows)
        else:
            result = self._fed((feeds[0], feeds[1], feeds[2]), keywords)
        out = result.out.transpose(1, 2) if self.axes == "tokens" else result.out
        return replace(result, out=out.unsqueeze(1) if self.axes in ("flat", "single") else out)

    def _fed(self, feeds: tuple[Tensor, Tensor, Tensor], keywords: dict[str, Any]) -> Result:
        return self.caller.read(self.caller.feed(feeds, True, **keywords), feeds[0], feeds[1])

    def _function(
        self, x: Tensor, source: Tensor, keywords: dict[str, Any], values: Tensor | None = None
    ) -> Result:
        assert self.projections is not None
        heads = {"q": self.num_heads, "k": self.num_kv_heads or self.num_heads}
        heads["v"] = heads["k"]
        values = source if values is None else values
        feeds = []
        for part, rows in (("q", x), ("k", source), ("v", values)):
            flat = rows @ self.projections[part].to(rows.device, rows.dtype).T
            feeds.append(flat.unflatten(-1, (heads[part], -1)).transpose(1, 2))
        result = self.attend(*feeds, **keywords)
        return Result(result.out.transpose(1, 2).flatten(2), result.weights, result.raw)

    @property
    def bare(self) -> bool:
        """Whether the call takes plain batches `[B, T, E]`, nothing turned or looped."""
        return self.caller.custom is None and self.caller.layout is USUAL

    def of_values(self, x: Tensor, values: Tensor) -> Tensor:
        """The output for queries and keys from x and values from another `[B, T, E]`."""
        keywords = self.mask_for(x)
        if self.projections is not None:
            return self._function(x, x, keywords, values).out
        raw = self.caller.feed((x, x, values), True, **keywords)
        return self.caller.read(raw, x, x).out

    @property
    def idle(self) -> set[str]:
        """Names of parameters that only another input uses: the call does not touch them, though
        code of the layer speaks of them."""
        if self.module is None:
            return set()
        try:
            with _Touched() as touched:
                self(self.input(min(self.most_tokens, ENOUGH)))
        except Exception:  # whatever it raises, a probe says so
            return set()
        said, named = set(names_called(self.module)), dict(self.module.named_parameters())
        layers = {name: layer_of(name) for name in named}
        used = {layers[name] for name, one in named.items() if id(one) in touched.seen}
        unused = {n: one for n, one in layers.items() if one not in used}
        return {n for n, one in unused.items() if is_called(self.module, one, said)}

    # --- inputs -----------------------------------------------------------------------------------

    def input(
        self,
        tokens: int = TOKENS,
        batch: int = BATCH,
        seed: int = 0,
        scale: float | int = 1.0,
        beyond: bool = False,
    ) -> Tensor:
        """Random x `[batch, tokens, embed_dim]` in the subject's dtype, the same every time.

        No more tokens than the context holds, unless `beyond` asks for them; always as many as it
        insists on.
        """
        if self.only:
            tokens = self.most_tokens
        elif not beyond:
            tokens = min(tokens, self.most_tokens)
        draw = torch.Generator().manual_seed(seed)
        shape = (batch, tokens, self.embed_dim)
        return (torch.randn(shape, generator=draw, dtype=torch.float64) * scale).to(self.dtype)

    def source(self, tokens: int = 3, batch: int = 1, seed: int = 0) -> str:
        """What to type for that input."""
        shape = f"{batch}, {tokens}, {self.embed_dim}"
        return f"torch.manual_seed({seed}); x = torch.randn({shape}, dtype=torch.float64)"

    def influence(self, x: Tensor) -> Tensor:
        """`[T, T]`: how strongly output token i depends on input token j; 0 where not at all.

        By the Jacobian where nobody wrote gradients of his own, otherwise by nudging the inputs.
        """
        x = x[:1].detach()
        try:
            found = self._jacobian(x.clone().requires_grad_(True))
        except (RuntimeError, AttributeError):  # a backward of its own that runs only once, perhaps
            found = None
        return self._nudged(x) if found is None else found

    def _jacobian(self, x: Tensor) -> Tensor | None:
        tokens, out = x.shape[1], self(x)
        if not out.requires_grad or any(True for _ in own_backwards(out)):
            return None
        draw = torch.Generator().manual_seed(self.seed + 1)
        along = torch.randn(out.shape[-1], generator=draw, dtype=torch.float64).to(out)
        found = torch.zeros(tokens, tokens, dtype=torch.float64)
        for i in range(tokens):
            of = out[0, i] @ along
            slope = torch.autograd.grad(of, x, retain_graph=True, allow_unused=True)[0]
            if slope is not None:
                found[i] = slope[0].detach().double().norm(dim=-1)
        return found if found.any() else None

    def _nudged(self, x: Tensor) -> Tensor:
        tokens, base = x.shape[1], self(x).detach()
        found = torch.zeros(tokens, tokens, dtype=torch.float64)
        for j in range(tokens):
            moved = x.clone()
            moved[:, j] += 0.5
            found[:, j] = (self(moved).detach() - base)[0].double().norm(dim=-1)
        return found

    # --- copies -----------------------------------------------------------------------------------

    def fresh(self) -> Target:
        """An independent copy."""
        return self._with(copied(self.caller.target))

    def untouched(self) -> Target:
        """A copy as it was before its first call, with the same weights; a usual one where its
        weights are made in that call."""
        if self.uncalled is None or self.module is None:
            return self.fresh()
        return self.alike(copied(self.uncalled)) or self.fresh()

    def alike(self, module: nn.Module) -> Target | None:
        """The same with another module of its class, and its own weights in it; None where it has
        others."""
        assert self.module is not None
        given = dict(self.module.named_parameters())
        own = dict(module.named_parameters())
        if any(isinstance(one, nn.UninitializedParameter) for one in own.values()):
            return None
        if {n: p.shape for n, p in own.items()} != {n: p.shape for n, p in given.items()}:
            return None
        module.to(self.dtype)
        module.eval()  # somebody's own may give nothing back
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(given[name])
        for child in module.modules():
            kept = {n: one for n, one in vars(child).items() if isinstance(one, Tensor)}
            for name, value in kept.items():
                if value.is_floating_point():
                    setattr(child, name, value.to(self.dtype))
        return self._with(module)

    def _with(self, target: Any, **changes: Any) -> Target:
        return replace(self, caller=replace(self.caller, target=target), **changes)

    def unmasked(self) -> Target:
        """The same, with no causal mask or flag that is passed."""
        return replace(self, causal=False, mask_form=None)

    def with_fills(self, fills: Mapping[str, Fill]) -> Target:
        """The same, called with other values for some arguments."""
        caller = replace(self.caller, fills={**self.caller.fills, **fills})
        return replace(self, caller=caller)

    def to(self, dtype: torch.dtype) -> Target:
        """A copy with weights and inputs in another dtype."""
        own = self.fresh()
        target = own.caller.target if own.module is None else own.module.to(dtype)
        return own._with(target, dtype=dtype)

    def double(self) -> Target:
        """A copy in float64; in the subject's own dtype where float64 gives an error or no numbers,
        and that does."""
        wide = self.to(torch.float64)
        with contextlib.suppress(Exception):  # whatever it raises, another probe says so
            numbers = bool(wide(wide.input()).isfinite().all())
            if numbers or not bool(self(self.input()).isfinite().all()):
                return wide
        return self.fresh()

    def randomised(self, seed: int = 1) -> Target:
        """A copy with fresh random parameters, so that no zeros hide anything; what a call kept of
        the old ones is not in it."""
        own = self.untouched()
        if own.module is not None:
            randomise(own.module, seed)
        return own

    def training(self, p: float) -> Target | None:
        """A copy in training mode with dropout p; None where it has no dropout for a p above 0."""
        own = self.fresh()
        if own.module is None or (not set_dropout(own.module, p) and p):
            return None
        own.module.train()
        return own

    def dropping(self) -> Target | None:
        """A copy in eval mode with dropout 0.5, from its constructor where that takes one; None
        where it has no dropout."""
        own = None
        if "dropout" in self.roles:
            with contextlib.suppress(Broken, ValueError):
                own = self.rebuilt(dropout=0.5)
        own = self.training(0.5) if own is None else own.untouched().to(self.dtype)
        if own is not None and own.module is not None:
            own.module.eval()
        return own

    def rebuilt(self, **changes: Any) -> Target | None:
        """From its constructor again, with roles or arguments changed; None for instances.

        Raises:
            Broken: the constructor or the first call fails.
        """
        return None if self.factory is None else self.factory(**changes)


class _Touched(TorchFunctionMode):
    """Notes the tensors that functions of PyTorch are given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.seen |= {id(one) for one in tensors_in([*args, kwargs or {}])}
        return func(*args, **kwargs or {})
