"""A plain function of q, k and v as a target: projections of our own go before it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found
from .call_adapter import Caller, UnusableResult
from .checked_target import BATCH, TOKENS, Broken, Target
from .construct import name_of
from .fills import left_out
from .first_call import how_to_call, mixes, not_run
from .masking import learn_causality
from .sizes import BuildSizes, shown

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
    if missing := caller.missing():
        raise ValueError(
            f"check({name_of(function)}): what it wants for {', '.join(missing)} cannot be worked "
            f"out; give it by name: hw.check(…, {missing[0]}=…)"
        )
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
    subject = _with_axes(subject)
    learn_causality(subject, causal)
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
    tables = [name for name in subject.caller.tables if not subject.caller.required(name)]
    fills = [{}, dict.fromkeys(tables, left_out)] if tables else [{}]
    for axes, given in product(AXES, fills):
        trial = replace(subject, axes=axes, caller=replace(subject.caller, fills=given))
        if axes in ("flat", "single"):  # one head
            own = _projections(trial.embed_dim, 1, 1, trial.head_dim or 8, trial.seed)
            one = replace(trial.caller, heads=1)
            trial = replace(trial, num_heads=1, num_kv_heads=1, projections=own, caller=one)
        try:
            trial(trial.input())
            goes = mixes(trial)[0]
        except Exception as error:
            errors.append(error)
            continue
        chosen = trial if goes or chosen is None else chosen
        if goes:
            break
    if chosen is None:
        error, shape = errors[0], [BATCH, subject.num_heads, TOKENS, subject.head_dim]
        if subject.guesses:
            raise how_to_call(subject, error) from error
        if isinstance(error, UnusableResult):
            raise Broken(found("shape", "function", x=shape, error=error)) from error
        raise not_run(f"q, k and v {shape}", error) from error
    chosen.notes.append(f"q, k and v are given as {AXES[chosen.axes]}")
    return chosen
