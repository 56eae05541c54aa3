import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedRoPEAttention(nn.Module):
    """
    x: [B, T, D]
    layer_cache: None, or a list [k, v] ([] for the first call) which is updated
    """

    def __init__(self, d_model, n_head, theta=10000.):
        super().__init__()
        self.n_head = n_head
        self.d_head = d_model // n_head
        self.qkv = nn.Linear(d_model, d_model * 3, bias=False)
        self.proj = nn.Linear(d_model, d_model, bias=False)
        self.register_buffer(
            'freqs', theta ** (-torch.arange(0, self.d_head, 2).float() / self.d_head), persistent=False)
        self._rope_len = None
        self._rope = None

    def rope_table(self, start, length, device, dtype):
        # sin/cos are not cheap, keep them from the last call
        if self._rope_len != length or self._rope.device != device or self._rope.dtype != dtype:
            t = torch.arange(start, start + length, device=device).float()
            ang = torch.einsum('t,f->tf', t, self.freqs)
            self._rope = torch.stack((ang.cos(), ang.sin())).to(dtype)
            self._rope_len = length
        return self._rope

    @staticmethod
    def rotate(x, table):
        cos, sin = table
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.stack((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1).flatten(-2)

    def forward(self, x, layer_cache=None):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.n_head, self.d_head).permute(2, 0, 3, 1, 4)
        start = layer_cache[0].shape[-2] if layer_cache else 0
        table = self.rope_table(start, T, x.device, q.dtype)
        q, k = self.rotate(q, table), self.rotate(k, table)

        if layer_cache is not None:
            if layer_cache:
                k = torch.cat((layer_cache[0], k), dim=-2)
                v = torch.cat((layer_cache[1], v), dim=-2)
            layer_cache[:] = [k, v]

        S = k.shape[-2]
        mask = torch.arange(S, device=x.device)[None, :] <= torch.arange(S - T, S, device=x.device)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.proj(y.transpose(1, 2).reshape(B, T, D))
