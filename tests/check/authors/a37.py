import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttentionWithCache(nn.Module):
    """Causal self-attention that remembers keys/values so that generation can feed one token at a time."""

    def __init__(self, d_model, n_heads, dropout=0.1):
        super().__init__()
        self.h = n_heads
        self.d = d_model // n_heads
        self.q_lin = nn.Linear(d_model, d_model)
        self.k_lin = nn.Linear(d_model, d_model)
        self.v_lin = nn.Linear(d_model, d_model)
        self.o_lin = nn.Linear(d_model, d_model)
        self.drop = nn.Dropout(dropout)
        self.k_cache = None
        self.v_cache = None

    def _heads(self, z):
        return z.view(z.shape[0], z.shape[1], self.h, self.d).transpose(1, 2)

    def forward(self, x):
        B, T, C = x.shape
        q = self._heads(self.q_lin(x))
        k = self._heads(self.k_lin(x))
        v = self._heads(self.v_lin(x))

        if self.k_cache is not None:
            k = torch.cat([self.k_cache, k], dim=2)
            v = torch.cat([self.v_cache, v], dim=2)
        self.k_cache = k.detach()
        self.v_cache = v.detach()

        S = k.size(2)
        scores = q @ k.transpose(-2, -1) / self.d ** 0.5
        allow = torch.tril(torch.ones(T, S, device=x.device), diagonal=S - T).bool()
        scores = scores.masked_fill(~allow, float("-inf"))
        w = self.drop(F.softmax(scores, dim=-1))
        return self.o_lin((w @ v).transpose(1, 2).reshape(B, T, C))
