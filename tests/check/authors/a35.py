import torch
import torch.nn as nn
import torch.nn.functional as F


class SlidingWindowAttention(nn.Module):
    """Mistral-like window: a token sees itself and the `window - 1` tokens before it.
    The cache never holds more than `window` positions."""

    def __init__(self, dim, n_heads, n_kv_heads, window=16):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.window = n_heads, n_kv_heads, window
        self.head_dim = dim // n_heads
        self.q_proj = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x, cache=None):
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)

        if cache is not None:
            k = torch.cat((cache[0], k), dim=2)
            v = torch.cat((cache[1], v), dim=2)
        s = k.shape[2]

        q_pos = torch.arange(s - t, s, device=x.device)[:, None]
        k_pos = torch.arange(s, device=x.device)[None, :]
        mask = (k_pos <= q_pos) & (k_pos > q_pos - self.window)

        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        y = y.transpose(1, 2).reshape(b, t, -1)

        if s > self.window:
            k, v = k[:, :, : self.window], v[:, :, : self.window]
        return self.o_proj(y), (k, v)
