import math

import torch
import torch.nn as nn


class LineAttention(nn.Module):
    """Plain multi-head attention over sequences [S, L, C]."""

    def __init__(self, channels, num_heads, max_len):
        super().__init__()
        self.h = num_heads
        self.d = channels // num_heads
        self.wq = nn.Linear(channels, channels, bias=False)
        self.wk = nn.Linear(channels, channels, bias=False)
        self.wv = nn.Linear(channels, channels, bias=False)
        self.wo = nn.Linear(channels, channels)
        self.max_len = max_len
        self.rel = nn.Parameter(torch.zeros(num_heads, 2 * max_len - 1))

    def forward(self, x):
        S, L, C = x.shape
        q = self.wq(x).view(S, L, self.h, self.d).transpose(1, 2)
        k = self.wk(x).view(S, L, self.h, self.d).transpose(1, 2)
        v = self.wv(x).view(S, L, self.h, self.d).transpose(1, 2)
        logits = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d)
        pos = torch.arange(L, device=x.device)
        logits = logits + self.rel[:, pos[None, :] - pos[:, None] + self.max_len - 1]
        o = torch.matmul(torch.softmax(logits, dim=-1), v)
        return self.wo(o.transpose(1, 2).contiguous().view(S, L, C))


class AxialAttention2d(nn.Module):
    """Attention along the width of a map, and along its height; the two
    results are summed onto the input.

    x: [B, C, H, W]
    """

    def __init__(self, channels, num_heads=4, max_len=64):
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.along_w = LineAttention(channels, num_heads, max_len)
        self.along_h = LineAttention(channels, num_heads, max_len)

    def forward(self, x):
        B, C, H, W = x.shape
        y = self.norm(x)

        # one sequence for each row
        rows = y.permute(0, 2, 3, 1).reshape(B * H, W, C)
        rows = self.along_w(rows).reshape(B, H, W, C).permute(0, 3, 1, 2)

        # one sequence for each column
        cols = y.permute(0, 3, 2, 1).reshape(B * W, H, C)
        cols = self.along_h(cols).reshape(B, W, H, C).permute(0, 3, 1, 2)

        return x + rows + cols


if __name__ == "__main__":
    torch.manual_seed(0)
    m = AxialAttention2d(32)
    x = torch.randn(2, 32, 14, 14)
    print(m(x).shape, sum(p.numel() for p in m.parameters()))
