"""Rung 2: one module per head, and a loop over the heads.

`CausalAttention` and `MultiHeadedAttentionWrapper` use the names of the from-scratch tutorials and
load their state dicts. Two more classes follow a notebook with raw matrices. No class has an output
projection: the outputs of the heads are only concatenated.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ._checks import check_dropout, check_input, check_sizes, mask_may_be_absent


class CausalAttention(nn.Module):
    """One head: every token attends to itself and to earlier tokens.

    Args:
        d_in: width of the input.
        d_out: width of queries, keys, values and output.
        context_length: the longest sequence.
        dropout: probability of dropping an attention weight, in training.
        qkv_bias: whether the three Linears have biases.

    Buffer `mask` `[context_length, context_length]`: 1 where the key comes after the query and is
    hidden, else 0.

    >>> CausalAttention(d_in=3, d_out=2, context_length=6, dropout=0.0)(torch.randn(2, 6, 3)).shape
    torch.Size([2, 6, 2])
    """

    mask: Tensor

    def __init__(
        self, d_in: int, d_out: int, context_length: int, dropout: float, qkv_bias: bool = False
    ) -> None:
        super().__init__()
        check_sizes("CausalAttention", d_in=d_in, d_out=d_out, context_length=context_length)
        check_dropout("CausalAttention", dropout)
        self.d_in = d_in
        self.context_length = context_length
        self.W_query = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_key = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.W_value = nn.Linear(d_in, d_out, bias=qkv_bias)
        self.dropout = nn.Dropout(dropout)
        ones = torch.ones(context_length, context_length)
        self.register_buffer("mask", torch.triu(ones, diagonal=1))
        mask_may_be_absent(self)

    def forward(self, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T d_out"]:
        check_input(self, x, self.d_in, self.context_length)
        queries, keys, values = self.W_query(x), self.W_key(x), self.W_value(x)
        attn_scores = queries @ keys.transpose(1, 2)  # [B, T, T]: queries by keys
        later = self.mask.bool()[: x.shape[1], : x.shape[1]]
        attn_scores = attn_scores.masked_fill(later, -torch.inf)
        attn_weights = torch.softmax(attn_scores / keys.shape[-1] ** 0.5, dim=-1)
        return self.dropout(attn_weights) @ values


class MultiHeadedAttentionWrapper(nn.Module):
    """Run the heads one after another and concatenate their outputs.

    Args:
        d_in: width of the input.
        d_out: width of ONE head; the output is `num_heads * d_out` wide.
        context_length: the longest sequence.
        dropout: probability of dropping an attention weight, in training.
        num_heads: number of heads.
        qkv_bias: whether the Linears of the heads have biases.

    >>> x = torch.randn(2, 6, 3)
    >>> MultiHeadedAttentionWrapper(3, 2, context_length=6, dropout=0.0, num_heads=2)(x).shape
    torch.Size([2, 6, 4])
    """

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
        check_sizes("MultiHeadedAttentionWrapper", num_heads=num_heads)
        self.heads = nn.ModuleList(
            CausalAttention(d_in, d_out, context_length, dropout, qkv_bias)
            for _ in range(num_heads)
        )

    def forward(self, x: Float[Tensor, "B T d_in"]) -> Float[Tensor, "B T heads_d_out"]:
        return torch.cat([head(x) for head in self.heads], dim=-1)


class NotebookCausalAttention(nn.Module):
    """One head in the style of a notebook: raw matrices `[dim, dim]`, as wide as the input.

    Args:
        dim: width of the input and of the head.
        context_len: the longest sequence.
        dropout: probability of dropping an attention weight, in training.
        faithful: keep the notebook's two bugs. It divides the scores by the root of the number
            of TOKENS, `keys.shape[1]`, which was the head dimension before a batch axis was added;
            and it initializes its matrices with `torch.rand`, all positive, so scores grow as dim²
            and the softmax is nearly one-hot. By default the scores are divided by the root of the
            head dimension, and the matrices have Xavier uniform initialization.

    >>> x = torch.randn(2, 6, 5)
    >>> NotebookCausalAttention(dim=5, context_len=6, dropout=0.0)(x).shape
    torch.Size([2, 6, 5])
    """

    mask: Tensor

    def __init__(self, dim: int, context_len: int, dropout: float, faithful: bool = False) -> None:
        super().__init__()
        check_sizes("NotebookCausalAttention", dim=dim, context_len=context_len)
        check_dropout("NotebookCausalAttention", dropout)
        self.dim = dim
        self.context_len = context_len
        self.faithful = faithful
        self.W_q = nn.Parameter(torch.rand(dim, dim))
        self.W_k = nn.Parameter(torch.rand(dim, dim))
        self.W_v = nn.Parameter(torch.rand(dim, dim))
        if not faithful:
            for matrix in (self.W_q, self.W_k, self.W_v):
                nn.init.xavier_uniform_(matrix)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.triu(torch.ones(context_len, context_len), diagonal=1))
        mask_may_be_absent(self)

    def forward(self, x: Float[Tensor, "B T dim"]) -> Float[Tensor, "B T dim"]:
        check_input(self, x, self.dim, self.context_len)
        queries, keys, values = x @ self.W_q, x @ self.W_k, x @ self.W_v
        attn_scores = queries @ keys.transpose(1, 2)
        later = self.mask.bool()[: x.shape[1], : x.shape[1]]
        attn_scores = attn_scores.masked_fill(later, -torch.inf)
        divisor = keys.shape[1 if self.faithful else -1] ** 0.5
        attn_weights = torch.softmax(attn_scores / divisor, dim=-1)
        return self.dropout(attn_weights) @ values


class NotebookMultiHead(nn.Module):
    """The notebook's heads side by side: the output is `num_heads * dim` wide.

    >>> x = torch.randn(2, 6, 5)
    >>> NotebookMultiHead(dim=5, context_len=6, dropout=0.0, num_heads=3)(x).shape
    torch.Size([2, 6, 15])
    """

    def __init__(
        self, dim: int, context_len: int, dropout: float, num_heads: int, faithful: bool = False
    ) -> None:
        super().__init__()
        check_sizes("NotebookMultiHead", num_heads=num_heads)
        self.heads = nn.ModuleList(
            NotebookCausalAttention(dim, context_len, dropout, faithful) for _ in range(num_heads)
        )

    def forward(self, x: Float[Tensor, "B T dim"]) -> Float[Tensor, "B T heads_dim"]:
        return torch.cat([head(x) for head in self.heads], dim=-1)
