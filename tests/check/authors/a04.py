import math

import torch
from torch import nn


class T5CausalSelfAttention(nn.Module):
    """T5 decoder self attention (no 1/sqrt(d) scaling, as in the paper)."""

    def __init__(self, d_model=64, d_kv=16, num_heads=4, num_buckets=32, max_distance=128, dropout=0.1):
        super().__init__()
        self.num_heads, self.d_kv = num_heads, d_kv
        self.num_buckets, self.max_distance = num_buckets, max_distance
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.dropout = dropout
        # T5 initialisation
        nn.init.normal_(self.q.weight, std=(d_model * d_kv) ** -0.5)
        nn.init.normal_(self.k.weight, std=d_model ** -0.5)
        nn.init.normal_(self.v.weight, std=d_model ** -0.5)
        nn.init.normal_(self.o.weight, std=inner ** -0.5)

    def _bucket(self, relative_position):
        n = -torch.min(relative_position, torch.zeros_like(relative_position))
        max_exact = self.num_buckets // 2
        is_small = n < max_exact
        large = max_exact + (
            torch.log(n.float().clamp(min=1) / max_exact)
            / math.log(self.max_distance / max_exact)
            * (self.num_buckets - max_exact)
        ).long()
        large = torch.clamp(large, max=self.num_buckets - 1)
        return torch.where(is_small, n, large)

    def compute_bias(self, length, device):
        context_position = torch.arange(length, device=device)[:, None]
        memory_position = torch.arange(length, device=device)[None, :]
        relative_position = context_position - memory_position
        values = self.relative_attention_bias(self._bucket(relative_position))
        return values.permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden):
        b, n, _ = hidden.shape

        def shape(z):
            return z.view(b, n, self.num_heads, self.d_kv).transpose(1, 2)

        q, k, v = shape(self.q(hidden)), shape(self.k(hidden)), shape(self.v(hidden))
        scores = torch.matmul(q, k.transpose(3, 2)) + self.compute_bias(n, hidden.device)
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool, device=hidden.device), diagonal=1)
        scores = scores.masked_fill(causal, torch.finfo(scores.dtype).min)
        w = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        w = nn.functional.dropout(w, p=self.dropout, training=self.training)
        ctx = torch.matmul(w, v).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o(ctx)
