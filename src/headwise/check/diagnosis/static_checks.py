"""How weights are kept and numbers dropped: mistakes that leave the arithmetic right."""

from __future__ import annotations

import torch
from torch import nn

from ..findings.verdict import Finding
from ..target.subject import Subject
from .call_lines import Dropouts
from .projections import Reading


def dropout_in_eval(subject: Subject) -> tuple[list[Finding], bool]:
    """Whether numbers are dropped in eval mode, and by which call."""
    try:
        trial = subject.rebuilt(dropout=0.5) or subject
    except Exception:
        trial = subject
    trial = trial.fresh()
    if trial.module is not None:
        trial.module.eval()
        if trial.factory is None:
            _raise_dropout(trial.module)
    x = trial.input(tokens=min(7, trial.context_length or 7))
    try:
        with Dropouts(off=False) as calls:
            once, again = trial(x), trial(x)
        if torch.equal(once.nan_to_num(), again.nan_to_num()) or not calls.dropped:
            return [], False
        with Dropouts(off=True):
            if not torch.equal(trial(x).nan_to_num(), trial(x).nan_to_num()):
                return [], False
    except Exception:
        return [], False
    call, line = calls.dropped[0]
    fused = call == "scaled_dot_product_attention"
    hint = (
        "F.scaled_dot_product_attention drops wherever its dropout_p is above 0: pass "
        "`dropout_p=self.dropout if self.training else 0.0`."
        if fused
        else "F.dropout drops unless told otherwise: pass `training=self.training`, or use an "
        "nn.Dropout module, which knows the mode."
    )
    message = f"Dropout is still at work in eval mode ({call}): two calls on one input differ."
    return [Finding("dropout-in-eval", "error", message, hint + line)], True


def _raise_dropout(module: nn.Module) -> None:
    """Sets probabilities of dropping that are kept as plain numbers."""
    for child in module.modules():
        for name, value in vars(child).items():
            if "drop" in name and isinstance(value, float) and 0.0 <= value < 1.0:
                setattr(child, name, 0.5)


def plain_lists(subject: Subject) -> list[Finding]:
    """Modules in a plain list, which PyTorch does not know of."""
    for child in subject.module.modules() if subject.module is not None else ():
        for name, value in vars(child).items():
            values = list(value.values()) if isinstance(value, dict) else value
            if name.startswith("_") or not isinstance(values, list | tuple) or not values:
                continue
            lost = all(isinstance(one, nn.Module | nn.Parameter) for one in values)
            held = {id(one) for one in [*child.modules(), *child.parameters()]}
            if lost and not any(id(one) in held for one in values):
                what = "ParameterList" if isinstance(values[0], nn.Parameter) else "ModuleList"
                message = (
                    f"self.{name} is a plain {type(value).__name__}, so PyTorch does not know its "
                    f"{len(values)} members: they are not trained, saved or moved."
                )
                hint = f"Put them in a list that registers them: `self.{name} = nn.{what}([...])`."
                return [Finding("registration", "error", message, hint)]
    return []


def shared_heads(reading: Reading) -> list[Finding]:
    shared = [source.name for source in reading.sources if source.shared]
    if not shared:
        return []
    message = f"All {reading.num_heads} heads are one and the same module: they share {shared[0]}."
    hint = (
        f"`[Head(…)] * {reading.num_heads}` repeats one object; build each of them: "
        f"`[Head(…) for _ in range({reading.num_heads})]`."
    )
    return [Finding("shared-heads", "error", message, hint)]


def no_output_projection(subject: Subject, reading: Reading) -> list[Finding]:
    """That nothing mixes the heads, where they are made together and so belong together."""
    joined = subject.module is None or reading.num_heads == 1 or reading.style == "per head"
    if joined or reading.out is not None:
        return []
    message = "There is no output projection: the heads' outputs only stand side by side."
    hint = (
        "If no layer outside does it, end with `self.out_proj(context)`, an nn.Linear as wide as "
        "all heads together: it lets each output use every head."
    )
    return [Finding("output-projection", "warning", message, hint)]
