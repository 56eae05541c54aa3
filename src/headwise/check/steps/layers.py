"""Follow the steps `per_head` and `split`, with the names of the ladder's rungs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import check
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import Step, StepPart, Test, Trial, hidden_wrongly, judge_shape, step
from .blame import agrees, twin, written
from .hints import finding, laid
from .slips import dropped
from .watching import watched

B, T = 2, 7
WIDTH, HEADS, CONTEXT, DROPOUT = 24, 3, 16, 0.25
D_IN, D_HEAD = 20, 8  # no two axes are alike
HEAD = "CausalAttention"
SIZES = f"{WIDTH} features in {HEADS} heads"
DROPS = "Dropout works once, on the weights: `self.dropout(weights)` after the softmax."
OUT = {HEAD: D_HEAD}  # the features that come out, where they are not WIDTH
HOLDS = (  # in the order of `hidden_wrongly`
    "a token does not see itself",
    "a token sees the next one",
    "the past is hidden, and not what comes later",
    "the past and the token itself are hidden, and not what comes later",
    "nothing is hidden",
    "it holds something else",
)


def _make(trial: Trial, name: str, d_in: int = D_IN, dropout: float = 0.0) -> nn.Module:
    """Build a class with the tutorial's arguments; with dropout, with biases too."""
    kind = trial.get(name)
    several = () if name in OUT else (HEADS,)
    d_out = D_HEAD if name in OUT or "Wrapper" in name else WIDTH
    biased = dropout and "qkv_bias" in inspect.signature(kind).parameters
    torch.manual_seed(0)
    return kind(d_in, d_out, CONTEXT, dropout, *several, **({"qkv_bias": True} if biased else {}))


def _built(trial: Trial, part: StepPart) -> Finding:
    """The class can be built with the tutorial's arguments, and is a module."""
    layer = _make(trial, part.name)
    if not isinstance(layer, nn.Module):
        return found(part.rule, "module", owner=part.name)
    trial.made[part.name] = layer.eval()
    trial.made[f"{part.name}, biased"] = _make(trial, part.name, dropout=DROPOUT)
    ours = twin(trial)
    assert ours is not None
    for name, value in vars(_make(ours, part.name)).items():
        own = getattr(layer, name, value)
        if type(value) is int and (own != value or isinstance(own, float)):
            source = re.findall(rf"self\.{name} = (.+)", ours.source.text)[0]
            words = {"said": f"is {own}", "value": value, "sizes": SIZES, "source": source}
            return found("step-sizes", "number", name=name, **words)
    return passed(part.rule, f"`{part.name}` can be built, from {D_IN} features.")


def _projection(trial: Trial, part: StepPart) -> Finding:
    """A layer from d_in, or what the heads found, to d_out; with a bias where one is wanted."""
    mixes = part.short == "out_proj"
    width, given = OUT.get(part.owner, WIDTH), (B, T, WIDTH if mixes else D_IN)
    layer, biased = (trial.made[f"{part.owner}{end}"] for end in ("", ", biased"))
    out = getattr(layer, part.short)(torch.randn(given))
    said = f"`{part.name}` makes {width} features of {given[-1]}."
    judged = judge_shape(part, out, given, (B, T, width), said, name=part.name, hint=part.hint)
    if judged.severity != "passed" or mixes or not _ignores(layer, biased, part.short):
        return judged
    has = getattr(getattr(layer, part.short), "bias", None) is not None
    words = {"line": trial.source.line(trial.names[part.name]), "name": part.short}
    return found(part.rule, "bias", has="always has a" if has else "has no", **words)


def _ignores(plain: nn.Module, biased: nn.Module, name: str) -> bool:
    """Whether a projection takes no notice of `qkv_bias`."""
    own = [getattr(layer, name, None) for layer in (plain, biased)]
    asked = "qkv_bias" in inspect.signature(type(plain)).parameters and isinstance(
        own[0], nn.Linear
    )
    return asked and [getattr(one, "bias", None) is not None for one in own] != [False, True]


def _dropout(trial: Trial, part: StepPart) -> Finding:
    """It drops as often as the class is told."""
    own: Any = getattr(trial.made[f"{part.owner}, biased"], part.short, None)
    number = isinstance(own, (int, float)) and not trial.source.calls(part.owner, part.short)
    rate = getattr(own, "p", None)
    if (own if number else rate) == DROPOUT:
        return passed(part.rule, f"`{part.name}` drops as often as the class is told.")
    called = f"is {own!r} and no layer, yet it is called"
    got = called if rate is None else f"drops {rate:g} of all weights"
    words = {"name": part.short, "got": got, "p": DROPOUT, "hint": part.hint}
    return found(part.rule, "dropout", line=trial.source.line(trial.names[part.name]), **words)


def _buffer(trial: Trial, part: StepPart) -> Finding:
    """The mask moves with the module, and holds 1 where the key comes later."""
    layer, line = trial.made[part.owner], trial.source.line(trial.names[part.name])
    mask = getattr(layer, "mask", None)
    words = {"owner": part.owner, "line": line, "size": CONTEXT, "hint": part.hint}
    if "mask" not in dict(layer.named_buffers()):
        tensor = "plain" if isinstance(mask, Tensor) else "none"
        return found(part.rule, "parameter" if isinstance(mask, nn.Parameter) else tensor, **words)
    assert isinstance(mask, Tensor)
    if mask.shape[-2:] != (CONTEXT, CONTEXT) or mask.numel() != CONTEXT**2:
        return found(part.rule, "buffer-shape", got=list(mask.shape), **words)
    hidden = mask.reshape(CONTEXT, CONTEXT) != 0
    wrong = hidden_wrongly(hidden)
    if wrong is None or _is_causal(layer):
        return passed(part.rule, f"`{part.name}` is a buffer: it moves with the module.")
    said = "everything is hidden" if bool(hidden.all()) else HOLDS[wrong]
    return found(part.rule, "buffer", said=said, **words)


def _is_causal(layer: nn.Module) -> bool:
    """Whether each output depends on its own token and those before it, whatever the mask holds."""
    x = torch.randn(1, T, D_IN, requires_grad=True)
    try:
        out = layer(x)[0].sum(-1)
        rows = [torch.autograd.grad(one, x, retain_graph=True)[0][0].abs().sum(-1) for one in out]
    except Exception:  # what is wrong there is said of `forward`
        return False
    return torch.equal(torch.stack(rows) != 0, torch.ones(T, T).tril().bool())


def _forward(trial: Trial, part: StepPart) -> Finding:
    """The right shape, and the numbers of the twin with the same weights, in training too."""
    width, given = OUT.get(part.owner, WIDTH), (B, T, D_IN)
    want, x = (B, T, width), torch.randn(given)
    said, hint = f"`{part.owner}` makes {want} of {given}.", trial.step.hint(part, "return")
    judged = passed(part.rule)
    blank = part.name in trial.blank  # which line drops is not settled then
    for biased in ("",) if blank else ("", ", biased"):

        def call(one: Trial, name: str = f"{part.owner}{biased}") -> Any:
            layer = _layer(one, trial, name)
            torch.manual_seed(0)
            return layer(x.clone())

        sizes = {"B": B, "T": T, "H": HEADS, "D": D_HEAD, "d_out": width}
        out = watched(trial, part, sizes, call)
        if blame := written(trial.watch):
            return finding(trial, part, blame)
        judged = judge_shape(part, out, given, want, said, name=part.owner, hint=hint)
        if judged.severity == "error":
            return laid(trial, part, None, judged)
        if agrees(trial, out):
            continue
        if not biased:
            return laid(trial, part, _named(trial, part), found(part.rule, "other"))
        wrong = laid(trial, part, None, found(part.rule, "other"))
        return replace(
            wrong,
            message=f"In training, {wrong.message}",
            hint=DROPS + dropped(trial, wrong.message),
        )
    return judged


def _layer(one: Trial, trial: Trial, name: str) -> nn.Module:
    """The layer of a trial, or its twin's, with the same weights."""
    if name not in one.made:
        theirs, (owner, _, biased) = trial.made[name], name.partition(", ")
        one.made[name] = _make(one, owner, dropout=DROPOUT if biased else 0.0)
        one.made[name].train(theirs.training).load_state_dict(theirs.state_dict(), strict=False)
    return one.made[name]


def _named(trial: Trial, part: StepPart) -> Finding | None:
    """The mistake that `check` names in a class."""
    heads = 1 if part.owner in OUT else HEADS
    layer = _make(trial, part.owner, WIDTH)
    errors = check(layer, embed_dim=WIDTH, num_heads=heads, causal=True).errors
    return errors[0] if errors else None


def _heads(trial: Trial, part: StepPart) -> Finding:
    heads, kind, words = trial.made[part.owner].heads, trial.get(HEAD), {"owner": part.owner}
    if not isinstance(heads, nn.ModuleList):
        return found(part.rule, "list", kind=type(heads).__name__, **words)
    if len(heads) != HEADS or not all(isinstance(head, kind) for head in heads):
        return found(part.rule, "count", count=len(heads), wanted=HEADS, **words)
    if len({id(head) for head in heads}) < len(heads):
        return found(part.rule, "same", **words)
    got, want = (_sizes(one) for one in (heads[0], trial.made[HEAD]))
    if got != want:
        words |= {"got": got, "want": want, "sizes": f"d_in={D_IN}, d_out={D_HEAD}"}
        return found(part.rule, "sizes", hint=part.hint, **words)
    told = trial.made[f"{part.owner}, biased"].heads[0]
    if f"{HEAD}.W_query" not in trial.waiting and _ignores(heads[0], told, "W_query"):
        return found(part.rule, "argument", name="qkv_bias", hint=part.hint, **words)
    drops = getattr(getattr(told, "dropout", None), "p", DROPOUT)
    if f"{HEAD}.dropout" not in trial.waiting and drops != DROPOUT:
        return found(part.rule, "argument", name="dropout", hint=part.hint, **words)
    return passed(part.rule, f"{len(heads)} heads, each with matrices of its own.")


def _sizes(layer: nn.Module) -> str:
    """What its parameters and buffers are: `[8, 20], [8, 20], [8, 20], [16, 16]`."""
    return ", ".join(str(list(one.shape)) for one in (*layer.parameters(), *layer.buffers()))


def _step(name: str, owner: str) -> Step:
    """A step whose class, in the end, goes through every rule."""

    def whole(trial: Trial, part: StepPart) -> Iterator[Finding]:
        layer = _make(trial, owner, WIDTH)
        yield from check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results

    return step(name, TESTS | {"whole": whole})


TESTS: dict[str, Test] = {
    "built": _built,
    "projection": _projection,
    "dropout": _dropout,
    "buffer": _buffer,
    "forward": _forward,
    "heads": _heads,
}
PER_HEAD = _step("per_head", "MultiHeadedAttentionWrapper")
SPLIT = _step("split", "MultiHeadAttn")
