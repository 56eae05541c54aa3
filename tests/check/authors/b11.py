import torch
import torch.nn as nn


class AxialAttention2d(nn.Module):
    """Row attention followed by column attention on a feature map.

    in / out: (B, C, H, W)
    """

    def __init__(self, channels, heads=8):
        super().__init__()
        self.heads = heads
        self.row_qkv = nn.Linear(channels, channels * 3, bias=False)
        self.col_qkv = nn.Linear(channels, channels * 3, bias=False)
        self.row_out = nn.Linear(channels, channels)
        self.col_out = nn.Linear(channels, channels)

    def _attend(self, seq, to_qkv, to_out):
        n, l, c = seq.shape
        q, k, v = to_qkv(seq).view(n, l, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = (q @ k.transpose(-1, -2)) * (c // self.heads) ** -0.5
        o = a.softmax(dim=-1) @ v
        return to_out(o.transpose(1, 2).reshape(n, l, c))

    def forward(self, x):
        B, C, H, W = x.shape
        x = x.permute(0, 2, 3, 1).contiguous()              # B H W C

        # along the width
        rows = x.view(B * H, W, C)
        x = x + self._attend(rows, self.row_qkv, self.row_out).view(B, H, W, C)

        # along the height
        cols = x.view(B * W, H, C)
        x = x + self._attend(cols, self.col_qkv, self.col_out).view(B, H, W, C)

        return x.permute(0, 3, 1, 2)
