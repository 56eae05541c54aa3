"""Resolve whatever is to be checked: a module, a class or factory, or a plain function."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import LAYOUTS, Caller, MaskForm, UnusableResult, tensors_in
from .checked_target import BATCH, TOKENS, Broken, Target, copied, is_users, told
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
from .fills import FILLS, OPTIONAL, Fill, left_out
from .masking import ZERO, learn_causality
from .names import building_role, calling_role

AXES = {"heads": "[B, H, T, D]", "tokens": "[B, T, H, D]", "flat": "[B, T, D]", "single": "[T, D]"}
"""Which axes a function's tensors have."""
MASKS = ("mask", "padding", "lengths", "cache")
"""Roles of arguments that are learnt apart."""
WAYS, SECONDS = 150, 3.0
"""How many tables are tried on a call, and for how long calls are tried."""


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

    try:
        return make()
    except (Broken, ValueError) as first:
        if args or arguments or request.call or request.sizes.num_heads or request.sizes.embed_dim:
            raise
        for heads, groups in ((4, None), (8, None), (6, 3)):  # some insist on such numbers
            sizes = replace(request.sizes, num_heads=heads, num_kv_heads=groups)
            request = replace(request, sizes=sizes)
            with contextlib.suppress(Broken, ValueError):
                return make()
        fault = first.__cause__
        own = isinstance(fault, NameError | AttributeError | ImportError)
        if not isinstance(first, Broken) or first.finding.rule != "builds" or own or fault is None:
            raise
        raise ValueError(
            f"check({label}): I do not know how to build this: give its arguments, as in "
            f"hw.check({label}, {_asked(factory)}), or a layer that is built. With what I made up "
            f"for them it fails: {told(fault)}"
        ) from fault


def _asked(factory: Callable[..., Any]) -> str:
    names = [p.name for p in signature(factory) if p.default is p.empty and p.kind <= 1]
    return ", ".join(f"{name}=…" for name in names)


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
    """Find how it is called: the layout of x, what other arguments get, the width of the output.

    Raises:
        Broken: the call fails, and nothing in it was made up.
        ValueError: it fails, and the call may be at fault.
    """
    caller, errors = subject.caller, list[BaseException]()
    if getattr(caller.target, "batch_first", True) is False:
        caller.layout = "time"
    until = time.monotonic() + SECONDS
    for way in _ways(caller):
        way.set(subject)
        try:
            result = subject.result(subject.input())
            if way.form is not None and not bool(result.out.isfinite().all()):
                raise UnusableResult("is not finite with a mask that hides nothing")
        except Exception as error:
            errors.append(error)
            if time.monotonic() > until or (way.plain and isinstance(error, UnusableResult)):
                break
            continue
        subject.out_dim = result.out.shape[-1]
        if not caller.settled:
            _choose_table(subject)
        if subject.bare and _is_time_first(subject):
            caller.layout = "time"
        if caller.layout not in ("batch", "single"):
            subject.notes.append(f"it takes x as {LAYOUTS[caller.layout][0]}")
        if way.room is not None:
            subject.notes.append(f"it takes no more than about {way.room} tokens")
        if caller.layout == "single":
            subject.notes.append("it takes one sequence [T, E] at a time, without a batch")
        return
    error, shape = errors[0], [BATCH, TOKENS, subject.embed_dim]
    if caller.custom is None and (_made_up(caller) or _of_guess(subject, error)):
        raise _question(subject, error) from error
    if isinstance(error, UnusableResult):
        raise Broken(found("shape", "result", x=shape, error=error, B=BATCH, T=TOKENS)) from error
    raise _not_run(f"x {shape}", error) from error


@dataclass(frozen=True)
class _Way:
    """One way to make the first call."""

    layout: str
    room: int | None = None
    form: MaskForm | None = None
    fills: Mapping[str, Fill] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        return self.form is None and not self.fills

    def set(self, subject: Target) -> None:
        """Let a subject be called so."""
        subject.caller.layout, subject.caller.fills = self.layout, dict(self.fills)
        subject.room, subject.open_form = self.room, self.form


def _ways(caller: Caller) -> Iterator[_Way]:
    """Ways to make the first call, the likeliest first."""
    usual = caller.layout
    wanted = [name for name in caller.parameters if caller.required(name)]
    given = [_options(caller, wanted), _options(caller, list(caller.parameters))]
    forms = (None, *_open_forms(caller, wanted))
    layouts = dict.fromkeys((usual, "single"))
    if caller.custom is not None:
        yield from (_Way(layout) for layout in layouts)
        yield from (_Way(usual, room) for room in (4, 2))
        return
    for layout, form in product(layouts, forms):
        yield _Way(layout, None, form)
    for fills, form in product(given[0], forms):
        yield _Way(usual, None, form, fills)
    for room, form in product((4, 2), forms):
        yield _Way(usual, room, form)
    for form in _open_forms(caller, list(caller.parameters)):
        yield _Way(usual, None, form)
    yield from (_Way(usual, None, None, fills) for fills in given[1])
    for layout, fills in product(LAYOUTS, ({}, *given[0][:2], *given[1][:1])):
        yield _Way(layout, None, None, fills)


def _options(caller: Caller, names: list[str]) -> list[dict[str, Fill]]:
    """What arguments get that nobody gave: the first option of each, then the second, and so on."""
    known = {*caller.inputs, *caller.extra}
    roles = {name: caller.roles[name] for name in names if name not in known}
    roles = {name: role for name, role in roles.items() if role in FILLS and role not in MASKS}
    each = {name: list(FILLS[role](caller.target, caller.head_dim)) for name, role in roles.items()}
    for name, options in each.items():
        if not caller.required(name):
            options.insert(1, left_out)
    most = max(map(len, each.values()), default=0)
    short = max((len(options) for options in each.values() if len(options) < most), default=1)

    def chosen(options: list[Fill], n: int) -> Fill:  # tables of one kind go together
        return options[(n if len(options) == most else n // most) % len(options)]

    return [
        {name: chosen(options, n) for name, options in each.items() if options}
        for n in range(min(most * short, WAYS))
    ]


def _choose_table(subject: Target) -> None:
    """Of rotary tables that go in, the first for which only the distance of tokens counts."""
    caller = subject.caller
    roles = {name: caller.roles[name] for name in caller.parameters}
    tables = [n for n, role in roles.items() if role in OPTIONAL and n not in caller.extra]
    caller.settled = True
    if not tables:
        return
    first = caller.fills
    for fills in ({}, *_options(caller, tables)):
        caller.fills = {**first, **fills}
        try:
            x = subject.input()
            here = subject(x)
            there = replace(subject, caller=replace(caller, start=5))(x)
        except Exception:  # of another shape than it wants
            continue
        if torch.allclose(here, there, atol=1e-4, rtol=1e-3):
            return
    caller.fills = first


def _made_up(caller: Caller) -> bool:
    """Whether the call holds more than x, or queries, keys and values under such names."""
    known = {*caller.inputs, *caller.extra}
    return any(caller.required(name) for name in caller.parameters if name not in known)


_OTHER_AXES = re.compile(
    r"values to unpack|expected \d dims|Dimension out of range|[Ee]xpected \d-?D|"
    r"number of dims|must be \d-?D|No query sequence"
)
_SIZES = re.compile(r"must match the size of tensor \w \((\d+)\)|size of tensor a \((\d+)\)")


def _of_guess(subject: Target, error: BaseException) -> bool:
    """Whether an error speaks of what was guessed: the axes of x, a size that is none of ours, an
    argument that was left out; or comes from a library, of whose layer x alone is no call."""
    if isinstance(error, UnusableResult):
        return False
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    if not frames or _OTHER_AXES.search(str(error)):
        return True
    known = [BATCH, TOKENS, subject.embed_dim, subject.num_heads, subject.head_dim, 1, 0]
    wide = {a * b * c for a in known for b in (1, 2, 3) for c in known if a and c} - {TOKENS**2}
    sizes = {int(n) for pair in _SIZES.findall(str(error)) for n in pair if n}
    if sizes and TOKENS in sizes and sizes - wide:
        return True
    caller = subject.caller
    words = set(re.findall(r"\w+", frames[-1].line or ""))
    left = [n for n in caller.parameters if not caller.required(n) and n not in caller.inputs]
    return bool(words & set(left))


def _question(subject: Target, error: BaseException) -> ValueError:
    """That somebody has to say how it is called."""
    caller = subject.caller
    rest = [n for n in caller.parameters if caller.required(n) and n not in caller.inputs]
    given = ", ".join(["x"] * max(1, len(caller.inputs)) + [f"{name}=…" for name in rest])
    call = f"lambda layer, x: layer({given})"
    return ValueError(
        f"check({subject.name}): I do not know how to call this: show me, with hw.check(…, "
        f'call={call}), or on the command line --call "{call}". A call that I made up fails: '
        f"{told(error)}"
    )


def _open_forms(caller: Caller, among: list[str]) -> list[MaskForm]:
    """Forms of a mask that hides nothing, for calls that insist on one."""
    names = [n for n in [*caller.named("mask"), *caller.named("padding")] if n in among]
    shapes = ("[T, S]", "[1, 1, T, S]", "[B, T, S]", "[B, S]", "[T, S, 1]")
    return [
        MaskForm(*form)
        for form in product(names, ("may", "added", "ones", "hidden", "later"), shapes)
    ]


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
