import torch
import torch.nn.functional as F
from torch import nn


class PyramidPooledAttention(nn.Module):
    """Full-resolution queries, keys and values pooled to several grids.

    The map is average-pooled to every grid size in `grids`; a depth-wise
    convolution (shared role: position encoding) is added to each pooled map
    and all pooled cells are put into one list of keys. With (1, 2, 4, 8) that
    is 85 keys whatever the resolution, so the cost is linear in pixels. Cells
    of different grids overlap on purpose: coarse cells carry context, fine
    ones detail. Pooling cells may also overlap where a grid does not divide
    the map; adaptive pooling deals with it.

    x: [B, C, H, W] -> [B, C, H, W]
    """

    def __init__(self, channels, heads=4, grids=(1, 2, 4, 8)):
        super().__init__()
        if channels % heads:
            raise ValueError("channels % heads != 0")
        self.heads = heads
        self.grids = tuple(grids)
        self.norm = nn.GroupNorm(1, channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.kv = nn.Linear(channels, 2 * channels)
        self.kv_norm = nn.LayerNorm(channels)
        self.local = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels) for _ in grids
        )
        self.out = nn.Conv2d(channels, channels, 1)

    def keys_from(self, x):
        cells = []
        for size, conv in zip(self.grids, self.local):
            p = F.adaptive_avg_pool2d(x, size)
            p = p + conv(p)
            cells.append(p.flatten(2))
        return torch.cat(cells, dim=2).transpose(1, 2)      # B, M, C

    def forward(self, x):
        b, c, h, w = x.shape
        y = self.norm(x)
        q = self.q(y).view(b, self.heads, c // self.heads, h * w).transpose(2, 3)
        src = self.kv_norm(self.keys_from(y))
        k, v = self.kv(src).view(b, -1, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        o = F.scaled_dot_product_attention(q, k, v)
        o = o.transpose(2, 3).reshape(b, c, h, w)
        return x + self.out(o)


if __name__ == "__main__":
    m = PyramidPooledAttention(32)
    for hw in ((16, 16), (20, 12)):
        print(m(torch.randn(2, 32, *hw)).shape)
