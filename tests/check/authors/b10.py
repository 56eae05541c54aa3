import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange


def shift_mask(H, W, ws, s):
    region = torch.zeros(H, W)
    i = 0
    for hs in (slice(0, -ws), slice(-ws, -s), slice(-s, None)):
        for wsl in (slice(0, -ws), slice(-ws, -s), slice(-s, None)):
            region[hs, wsl] = i
            i += 1
    win = rearrange(region, '(nh a) (nw b) -> (nh nw) (a b)', a=ws, b=ws)
    return win[:, :, None] == win[:, None, :]       # may attend


class ShiftedWindowMSA(nn.Module):
    """x is a channels-last map (B, H, W, C), H and W multiples of the window."""

    def __init__(self, dim, heads, window=7, shifted=False):
        super().__init__()
        self.heads, self.ws = heads, window
        self.shift = window // 2 if shifted else 0
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        B, H, W, C = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, shifts=(-self.shift, -self.shift), dims=(1, 2))

        q, k, v = rearrange(self.qkv(y), 'b (nh a) (nw c) (t h d) -> t b (nh nw) h (a c) d',
                            a=self.ws, c=self.ws, t=3, h=self.heads)
        mask = None
        if self.shift:
            mask = shift_mask(H, W, self.ws, self.shift).to(x.device)
            mask = mask[None, :, None]
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        o = rearrange(o, 'b (nh nw) h (a c) d -> b (nh a) (nw c) (h d)',
                      nh=H // self.ws, a=self.ws)

        if self.shift:
            o = torch.roll(o, shifts=(-self.shift, -self.shift), dims=(1, 2))
        return x + self.out(o)
