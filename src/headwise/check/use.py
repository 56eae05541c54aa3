"""Probe the use of a layer: training, saving, moving, eval mode and other memory layouts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .behavior import POSITIONS, bent
from .code import class_sources, describe, line_of, set_dropout
from .probing import Probing
from .rules import passed, skipped, violation
from .target import Question, Target, causal_mask, tensors_in
from .verdict import Finding

MOVES = {"to", "type_as", "cuda", "copy_"}
"""Methods that move a tensor to another device."""
MANY = 512
"""The longest context that is tested."""
MAY_MIX = MOVES | {"__getitem__", "__setitem__", "index_put_", "expand_as", "view_as", "reshape_as"}
"""Functions that accept tensors on two devices, or only read a shape."""


def runs(ctx: Probing) -> Finding | None:
    """Call the layer in training mode, without dropout."""
    own = ctx.random.fresh()
    set_dropout(own.layer, 0.0)
    own.layer.train()
    try:
        with torch.no_grad():
            own(own.input())
    except Exception as error:
        return violation("runs", "train", error=describe(error))
    return passed("runs")


def deterministic(ctx: Probing) -> Finding | None:
    """Call the layer repeatedly in eval mode."""
    own = ctx.exact.fresh()
    with torch.no_grad():
        first, second, third = (own(ctx.x) for _ in range(3))
    if ctx.near(first.nan_to_num(7.0), second.nan_to_num(7.0)):
        return passed("deterministic")
    return violation("deterministic", "kept" if ctx.near(third, second) else "differs")


def dropout_in_eval(ctx: Probing) -> Finding | None:
    """Call the layer in eval mode with dropout 0.5."""
    own = _dropping(ctx)
    if own is None:
        return None
    own.layer.eval()
    x = own.input()
    try:
        with torch.no_grad():
            one, two = own(x), own(x)
    except Exception:
        return None
    rule = "dropout-in-eval"
    return passed(rule) if ctx.near(one, two) else violation(rule, "drops")


def _dropping(ctx: Probing) -> Target | None:
    """Return a copy with dropout 0.5, built by its constructor if that takes a dropout argument."""
    if "dropout" in ctx.target.roles and ctx.target.rebuild is not None:
        try:
            return ctx.target.rebuild(dropout=0.5)
        except Exception:  # the constructor may raise
            pass
    return ctx.target.with_dropout(0.5, training=False)


def dropout(ctx: Probing) -> Finding | None:
    """Call the layer in training mode with dropout 0.5: some values must be dropped."""
    own = _dropping(ctx)
    if own is None:
        return None
    own.layer.train()
    x = own.input()
    try:
        with torch.no_grad():
            one, two = own(x), own(x)
    except Exception as error:
        return violation("dropout", "fails", error=describe(error))
    if torch.equal(one, two):
        return violation("dropout", "idle")
    same = x[:, :1].expand_as(x).contiguous()
    with torch.no_grad():
        dropped = own(same)
        own.layer.eval()
        kept = own(same)
    return violation("dropout", "before") if ctx.near(dropped, kept) else passed("dropout")


def train_eval(ctx: Probing) -> Finding | None:
    """Compare outputs in training mode without dropout with those in eval mode."""
    own = ctx.exact.fresh()
    set_dropout(own.layer, 0.0)
    own.layer.train()
    try:
        with torch.no_grad():
            out = own(ctx.x)
    except Exception:
        return None
    return passed("train-eval") if ctx.near(out, ctx.out) else violation("train-eval", "differs")


def gradients(ctx: Probing) -> Finding | None:
    """Look for parameters, or rows or columns of them, that get no gradient in any of the calls."""
    own = ctx.exact.fresh()
    named = [(n, p) for n, p in own.layer.named_parameters() if p.requires_grad]
    if not named:
        return skipped("gradients", "It has no trainable parameters.")
    calls: list[dict[str, Any]] = [{}]
    if "memory" in own.takes:
        calls.append({"memory": own.input(ctx.tokens, seed=8)})
    dead: set[str] | None = None
    for given in calls:
        try:
            out = own.result(ctx.x, **given).out
            draw = torch.Generator().manual_seed(9)
            along = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out)
            slopes = torch.autograd.grad(
                (out * along).sum(), [p for _, p in named], allow_unused=True
            )
        except Exception as error:
            if given:
                continue
            if "does not require grad" in str(error):
                slopes = [None] * len(named)
            else:
                return skipped("gradients", f"The call with gradients fails: {describe(error)}")
        parts = {_dead(ctx, n, p, s) for (n, p), s in zip(named, slopes, strict=True)} - {""}
        dead = parts if dead is None else dead & parts
    missing = [one for one in dict.fromkeys(n for n, _ in named) if one in (dead or ())]
    missing += sorted(one for one in dead or () if one not in missing)
    if own.shown and missing:  # another call may use them
        code = class_sources(own.layer)
        missing = [one for one in missing if f"{one.split('.')[0]}(" not in code]
    if not missing:
        return passed("gradients")
    which = f"{' and '.join(missing[:3])}{' and more' * (len(missing) > 3)}"
    return violation("gradients", "missing", which=which)


def _dead(ctx: Probing, name: str, parameter: Tensor, slope: Tensor | None) -> str:
    """Return the part of a parameter without a gradient; "" if all of it has one."""
    if slope is None:
        return name
    if parameter.ndim < 2 or not parameter.numel() or POSITIONS.search(name.lower()):
        return ""
    if bool((slope == 0).all()):
        return name
    if bent(ctx.exact.layer):  # a ReLU may be zero for all tokens
        return ""
    for axis in range(parameter.ndim):
        others = [n for n in range(parameter.ndim) if n != axis]
        rows = (slope.abs().amax(dim=others) == 0).nonzero().flatten().tolist()
        if rows:
            which = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else f"{rows[0]}"
            return f"{'rows' if axis == 0 else 'columns'} {which} of {name}"
    return ""


def input_kept(ctx: Probing) -> Finding | None:
    """Check that the call does not change x or the other sequence."""
    own, x = ctx.exact.fresh(), ctx.x.clone()
    given: dict[str, Any] = {"memory": x.flip(1).clone()} if "memory" in own.takes else {}
    before = {name: one.clone() for name, one in given.items()}
    try:
        with torch.no_grad():
            if _passes_mask(own) and not given:
                given["allow"] = causal_mask(ctx.tokens, ctx.tokens)
            own.call(own.layer, x, given)
    except Exception:
        return None
    if not torch.equal(x, ctx.x):
        return violation("input-kept", "changed", what="x")
    if any(not torch.equal(given[name], one) for name, one in before.items()):
        return violation("input-kept", "changed", what="the other sequence")
    return passed("input-kept")


def contiguous(ctx: Probing) -> Finding | None:
    """Call the layer on an x that is transposed in memory."""
    x = ctx.x.transpose(0, 1).contiguous().transpose(0, 1)
    given = {"allow": causal_mask(ctx.tokens, ctx.tokens)} if _passes_mask(ctx.exact) else {}
    try:
        with torch.no_grad():
            raw = ctx.exact.call(ctx.exact.layer, x, given)
            out = next(tensors_in(raw))
    except Question:
        return None
    except Exception as error:
        return violation("contiguous", "fails", error=describe(error))
    if out.shape != ctx.out.shape or ctx.near(out, ctx.out):
        return passed("contiguous")
    return violation("contiguous", "differs")


def registered(ctx: Probing) -> Finding | None:
    """Look for modules and weights that are not registered with PyTorch."""
    layer = ctx.target.layer
    for name, held in unregistered(layer):
        parameters = all(isinstance(one, nn.Parameter) for one in held)
        kind = "dict" if isinstance(held, dict) else type(held).__name__
        what, wanted = ("parameters", "Parameter") if parameters else ("modules", "Module")
        wanted += "Dict" if isinstance(held, dict) else "List"
        return violation("registered", "list", name=name, kind=kind, what=what, wanted=wanted)
    return passed("registered")


def unregistered(layer: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield plain lists and dicts that hold modules or parameters not registered with
    PyTorch."""
    known = {id(one) for one in (*layer.parameters(), *layer.modules())}
    for path, child in layer.named_modules():
        for name, value in vars(child).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            inside = list(value.values()) if isinstance(value, dict) else list(value)
            lost = [one for one in inside if isinstance(one, nn.Module | nn.Parameter)]
            if any(id(one) not in known for one in lost):
                yield (f"{path}.{name}" if path else name), value


class Elsewhere(TorchFunctionMode):
    """Raise if tensors on two devices are combined, even on a machine that has only one device.

    The tensors of the layer and its input are marked as being on the other device; tensors created
    without a device are on the CPU. PyTorch's device `meta` has the same rules but takes seconds to
    start.

    >>> with Elsewhere([x := torch.ones(2)]):
    ...     x + torch.ones(2)
    Traceback (most recent call last):
    RuntimeError: Expected all tensors to be on the same device, but one is on the CPU
    """

    def __init__(self, there: Iterable[Tensor]) -> None:
        super().__init__()
        for one in there:
            _mark(one)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        given = list(tensors_in([*args, kwargs]))
        there = [one for one in given if _is_marked(one)]
        here = [one for one in given if not _is_marked(one) and one.ndim and one.numel()]
        if there and here and name not in MAY_MIX:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but one is on the CPU"
            )
        result = func(*args, **kwargs)
        moved = name in MOVES and any(isinstance(one, torch.device | str | int) for one in args[1:])
        if there or kwargs.get("device") is not None or moved:
            for one in tensors_in(result):
                _mark(one)
        return result


def _mark(one: Tensor) -> None:
    one._headwise_there = True  # type: ignore[attr-defined]


def _is_marked(one: Tensor) -> bool:
    return getattr(one, "_headwise_there", False)


def move(ctx: Probing) -> Finding | None:
    """Call the layer as if its weights and input were on a GPU; find tensors left on the CPU."""
    own = ctx.random.fresh()
    if own.shown or any(True for _ in unregistered(own.layer)):
        return None  # tensors that a shown call creates are not marked
    x = own.input()
    given = {"allow": causal_mask(x.shape[1], x.shape[1])} if _passes_mask(own) else {}
    held = [*own.layer.parameters(), *own.layer.buffers(), x, *given.values()]
    try:
        with torch.no_grad(), Elsewhere(held):
            own.call(own.layer, x, given)
    except RuntimeError as error:
        if "Expected all tensors" not in str(error):
            return None
        line = line_of(error)
        code = line.code if line else ""
        for path, child in own.layer.named_modules():
            for name, value in vars(child).items():
                if isinstance(value, Tensor) and name in code:
                    return violation("move", "stays", name=f"{path}.{name}" if path else name)
        return violation("move", "fails", error=describe(error))
    except Exception:  # other probes report it
        return None
    return passed("move")


def _passes_mask(target: Target) -> bool:
    passed_in = target.causal and target.causal_from == "mask"
    return passed_in and bool(target.takes & {"allow", "causal"})


def reload(ctx: Probing) -> Finding | None:
    """Load the layer's state dict into a second layer, built with a different seed."""
    target = ctx.target
    if target.rebuild is None:
        return None
    try:
        other = target.rebuild(seed=target.seed + 1)
    except Exception:
        return None
    assert other is not None
    try:
        other.layer.load_state_dict(ctx.random.layer.state_dict())
    except Exception as error:
        return violation("reload", "loads", error=" ".join(str(error).split())[:200])
    x = ctx.random.input()
    other.causal, other.causal_from, other.call = target.causal, target.causal_from, target.call
    with torch.no_grad():
        try:
            one, two = ctx.random(x), other(x)
        except Exception:
            return None
    return passed("reload") if ctx.near(two, one) else violation("reload", "differs")


def context(ctx: Probing) -> Finding | None:
    """Pass more tokens than the context length."""
    longest = ctx.target.context_length
    if longest is None or longest > MANY or not ctx.target.causal:
        return None
    x = ctx.exact.input(longest + 1, 1, beyond=True)
    try:
        with torch.no_grad():
            out = ctx.exact(x)
    except Exception:
        return None
    if out.shape[1] != longest + 1 or not ctx.near(out[:, :longest], ctx.call(x[:, :longest])):
        return violation("context", "silent", longest=longest)
    return None
