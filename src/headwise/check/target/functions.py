"""Plain functions of q, k and v as subjects: projections of our own go before them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .call_adapter import Caller, Unusable
from .construct import Sizes, shown
from .masking import ZERO, learn_causality
from .subject import BATCH, TOKENS, Broken, Subject, told


def of_function(
    function: Callable[..., Any],
    sizes: Sizes,
    causal: bool | None,
    seed: int,
    arguments: dict[str, Any],
) -> Subject:
    sizes = sizes.settle(sizes.num_kv_heads is not None)
    embed, heads = sizes.embed_dim or 24, sizes.num_heads or 3
    groups = sizes.num_kv_heads or heads
    dim = max(1, embed // heads)
    caller = Caller(function, extra=arguments, head_dim=dim, heads=heads, function=True)
    missing = caller.missing()
    if missing:
        raise ValueError(
            f"check({getattr(function, '__name__', 'function')}): what it wants for "
            f"{', '.join(missing)} cannot be worked out; give it by name: "
            f"hw.check(…, {missing[0]}=…)"
        )
    label = getattr(function, "__name__", type(function).__name__)
    subject = Subject(
        name=f"{label}(q, k, v{', ' * bool(arguments)}{shown(arguments)})",
        caller=caller,
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=dim,
        seed=seed,
        projections=_projections(embed, heads, groups, dim, seed),
    )
    _find_axes(subject)
    learn_causality(subject, causal)
    result = subject.result(subject.input())
    subject.out_dim, subject.returns_weights = result.out.shape[-1], result.weights is not None
    return subject


def _projections(embed: int, heads: int, groups: int, dim: int, seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed + 2)
    rows = {"q": heads * dim, "k": groups * dim, "v": groups * dim}
    scale = 1.5 / embed**0.5
    return {
        part: torch.randn(count, embed, generator=draw, dtype=torch.float64) * scale
        for part, count in rows.items()
    }


def _find_axes(subject: Subject) -> None:
    """Which axes a function's tensors have: tried in turn, told apart by who depends on whom."""
    errors: list[BaseException] = []
    fallback: str | None = None
    for axes in ("heads", "tokens", "flat", "single"):
        trial = subject if axes in ("heads", "tokens") else _one_head(subject)
        trial = replace(trial, axes=axes)
        try:
            trial(trial.input())
            mixes = _mixes_tokens(trial)
        except Exception as error:
            errors.append(error)
            continue
        if mixes:
            fallback = axes
            break
        fallback = fallback or axes
    if fallback is None:
        error = errors[0]
        shape = [BATCH, subject.num_heads, TOKENS, subject.head_dim]
        if isinstance(error, Unusable):
            raise Broken(
                "shape",
                f"For q, k and v {shape} it {error}; the output must have q's shape.",
                "Return weights @ v, or (output, weights).",
            ) from error
        raise Broken(
            "runs",
            f"The call on q, k and v {shape} fails: {told(error)}.",
            advice(error),
        ) from error
    chosen = subject if fallback in ("heads", "tokens") else _one_head(subject)
    subject.axes = fallback
    subject.num_heads, subject.num_kv_heads = chosen.num_heads, chosen.num_kv_heads
    subject.projections, subject.caller = chosen.projections, chosen.caller
    words = {
        "heads": "[B, H, T, D]",
        "tokens": "[B, T, H, D]",
        "flat": "[B, T, D]",
        "single": "[T, D]",
    }
    subject.notes.append(f"q, k and v are given as {words[fallback]}")


def _one_head(subject: Subject) -> Subject:
    dim = subject.head_dim or 8
    own = _projections(subject.embed_dim, 1, 1, dim, subject.seed)
    caller = replace(subject.caller, heads=1)
    return replace(subject, num_heads=1, num_kv_heads=1, projections=own, caller=caller)


def _mixes_tokens(subject: Subject) -> bool:
    """Whether some output depends on another token: else the axes are taken for one another."""
    found = subject.influence(subject.input(tokens=5, batch=1)).nan_to_num(1.0)
    off = found.tril(-1) + found.triu(1)
    return bool(off.max() > ZERO * found.max())


def advice(error: BaseException) -> str:
    text = str(error)
    if "mat1 and mat2" in text or "size mismatch" in text:
        return (
            "Two matrices do not fit. Print the shapes just before that line: with E features and "
            "H heads, scores are q @ k.transpose(-2, -1) with q and k [B, H, T, E / H]."
        )
    if ("view" in text and "contiguous" in text) or "view size" in text:
        return "After transpose, use .contiguous().view(…) or .reshape(…)."
    if "must match" in text or "shape" in text or "expected" in text.lower():
        return (
            "Print the shapes just before that line; scores must be [B, H, T, T], and a mask must "
            "be cut to the tokens that are there, mask[:T, :T]."
        )
    if isinstance(error, (NameError, AttributeError)):
        return "A name is used there that does not exist; is it spelled as in __init__?"
    return "Make this call run first; everything else is checked after that."
