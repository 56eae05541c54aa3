"""Resolve whatever is to be checked: a module, a class or factory, or a plain function."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import OF_DICTS, Caller
from .checked_target import Target
from .construct import build, name_of
from .copies import copied
from .errors import Broken, told, wants_memory
from .first_call import first_call, mixes
from .functions import called_at_once, holding, of_function, weights_taken
from .introspect import (
    facts,
    input_width,
    is_called,
    layer_of,
    matrix_width,
    names_called,
    own_sizes,
    written_code,
)
from .kinds import (
    holds_qkv,
    is_factory,
    is_function_of_qkv,
    is_function_of_x,
    is_object,
)
from .masking import MASKS, learn_causality, shows_next
from .memory import marked, unset_in
from .names import building_role
from .retries import SECONDS, UNMADE, asked_for, blamed, fitted, other_sizes
from .signatures import signature, with_forward
from .sizes import BuildSizes, shown
from .unknowns import is_apart

SCORES = re.compile(r"softmax|matmul|einsum|bmm|\bmm\(|@|scaled_dot|[Aa]tt(entio)?n|[qQ]uer")
"""Code that may make scores of two tokens, or speaks of such."""


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
    if isinstance(thing, nn.Module) or is_object(thing):
        if args or arguments:
            raise ValueError(
                f"check({type(thing).__name__}(…), {shown(arguments) or '…'}): this is built "
                "already; arguments of its constructor go with the class, not with an instance"
            )
        return _scoring(_of_instance(thing, request))
    if not callable(thing):
        raise ValueError(
            f"check({thing!r}): this is a {type(thing).__name__}; give a module, a class with "
            "its arguments, or a function of q, k and v"
        )
    home = vars(sys.modules.get(getattr(thing, "__module__", None) or "", sys))
    why, spoken, used = home.get("__alone__", ("", {}, {}))  # by `files.alone`
    lost = spoken.get(name_of(thing), ())
    try:
        subject = _scoring(_of_callable(thing, args, arguments, request))
    except Broken as broken:
        if not lost or broken.finding.rule == "file-import" or broken.finding.ground == "any":
            raise
        raise ValueError(
            f"check({name_of(thing)}): it speaks of {', '.join(lost)}, which could not be imported "
            f"here, and without that it cannot be judged. {broken.finding.message}"
        ) from broken
    more = used.get(name_of(thing), ())
    subject.absent += [f"no {name}, which could not be imported" for name in more]
    if why:
        subject.notes.append(f"it was loaded without what failed as it was imported: {why}")
    return subject


def _of_callable(
    thing: Any, args: tuple[Any, ...], arguments: dict[str, Any], request: Request
) -> Target:
    sizes = request.sizes
    width = sizes.embed_dim or 24
    if request.call is not None and not arguments and not is_factory(thing):
        return _of_instance(thing, replace(request, sizes=replace(sizes, embed_dim=width)))
    if holds_qkv(thing, arguments):
        thing = called_at_once(thing)
    if weights_taken(thing, arguments):
        return _of_weights(thing, arguments, request)
    if is_function_of_qkv(thing, arguments):
        return of_function(thing, arguments, sizes, request.causal, request.seed)
    if is_function_of_x(thing, width, arguments):
        return _of_instance(thing, replace(request, sizes=replace(sizes, embed_dim=width)))
    return _of_factory(thing, args, arguments, request)


# --- modules and factories ------------------------------------------------------------------------


def _of_instance(thing: Any, request: Request) -> Target:
    known, name, sizes = facts(thing), f"{name_of(thing)}(…)", request.sizes
    label = f"check({name})"
    if request.call is None and isinstance(thing, nn.Module) and is_function_of_qkv(thing, {}):
        return _without_weights(copied(thing), name, known, request)
    width = sizes.embed_dim or _width_of(thing, known)
    if width is None:
        raise ValueError(
            f"{label}: the width of its input cannot be found; give it: "
            "hw.check(module, embed_dim=24)"
        )
    heads = sizes.num_heads or known.get("heads") or _heads_of(thing)
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
    return _settled(copied(thing), name, width, heads, known, request)


def _without_weights(thing: Any, name: str, known: dict[str, Any], request: Request) -> Target:
    """The subject for a function of q, k and v that was built; its sizes are those it was told."""
    sizes = request.sizes
    heads = sizes.num_heads or known.get("heads", 3)
    one = known.get("width") if "heads" not in known else None  # told of one width, it means q's
    width = sizes.embed_dim or heads * (known.get("head_dim") or one or 8)
    sizes = replace(sizes, embed_dim=width, num_heads=heads)
    return of_function(thing, {}, sizes, request.causal, request.seed, name)


def _of_weights(function: Any, arguments: dict[str, Any], request: Request) -> Target:
    """The subject for a function that is handed its weights."""
    own, names = request.sizes.settle(False), [*weights_taken(function, arguments)]
    width, heads = own.embed_dim or 24, own.num_heads or 3
    sizes = replace(own, num_kv_heads=own.num_kv_heads or heads)
    roles = {"heads": heads, "width": width}
    label, faults = f"{name_of(function)}(…, {', '.join(names)})", list[Exception]()
    for turned in (False, True):
        module = holding(function, arguments, sizes, turned)
        try:
            return _settled(module, label, width, heads, {}, request, roles)
        except (Broken, ValueError) as fault:
            faults.append(fault)
    raise ValueError(
        f"check({label}): I made up the weights that it is handed, and with them the call fails: "
        f"give a function of q, k and v, or a module. {faults[0]}"
    ) from faults[0].__cause__


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


def _built(
    factory: Callable[..., Any], args: tuple[Any, ...], own: dict[str, Any], sizes: BuildSizes
) -> tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What `build` gives, in a dtype that all of it has.

    Raises:
        ValueError: an argument that has to be asked for, or what it gives computes nothing.
        Broken: it cannot be built, or what it gives cannot be called or listed.
    """
    label = name_of(factory)
    try:
        with marked():
            made = build(factory, args, own, sizes)
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith("check("):
            raise
        way = "super" if UNMADE.search(str(error)) else "fails"
        raise Broken(found("builds", way, label=label, error=told(error))) from error
    target = made[0]
    if isinstance(target, nn.Module):
        odd = [type(one) for one in (target, *_inner(target)) if type(one).__hash__ is None]
        if odd:
            raise Broken(found("builds", "unhashable", label=label, name=odd[0].__name__))
        half = {torch.bfloat16, torch.float16}
        if half & {one.dtype for one in target.parameters()}:  # others may be of another dtype
            target.float()
    elif not callable(target):
        kind = type(target).__name__
        public = (getattr(target, one) for one in dir(target) if not one.startswith("_"))
        other = not hasattr(target, "forward") and any(map(callable, public))
        if isinstance(target, Tensor) and MASKS.search(label.lower()) and shows_next(target):
            raise Broken(found("causality", "next"))
        if isinstance(target, Tensor) or other:  # a mask or a table, say: no mistake
            raise ValueError(
                f"check({label}): it gives a {kind} for sizes; name what computes attention"
            )
        inside = getattr(target, "__dict__", {})
        held = [name for name, one in inside.items() if isinstance(one, nn.Module)]
        if held:
            raise Broken(found("registered", "class", kind=kind, names=", ".join(held[:4])))
        raise Broken(found("builds", "result", label=label, kind=kind))
    return made


def _of_factory(
    factory: Callable[..., Any],
    args: tuple[Any, ...],
    arguments: dict[str, Any],
    request: Request,
) -> Target:
    label, own = name_of(factory), request.sizes
    names, widths = [p.name for p in signature(factory)][len(args) :], list[int | None]()
    wanted = {name: getattr(own, name) for name in ("embed_dim", "num_heads", "num_kv_heads")}
    said = arguments | {name: n for name, n in wanted.items() if n is not None and name in names}

    def make(request: Request, /, seed: int = request.seed, **changes: Any) -> Target:
        changes = request.sizes.changes | changes
        sizes = replace(request.sizes, changes=changes)
        own = {name: v for name, v in said.items() if building_role(name) not in changes}
        own |= {name: changes[name] for name in changes if name in names}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            target, named, roles, made_up = _built(factory, args, own, sizes)
        if not widths:
            widths.append(input_width(target) if isinstance(target, nn.Module) else None)
        made_up |= request.sizes.changes
        guessed = [f"{name}={value!r}" for name, value in made_up.items()]
        again = functools.partial(make, request)
        made: dict[str, Any] = {"factory": again, "arguments": named, "made_up": made_up}
        made["unset"] = unset_in(target)
        if request.call is None and is_function_of_qkv(target, {}):
            subject = _without_weights(target, f"{label}({shown(named)})", roles, request)
            return replace(subject, roles=roles, **made)
        known = facts(target)
        if sizes.plain:  # a configuration may speak of several layers
            roles = {**roles, **{name: known[name] for name in ("width", "heads") if name in known}}
            if isinstance(target, nn.Module) and (wide := input_width(target)):
                roles["width"] = wide
        roles = own_sizes(roles, target)
        heads = roles.get("heads") or known.get("heads") or _heads_of(target) or 1
        known |= roles
        width = roles.get("width") or _width_of(target, known) or sizes.embed_dim or 24
        name = f"{label}({shown(named)})"
        try:
            subject = _settled(target, name, width, heads, known, request, roles)
        except (RuntimeError, MemoryError) as error:
            if not wants_memory(error):
                raise
            raise ValueError(
                f"check({name}): with these sizes it takes more memory than there is; give smaller "
                f"ones: hw.check({label}, {asked_for(factory)})"
            ) from error
        except Broken as broken:
            if guessed and is_apart(broken.__cause__, made_up.values()):
                broken.finding = replace(broken.finding, ground="any")
            if not guessed or broken.finding.ground == "any" or alike(request, broken, made_up):
                raise
            raise ValueError(
                f"check({name}): I made up {', '.join(guessed)}, and with it the call fails: give "
                f"what is meant: hw.check({label}, {asked_for(factory)}). {broken.finding.message}"
            ) from broken.__cause__
        return replace(subject, **made)

    def alike(request: Request, broken: Broken, made_up: Mapping[str, Any]) -> bool:
        """Whether other numbers in place of those that were made up fail with the same shapes."""
        others = {n: 2 * one for n, one in made_up.items() if type(one) is int and n in names}
        if len(others) < len(made_up) or not isinstance(broken.__cause__, RuntimeError):
            return False
        try:
            make(request, **others)
        except (Broken, ValueError) as other:
            return str(other.__cause__) == str(broken.__cause__)
        return False

    try:
        subject = make(request)
    except (Broken, ValueError) as first:
        given = bool(args or arguments or request.call or own.num_heads or own.embed_dim)
        until, others = time.process_time() + SECONDS, list[Exception]()
        tries = other_sizes(factory, own, first, given, widths)
        for sizes in tries if given else fitted(tries, others):
            if time.process_time() > until:
                break
            try:
                subject = make(replace(request, sizes=sizes))
                if not _hides_groups(subject) or not isinstance(first, Broken):
                    return subject
                others.append(first)
            except (Broken, ValueError) as error:
                others.append(error)
                if isinstance(error, Broken) and error.finding.ground == "any":
                    break  # whatever its sizes are
        fault = blamed(first, others, factory, given)
        raise fault from fault.__cause__ or first.__cause__
    flags = (p for p in signature(factory) if building_role(p.name) == "causal")
    if subject.causal_from == "named" and any(one.default is False for one in flags):
        with contextlib.suppress(Broken, ValueError):  # its name says more than the default
            return make(replace(request, sizes=replace(own, causal=True)))
    return subject


def _hides_groups(subject: Target) -> bool:
    """Whether its keys have one head, which fits any number, or as many as go with each of them:
    then a mistake in how often they are repeated does not show."""
    groups = subject.num_kv_heads or subject.num_heads
    return groups < subject.num_heads and groups in (1, subject.num_heads // groups)


def _inner(module: nn.Module) -> Iterator[nn.Module]:
    """The modules within, which PyTorch itself only lists where they can be put into a set."""
    for child in module._modules.values():
        if child is not None:
            yield from (child, *_inner(child))


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
    parameters, method = (), ""
    if isinstance(target, nn.Module):
        method = with_forward(target) if request.call is None else ""
        target.eval()  # which somebody's own `train` may not give back
        target = target.cpu()
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
        uncalled=copied(target) if isinstance(target, nn.Module) else None,
    )
    if method:
        subject.notes.append(f"it has no forward: its {method} is called")
    if call is None:
        _refuse_dictionaries(subject)
        wide = known.get("kv_width", width)
        _refuse_other_widths(subject, wide if wide != width and _reads(target, wide) else width)
    first_call(subject)
    _refuse_unmade(subject)
    learn_causality(subject, request.causal)
    if said is None and subject.out_dim % heads == 0:
        subject.head_dim = subject.out_dim // heads
    return subject


def _scoring(subject: Target) -> Target:
    """The subject, but where no token hangs on another, and no code speaks of what would make it
    so: a table of positions, a norm, a feed-forward part. Then what computes attention is asked
    for."""
    shown = subject.caller.custom is not None
    code = written_code(subject.module) if subject.module is not None and not shown else ""
    if code and not SCORES.search(code) and mixes(subject) == (False, False):
        raise ValueError(
            f"check({subject.name}): it computes each token by itself, and nothing in its code "
            "makes scores of two; name what computes attention"
        )
    return subject


def _refuse_dictionaries(subject: Target) -> None:
    """Ask how to call what takes its sequences by name."""
    for name in subject.caller.inputs:
        if OF_DICTS.match(str(subject.caller.parameters[name].annotation)):
            raise ValueError(
                f"check({subject.name}): its {name} is a dictionary; say how to call it: "
                'hw.check(…, call=lambda layer, x: layer({"q": x, …}))'
            )


def _refuse_unmade(subject: Target) -> None:
    """Say which lazy layers have no weights after a call: nothing calls them, or not this call."""
    named = subject.module.named_parameters() if subject.module is not None else ()
    unmade = [name for name, one in named if isinstance(one, nn.UninitializedParameter)]
    if not unmade or subject.module is None:
        return
    read, which = {*names_called(subject.module)}, " and ".join(unmade[:3])
    if any(not is_called(subject.module, layer_of(name), read) for name in unmade):
        raise Broken(replace(found("gradients", "missing", which=which), ground="any"))
    raise ValueError(
        f"check({subject.name}): {which} have no shape yet, for only another call makes them: give "
        "it that call, hw.check(…, call=lambda layer, x: …), or a layer that was called"
    )


def _reads(target: Any, wide: int) -> bool:
    """Whether a matrix takes inputs of this width; anything may, where none is there yet."""
    parameters = tuple(target.parameters()) if isinstance(target, nn.Module) else ()
    made = [one for one in parameters if not isinstance(one, nn.UninitializedParameter)]
    return not made or any(wide in one.shape[1:] for one in made)


def _refuse_other_widths(subject: Target, kv_width: int) -> None:
    """Ask how to call what wants keys of another width than queries."""
    width = subject.embed_dim
    if kv_width != width:
        feeds = ["x"] + [f"x[..., :{kv_width}]"] * (2 if subject.caller.separate else 1)
        raise ValueError(
            f"check({subject.name}): its keys are {kv_width} wide and its queries {width}, so it "
            "cannot attend to its own input; say how to call it: hw.check(…, call=lambda layer, "
            f"x: layer({', '.join(feeds)}))"
        )
