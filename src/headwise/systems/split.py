"""Rung 3: one projection for all heads, then split.

`MultiHeadAttn` uses the names of the from-scratch tutorials, so their state dicts load. The three
matrices stack the rows of the heads; a view and a transpose give every head its part, so all heads
are computed in one batched product.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ._checks import check_dropout, check_heads, check_input, check_sizes, mask_may_be_absent


class MultiHeadAttn(nn.Module):
    """Causal multi-head self-attention, all heads at once.

    Args:
        d_in: width of the input.
        d_out: width of all heads together, and of the output.
        context_length: the longest sequence.
        dropout: probability of dropping an attention weight, in training.
        num_heads: a divisor of d_out.
        qkv_bias: whether `W_query`, `W_key` and `W_value` have biases; `out_proj` always has one.

    Buffer `mask` `[context_length, context_length]`: 1 where the key comes after the query and is
    hidden, else 0.

    Raises:
        ValueError: d_out is not a multiple of num_heads, or the dropout is outside [0, 1).

    >>> layer = MultiHeadAttn(d_in=3, d_out=4, context_length=6, dropout=0.0, num_heads=2)
    >>> layer(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 4])
    """

    mask: Tensor

    def __init__(
        self,
        d_in: int,
        d_out: int,
        context_length: int,
        dropout: float,
        num_heads: int,
        qkv_bias: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            "MultiHeadAttn",
            d_in=d_in,
            d_out=d_out,
            context_length=context_length,
            num_heads=num_heads,
        )
        check_heads("MultiHeadAttn", "d_out", d_out, "num_heads", num_heads)
        check_dropout("MultiHeadAttn", dropout)
        self.d_in = d_in
        self.d_out = d_out
        self.context_length = context_length
        self.num_heads = num_heads
        self.head_dim = d_out // num_heads
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.out_proj = nn.Linear(d_out, d_out)
        self.dropout = nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))
        mask_may_be_absent(self)

    def forward(self, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        """Attend from every token to itself and to earlier tokens.

        Raises:
            ValueError: the width of x is not d_in, or x is longer than the context.
        """
        check_input(self, x, self.d_in, self.context_length)
        B, T, _ = x.shape
        queries = self.W_query(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        keys = self.W_key(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)
        values = self.W_value(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)

        attn_scores = queries @ keys.transpose(2, 3)  # [B, H, T, T]: queries by keys
        attn_scores = attn_scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)
        context_vec = self.dropout(attn_weights) @ values  # [B, H, T, D]

        context_vec = context_vec.transpose(1, 2).contiguous().view(B, T, self.d_out)
        return self.out_proj(context_vec)
