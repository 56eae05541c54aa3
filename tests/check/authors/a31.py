import torch
import torch.nn as nn
import torch.nn.functional as F


class LlamaStyleAttention(nn.Module):
    def __init__(self, dim, n_heads, max_len=512, base=10000.0):
        super().__init__()
        self.n_heads = n_heads
        self.hd = dim // n_heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        freq = base ** -(torch.arange(0, self.hd, 2).float() / self.hd)
        ang = torch.arange(max_len).float()[:, None] * freq[None, :]
        self.register_buffer("rope_cos", torch.cat([ang, ang], -1).cos(), persistent=False)
        self.register_buffer("rope_sin", torch.cat([ang, ang], -1).sin(), persistent=False)

    def rope(self, x, start):
        n = x.size(-2)
        c = self.rope_cos[start:start + n].to(x.dtype)
        s = self.rope_sin[start:start + n].to(x.dtype)
        a, b = x.chunk(2, -1)
        return x * c + torch.cat([-b, a], -1) * s

    def forward(self, x, kv=None):
        """kv: cache returned by the previous call, or None for the prompt"""
        B, T, D = x.shape
        q, k, v = self.wqkv(x).view(B, T, 3, self.n_heads, self.hd).permute(2, 0, 3, 1, 4).unbind(0)

        past_len = 0
        if kv is not None:
            pk, pv = kv
            past_len = pk.size(2)
            k = torch.cat([pk, k], dim=2)
            v = torch.cat([pv, v], dim=2)

        q = self.rope(q, past_len)
        k = self.rope(k, 0)
        new_kv = (k, v)

        total = k.size(2)
        mask = torch.full((T, total), float("-inf"), device=x.device, dtype=x.dtype).triu(past_len + 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y = y.transpose(1, 2).reshape(B, T, D)
        return self.wo(y), new_kv
