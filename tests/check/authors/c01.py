"""Shifted-window self-attention on channel-last feature maps."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def to_windows(x, ws):
    b, h, w, c = x.shape
    x = x.view(b, h // ws, ws, w // ws, ws, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, ws * ws, c)


def from_windows(win, ws, h, w):
    b = win.shape[0] // ((h // ws) * (w // ws))
    x = win.view(b, h // ws, w // ws, ws, ws, -1)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, -1)


def pair_index(ws):
    r = torch.arange(ws)
    yx = torch.stack(torch.meshgrid(r, r, indexing="ij")).flatten(1)
    d = yx[:, :, None] - yx[:, None, :] + (ws - 1)
    return d[0] * (2 * ws - 1) + d[1]


class ShiftedWindowAttention(nn.Module):
    """Attention inside `ws` x `ws` windows of a map rolled by `shift`.

    Input and output are [B, H, W, C] with H and W multiples of `ws`; the
    caller adds the residual.
    """

    def __init__(self, dim, heads=4, ws=4, shift=0):
        super().__init__()
        assert 0 <= shift < ws and dim % heads == 0
        self.heads, self.ws, self.shift = heads, ws, shift
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.zeros((2 * ws - 1) ** 2, heads))
        nn.init.trunc_normal_(self.table, std=0.02)
        self.register_buffer("index", pair_index(ws), persistent=False)

    def region_mask(self, h, w, device):
        # windows at the border hold pieces of the map that are not neighbours
        img = torch.zeros(1, h, w, 1, device=device)
        cuts = (slice(0, -self.ws), slice(-self.ws, -self.shift), slice(-self.shift, None))
        n = 0
        for a in cuts:
            for b in cuts:
                img[:, a, b] = n
                n += 1
        ids = to_windows(img, self.ws).squeeze(-1)
        return ids[:, None, :] == ids[:, :, None]

    def forward(self, x):
        b, h, w, c = x.shape
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
        win = to_windows(x, self.ws)
        n = self.ws * self.ws
        q, k, v = self.qkv(win).view(-1, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)

        bias = self.table[self.index].permute(2, 0, 1)[None]
        if self.shift:
            same = self.region_mask(h, w, x.device)
            block = torch.zeros(same.shape, device=x.device).masked_fill(~same, float("-inf"))
            bias = bias + block.repeat(b, 1, 1)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(q.shape[0], -1, -1, -1))
        y = self.out(y.transpose(1, 2).reshape(-1, n, c))
        y = from_windows(y, self.ws, h, w)
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))
        return y


if __name__ == "__main__":
    layer = ShiftedWindowAttention(32, heads=4, ws=4, shift=2)
    print(layer(torch.randn(2, 8, 16, 32)).shape)
