import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class NeoXConfig:
    hidden_size: int = 64
    num_attention_heads: int = 4
    max_position_embeddings: int = 128
    rotary_pct: float = 0.25
    rotary_emb_base: int = 10000
    attention_dropout: float = 0.0


def _rotate(x):
    h = x.shape[-1] // 2
    return torch.cat([-x[..., h:], x[..., :h]], -1)


class NeoXAttention(nn.Module):
    def __init__(self, config: NeoXConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.head_size = config.hidden_size // self.num_heads
        self.rot = int(self.head_size * config.rotary_pct)
        n = config.max_position_embeddings
        self.register_buffer("bias", torch.tril(torch.ones(n, n, dtype=torch.bool))[None, None], persistent=False)
        f = config.rotary_emb_base ** (-torch.arange(0, self.rot, 2).float() / self.rot)
        ang = torch.arange(n).float()[:, None] * f[None]
        ang = torch.cat([ang, ang], -1)
        self.register_buffer("cos", ang.cos(), persistent=False)
        self.register_buffer("sin", ang.sin(), persistent=False)
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.attn_drop = nn.Dropout(config.attention_dropout)

    def forward(self, hidden_states, layer_past=None, use_cache=False):
        b, t, _ = hidden_states.shape
        # weights are stored per head: [q_0 k_0 v_0 q_1 k_1 v_1 ...]
        qkv = self.query_key_value(hidden_states)
        qkv = qkv.view(b, t, self.num_heads, 3 * self.head_size).permute(0, 2, 1, 3)
        q = qkv[..., : self.head_size]
        k = qkv[..., self.head_size : 2 * self.head_size]
        v = qkv[..., 2 * self.head_size :]

        off = 0 if layer_past is None else layer_past[0].shape[-2]
        cos, sin = self.cos[off : off + t].to(q.dtype), self.sin[off : off + t].to(q.dtype)
        qr, qp = q[..., : self.rot], q[..., self.rot :]
        kr, kp = k[..., : self.rot], k[..., self.rot :]
        q = torch.cat([qr * cos + _rotate(qr) * sin, qp], -1)
        k = torch.cat([kr * cos + _rotate(kr) * sin, kp], -1)

        if layer_past is not None:
            k = torch.cat([layer_past[0], k], -2)
            v = torch.cat([layer_past[1], v], -2)
        present = (k, v) if use_cache else None

        n = k.shape[-2]
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_size)
        scores = scores.masked_fill(~self.bias[:, :, n - t : n, :n], torch.finfo(scores.dtype).min)
        w = self.attn_drop(scores.softmax(-1, dtype=torch.float32).to(v.dtype))
        ctx = (w @ v).permute(0, 2, 1, 3).contiguous().view(b, t, -1)
        return self.dense(ctx), present
