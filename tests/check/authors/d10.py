"""Sliding-window attention with a rolling key/value store for generation."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def apply_rotary(x, pos, base=10000.0):
    d = x.shape[-1]
    freq = base ** (-torch.arange(0, d, 2, device=x.device).float() / d)
    ang = pos.float()[:, None] * freq[None, :]
    c, s = ang.cos(), ang.sin()
    x1, x2 = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([x1 * c - x2 * s, x2 * c + x1 * s], dim=-1)


class RollingWindowAttention(nn.Module):
    """Every token sees itself and the window - 1 tokens before it.

    While generating, the store holds at most `window` entries; the entry of
    position p lives in slot p % window, so that a new token replaces the one
    that has just left the window. Keys are stored after rotation.
    """

    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window, self.hd = heads, window, dim // heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)

    def _project(self, x, pos):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, self.hd).permute(2, 0, 3, 1, 4)
        return apply_rotary(q, pos), apply_rotary(k, pos), v

    def _merge(self, y):
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x):
        y, _ = self.prefill(x)
        return y

    def prefill(self, x):
        b, t, _ = x.shape
        pos = torch.arange(t, device=x.device)
        q, k, v = self._project(x, pos)
        gap = pos[:, None] - pos[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=(gap >= 0) & (gap < self.window))

        n = min(t, self.window)
        store = {
            "k": k.new_zeros(b, self.heads, self.window, self.hd),
            "v": v.new_zeros(b, self.heads, self.window, self.hd),
            "seen": t,
        }
        store["k"][:, :, :n] = k[:, :, t - n :]
        store["v"][:, :, :n] = v[:, :, t - n :]
        return self._merge(y), store

    def step(self, x, store):
        """x: [B, 1, dim]; updates the store in place."""
        p = store["seen"]
        q, k, v = self._project(x, torch.tensor([p], device=x.device))
        slot = p % self.window
        store["k"][:, :, slot] = k[:, :, 0]
        store["v"][:, :, slot] = v[:, :, 0]
        store["seen"] = p + 1
        n = min(p + 1, self.window)
        y = F.scaled_dot_product_attention(q, store["k"][:, :, :n], store["v"][:, :, :n])
        return self._merge(y)


if __name__ == "__main__":
    m = RollingWindowAttention(64, 4, window=16).eval()
    with torch.no_grad():
        y, st = m.prefill(torch.randn(2, 40, 64))
        for _ in range(5):
            y = m.step(torch.randn(2, 1, 64), st)
    print(y.shape, st["seen"])
