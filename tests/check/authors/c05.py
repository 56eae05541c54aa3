# Cosine window attention with continuous position bias (log spaced offsets).
import math

import torch
from torch import nn
import torch.nn.functional as F


class CosineWindowAttention(nn.Module):
    # Scores are cosines, so they lie in [-1, 1] whatever the head size: there
    # is no 1/sqrt(d). A learnt temperature per head makes them sharp, and it
    # is clamped (at 100) to keep the softmax from collapsing early.

    MAX_LOG_TEMP = math.log(100.0)

    def __init__(self, dim, n_heads, win=8, hidden=128):
        super().__init__()
        self.n_heads = n_heads
        self.win = win
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        # no bias for the keys: it would only rotate them all alike
        self.q_bias = nn.Parameter(torch.zeros(dim))
        self.v_bias = nn.Parameter(torch.zeros(dim))
        self.log_temp = nn.Parameter(torch.full((n_heads, 1, 1), math.log(10.0)))
        self.position = nn.Sequential(
            nn.Linear(2, hidden), nn.ReLU(inplace=True), nn.Linear(hidden, n_heads, bias=False)
        )
        self.proj = nn.Linear(dim, dim)

        d = torch.arange(-(win - 1), win).float()
        grid = torch.stack(torch.meshgrid(d, d, indexing="ij"), dim=-1) / max(win - 1, 1) * 8
        grid = torch.sign(grid) * torch.log2(grid.abs() + 1) / 3
        self.register_buffer("grid", grid.view(-1, 2), persistent=False)

        p = torch.arange(win)
        yy, xx = (g.flatten() for g in torch.meshgrid(p, p, indexing="ij"))
        dy = yy[:, None] - yy[None, :] + win - 1
        dx = xx[:, None] - xx[None, :] + win - 1
        self.register_buffer("which", dy * (2 * win - 1) + dx, persistent=False)

    def position_bias(self):
        table = 16 * torch.sigmoid(self.position(self.grid))   # ((2w-1)^2, heads)
        return table[self.which].permute(2, 0, 1)

    def forward(self, x, mask=None):
        """x [nW*B, win*win, dim]; mask [nW, N, N], added to the scores."""
        m, n, c = x.shape
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.view(m, n, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)

        cos = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2)
        s = cos * self.log_temp.clamp(max=self.MAX_LOG_TEMP).exp()
        s = s + self.position_bias()
        if mask is not None:
            nw = mask.size(0)
            s = (s.view(m // nw, nw, self.n_heads, n, n) + mask[None, :, None]).view(m, self.n_heads, n, n)
        y = s.softmax(-1) @ v
        return self.proj(y.transpose(1, 2).reshape(m, n, c))


if __name__ == "__main__":
    net = CosineWindowAttention(48, 3, win=4)
    print(net(torch.randn(6, 16, 48)).shape)
