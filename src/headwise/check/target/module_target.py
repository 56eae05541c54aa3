"""Make the target for a module whose sizes are known: how it is called, whether it is causal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..findings.rules import found
from .call_adapter import OF_DICTS, Caller
from .checked_target import Target
from .copies import copied
from .errors import Broken
from .first_call import first_call, put_ids
from .functions import of_function
from .introspect import input_width, is_called, layer_of, matrix_width, names_called
from .masking import learn_causality
from .names import building_role
from .shown_call import fit_sizes, refuse_call, wants_ids
from .signatures import signature, with_forward
from .sizes import BuildSizes


@dataclass(frozen=True)
class Request:
    """What was said of the target, beside the target itself and its own arguments."""

    sizes: BuildSizes
    causal: bool | None = None
    seed: int = 0
    call: Callable[..., Any] | None = None


def module_target(
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
    else:
        refuse_call(subject, call)
        if wants_ids(call) and not put_ids(subject, frozenset(["ids"])):
            raise ValueError(
                f"check({name}): in the call that you show no nn.Embedding gets the ids as they are"
            )
    first_call(subject)
    if call is not None:
        fit_sizes(subject, call)
    _refuse_unmade(subject)
    learn_causality(subject, request.causal)
    if said is None and subject.out_dim % heads == 0:
        subject.head_dim = subject.out_dim // heads
    return subject


def without_weights(thing: Any, name: str, known: dict[str, Any], request: Request) -> Target:
    """The subject for a function of q, k and v that was built; its sizes are those it was told."""
    sizes = request.sizes
    heads = sizes.num_heads or known.get("heads", 3)
    one = known.get("width") if "heads" not in known else None  # told of one width, it means q's
    width = sizes.embed_dim or heads * (known.get("head_dim") or one or 8)
    sizes = replace(sizes, embed_dim=width, num_heads=heads)
    return of_function(thing, {}, sizes, request.causal, request.seed, name)


def width_of(thing: Any, known: dict[str, Any]) -> int | None:
    if not isinstance(thing, nn.Module):
        return known.get("width")
    return input_width(thing) or known.get("width") or matrix_width(thing)


def heads_of(thing: Any) -> int | None:
    """From a list of heads, or 1 where nothing in the constructor speaks of heads."""
    for child in thing.modules() if isinstance(thing, nn.Module) else ():
        parts = list(child) if isinstance(child, nn.ModuleList) else []
        if parts and all(any(True for _ in part.parameters()) for part in parts):
            return len(parts)
    roles = {building_role(p.name) for p in signature(type(thing))}
    return None if roles & {"heads", "config"} else 1


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
