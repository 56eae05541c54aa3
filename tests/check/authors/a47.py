import torch
import torch.nn as nn


class AlibiAttention(nn.Module):
    def __init__(self, dim, n_heads, dropout=0.0):
        super().__init__()
        assert n_heads & (n_heads - 1) == 0, "power of two please"
        self.n_heads = n_heads
        self.d = dim // n_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.drop = nn.Dropout(dropout)
        ratio = 2 ** (-8 / n_heads)
        self.m = torch.tensor([ratio ** (i + 1) for i in range(n_heads)])

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (y.view(B, T, self.n_heads, self.d).transpose(1, 2) for y in (q, k, v))

        pos = torch.arange(T, device=x.device)
        rel = (pos[None, :] - pos[:, None]).to(x.dtype)  # j - i, <= 0 for the past
        bias = self.m.view(1, -1, 1, 1) * rel

        att = (q @ k.transpose(-1, -2)) * self.d ** -0.5 + bias
        att = att.masked_fill(rel > 0, float("-inf"))
        att = self.drop(att.softmax(-1))
        return self.o((att @ v).transpose(1, 2).contiguous().view(B, T, C))
