"""Right: bare parameters with an axis for the heads, and einsum, as those write who read models."""

import torch
from torch import nn


class Attention(nn.Module):
    """Causal self-attention with one matrix a head."""

    def __init__(self, d_model, n_heads, n_ctx):
        super().__init__()
        if d_model % n_heads:
            raise ValueError("d_model must be a multiple of n_heads")
        d_head = d_model // n_heads
        self.d_head = d_head
        self.n_ctx = n_ctx
        self.W_Q = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_V = nn.Parameter(torch.empty(n_heads, d_model, d_head))
        self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        self.b_Q = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_K = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_V = nn.Parameter(torch.zeros(n_heads, d_head))
        self.b_O = nn.Parameter(torch.zeros(d_model))
        for weight in (self.W_Q, self.W_K, self.W_V, self.W_O):
            nn.init.normal_(weight, std=0.1)

    def forward(self, x):
        length = x.shape[1]
        if length > self.n_ctx:
            raise ValueError(f"more than {self.n_ctx} tokens")
        q = torch.einsum("bpm,hmd->bphd", x, self.W_Q) + self.b_Q
        k = torch.einsum("bpm,hmd->bphd", x, self.W_K) + self.b_K
        v = torch.einsum("bpm,hmd->bphd", x, self.W_V) + self.b_V
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / self.d_head**0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        pattern = scores.masked_fill(later, -torch.inf).softmax(-1)
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, v)
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O
