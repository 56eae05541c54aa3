"""FlexAttention: PyTorch's own function for scores and masks of one's own."""

from __future__ import annotations

import torch
from torch.nn.attention.flex_attention import flex_attention

PACKAGES = ["transformers==5.23.0"]


def weights() -> str:
    """What figures are made of: its log-sum-exp."""
    q = torch.randn(1, 4, 32, 16)
    try:
        torch.compile(flex_attention)(q, q, q, return_lse=True)
    except Exception as error:
        if "return_lse" not in str(error):
            raise
        return "–; compiled for a CPU it refuses `return_lse`, too"
    return "–; its log-sum-exp alone"


def layer() -> str:
    q = torch.randn(1, 4, 32, 16)
    with torch.no_grad():
        out = torch.compile(flex_attention)(q, q, q, score_mod=lambda s, b, h, i, j: s + (i - j))
    wanted = (q @ q.mT * 16**-0.5 + torch.arange(32)[:, None] - torch.arange(32)).softmax(-1) @ q
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
    return "a function: any score and mask, compiled and fused"
