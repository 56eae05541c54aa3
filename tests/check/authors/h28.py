import torch
import torch.nn as nn


def window_partition(x, ws):
    """[B, H, W, C] -> [B * nW, ws * ws, C]"""
    B, H, W, C = x.shape
    x = x.view(B, H // ws, ws, W // ws, ws, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, ws * ws, C)


def window_reverse(windows, ws, H, W):
    C = windows.shape[-1]
    x = windows.view(-1, H // ws, W // ws, ws, ws, C)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, H, W, C)


class WindowAttention(nn.Module):
    """Window based multi-head self attention with relative position bias (Swin)."""

    def __init__(self, dim, num_heads, window_size=7, attn_drop=0.0):
        super().__init__()
        self.window_size = window_size
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5

        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * window_size - 1) ** 2, num_heads)
        )
        nn.init.trunc_normal_(self.relative_position_bias_table, std=0.02)

        ys, xs = torch.meshgrid(torch.arange(window_size), torch.arange(window_size), indexing="ij")
        coords = torch.stack([ys.flatten(), xs.flatten()])         # 2, N
        rel = coords[:, :, None] - coords[:, None, :]              # 2, N, N
        rel = rel + window_size - 1                                # start from 0
        index = rel[0] * 13 + rel[1]                               # N, N
        self.register_buffer("relative_position_index", index, persistent=False)

        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        # x: [B * nW, N, C]
        B_, N, C = x.shape
        qkv = self.qkv(x).reshape(B_, N, 3, self.num_heads, C // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = (q * self.scale) @ k.transpose(-2, -1)

        bias = self.relative_position_bias_table[self.relative_position_index]  # N, N, nH
        attn = attn + bias.permute(2, 0, 1).unsqueeze(0)

        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(B_, N, C)
        return self.proj(x)


class SwinBlock(nn.Module):
    def __init__(self, dim, num_heads, window_size=7):
        super().__init__()
        self.ws = window_size
        self.norm1 = nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, num_heads, window_size)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        # x: [B, H, W, C] with H and W multiples of the window
        _, H, W, _ = x.shape
        y = self.attn(window_partition(self.norm1(x), self.ws))
        x = x + window_reverse(y, self.ws, H, W)
        return x + self.mlp(self.norm2(x))
