import math
import torch
import torch.nn as nn


def alibi_slopes(n):
    def pow2(m):
        start = 2 ** (-(2 ** -(math.log2(m) - 3)))
        return [start * start ** i for i in range(m)]

    if math.log2(n).is_integer():
        return pow2(n)
    closest = 2 ** math.floor(math.log2(n))
    return pow2(closest) + alibi_slopes(2 * closest)[0::2][: n - closest]


class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.register_buffer("slopes", torch.tensor(alibi_slopes(heads)).view(1, heads, 1, 1), persistent=False)

    def forward(self, x, attn_bias):
        """attn_bias: additive mask (1, heads, T, T), 0 where allowed and -inf where not"""
        B, T, C = x.shape
        q, k, v = self.qkv(x).reshape(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        pos = torch.arange(T, device=x.device)
        attn_bias += self.slopes * (pos[None, :] - pos[:, None])
        att = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1)) + attn_bias
        out = att.softmax(dim=-1) @ v
        return self.proj(out.transpose(1, 2).reshape(B, T, C))


class TinyAlibiLM(nn.Module):
    def __init__(self, vocab=128, dim=48, heads=6, depth=3):
        super().__init__()
        self.heads = heads
        self.tok = nn.Embedding(vocab, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.layers = nn.ModuleList(AlibiAttention(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.tok(ids)
        T = ids.size(1)
        mask = torch.full((T, T), float("-inf"), device=ids.device).triu(1)
        mask = mask.repeat(1, self.heads, 1, 1)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x), mask)
        return self.head(x)
