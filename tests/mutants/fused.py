"""Right: one projection for queries, keys and values, as small GPTs write it."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    """Causal multi-head self-attention, told its sizes by a config."""

    def __init__(self, config):
        super().__init__()
        if config.n_embd % config.n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.dropout = config.dropout
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.n_embd = config.n_embd
        self.block_size = config.block_size
        bias = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", bias[None, None], persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        if self.block_size < T:
            raise ValueError(f"{T} tokens do not fit a block of {self.block_size}")
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(~self.bias[:, :, :T, :T].bool(), float("-inf"))
        att = F.softmax(att, dim=-1)
        att = F.dropout(att, self.dropout, training=self.training)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))
