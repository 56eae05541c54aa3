"""Decoding with keys and values in fixed-size pages."""
from typing import List

import torch
import torch.nn as nn
import torch.nn.functional as F


class Sequence:
    def __init__(self):
        self.pages: List[int] = []
        self.length = 0


class PagePool:
    def __init__(self, n_pages, page_size, heads, head_dim):
        self.page_size = page_size
        self.k = torch.zeros(n_pages, page_size, heads, head_dim)
        self.v = torch.zeros(n_pages, page_size, heads, head_dim)
        self.free = list(range(n_pages))

    def append(self, seq: Sequence, k, v):
        slot = seq.length % self.page_size
        if slot == 0:
            seq.pages.append(self.free.pop())
        page = seq.pages[-1]
        self.k[page, slot] = k
        self.v[page, slot] = v
        seq.length += 1

    def release(self, seq: Sequence):
        self.free.extend(seq.pages)
        seq.pages, seq.length = [], 0

    def gather(self, seqs: List[Sequence]):
        """-> k, v [B, S, H, D] and valid [B, S] for the longest of the seqs."""
        used = torch.tensor([len(s.pages) for s in seqs])
        width = int(used.max())
        table = torch.zeros(len(seqs), width, dtype=torch.long)
        for row, s in enumerate(seqs):
            table[row, : len(s.pages)] = torch.tensor(s.pages)
        valid = torch.arange(width)[None, :] < used[:, None]
        valid = valid.repeat_interleave(self.page_size, dim=1)
        return self.k[table].flatten(1, 2), self.v[table].flatten(1, 2), valid


class PagedAttention(nn.Module):
    """forward() is the training path, decode() adds one token per sequence."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, t, c))

    @torch.no_grad()
    def decode(self, x, seqs: List[Sequence], pool: PagePool):
        """x: [B, dim], the newest token of each sequence."""
        q, k, v = self.qkv(x).view(len(seqs), 3, self.heads, self.hd).unbind(1)
        for i, s in enumerate(seqs):
            pool.append(s, k[i], v[i])
        keys, values, valid = pool.gather(seqs)
        att = torch.einsum("bhd,bshd->bhs", q, keys) * self.hd ** -0.5
        att = att.masked_fill(~valid[:, None, :], float("-inf")).softmax(dim=-1)
        y = torch.einsum("bhs,bshd->bhd", att, values)
        return self.out(y.flatten(1))


if __name__ == "__main__":
    layer, pool = PagedAttention(64, 4), PagePool(32, 8, 4, 16)
    a, b = Sequence(), Sequence()
    for _ in range(5):
        layer.decode(torch.randn(1, 64), [a], pool)
    for _ in range(9):
        y = layer.decode(torch.randn(2, 64), [a, b], pool)
    print(y.shape, a.length, b.length, len(pool.free))
