"""Follow the steps `per_head` and `split`, with the names of the ladder's rungs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import check
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import Step, StepPart, Test, Trial, judge_shape, step
from .watching import watched

B, T = 2, 7
WIDTH, HEADS, CONTEXT, DROPOUT = 24, 3, 16, 0.25
D_IN, D_HEAD = 20, 8  # no two axes are alike
OUT = {"CausalAttention": D_HEAD}  # the features that come out, where they are not WIDTH
DIAGONALS = {
    "a token does not see itself": lambda ones: ones.triu(0),
    "a token sees the next one": lambda ones: ones.triu(2),
    "the past is hidden, and not what comes later": lambda ones: ones.tril(-1),
    "the past and the token itself are hidden, and not what comes later": lambda ones: ones.tril(0),
    "nothing is hidden": lambda ones: 0 * ones,
    "everything is hidden": lambda ones: ones,
}


def _make(trial: Trial, name: str, d_in: int = D_IN, dropout: float = 0.0) -> nn.Module:
    """Build a class with the tutorial's arguments; with dropout, with biases too."""
    kind = trial.get(name)
    several = () if name in OUT else (HEADS,)
    d_out = D_HEAD if name in OUT or "Wrapper" in name else WIDTH
    biased = dropout and "qkv_bias" in inspect.signature(kind).parameters
    torch.manual_seed(0)
    return kind(d_in, d_out, CONTEXT, dropout, *several, **({"qkv_bias": True} if biased else {}))


def _built(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """The class can be built with the tutorial's arguments, and is a module."""
    layer = _make(trial, part.name)
    if isinstance(layer, nn.Module):
        trial.made[part.name] = layer.eval()
        trial.made[f"{part.name}, biased"] = _make(trial, part.name, dropout=DROPOUT)
        yield passed(part.rule, f"`{part.name}` can be built, from {D_IN} features.")
    else:
        yield found(part.rule, "module", owner=part.name)


def _projection(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """A layer from d_in, or what the heads found, to d_out; with a bias where one is wanted."""
    mixes = part.short == "out_proj"
    width, given = OUT.get(part.owner, WIDTH), (B, T, WIDTH if mixes else D_IN)
    layer, biased = (trial.made[f"{part.owner}{end}"] for end in ("", ", biased"))
    out = getattr(layer, part.short)(torch.randn(given))
    said = f"`{part.name}` makes {width} features of {given[-1]}."
    judged = judge_shape(part, out, given, (B, T, width), said, name=part.name, hint=part.hint)
    if judged.severity == "passed" and not mixes and _ignores(layer, biased, part.short):
        has = getattr(getattr(layer, part.short), "bias", None) is not None
        words = {"line": trial.source.line(trial.names[part.name]), "name": part.short}
        yield found(part.rule, "bias", has="always has a" if has else "has no", **words)
    else:
        yield judged


def _ignores(plain: nn.Module, biased: nn.Module, name: str) -> bool:
    """Whether a projection takes no notice of `qkv_bias`."""
    if "qkv_bias" not in inspect.signature(type(plain)).parameters:
        return False
    bias = [
        getattr(getattr(layer, name, None), "bias", None) is not None for layer in (plain, biased)
    ]
    return isinstance(getattr(plain, name, None), nn.Linear) and bias != [False, True]


def _dropout(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """It drops as often as the class is told."""
    own: Any = getattr(trial.made[f"{part.owner}, biased"], part.short, None)
    numbers = isinstance(own, (int, float)) and not trial.source.calls(part.owner, part.short)
    if (own if numbers else getattr(own, "p", None)) == DROPOUT:
        yield passed(part.rule, f"`{part.name}` drops as often as the class is told.")
        return
    rate = getattr(own, "p", None)
    got = f"is {own!r} and no layer, yet it is called"
    if rate is not None:
        got = f"drops {rate:g} of all weights"
    line = trial.source.line(trial.names[part.name])
    yield found(
        part.rule, "dropout", line=line, name=part.short, got=got, p=DROPOUT, hint=part.hint
    )


def _buffer(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """The mask moves with the module, and holds 1 where the key comes later."""
    layer, line = trial.made[part.owner], trial.source.line(trial.names[part.name])
    mask = getattr(layer, "mask", None)
    words = {"owner": part.owner, "line": line, "size": CONTEXT, "hint": part.hint}
    if "mask" not in dict(layer.named_buffers()):
        tensor = "plain" if isinstance(mask, Tensor) else "none"
        yield found(part.rule, "parameter" if isinstance(mask, nn.Parameter) else tensor, **words)
        return
    assert isinstance(mask, Tensor)
    ones, size = torch.ones(CONTEXT, CONTEXT), tuple(mask.shape)
    if size[-2:] != (CONTEXT, CONTEXT) or mask.numel() != CONTEXT**2:
        yield found(part.rule, "buffer-shape", got=list(size), **words)
        return
    later = mask.reshape(CONTEXT, CONTEXT) != 0
    if torch.equal(later, ones.triu(1).bool()) or _is_causal(layer):
        yield passed(part.rule, f"`{part.name}` is a buffer: it moves with the module.")
        return
    said = (said for said, of in DIAGONALS.items() if torch.equal(later, of(ones).bool()))
    yield found(part.rule, "buffer", said=next(said, "it holds something else"), **words)


def _is_causal(layer: nn.Module) -> bool:
    """Whether each output depends on its own token and those before it, whatever the mask holds."""
    x = torch.randn(1, T, D_IN, requires_grad=True)
    try:
        out = layer(x)[0].sum(-1)
        rows = [torch.autograd.grad(one, x, retain_graph=True)[0][0].abs().sum(-1) for one in out]
    except Exception:  # what is wrong there is said of `forward`
        return False
    return torch.equal(torch.stack(rows) != 0, torch.ones(T, T).tril().bool())


def _shape(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """What comes out has the right shape; the line of a NaN is kept for the whole."""
    width, given = OUT.get(part.owner, WIDTH), (B, T, D_IN)
    want, layer = (B, T, width), trial.made[part.owner]
    sizes = {"B": B, "T": T, "H": HEADS, "D": D_HEAD, "d_out": width}
    out = watched(trial, part, sizes, lambda: layer(torch.randn(given)))
    said, hint = f"`{part.owner}` makes {want} of {given}.", trial.step.hint(part, "return")
    judged = judge_shape(part, out, given, want, said, name=part.owner, hint=hint)
    if judged.severity == "error":
        yield trial.watch.misfit() or judged
    else:
        if bool(out.isnan().any()):
            trial.made["nan"] = trial.watch.nan()
        yield judged


def _heads(trial: Trial, part: StepPart) -> Iterator[Finding]:
    heads, kind = trial.made[part.owner].heads, trial.get("CausalAttention")
    if not isinstance(heads, nn.ModuleList):
        yield found(part.rule, "list", owner=part.owner, kind=type(heads).__name__)
    elif len(heads) != HEADS or not all(isinstance(head, kind) for head in heads):
        yield found(part.rule, "count", owner=part.owner, count=len(heads), wanted=HEADS)
    elif len({id(head) for head in heads}) < len(heads):
        yield found(part.rule, "same", owner=part.owner)
    else:
        told = trial.made[f"{part.owner}, biased"].heads[0]
        drops = getattr(getattr(told, "dropout", None), "p", DROPOUT)
        right = "CausalAttention.W_query" not in trial.waiting
        if right and _ignores(heads[0], told, "W_query"):
            yield found(part.rule, "argument", owner=part.owner, name="qkv_bias", hint=part.hint)
        elif drops != DROPOUT and "CausalAttention.dropout" not in trial.waiting:
            yield found(part.rule, "argument", owner=part.owner, name="dropout", hint=part.hint)
        else:
            yield passed(part.rule, f"{len(heads)} heads, each with matrices of its own.")


TESTS: dict[str, Test] = {
    "built": _built,
    "projection": _projection,
    "dropout": _dropout,
    "buffer": _buffer,
    "shape": _shape,
    "heads": _heads,
}


def _step(name: str, owner: str) -> Step:
    """A step whose class, in the end, goes through every rule."""

    def whole(trial: Trial) -> Iterator[Finding]:
        layer = _make(trial, owner, WIDTH)
        results = check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results
        first = next((one.rule for one in results if one.severity == "error"), "")
        if first == "finite" and (line := trial.made.get("nan")) is not None:
            yield line  # no mistake has this name: at least it is known where it begins
        yield from results

    return step(name, TESTS, whole)


PER_HEAD = _step("per_head", "MultiHeadedAttentionWrapper")
SPLIT = _step("split", "MultiHeadAttn")
