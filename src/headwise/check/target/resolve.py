"""Taking whatever is to be checked: a module, a class or factory, or a plain function."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .call_adapter import Caller, MaskForm, Unusable, tensors_in
from .construct import Sizes, build, facts, input_width, matrix_width, shown, signature
from .functions import advice, of_function
from .masking import learn_causality
from .names import building_role, calling_role
from .subject import BATCH, TOKENS, Broken, Subject, copied, told


def take(
    thing: Any,
    *args: Any,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    call: Callable[[Any, Tensor], Any] | None = None,
    **arguments: Any,
) -> Subject:
    """The subject for whatever was given.

    Args:
        thing: a module, a class or factory, or a function of q, k and v.
        args, arguments: the constructor's (a function's own, by name).
        embed_dim, num_heads, num_kv_heads, causal: where they are known.
        seed: of all random numbers.
        call: `call(thing, x)` calls it, where nothing else does.

    Raises:
        ValueError: something must be given that cannot be worked out.
        Broken: it cannot be built, or its first call fails.
    """
    sizes = Sizes(embed_dim, num_heads, num_kv_heads, causal=causal)
    thing = getattr(thing, "_orig_mod", thing)  # what torch.compile has wrapped
    if isinstance(thing, nn.Module) or _is_object(thing):
        if args or arguments:
            raise ValueError(
                f"check({type(thing).__name__}(…), {shown(arguments) or '…'}): this is built "
                "already; arguments of its constructor go with the class, not with an instance"
            )
        return _of_instance(thing, sizes, causal, seed, call)
    if not callable(thing):
        raise ValueError(
            f"check({thing!r}): this is a {type(thing).__name__}; give a module, a class with "
            "its arguments, or a function of q, k and v"
        )
    if _is_function_of_qkv(thing, arguments):
        return of_function(thing, sizes, causal, seed, arguments)
    if _is_function_of_x(thing, sizes.embed_dim or 24, arguments):
        return _of_instance(thing, replace(sizes, embed_dim=embed_dim or 24), causal, seed, call)
    return _of_factory(thing, args, arguments, sizes, causal, seed, call)


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
        return not inspect.isfunction(thing) and not isinstance(thing, type)
    roles = [calling_role(p.name) for p in parameters[:3]]
    if roles[:2] == ["query", "key"] or set(roles) == {"query", "key", "value"}:
        return True
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    unknown = [p for p in required if building_role(p.name) is None]
    return len(required) == 3 and len(unknown) >= 2


def _of_instance(
    thing: Any, sizes: Sizes, causal: bool | None, seed: int, call: Callable[..., Any] | None
) -> Subject:
    known = facts(thing)
    width = sizes.embed_dim or _width_of(thing, known)
    if width is None:
        raise ValueError(
            f"check({type(thing).__name__}(…)): the width of its input cannot be found; give it: "
            "hw.check(module, embed_dim=24)"
        )
    heads = sizes.num_heads or known.get("heads") or _heads_of(thing)
    if heads is None:
        raise ValueError(
            f"check({type(thing).__name__}(…)): how many heads it has cannot be found; give it: "
            f"hw.check(module, embed_dim={width}, num_heads=3)"
        )
    if isinstance(thing, nn.Module) and any(p.is_meta for p in thing.parameters()):
        raise ValueError(
            f"check({type(thing).__name__}(…)): its weights are on the device meta and have no "
            "numbers; give one that is on the CPU or a GPU"
        )
    target = copied(thing)
    if isinstance(target, nn.Module):
        target = target.eval().cpu()
    name = f"{type(thing).__name__}(…)"
    return _settled(target, name, width, heads, known, sizes, causal, seed, call, {}, {})


def _width_of(thing: Any, known: dict[str, Any]) -> int | None:
    if not isinstance(thing, nn.Module):
        return known.get("width")
    return input_width(thing) or known.get("width") or matrix_width(thing)


def _heads_of(thing: Any) -> int | None:
    """From a list of heads, or 1 where nothing in the constructor speaks of heads."""
    if isinstance(thing, nn.Module):
        for child in thing.modules():
            parts = list(child) if isinstance(child, nn.ModuleList) else []
            if parts and all(any(True for _ in part.parameters()) for part in parts):
                return len(parts)
    roles = {building_role(p.name) for p in signature(type(thing))}
    return None if roles & {"heads", "config"} else 1


def _of_factory(
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    sizes: Sizes,
    causal: bool | None,
    seed: int,
    call: Callable[..., Any] | None,
) -> Subject:
    label = getattr(factory, "__name__", None) or type(factory).__name__

    def make(seed: int = seed, **changes: Any) -> Subject:
        wanted = replace(sizes, changes=changes)
        own = {
            name: value
            for name, value in arguments.items()
            if building_role(name) not in changes or building_role(name) is None
        }
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                built = build(factory, args, own, wanted)
        except ValueError as error:
            if str(error).startswith("check("):
                raise
            raise _not_built(label, error) from error
        except Exception as error:
            raise _not_built(label, error) from error
        if not callable(built.thing):
            raise Broken(
                "builds",
                f"{label} gives a {type(built.thing).__name__}, which cannot be called.",
                "Give a class derived from nn.Module, or a function that returns a module.",
            )
        target = built.thing
        if not isinstance(target, nn.Module) and _is_function_of_qkv(target, {}):
            return of_function(target, sizes, causal, seed, {})
        if isinstance(target, nn.Module):
            target = target.eval().cpu()
        known = {**facts(target), **built.roles}
        width = built.roles.get("width") or _width_of(target, known)
        heads = built.roles.get("heads") or facts(target).get("heads") or _heads_of(target)
        name = f"{label}({built})"
        width = width or sizes.embed_dim or 24
        subject = _settled(
            target,
            name,
            width,
            heads or 1,
            known,
            sizes,
            causal,
            seed,
            call,
            built.arguments,
            built.roles,
        )
        return replace(subject, factory=make)

    return make()


def _not_built(label: str, error: BaseException) -> Broken:
    return Broken(
        "builds",
        f"{label} cannot be built: {told(error)}.",
        "Make the constructor run first; everything else is checked after that.",
    )


def _settled(
    target: Any,
    name: str,
    width: int,
    heads: int,
    known: dict[str, Any],
    sizes: Sizes,
    causal: bool | None,
    seed: int,
    call: Callable[..., Any] | None,
    arguments: dict[str, Any],
    roles: dict[str, Any],
) -> Subject:
    head_dim = sizes.head_dim or known.get("head_dim") or max(1, width // heads)
    caller = Caller(target, head_dim=head_dim, heads=heads, custom=call)
    subject = Subject(
        name=name,
        caller=caller,
        embed_dim=width,
        num_heads=heads,
        num_kv_heads=sizes.num_kv_heads or known.get("kv_heads"),
        head_dim=head_dim,
        context_length=known.get("context"),
        dtype=_dtype_of(target),
        seed=seed,
        arguments=arguments,
        roles=roles,
    )
    missing = [] if call is not None else caller.missing()
    if missing:
        raise ValueError(
            f"check({name}): what its call wants for {', '.join(missing)} cannot be worked out; "
            f"say how to call it: hw.check(…, call=lambda layer, x: layer(x, {missing[0]}=…))"
        )
    if call is None:
        _check_widths(subject, known)
    _first_call(subject)
    learn_causality(subject, causal)
    result = subject.result(subject.input())
    subject.returns_weights = result.weights is not None
    if "head_dim" not in known and sizes.head_dim is None and subject.out_dim % heads == 0:
        subject.head_dim = subject.out_dim // heads
    return subject


def _check_widths(subject: Subject, known: dict[str, Any]) -> None:
    """Keys of another width than queries cannot come from the same x."""
    width = known.get("kv_width", subject.embed_dim)
    if width == subject.embed_dim:
        return
    feeds = ", ".join(["x"] + [f"x[..., :{width}]"] * (2 if subject.caller.separate else 1))
    raise ValueError(
        f"check({subject.name}): its keys are {width} wide and its queries {subject.embed_dim}, so "
        f"it cannot attend to its own input; say how to call it: hw.check(…, call=lambda layer, "
        f"x: layer({feeds}))"
    )


def _dtype_of(target: Any) -> torch.dtype:
    parameters = target.parameters() if isinstance(target, nn.Module) else ()
    return next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)


# --- the first call -------------------------------------------------------------------------------


def _first_call(subject: Subject) -> None:
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
            if layout == "batch" and caller.custom is None and _is_time_first(subject):
                caller.layout = "time"
                subject.notes.append("it takes x as [T, B, E]")
            if room is not None:
                subject.notes.append(f"it takes no more than about {room} tokens")
            if layout == "single":
                subject.notes.append("it takes one sequence [T, E] at a time, without a batch")
            return
        if isinstance(errors[0], Unusable):
            break
    error, shape = errors[0], [BATCH, TOKENS, subject.embed_dim]
    if isinstance(error, Unusable):
        raise Broken(
            "shape",
            f"For x {shape} it {error}; the output must be [{BATCH}, {TOKENS}, out_dim].",
            "Join the heads again before returning: out.transpose(1, 2).reshape(B, T, -1); and "
            "return the output, or (output, weights).",
        ) from error
    raise Broken(
        "runs",
        f"The call on x {shape} fails: {told(error)}.",
        advice(error),
    ) from error


def _open_forms(caller: Caller) -> list[MaskForm]:
    """Forms of a mask that hides nothing, for calls that insist on one."""
    names = [name for name in caller.named("mask") if caller.required(name)]
    names += [name for name in caller.named("padding") if caller.required(name)]
    return [
        MaskForm(name, kind, shape)
        for name in names
        for kind in ("may", "added", "ones")
        for shape in ("[T, S]", "[1, 1, T, S]", "[B, T, S]", "[B, S]")
    ]


def _is_time_first(subject: Subject) -> bool:
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
