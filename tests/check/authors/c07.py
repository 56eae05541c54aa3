import torch
from torch import nn


class CrissCross(nn.Module):
    """Each position looks at its own row and its own column, with one softmax
    over the H + W candidates. The position itself is met in both; it is taken
    out of the column so that it counts once."""

    def __init__(self, in_ch, reduction=8):
        super().__init__()
        mid = max(in_ch // reduction, 4)
        self.query = nn.Conv2d(in_ch, mid, 1)
        self.key = nn.Conv2d(in_ch, mid, 1)
        self.value = nn.Conv2d(in_ch, in_ch, 1)
        self.scale = mid ** -0.5
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = self.query(x), self.key(x), self.value(x)
        q = q * self.scale

        # column: (y, x) against (j, x)
        col = torch.einsum("bcyx,bcjx->byxj", q, k)
        eye = torch.eye(h, dtype=torch.bool, device=x.device)
        col = col.masked_fill(eye[None, :, None, :], float("-inf"))
        # row: (y, x) against (y, i)
        row = torch.einsum("bcyx,bcyi->byxi", q, k)

        weight = torch.softmax(torch.cat([col, row], dim=-1), dim=-1)
        row_w, col_w = weight[..., :w], weight[..., w:]

        out = torch.einsum("byxj,bcjx->bcyx", col_w, v)
        out = out + torch.einsum("byxi,bcyi->bcyx", row_w, v)
        return x + self.gamma * out


class RecurrentCrissCross(nn.Module):
    """Two passes let every position reach every other one."""

    def __init__(self, in_ch, mid_ch, passes=2):
        super().__init__()
        self.inp = nn.Sequential(
            nn.Conv2d(in_ch, mid_ch, 3, padding=1, bias=False), nn.BatchNorm2d(mid_ch), nn.ReLU()
        )
        self.cc = CrissCross(mid_ch)
        self.passes = passes

    def forward(self, x):
        x = self.inp(x)
        for _ in range(self.passes):
            x = self.cc(x)
        return x


if __name__ == "__main__":
    net = RecurrentCrissCross(16, 32)
    print(net(torch.randn(2, 16, 12, 12)).shape)
