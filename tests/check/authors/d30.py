import torch
from torch import nn
import torch.nn.functional as F


class RecomputeAttention(nn.Module):
    """Causal attention that caches its *input* and not its keys and values.

    With few wide layers the input is half the size of keys plus values, and
    rebuilding those is cheap next to the bandwidth that is saved. The cache is
    a dict {"h": [B, S, dim]} that the caller keeps; {} starts a new one.
    """

    def __init__(self, dim, heads, base=10000.0, limit=None):
        super().__init__()
        self.heads = heads
        self.hd = dim // heads
        self.base = base
        self.limit = limit
        self.norm = nn.LayerNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def turn(self, x, first):
        n, d = x.shape[-2:]
        pos = torch.arange(first, first + n, device=x.device, dtype=torch.float32)
        ang = pos[:, None] * self.base ** (-torch.arange(0, d, 2, device=x.device) / d)
        c, s = ang.cos().to(x.dtype), ang.sin().to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * c - b * s, a * s + b * c], dim=-1)

    def forward(self, x, cache=None):
        h = self.norm(x)
        new = h.shape[1]
        if cache is not None:
            if "h" in cache:
                h = torch.cat([cache["h"], h], dim=1)
            if self.limit is not None:
                # the oldest of the new tokens still needs limit - 1 before it
                h = h[:, -(self.limit - 1 + new):]
            cache["h"] = h if self.limit is None else h[:, -self.limit:]
        total = h.shape[1]

        q = self.wq(h[:, total - new:]).unflatten(-1, (self.heads, self.hd)).transpose(1, 2)
        k, v = self.wkv(h).unflatten(-1, (2, self.heads, self.hd)).permute(2, 0, 3, 1, 4)
        # positions count from the oldest entry that is still held; only
        # differences matter to the products
        q, k = self.turn(q, total - new), self.turn(k, 0)

        row = torch.arange(total - new, total, device=x.device)[:, None]
        col = torch.arange(total, device=x.device)[None, :]
        see = col <= row
        if self.limit is not None:
            see = see & (row - col < self.limit)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=see)
        return x + self.wo(y.transpose(1, 2).flatten(2))


if __name__ == "__main__":
    m, cache = RecomputeAttention(64, 4, limit=10).eval(), {}
    with torch.no_grad():
        m(torch.randn(1, 7, 64), cache)
        for _ in range(6):
            y = m(torch.randn(1, 1, 64), cache)
    print(y.shape, cache["h"].shape)
