# Decoder self-attention with T5 style bucketed position bias.
import math
import torch
from torch import nn


class T5DecoderAttention(nn.Module):

    def __init__(self, d_model=512, d_kv=64, num_heads=8, num_buckets=32,
                 max_distance=128, dropout_rate=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.d_kv = d_kv
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        inner = num_heads * d_kv
        self.q = nn.Linear(d_model, inner, bias=False)
        self.k = nn.Linear(d_model, inner, bias=False)
        self.v = nn.Linear(d_model, inner, bias=False)
        self.o = nn.Linear(inner, d_model, bias=False)
        self.relative_attention_bias = nn.Embedding(num_buckets, num_heads)
        self.dropout = nn.Dropout(dropout_rate)
        # T5 folds 1/sqrt(d_kv) into the initial query weights
        nn.init.normal_(self.q.weight, std=(d_model * d_kv) ** -0.5)
        nn.init.normal_(self.k.weight, std=d_model ** -0.5)
        nn.init.normal_(self.v.weight, std=d_model ** -0.5)
        nn.init.normal_(self.o.weight, std=inner ** -0.5)
        nn.init.normal_(self.relative_attention_bias.weight, std=d_model ** -0.5)

    def _bucket(self, rel):
        """rel: key position minus query position.

        Half of the buckets are exact distances, the other half grow
        logarithmically up to max_distance.
        """
        n = (-rel).clamp(min=0)
        exact = self.num_buckets // 2
        ratio = torch.log(n.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        large = exact + (ratio * (self.num_buckets - exact)).long()
        large = large.clamp(max=self.num_buckets - 1)
        return torch.where(n < exact, n, large)

    def position_bias(self, length, device):
        pos = torch.arange(length, device=device)
        rel = pos[:, None] - pos[None, :]
        bias = self.relative_attention_bias(self._bucket(rel))
        return bias.permute(2, 0, 1).unsqueeze(0)

    def forward(self, hidden, mask=None):
        """hidden [B, T, d_model], mask [B, T] of 1 (token) and 0 (pad at the end)."""
        B, T, _ = hidden.shape

        def heads(t):
            return t.view(B, T, self.num_heads, self.d_kv).transpose(1, 2)

        q, k, v = heads(self.q(hidden)), heads(self.k(hidden)), heads(self.v(hidden))
        scores = q @ k.transpose(-1, -2)
        scores = scores + self.position_bias(T, hidden.device)

        allowed = torch.tril(torch.ones(T, T, dtype=torch.bool, device=hidden.device))[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :].bool()
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)

        probs = self.dropout(scores.float().softmax(-1).type_as(scores))
        ctx = (probs @ v).transpose(1, 2).reshape(B, T, -1)
        return self.o(ctx)
