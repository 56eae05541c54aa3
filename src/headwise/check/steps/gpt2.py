"""The step `gpt2` on PyTorch: one matrix for q, k and v, heads split and merged by hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ...definition import attention
from ...masks import Causal
from .. import check
from ..findings.verdict import Finding
from .base import Step, Test, Trial, passed, shape_of, wrong
from .judges import (
    ATTENTION_HINT,
    B,
    D,
    E,
    H,
    T,
    gpt2_parts,
    judge_mask,
    judge_merge,
    judge_projection,
    judge_sizes,
    judge_split,
)

WIDTH, HEADS = 24, 3  # those of the whole

_ON_MAX = "On MAX: `from max.experimental.nn import Linear, Module` (25.7: max.nn.module_v3)."
IMPORTS = {
    "torch": "Write at the top: `import torch`.",
    "nn": "Write at the top: `from torch import nn`.",
    "Tensor": "Write at the top: `from torch import Tensor`.",
    "Module": f"Write at the top: `from torch import nn`, and `nn.Module` here. {_ON_MAX}",
    "Linear": f"Write at the top: `from torch import nn`, and `nn.Linear` here. {_ON_MAX}",
    "F": "Write at the top: `import torch.nn.functional as F`.",
    "math": "Write at the top: `import math`.",
    "GPT2Config": "Define it (a dataclass with n_embd and n_head), or import it.",
}


def config(width: int = E, heads: int = H) -> Any:
    """GPT-2's own sizes, or small ones; every name that its configuration has."""
    return SimpleNamespace(
        n_embd=width,
        n_head=heads,
        n_layer=12,
        n_positions=1024,
        n_ctx=1024,
        n_inner=None,
        vocab_size=50257,
        layer_norm_epsilon=1e-5,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
    )


def _built(trial: Trial) -> Iterator[Finding]:
    torch.manual_seed(0)
    layer = trial.get("GPT2MultiHeadAttention")(config())
    if not isinstance(layer, nn.Module):
        yield wrong(
            "step-sizes",
            "`GPT2MultiHeadAttention` is no nn.Module.",
            "Write `class GPT2MultiHeadAttention(nn.Module):`, and `super().__init__()` first.",
        )
        return
    trial.made["layer"] = layer.eval()
    yield from judge_sizes(layer)


def _projection(name: str, width: int) -> Test:
    def test(trial: Trial) -> Iterator[Finding]:
        yield judge_projection(
            name, getattr(trial.made["layer"], name)(torch.randn(B, T, E)), width
        )

    return test


def _split(trial: Trial) -> Iterator[Finding]:
    x = torch.randn(B, T, E)
    yield judge_split(trial.made["layer"]._split_heads(x.clone(), H, D), x)


def _merge(trial: Trial) -> Iterator[Finding]:
    heads = torch.randn(B, H, T, D)
    yield judge_merge(trial.made["layer"]._merge_heads(heads.clone(), H, D), heads)


def _mask(trial: Trial) -> Iterator[Finding]:
    function = trial.get("causal_mask")
    options: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    try:
        mask = function(T, 0, **options)
    except TypeError:  # without these keywords is as good
        options = {}
        mask = function(T, 0)
    try:
        cached = function(3, 2, **options)
    except Exception:
        cached = torch.zeros(0)
    yield judge_mask(mask, cached)


def _attn(trial: Trial) -> Iterator[Finding]:
    q, k, v = torch.randn(3, B, H, T, D).unbind()
    out = trial.made["layer"]._attn(q.clone(), k.clone(), v.clone())
    out = out[0] if isinstance(out, tuple) else out
    if shape_of(out) != str((B, H, T, D)):
        yield wrong(
            "step-attention",
            f"`_attn` gives {shape_of(out)} for heads of {(B, H, T, D)}; it should keep the shape.",
            ATTENTION_HINT,
        )
        return
    right = attention(q, k, v, mask=Causal()).out
    if torch.allclose(out, right, atol=1e-5):
        yield passed("step-attention", f"`_attn` computes attention in every head: {(B, H, T, D)}.")
        return
    yield from _named(trial)


def _named(trial: Trial) -> Iterator[Finding]:
    """The mistake in `_attn`, by its name where it has one."""
    small = trial.get("GPT2MultiHeadAttention")(config(WIDTH, HEADS)).eval()

    def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = small._attn(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    verdict = check(attn, embed_dim=WIDTH, num_heads=HEADS, causal=True)
    found = verdict.errors[:1]
    for one in found:
        said = f"`_attn` does not compute attention. {one.message}"
        yield Finding(one.rule, "error", said, one.hint, one.example)
    if not found:
        yield wrong(
            "step-attention",
            "`_attn` gives the right shape, but other numbers than attention.",
            ATTENTION_HINT,
        )


def _forward(trial: Trial) -> Iterator[Finding]:
    out = trial.made["layer"](torch.randn(B, T, E))
    if shape_of(out) == str((B, T, E)):
        yield passed("step-forward", f"`forward` keeps the shape: {(B, T, E)}.")
        return
    yield wrong(
        "step-forward",
        f"`forward` gives {shape_of(out)} for {(B, T, E)}; it should keep the shape.",
        "Return what `c_proj` gives, and nothing beside it.",
    )


def _whole(trial: Trial) -> Iterator[Finding]:
    torch.manual_seed(0)
    layer = trial.get("GPT2MultiHeadAttention")(config(WIDTH, HEADS))
    yield from check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results


GPT2 = Step(
    "gpt2",
    "GPT-2's attention: one matrix for q, k and v, heads split and merged by hand",
    gpt2_parts(
        "nn.Linear",
        "`split`",
        {
            "causal_mask": _mask,
            "GPT2MultiHeadAttention": _built,
            "c_attn": _projection("c_attn", 3 * E),
            "c_proj": _projection("c_proj", E),
            "_split_heads": _split,
            "_merge_heads": _merge,
            "_attn": _attn,
            "forward": _forward,
        },
    ),
    IMPORTS,
    _whole,
)
