import torch
import torch.nn as nn


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def duplicate_interleave(m):
    return m.repeat_interleave(2, dim=-1)


class XPosAttention(nn.Module):
    """Length-extrapolatable attention (xPos, Sun et al. 2022): rotary plus an exponential decay per frequency."""

    def __init__(self, embed_dim, num_heads, scale_base=512):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scaling = self.head_dim ** -0.5
        self.scale_base = scale_base
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def _xpos(self, x):
        pos = torch.arange(x.size(-2), device=x.device, dtype=torch.float32)
        hd = self.head_dim
        d = torch.arange(0, hd, 2, device=x.device, dtype=torch.float32)
        zeta = (d + 0.4 * hd) / (1.4 * hd)
        scale = zeta ** (pos / self.scale_base)[:, None]
        angle = pos[:, None] / 10000 ** (d / hd)
        sin = duplicate_interleave(angle.sin() * scale)
        cos = duplicate_interleave(angle.cos() * scale)
        return (x * cos + rotate_every_two(x) * sin).type_as(x)

    def forward(self, x):
        bsz, tgt_len, embed_dim = x.size()
        q = self.q_proj(x) * self.scaling
        k = self.k_proj(x)
        v = self.v_proj(x)
        q = q.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = k.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        v = v.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)
        q = self._xpos(q)
        k = self._xpos(k)

        attn_weights = torch.matmul(q, k.transpose(2, 3))
        attn_mask = torch.triu(torch.zeros(tgt_len, tgt_len, device=x.device).float().fill_(float("-inf")), 1)
        attn_weights = attn_weights + attn_mask.type_as(attn_weights)
        attn_probs = attn_weights.softmax(-1, dtype=torch.float32).type_as(attn_weights)
        attn = torch.matmul(attn_probs, v).transpose(1, 2).reshape(bsz, tgt_len, embed_dim)
        return self.out_proj(attn)
