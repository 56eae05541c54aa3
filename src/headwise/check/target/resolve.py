"""Resolve whatever is to be checked: a module, a class or factory, or a plain function."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .checked_target import Target
from .construct import name_of
from .copies import copied
from .errors import Broken
from .factory_target import factory_target
from .first_call import mixes
from .functions import called_at_once, holding, of_function, weights_taken
from .introspect import facts, written_code
from .kinds import holds_qkv, is_factory, is_function_of_qkv, is_function_of_x, is_object
from .module_target import Request, heads_of, module_target, width_of, without_weights
from .names import building_role
from .signatures import signature
from .sizes import BuildSizes, shown

SCORES = re.compile(r"softmax|matmul|einsum|bmm|\bmm\(|@|scaled_dot|[Aa]tt(entio)?n|[qQ]uer")
"""Code that may make scores of two tokens, or speaks of such."""


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
    return factory_target(thing, args, arguments, request)


# --- modules and factories ------------------------------------------------------------------------


def _of_instance(thing: Any, request: Request) -> Target:
    known, name, sizes = facts(thing), f"{name_of(thing)}(…)", request.sizes
    label = f"check({name})"
    if request.call is None and isinstance(thing, nn.Module) and is_function_of_qkv(thing, {}):
        return without_weights(copied(thing), name, known, request)
    width = sizes.embed_dim or width_of(thing, known)
    if width is None:
        raise ValueError(
            f"{label}: the width of its input cannot be found; give it: "
            "hw.check(module, embed_dim=24)"
        )
    heads = sizes.num_heads or known.get("heads") or heads_of(thing)
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
    return module_target(copied(thing), name, width, heads, known, request)


def _of_weights(function: Any, arguments: dict[str, Any], request: Request) -> Target:
    """The subject for a function that is handed its weights."""
    own, names = request.sizes.settle(False), [*weights_taken(function, arguments)]
    width, heads = own.embed_dim or 24, own.num_heads or 3
    sizes = replace(own, num_kv_heads=own.num_kv_heads or heads)
    takes = any(building_role(one.name) == "heads" for one in signature(function))
    roles = {"width": width}
    if takes or request.sizes.num_heads:  # else they stand in its code, perhaps as another number
        roles["heads"] = heads
    label, faults = f"{name_of(function)}(…, {', '.join(names)})", list[Exception]()
    for turned in (False, True):
        module = holding(function, arguments, sizes, turned)
        try:
            return module_target(module, label, width, heads, {}, request, roles)
        except (Broken, ValueError) as fault:
            faults.append(fault)
    raise ValueError(
        f"check({label}): I made up the weights that it is handed, and with them the call fails: "
        f"give a function of q, k and v, or a module. {faults[0]}"
    ) from faults[0].__cause__


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
