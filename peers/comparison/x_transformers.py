"""x-transformers: layers and models to build with."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from x_transformers import Decoder, TransformerWrapper
from x_transformers.x_transformers import Attention

from . import shared

PACKAGES = ["x-transformers==2.31.10", "transformers==5.23.0"]
SAME_MODEL = False


def model(length: int, flash: bool = False) -> TransformerWrapper:
    torch.manual_seed(0)
    layers = Decoder(
        dim=shared.WIDTH, depth=shared.LAYERS, heads=shared.HEADS, attn_dim_head=32,
        attn_flash=flash,
    )  # fmt: skip
    return TransformerWrapper(num_tokens=shared.VOCAB, max_seq_len=length, attn_layers=layers)


def weights() -> str:
    small, tokens = model(32), shared.ids(32)
    with torch.no_grad():
        _, found = small(tokens, return_attn=True)
    assert found[0].shape == (1, 4, 32, 32)
    shared.agree(found[0].sum(-1), torch.ones(1, 4, 32))
    return "yes, of its own models, without flash"


def entropies(length: int) -> Callable[[], list[Tensor]]:
    small, tokens = model(length).eval(), shared.ids(length)

    def run() -> list[Tensor]:
        with torch.no_grad():
            _, found = small(tokens, return_attn=True)
        return [shared.entropies(one) for one in found]

    return run


def training() -> str:
    small, tokens = model(32), shared.ids(32)
    logits, found = small(tokens, return_attn=True)
    logits.square().mean().backward()
    assert shared.entropies(found[0]).shape == (1, 4, 32)
    return "of its own models, by hand"


def gradients() -> str:
    small, tokens = model(32), shared.ids(32)
    _, found = small(tokens, return_attn=True)
    shared.with_gradient(found[0]).sum().backward()
    assert small.token_emb.emb.weight.grad.abs().sum() > 0
    return "yes, through the matrix"


def layer() -> str:
    x = torch.randn(2, 17, 24)
    made = Attention(24, heads=6, kv_heads=2, dim_head=4, causal=True, flash=True)
    out = made(x)
    assert (out[0] if isinstance(out, tuple) else out).shape == x.shape
    return "yes, and whole models, in many variants"
