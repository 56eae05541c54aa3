"""Judge the parts of GPT-2's attention by what they give, whatever library made it.

A variant of the step leaves two things in `trial.made`: `layer`, and `give`, which gives the output
of a part for the inputs that stand in `inputs`: x `[B, T, E]`, and q, k and v `[B, H, T, D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import StepPart, Test, Trial, judge_shape, shape_of

# The tutorial's sizes, in which no two axes are alike.
B, T, E, H, D = 2, 8, 768, 12, 64
OWNER = "GPT2MultiHeadAttention"


def config(width: int = E, heads: int = H) -> Any:
    """GPT-2's own sizes, or small ones; every name that its configuration has."""
    sizes = {"n_embd": width, "n_head": heads, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    rest = {"n_inner": None, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}
    return SimpleNamespace(**sizes, **drops, **rest)


def calls(
    trial: Trial, layer: Any, x: Any, q: Any, k: Any, v: Any
) -> Mapping[str, Callable[..., Any]]:
    """How each part is called."""

    def mask(queries: int, cached: int) -> Any:
        return trial.get("causal_mask")(queries, cached, dtype=q.dtype, device=q.device)

    return {
        "causal_mask": lambda: mask(T, 0),
        "causal_mask cached": lambda: mask(3, 2),
        "c_attn": lambda: layer.c_attn(x),
        "c_proj": lambda: layer.c_proj(x),
        "_split_heads": lambda: layer._split_heads(x, H, D),
        "_merge_heads": lambda: layer._merge_heads(q, H, D),
        "_attn": lambda: layer._attn(q, k, v),
        "forward": lambda: layer(x),
    }


def judge_sizes(layer: Any) -> Iterator[Finding]:
    """The three numbers that the rest of the class is written with."""
    right = {
        "embed_dim": (E, "config.n_embd"),
        "num_heads": (H, "config.n_head"),
        "head_dim": (D, "self.embed_dim // self.num_heads"),
    }
    wrong = [name for name, (value, _) in right.items() if getattr(layer, name, None) != value]
    for name in wrong:
        own, (value, source) = getattr(layer, name, None), right[name]
        said = "is missing" if own is None else f"is {own}"
        yield found("step-sizes", "number", name=name, said=said, value=value, source=source)
    if not wrong:
        yield passed("step-sizes", f"{E} features are {H} heads of {D}.")


def _projection(trial: Trial, part: StepPart) -> Iterator[Finding]:
    packed, out = part.short == "c_attn", trial.made["give"](part.short)
    given, want = (B, T, E), (B, T, 3 * E if packed else E)
    what = "queries, keys and values" if packed else "the output"
    times = "3 * self.embed_dim" if packed else "self.embed_dim"
    hint = f"It is a linear layer from self.embed_dim to {times}, with a bias."
    said = f"`{part.short}` makes {what}: {given} to {want}."
    yield judge_shape(part, out, given, want, said, name=part.short, hint=hint)


def _split(trial: Trial, part: StepPart) -> Iterator[Finding]:
    x, out = trial.made["inputs"][0], trial.made["give"](part.short)
    shapes = {(B, T, H, D): "behind", (B, H, D, T): "swapped", (B, T, E): "whole"}
    turns = x.view(B, T, D, H).permute(0, 3, 1, 2)
    numbers = {"view": x.view(B, H, T, D), "turns": turns}
    right = x.view(B, T, H, D).transpose(1, 2)
    yield _judged(part.rule, out, right, (B, T, E), shapes, numbers)


def _merge(trial: Trial, part: StepPart) -> Iterator[Finding]:
    heads, out = trial.made["inputs"][1], trial.made["give"](part.short)
    shapes = {(B, T, H, D): "behind", (B, H, T, D): "whole", (B, H * T, D): "joined"}
    turns = heads.permute(0, 2, 3, 1).reshape(B, T, E)
    numbers = {"view": heads.reshape(B, T, E), "turns": turns}
    right = heads.transpose(1, 2).reshape(B, T, E)
    yield _judged(part.rule, out, right, (B, H, T, D), shapes, numbers)


def _judged(
    rule: str,
    out: Any,
    right: Tensor,
    given: tuple[int, ...],
    shapes: Mapping[tuple[int, ...], str],
    numbers: Mapping[str, Tensor],
) -> Finding:
    """Shape first, then numbers: the ways of the rule that common mistakes give."""
    words = {"got": shape_of(out), "given": given, "want": tuple(right.shape)}
    if words["got"] != str(words["want"]):
        ways = {str(shape): way for shape, way in shapes.items()}
        return found(rule, ways.get(words["got"], "shape"), **words)
    same = (way for way, other in {"right": right, **numbers}.items() if torch.allclose(out, other))
    return found(rule, next(same, "numbers"), **words)


MASKS = {
    "it hides the token itself, too": lambda ones: ones.triu(0),
    "it lets every token see the next one": lambda ones: ones.triu(2),
    "it hides the past and shows the future": lambda ones: ones.tril(-1),
    "it hides the past and the token itself": lambda ones: ones.tril(0),
    "it hides nothing": lambda ones: ones.triu(T),
}


def _mask(trial: Trial, part: StepPart) -> Iterator[Finding]:
    mask = trial.made["give"](part.short)
    if shape_of(mask) != str((T, T)):
        yield found(part.rule, "shape", T=T, got=shape_of(mask), want=(T, T))
        return
    if mask.dtype == torch.bool:
        yield found(part.rule, "boolean")
        return
    ones, hidden = torch.ones(T, T), mask <= -1e4
    if not bool((mask[~hidden] == 0).all()):
        yield found(part.rule, "numbers")
    elif torch.equal(hidden, ones.triu(1).bool()):
        yield from _right_mask(trial, part, finite=bool((mask[hidden] > -torch.inf).any()))
    else:
        said = [said for said, of in MASKS.items() if torch.equal(hidden, of(ones).bool())]
        yield found(part.rule, "other", said=said[0]) if said else found(part.rule, "numbers")


def _right_mask(trial: Trial, part: StepPart, finite: bool) -> Iterator[Finding]:
    """Three new tokens after two that are cached: a mask aligned to the start is a trap."""
    try:
        cached = trial.made["give"](f"{part.short} cached")
        aligned = tuple(cached.shape) == (3, 5) and bool((cached[-1] == 0).all())
    except Exception:
        aligned = False
    said = f"`{part.short}` hides what comes later with -inf, and nothing else."
    if not aligned:
        yield found(part.rule, "cached")
    else:
        yield found(part.rule, "finite") if finite else passed(part.rule, said)


def _forward(trial: Trial, part: StepPart) -> Iterator[Finding]:
    out = trial.made["give"](part.short)
    if shape_of(out) == str((B, T, E)):
        yield passed(part.rule, f"`forward` keeps the shape: {(B, T, E)}.")
    else:
        yield found(part.rule, "kept", got=shape_of(out), given=(B, T, E))


def attention_test(right: Callable[[list[Tensor], Tensor], bool], fault: Test) -> Test:
    """The test of `_attn`: its shape, whether it is `right`, and the `fault` where it is not."""

    def test(trial: Trial, part: StepPart) -> Iterator[Finding]:
        out, want = trial.made["give"](part.short), (B, H, T, D)
        out = out[0] if isinstance(out, tuple) else out
        if shape_of(out) != str(want):
            yield found(part.rule, "shape", got=shape_of(out), want=want, hint=part.hint)
        elif right(trial.made["inputs"][1:], out):
            yield passed(part.rule, f"`_attn` computes attention in every head: {want}.")
        else:
            trial.made["_attn"] = out
            faults = list(fault(trial, part))
            yield from faults or [found(part.rule, "numbers", hint=part.hint)]

    return test


TESTS: dict[str, Test] = {
    "causal_mask": _mask,
    "projection": _projection,
    "split_heads": _split,
    "merge_heads": _merge,
    "forward": _forward,
}
