"""Right: three projections for all heads, then split, as a book writes it."""

import torch
from torch import nn


class MultiHeadAttention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, d_in, d_out, context_length, num_heads, dropout=0.0, qkv_bias=True):
        super().__init__()
        if d_out % num_heads:
            raise ValueError(f"d_out={d_out} must be a multiple of num_heads={num_heads}")
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
        mask = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        b, num_tokens, _ = x.shape
        if num_tokens > self.context_length:
            raise ValueError(f"{num_tokens} tokens do not fit {self.context_length}")

        queries = self.W_query(x)
        keys = self.W_key(x)
        values = self.W_value(x)

        queries = queries.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        keys = keys.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)
        values = values.view(b, num_tokens, self.num_heads, self.head_dim).transpose(1, 2)

        attn_scores = queries @ keys.transpose(2, 3)
        later = self.mask.bool()[:num_tokens, :num_tokens]
        attn_scores = attn_scores.masked_fill(later, -torch.inf)
        attn_weights = torch.softmax(attn_scores / self.head_dim**0.5, dim=-1)
        attn_weights = self.dropout(attn_weights)

        context_vec = (attn_weights @ values).transpose(1, 2)
        context_vec = context_vec.reshape(b, num_tokens, self.d_out)
        return self.out_proj(context_vec)
