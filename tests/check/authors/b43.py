import torch
import torch.nn as nn
import torch.nn.functional as F


class GroupedResampler(nn.Module):
    """Resamples N visual tokens to `n_out` latents. Keys/values use fewer heads than the queries
    and also cover the latents themselves (Flamingo).

    tokens: (B, N, D), valid: optional (B, N) bool, True = valid.
    """

    def __init__(self, dim, n_out=16, q_heads=8, kv_heads=2):
        super().__init__()
        assert q_heads % kv_heads == 0 and dim % q_heads == 0
        self.qh, self.kvh, self.hd = q_heads, kv_heads, dim // q_heads
        self.latents = nn.Parameter(torch.randn(n_out, dim) * dim ** -0.5)
        self.ln_t, self.ln_l = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * kv_heads * self.hd, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, tokens, valid=None):
        B = tokens.size(0)
        lat = self.latents.expand(B, -1, -1)
        lat_n = self.ln_l(lat)
        mem = torch.cat([self.ln_t(tokens), lat_n], dim=1)

        q = self.wq(lat_n).view(B, -1, self.qh, self.hd).transpose(1, 2) * self.hd ** -0.5
        k, v = self.wkv(mem).view(B, mem.size(1), 2, self.kvh, self.hd).permute(2, 0, 3, 1, 4)
        # query head h reads kv head h % kvh
        k = k.repeat(1, self.qh // self.kvh, 1, 1)
        v = v.repeat(1, self.qh // self.kvh, 1, 1)

        if valid is not None:
            valid = F.pad(valid, (0, lat.size(1)), value=True)[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=valid, scale=1.0)
        return lat + self.wo(y.transpose(1, 2).flatten(2))
