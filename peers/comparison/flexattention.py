"""FlexAttention: PyTorch's own function for scores and masks of one's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from . import shared

PACKAGES = ["transformers==5.23.0"]


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def entropy(q: Tensor, k: Tensor) -> Tensor:
    """By hand, of what it gives: one call with the keys as values, and its log-sum-exp."""
    mask = create_block_mask(causal, None, None, q.shape[2], k.shape[2], device="cpu")
    compiled = torch.compile(flex_attention)
    mean_key, lse = compiled(q, k, k, block_mask=mask, return_lse=True)
    return lse - q.shape[-1] ** -0.5 * (q * mean_key).sum(-1)


def entropies(length: int) -> Callable[[], list[Tensor]]:
    model, tokens = shared.gpt(length, "sdpa"), shared.ids(length)
    found: list[Tensor] = []

    def keep(module: torch.nn.Module, inputs: object, qkv: Tensor) -> None:
        q, k, _ = (part.unflatten(-1, (4, 32)).transpose(1, 2) for part in qkv.split(128, -1))
        found.append(entropy(q, k))

    for block in model.transformer.h:
        block.attn.c_attn.register_forward_hook(keep)

    def run() -> list[Tensor]:
        found.clear()
        with torch.no_grad():
            model(tokens)
        return list(found)

    return run


def layer() -> str:
    q = torch.randn(1, 4, 32, 16)
    out = torch.compile(flex_attention)(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))
    assert out.shape == q.shape
    return "a function: any score and mask, compiled and fused"
