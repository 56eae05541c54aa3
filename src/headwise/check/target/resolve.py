"""Resolve whatever is to be checked: a module, a class or factory, or a plain function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import Caller, MaskForm, UnusableResult, tensors_in
from .checked_target import BATCH, TOKENS, Broken, Target, copied, told
from .construct import (
    BuildSizes,
    build,
    facts,
    input_width,
    matrix_width,
    name_of,
    shown,
    signature,
)
from .masking import ZERO, learn_causality
from .names import building_role, calling_role

AXES = {"heads": "[B, H, T, D]", "tokens": "[B, T, H, D]", "flat": "[B, T, D]", "single": "[T, D]"}
"""Which axes a function's tensors have."""


@dataclass(frozen=True)
class Request:
    """What was said of the target, beside the target itself and its own arguments."""

    sizes: BuildSizes
    causal: bool | None = None
    seed: int = 0
    call: Callable[..., Any] | None = None


def resolve(
    thing: Any,
    *args: Any,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    call: Callable[[Any, Tensor], Any] | None = None,
    **arguments: Any,
) -> Target:
    """Make the target for a module, a class or factory, or a function of q, k and v.

    Args:
        thing: and all others, as `check` takes them.

    Raises:
        ValueError: something must be given that cannot be worked out.
        Broken: it cannot be built, or its first call fails.
    """
    sizes = BuildSizes(embed_dim, num_heads, num_kv_heads, causal=causal)
    request = Request(sizes, causal, seed, call)
    thing = getattr(thing, "_orig_mod", thing)  # what torch.compile has wrapped
    if isinstance(thing, nn.Module) or _is_object(thing):
        if args or arguments:
            raise ValueError(
                f"check({type(thing).__name__}(…), {shown(arguments) or '…'}): this is built "
                "already; arguments of its constructor go with the class, not with an instance"
            )
        return _of_instance(thing, request)
    if not callable(thing):
        raise ValueError(
            f"check({thing!r}): this is a {type(thing).__name__}; give a module, a class with "
            "its arguments, or a function of q, k and v"
        )
    width = request.sizes.embed_dim or 24
    if _is_function_of_qkv(thing, arguments):
        return _of_function(thing, arguments, request)
    if _is_function_of_x(thing, width, arguments):
        sizes = replace(request.sizes, embed_dim=width)
        return _of_instance(thing, replace(request, sizes=sizes))
    return _of_factory(thing, args, arguments, request)


def _is_object(thing: Any) -> bool:
    """Whether it is an object with a call of its own, which is no nn.Module."""
    plain = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
    known = callable(thing) and not isinstance(thing, plain)
    return known and any("__call__" in vars(kind) for kind in inspect.getmro(type(thing))[:-1])


def _is_function_of_x(thing: Any, width: int, arguments: dict[str, Any]) -> bool:
    """Whether it gives tensors for a tensor: its one argument has no name of a size."""
    required = [p for p in signature(thing) if p.default is p.empty and p.name not in arguments]
    names = [p.name for p in required if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if inspect.isclass(thing) or len(names) != 1 or building_role(names[0]) is not None:
        return False
    try:
        return any(True for _ in tensors_in(thing(torch.zeros(BATCH, TOKENS, width))))
    except Exception:  # a factory chokes on a tensor
        return False


def _is_function_of_qkv(thing: Any, arguments: dict[str, Any]) -> bool:
    """Whether the first things it takes are tensors, not sizes."""
    if inspect.isclass(thing):
        return False
    parameters = [p for p in signature(thing) if p.name not in arguments]
    if not parameters:  # builtins tell nothing; Python's own factories without arguments do
        return not inspect.isfunction(thing)
    roles = [calling_role(p.name) for p in parameters[:3]]
    if roles[:2] == ["query", "key"] or set(roles) == {"query", "key", "value"}:
        return True
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    unknown = [p for p in required if building_role(p.name) is None]
    return len(required) == 3 and len(unknown) >= 2


# --- modules and factories ------------------------------------------------------------------------


def _of_instance(thing: Any, request: Request) -> Target:
    known, label = facts(thing), f"check({type(thing).__name__}(…))"
    width = request.sizes.embed_dim or _width_of(thing, known)
    if width is None:
        raise ValueError(
            f"{label}: the width of its input cannot be found; give it: "
            "hw.check(module, embed_dim=24)"
        )
    heads = request.sizes.num_heads or known.get("heads") or _heads_of(thing)
    if heads is None:
        raise ValueError(
            f"{label}: how many heads it has cannot be found; give it: "
            f"hw.check(module, embed_dim={width}, num_heads=3)"
        )
    if isinstance(thing, nn.Module) and any(p.is_meta for p in thing.parameters()):
        raise ValueError(
            f"{label}: its weights are on the device meta and have no numbers; give one that is "
            "on the CPU or a GPU"
        )
    name = f"{type(thing).__name__}(…)"
    return _settled(copied(thing), name, width, heads, known, request)


def _width_of(thing: Any, known: dict[str, Any]) -> int | None:
    if not isinstance(thing, nn.Module):
        return known.get("width")
    return input_width(thing) or known.get("width") or matrix_width(thing)


def _heads_of(thing: Any) -> int | None:
    """From a list of heads, or 1 where nothing in the constructor speaks of heads."""
    for child in thing.modules() if isinstance(thing, nn.Module) else ():
        parts = list(child) if isinstance(child, nn.ModuleList) else []
        if parts and all(any(True for _ in part.parameters()) for part in parts):
            return len(parts)
    roles = {building_role(p.name) for p in signature(type(thing))}
    return None if roles & {"heads", "config"} else 1


def _of_factory(
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    request: Request,
) -> Target:
    label = name_of(factory)

    def make(seed: int = request.seed, **changes: Any) -> Target:
        sizes = replace(request.sizes, changes=changes)
        own = {name: v for name, v in arguments.items() if building_role(name) not in changes}
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                target, named, roles = build(factory, args, own, sizes)
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("check("):
                raise
            raise Broken(found("builds", "fails", label=label, error=told(error))) from error
        if not callable(target):
            kind = type(target).__name__
            raise Broken(found("builds", "result", label=label, kind=kind))
        if not isinstance(target, nn.Module) and _is_function_of_qkv(target, {}):
            return _of_function(target, {}, replace(request, call=None))
        known = facts(target)
        heads = roles.get("heads") or known.get("heads") or _heads_of(target) or 1
        known |= roles
        width = roles.get("width") or _width_of(target, known) or sizes.embed_dim or 24
        name = f"{label}({shown(named)})"
        subject = _settled(target, name, width, heads, known, request, roles)
        return replace(subject, factory=make)

    return make()


def _settled(
    target: Any,
    name: str,
    width: int,
    heads: int,
    known: dict[str, Any],
    request: Request,
    roles: dict[str, Any] | None = None,
) -> Target:
    """The subject for a target whose sizes are known: how it is called, and whether causal."""
    parameters = ()
    if isinstance(target, nn.Module):
        target = target.eval().cpu()
        parameters = target.parameters()
    sizes, call = request.sizes, request.call
    said = sizes.head_dim or known.get("head_dim")
    dim = said or max(1, width // heads)
    subject = Target(
        name=name,
        caller=Caller(target, head_dim=dim, heads=heads, custom=call),
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=sizes.num_kv_heads or known.get("kv_heads"),
        head_dim=dim,
        context_length=known.get("context"),
        dtype=next((p.dtype for p in parameters if p.is_floating_point()), torch.float32),
        seed=request.seed,
        roles=roles or {},
    )
    if call is None:
        _refuse_other_calls(subject, known.get("kv_width", width))
    _first_call(subject)
    learn_causality(subject, request.causal)
    if said is None and subject.out_dim % heads == 0:
        subject.head_dim = subject.out_dim // heads
    return subject


def _refuse_other_calls(subject: Target, kv_width: int) -> None:
    """Ask how to call what wants unknown arguments, or keys of another width than queries."""
    missing, width = subject.caller.missing(), subject.embed_dim
    if missing:
        raise ValueError(
            f"check({subject.name}): what its call wants for {', '.join(missing)} cannot be worked "
            f"out; say how to call it: hw.check(…, call=lambda layer, x: layer(x, {missing[0]}=…))"
        )
    if kv_width != width:
        feeds = ["x"] + [f"x[..., :{kv_width}]"] * (2 if subject.caller.separate else 1)
        raise ValueError(
            f"check({subject.name}): its keys are {kv_width} wide and its queries {width}, so it "
            "cannot attend to its own input; say how to call it: hw.check(…, call=lambda layer, "
            f"x: layer({', '.join(feeds)}))"
        )


# --- the first call -------------------------------------------------------------------------------


def _first_call(subject: Target) -> None:
    """Finds the layout in which x goes in, and the width of the output."""
    caller = subject.caller
    if getattr(caller.target, "batch_first", True) is False:
        caller.layout = "time"
    errors: list[BaseException] = []
    layouts = dict.fromkeys((caller.layout, "single"))
    for room, layout in [(None, one) for one in layouts] + [(4, caller.layout), (2, caller.layout)]:
        caller.layout, subject.room = layout, room
        for form in (None, *_open_forms(caller)):
            subject.open_form = form
            try:
                result = subject.result(subject.input())
            except Exception as error:
                errors.append(error)
                continue
            subject.out_dim = result.out.shape[-1]
            if subject.bare and _is_time_first(subject):
                caller.layout = "time"
                subject.notes.append("it takes x as [T, B, E]")
            if room is not None:
                subject.notes.append(f"it takes no more than about {room} tokens")
            if layout == "single":
                subject.notes.append("it takes one sequence [T, E] at a time, without a batch")
            return
        if isinstance(errors[0], UnusableResult):
            break
    error, shape = errors[0], [BATCH, TOKENS, subject.embed_dim]
    if isinstance(error, UnusableResult):
        raise Broken(found("shape", "result", x=shape, error=error, B=BATCH, T=TOKENS)) from error
    raise _not_run(f"x {shape}", error) from error


def _open_forms(caller: Caller) -> list[MaskForm]:
    """Forms of a mask that hides nothing, for calls that insist on one."""
    names = filter(caller.required, [*caller.named("mask"), *caller.named("padding")])
    shapes = ("[T, S]", "[1, 1, T, S]", "[B, T, S]", "[B, S]")
    return [MaskForm(*form) for form in product(names, ("may", "added", "ones"), shapes)]


def _is_time_first(subject: Target) -> bool:
    """Whether what is mixed lies along the first axis, and nothing along the second."""
    x = subject.input().detach().requires_grad_(True)
    try:
        out = subject.caller(x.clone()).out
        if not out.requires_grad:
            return False
        slope = torch.autograd.grad(out[-1, -1].sum(), x)[0].norm(dim=-1)
    except Exception:
        return False
    return bool(slope[:-1, -1].sum() > 0) and bool((slope[:, :-1] == 0).all())


def _not_run(what: str, error: BaseException) -> Broken:
    """A first call that fails, with what its error says of the reason."""
    text, way = str(error), "other"
    if "mat1 and mat2" in text or "size mismatch" in text:
        way = "matrices"
    elif ("view" in text and "contiguous" in text) or "view size" in text:
        way = "view"
    elif "must match" in text or "shape" in text or "expected" in text.lower():
        way = "shapes"
    elif isinstance(error, (NameError, AttributeError)):
        way = "name"
    return Broken(found("runs", way, what=what, error=told(error)))


# --- functions of q, k and v: projections of our own go before them -------------------------------


def _of_function(
    function: Callable[..., Any], arguments: dict[str, Any], request: Request
) -> Target:
    sizes = request.sizes.settle(request.sizes.num_kv_heads is not None)
    embed, heads = sizes.embed_dim or 24, sizes.num_heads or 3
    groups, dim = sizes.num_kv_heads or heads, max(1, embed // heads)
    label = name_of(function)
    caller = Caller(function, extra=arguments, head_dim=dim, heads=heads, function=True)
    if missing := caller.missing():
        raise ValueError(
            f"check({label}): what it wants for {', '.join(missing)} cannot be worked out; give it "
            f"by name: hw.check(…, {missing[0]}=…)"
        )
    subject = Target(
        name=f"{label}(q, k, v{', ' * bool(arguments)}{shown(arguments)})",
        caller=caller,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=dim,
        seed=request.seed,
        projections=_projections(embed, heads, groups, dim, request.seed),
    )
    subject = _with_axes(subject)
    learn_causality(subject, request.causal)
    subject.out_dim = subject(subject.input()).shape[-1]
    return subject


def _projections(embed: int, heads: int, groups: int, dim: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed + 2)
    rows = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    scale = 1.5 / embed**0.5
    return {
        part: torch.randn(count, embed, generator=draw, dtype=torch.float64) * scale
        for part, count in rows.items()
    }


def _with_axes(subject: Target) -> Target:
    """The subject with the axes of its tensors: tried in turn, told by who depends on whom."""
    errors: list[BaseException] = []
    chosen: Target | None = None
    for axes in AXES:
        trial = replace(subject, axes=axes)
        if axes in ("flat", "single"):  # one head
            own = _projections(trial.embed_dim, 1, 1, trial.head_dim or 8, trial.seed)
            one = replace(trial.caller, heads=1)
            trial = replace(trial, num_heads=1, num_kv_heads=1, projections=own, caller=one)
        try:
            trial(trial.input())
            mixes = _mixes_tokens(trial)
        except Exception as error:
            errors.append(error)
            continue
        chosen = trial if mixes or chosen is None else chosen
        if mixes:
            break
    if chosen is None:
        error, shape = errors[0], [BATCH, subject.num_heads, TOKENS, subject.head_dim]
        if isinstance(error, UnusableResult):
            raise Broken(found("shape", "function", x=shape, error=error)) from error
        raise _not_run(f"q, k and v {shape}", error) from error
    chosen.notes.append(f"q, k and v are given as {AXES[chosen.axes]}")
    return chosen


def _mixes_tokens(subject: Target) -> bool:
    """Whether some output depends on another token: else the axes are taken for one another."""
    influence = subject.influence(subject.input(tokens=5, batch=1)).nan_to_num(1.0)
    off = influence.tril(-1) + influence.triu(1)
    return bool(off.max() > ZERO * influence.max())
