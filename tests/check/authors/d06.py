"""Batched-matmul attention with linear position biases."""
import math

import torch
import torch.nn as nn


def alibi_slopes(n):
    """Geometric head slopes, with the usual fill-in for odd head counts."""

    def pow2(m):
        start = 2.0 ** (-8.0 / m)
        return [start ** (i + 1) for i in range(m)]

    if math.log2(n).is_integer():
        return pow2(n)
    near = 2 ** int(math.floor(math.log2(n)))
    return pow2(near) + pow2(2 * near)[0::2][: n - near]


class BmmAlibiAttention(nn.Module):
    def __init__(self, embed_dim, num_heads, dropout=0.0):
        super().__init__()
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.qkv_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(num_heads)))

    def fold(self, x, bsz, length):
        # [B, T, C] -> [B * H, T, D]
        x = x.reshape(bsz, length, self.num_heads, self.head_dim)
        return x.permute(0, 2, 1, 3).reshape(bsz * self.num_heads, length, self.head_dim)

    def bias(self, bsz, length):
        pos = torch.arange(length, device=self.slopes.device)
        dist = (pos[None, :] - pos[:, None]).to(self.slopes.dtype)
        per_row = self.slopes.repeat_interleave(bsz)
        bias = per_row[:, None, None] * dist[None]
        ahead = (dist > 0)[None]
        return bias.masked_fill(ahead, float("-inf"))

    def forward(self, x):
        bsz, length, _ = x.shape
        q, k, v = self.qkv_proj(x).split(self.embed_dim, dim=-1)
        q = self.fold(q * self.scaling, bsz, length)
        k = self.fold(k, bsz, length)
        v = self.fold(v, bsz, length)

        logits = torch.baddbmm(self.bias(bsz, length), q, k.transpose(1, 2))
        weights = self.dropout(logits.softmax(dim=-1))
        ctx = torch.bmm(weights, v)

        ctx = ctx.view(bsz, self.num_heads, length, self.head_dim)
        ctx = ctx.permute(0, 2, 1, 3).reshape(bsz, length, self.embed_dim)
        return self.out_proj(ctx)


if __name__ == "__main__":
    torch.manual_seed(0)
    m = BmmAlibiAttention(96, 6)
    print(m(torch.randn(4, 17, 96)).shape)
