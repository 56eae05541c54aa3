"""Follow the step `gpt2` on PyTorch: one matrix for q, k and v, heads split and merged by hand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core.masks import Causal
from ...core.reference import attention
from .. import check
from ..findings.rules import found
from ..findings.verdict import Finding
from .base import StepPart, Trial, step
from .gpt2_parts import OWNER, TESTS, B, D, E, H, T, attention_test, calls, config, judge_sizes

WIDTH, HEADS = 24, 3  # those of the whole


def _ready(trial: Trial, **made: Any) -> None:
    inputs = [torch.randn(B, T, E), *torch.randn(3, B, H, T, D)]
    trial.made |= {"inputs": inputs, "give": partial(_give, trial), **made}


def _give(trial: Trial, name: str) -> Any:
    """What a part gives for inputs that are the same every time."""
    inputs = (x.clone() for x in trial.made["inputs"])
    try:
        return calls(trial, trial.made.get("layer"), *inputs)[name]()
    except TypeError:
        if not name.startswith("causal_mask"):
            raise
        # without these keywords is as good
        return trial.get("causal_mask")(*((3, 2) if name.endswith("cached") else (T, 0)))


def _mask(trial: Trial, part: StepPart) -> Iterator[Finding]:
    _ready(trial)
    yield from TESTS["causal_mask"](trial, part)


def _built(trial: Trial, part: StepPart) -> Iterator[Finding]:
    torch.manual_seed(0)
    layer = trial.get(OWNER)(config())
    if not isinstance(layer, nn.Module):
        yield found(part.rule, "module", owner=OWNER)
        return
    _ready(trial, layer=layer.eval())
    yield from judge_sizes(layer)


def _is_right(heads: list[Tensor], out: Tensor) -> bool:
    q, k, v = heads
    return torch.allclose(out, attention(q, k, v, mask=Causal()).out, atol=1e-5)


def _named(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """The mistake in `_attn`, by its name where it has one."""
    small = trial.get(OWNER)(config(WIDTH, HEADS)).eval()

    def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = small._attn(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    for one in check(attn, embed_dim=WIDTH, num_heads=HEADS, causal=True).errors[:1]:
        said = f"`_attn` does not compute attention. {one.message}"
        yield replace(one, severity="error", message=said, explained_by=None)


def _whole(trial: Trial) -> Iterator[Finding]:
    torch.manual_seed(0)
    layer = trial.get(OWNER)(config(WIDTH, HEADS))
    yield from check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results


_OWN = {"causal_mask": _mask, "built": _built, "attn": attention_test(_is_right, _named)}
GPT2 = step("gpt2", {**TESTS, **_OWN}, _whole)
