"""A plain function as a target: projections of our own go before one of q, k and v, and one that is
handed its weights becomes a module that holds them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import Caller, UnusableResult
from .checked_target import BATCH, TOKENS, Target
from .construct import as_typed, name_of
from .errors import Broken, users_frames
from .fills import left_out
from .first_call import mixes, steady_form
from .learnt import learn
from .masking import learn_causality
from .names import building_role, calling_role, parts_of
from .refusals import how_to_call, not_run
from .signatures import signature, source_of
from .sizes import BuildSizes, Unknown, shown
from .ways import open_forms

AXES = {"heads": "[B, H, T, D]", "tokens": "[B, T, H, D]", "flat": "[B, T, D]", "single": "[T, D]"}
"""Which axes a function's tensors have."""


def of_function(
    function: Callable[..., Any],
    arguments: dict[str, Any],
    sizes: BuildSizes,
    causal: bool | None,
    seed: int,
    label: str = "",
) -> Target:
    """The target for a function of q, k and v, or a module of them that has no weights.

    Args:
        arguments: that it gets beside them.
        label: what to call it; its name by default.
    """
    sizes = sizes.settle(sizes.num_kv_heads is not None)
    embed, heads = sizes.embed_dim or 24, sizes.num_heads or 3
    groups, dim = sizes.num_kv_heads or heads, max(1, embed // heads)
    label = label or f"{name_of(function)}(q, k, v{', ' * bool(arguments)}{shown(arguments)})"
    if isinstance(function, nn.Module):
        function.eval()
    caller = Caller(function, extra=arguments, head_dim=dim, heads=heads, function=True)
    told = _sized(caller.missing(), replace(sizes, num_kv_heads=groups))
    caller = replace(caller, extra=arguments | told)
    subject = Target(
        name=label,
        caller=caller,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=dim,
        seed=seed,
        projections=_projections(embed, heads, groups, dim, seed),
    )
    subject = _with_axes(subject, bool(told))
    learn_causality(subject, causal)
    subject.out_dim = subject(subject.input()).shape[-1]
    return subject


def _reached(error: BaseException) -> int:
    """How far a call came: the line of a function of somebody's, the first of it, that failed."""
    frames = users_frames(error)
    return frames[0].lineno or 0 if frames else 0


def _projections(embed: int, heads: int, groups: int, dim: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed + 2)
    rows = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    scale = 1.5 / embed**0.5
    return {
        part: torch.randn(count, embed, generator=draw, dtype=torch.float64) * scale
        for part, count in rows.items()
    }


def _with_axes(subject: Target, guessed: bool) -> Target:
    """The subject with the axes of its tensors: tried in turn, told by who depends on whom.

    Args:
        guessed: whether sizes that it gets beside them are a guess.
    """
    errors: list[tuple[str, BaseException]] = []
    chosen: Target | None = None
    missing = subject.caller.missing()
    tables = [name for name in subject.caller.tables if not subject.caller.required(name)]
    fills = [{}, dict.fromkeys(tables, left_out)] if tables else [{}]
    forms = (None, *open_forms(subject.caller, subject.caller.made_up))
    for form, axes, given in product(forms, AXES, fills):
        caller = replace(subject.caller, fills=given)
        trial = replace(subject, axes=axes, caller=caller, open_form=form)
        if axes in ("flat", "single"):  # one head
            own = _projections(trial.embed_dim, 1, 1, trial.head_dim or 8, trial.seed)
            one = replace(trial.caller, heads=1)
            trial = replace(trial, num_heads=1, num_kv_heads=1, projections=own, caller=one)
        if missing:
            learn(trial)
        try:
            trial(trial.input())
            goes = mixes(trial)[0]
        except Exception as error:
            errors.append((axes, error))
            continue
        chosen = trial if goes or chosen is None else chosen
        if goes:
            break
    if chosen is not None:
        steady_form(chosen)
    else:
        axes, error = max(errors, key=lambda one: _reached(one[1]))
        sizes = {"B": BATCH, "H": subject.num_heads, "T": TOKENS, "D": subject.head_dim}
        shape = [sizes[axis] for axis in re.findall(r"\w", AXES[axes])]
        if missing and subject.module is None:
            raise ValueError(
                f"check({subject.name}): what it wants for {', '.join(missing)} cannot be worked "
                f"out; give it: {as_typed(subject.caller.target, missing)}"
            ) from error
        if guessed or subject.guesses or len(forms) > 1:
            raise how_to_call(subject, error) from error
        if isinstance(error, UnusableResult):
            raise Broken(found("shape", "function", x=shape, error=error)) from error
        raise not_run(f"q, k and v {shape}", error) from error
    chosen.notes.append(f"q, k and v are given as {AXES[chosen.axes]}")
    return chosen


def called_at_once(kind: type[nn.Module]) -> Callable[..., Any]:
    """The function of q, k and v that a class is which holds them, built and called."""

    def call(*args: Any, **more: Any) -> Any:
        return kind(*args, **more)()

    call.__name__, call.__module__ = kind.__name__, kind.__module__
    call.__dict__["__signature__"] = inspect.signature(kind)
    return call


# --- functions that are handed their weights ------------------------------------------------------

_WEIGHT = re.compile(r"weight|proj|(^|_)w(_|$|[qkvo]+$)", re.IGNORECASE)
_BIAS = re.compile(r"bias|(^|_)b(_|$|[qkvo]+$)", re.IGNORECASE)


def weights_taken(function: Callable[..., Any], given: Collection[str] = ()) -> dict[str, str]:
    """The weights and biases that a function wants as arguments, and the projections in them;
    nothing where those of queries, keys and values are not among them.

    >>> weights_taken(lambda x, W_qkv, W_o, num_heads: x)
    {'W_qkv': 'qkv', 'W_o': 'o'}
    """
    if inspect.isclass(function) or isinstance(function, nn.Module):
        return {}
    wanted = [p.name for p in signature(function) if p.default is p.empty and p.kind <= 1]
    found = {
        name: parts_of(name)
        for name in wanted
        if name not in given
        and (_WEIGHT.search(name) or _BIAS.search(name))
        and calling_role(name) is None
    }
    found = {name: parts for name, parts in found.items() if parts}
    weights = "".join(parts for name, parts in found.items() if not _BIAS.search(name))
    return found if set(weights) >= set("qkv") else {}


def _sized(names: Collection[str], sizes: BuildSizes) -> dict[str, Any]:
    """The sizes that arguments of such names get, where a name tells one."""
    roles = {name: building_role(name, needed=True) for name in names}
    found = {name: sizes.value(role) for name, role in roles.items() if role is not None}
    return {name: value for name, value in found.items() if value is not Unknown}


def holding(
    function: Callable[..., Any], given: Mapping[str, Any], sizes: BuildSizes, turned: bool
) -> nn.Module:
    """A module that holds the weights which a function is handed, and hands them on.

    Args:
        given: arguments that somebody gave.
        turned: whether weights lie in the rarer of two ways: `[features, inputs]` is usual for what
            is called a weight, as PyTorch's functions take it, and `[inputs, features]` else.
    """
    taken, code, fixed = weights_taken(function, given), source_of(function), dict(given)
    module, parameters = nn.Module(), signature(function)
    for number, parameter in enumerate(parameters):
        name = parameter.name
        if name in taken and _BIAS.search(name) and re.search(rf"\b{name} is (not )?None", code):
            fixed[name] = None
        elif name in taken:
            shape = sizes.widths(taken[name])
            shape = shape[::-1] if ("weight" in name.lower()) != turned else shape
            shape = (sizes.widths(taken[name])[1],) if _BIAS.search(name) else shape
            module.register_parameter(name, nn.Parameter(torch.randn(shape) / shape[-1] ** 0.5))
        elif number and name not in fixed and parameter.default is parameter.empty:
            fixed |= {} if calling_role(name) else _sized([name], sizes)
    free = [one for one in parameters if one.name not in {*taken, *fixed}]
    names = [one.name for one in free]

    def forward(self: nn.Module, *args: Any, **more: Any) -> Any:
        held = dict(zip(names, args, strict=False)) | dict(self.named_parameters())
        return function(**held, **fixed, **more)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__dict__["__signature__"] = inspect.Signature([own, *free])
    body = {"forward": forward, "__module__": function.__module__}
    module.__class__ = type(name_of(function), (nn.Module,), body)
    return module
