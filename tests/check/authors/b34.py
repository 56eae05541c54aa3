import torch
import torch.nn as nn


class MultiHeadSelfAttention(nn.Module):
    # x : batch, tokens, dim     mask : batch, tokens (True = token)
    def __init__(self, dim, n_heads):
        super().__init__()
        assert dim % n_heads == 0, 'dim must be divisible by n_heads'
        d_head = dim // n_heads
        self.scale = d_head ** -0.5
        # one small q/k/v projection per head
        self.heads = nn.ModuleList([nn.Linear(dim, 3 * d_head)] * n_heads)
        self.linear = nn.Linear(dim, dim)

    def one_head(self, qkv, mask):
        q, k, v = qkv.chunk(3, dim=-1)
        score = q @ k.transpose(1, 2) * self.scale
        if mask is not None:
            score = score.masked_fill(~mask.unsqueeze(1), float('-inf'))
        return torch.softmax(score, -1) @ v

    def forward(self, x, mask=None):
        out = [self.one_head(proj(x), mask) for proj in self.heads]
        return self.linear(torch.cat(out, dim=-1))
