import torch
import torch.nn as nn
import torch.nn.functional as F


class PersistentMemoryAttention(nn.Module):
    """All-attention style layer: learned key/value slots shared by all inputs.

    padding_mask: (B, L) bool, True = ignore.
    """

    def __init__(self, dim, heads=8, n_memory=16, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.d = dim // heads
        self.n_memory = n_memory
        self.dropout = dropout
        self.in_proj_weight = nn.Parameter(torch.empty(3 * dim, dim))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * dim))
        self.mem_k = nn.Parameter(torch.randn(heads, n_memory, self.d) / self.d ** 0.5)
        self.mem_v = nn.Parameter(torch.randn(heads, n_memory, self.d) / n_memory ** 0.5)
        self.out_proj = nn.Linear(dim, dim)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x, padding_mask=None):
        B, L, D = x.shape
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = (t.view(B, L, self.heads, self.d).transpose(1, 2) for t in qkv.split(D, dim=-1))

        k = torch.cat([self.mem_k.expand(B, -1, -1, -1), k], dim=2)
        v = torch.cat([self.mem_v.expand(B, -1, -1, -1), v], dim=2)

        scores = q @ k.transpose(-2, -1) / self.d ** 0.5
        if padding_mask is not None:
            # memory slots are always visible
            padding_mask = F.pad(padding_mask, (0, self.n_memory), value=False)
            scores = scores.masked_fill(padding_mask[:, None, None, :], float('-inf'))
        attn = F.dropout(scores.softmax(dim=-1), self.dropout, self.training)
        return self.out_proj((attn @ v).transpose(1, 2).reshape(B, L, D))
