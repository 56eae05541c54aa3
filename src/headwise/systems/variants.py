"""Other implementations of the same causal layer, all with headwise's own weight layout.

Every class here computes the same function as `headwise.MultiHeadAttention` with `Causal()`, and
loads its state: `qkv`, one Linear for queries, keys and values, and `out`. They differ in the
computation between the two. Only `TorchAttention` has PyTorch's names (layout `torch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ._checks import check_heads, check_input, check_sizes


class Packed(nn.Module):
    """The two projections and the split into heads; subclasses implement `attend`.

    Args:
        embed_dim: width E of input and output.
        num_heads: heads H, a divisor of E.
        bias: whether both Linears have biases.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__()
        name = type(self).__name__
        check_sizes(name, embed_dim=embed_dim, num_heads=num_heads)
        check_heads(name, "embed_dim", embed_dim, "num_heads", num_heads)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=bias)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        check_input(self, x, self.embed_dim)
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(x).split(self.embed_dim, dim=-1)
        )
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute causal attention of q, k and v `[B, H, T, D]`."""
        raise NotImplementedError


def earlier(length: int, device: torch.device) -> Tensor:
    """Return `[T, T]`: True where the key is no later than the query."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril()


class FusedQKV(Packed):
    """The explicit T×T matrix: two products and a softmax.

    >>> FusedQKV(12, num_heads=3)(torch.randn(2, 5, 12)).shape
    torch.Size([2, 5, 12])
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~earlier(q.shape[-2], q.device), -torch.inf)
        return torch.softmax(scores, dim=-1) @ v


class Einsum(Packed):
    """The same computation with einsum: named axes, no transposes."""

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        check_input(self, x, self.embed_dim)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)  # [B, T, H, D]
        scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~earlier(x.shape[1], x.device), -torch.inf)
        heads = torch.einsum("bhts,bshd->bthd", torch.softmax(scores, dim=-1), v)
        return self.out(heads.flatten(2))


class SDPAFlag(Packed):
    """PyTorch's fused attention, with `is_causal=True`: it may skip hidden keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class SDPAMask(Packed):
    """PyTorch's fused attention with the mask as a matrix, so it cannot skip hidden keys."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = earlier(q.shape[-2], q.device)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class FlexAttention(Packed):
    """PyTorch's FlexAttention: the mask as a function, compiled into the kernel.

    `flex_lacks_backward` returns the reason if it cannot train.
    """

    def __init__(self, embed_dim: int, num_heads: int, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads, bias)
        self._compiled: Callable[..., Any] | None = None
        self._block_mask: Any = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention import flex_attention as flex

        length = q.shape[-2]
        if self._compiled is None:
            self._compiled = torch.compile(flex.flex_attention, fullgraph=True)
        if self._block_mask is None or self._block_mask.shape[-1] != length:
            self._block_mask = flex.create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=q.device.type
            )
        return self._compiled(q, k, v, block_mask=self._block_mask)


def flex_lacks_backward(device: torch.device) -> str | None:
    """Return the reason that FlexAttention has no backward pass on a device, or None.

    >>> flex_lacks_backward(torch.device("cpu"))
    'it has no backward pass on a CPU'
    """
    return "it has no backward pass on a CPU" if device.type == "cpu" else None


class TorchAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention`, called causally on one input.

    Args:
        embed_dim: width E of input and output.
        num_heads: heads H, a divisor of E.
        bias: whether its projections have biases.
        weights: also compute the attention weights (PyTorch's default), which are discarded; this
            prevents the use of the fused kernel.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, bias: bool = True, weights: bool = False
    ) -> None:
        check_sizes("TorchAttention", embed_dim=embed_dim, num_heads=num_heads)
        check_heads("TorchAttention", "embed_dim", embed_dim, "num_heads", num_heads)
        super().__init__(embed_dim, num_heads, bias=bias, batch_first=True)
        self.weights = weights

    def forward(self, x: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        check_input(self, x, self.embed_dim)
        hidden = ~earlier(x.shape[1], x.device)  # in PyTorch's layer, True means hidden
        out, _ = super().forward(
            x, x, x, attn_mask=hidden, is_causal=not self.weights, need_weights=self.weights
        )
        return out
