from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Config:
    d_model: int = 64
    n_q_heads: int = 8
    n_kv_heads: int = 2
    attn_bias: bool = False


class GroupedQueryAttention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.cfg = cfg
        self.hd = cfg.d_model // cfg.n_q_heads
        self.r = cfg.n_q_heads // cfg.n_kv_heads
        self.wq = nn.Linear(cfg.d_model, cfg.n_q_heads * self.hd, bias=cfg.attn_bias)
        self.wkv = nn.Linear(cfg.d_model, 2 * cfg.n_kv_heads * self.hd, bias=cfg.attn_bias)
        self.wo = nn.Linear(cfg.n_q_heads * self.hd, cfg.d_model, bias=cfg.attn_bias)

    def forward(self, x, attn_mask=None):
        """attn_mask: bool, True where attention is allowed, broadcastable to (B, H, T, T).
        Plain causal attention when it is None."""
        B, T, _ = x.shape
        G = self.cfg.n_kv_heads
        q = self.wq(x).view(B, T, self.cfg.n_q_heads, self.hd).transpose(1, 2)
        k, v = self.wkv(x).view(B, T, 2, G, self.hd).permute(2, 0, 3, 1, 4)

        k = k[:, :, None].expand(B, G, self.r, T, self.hd).reshape(B, -1, T, self.hd)
        v = v[:, None].expand(B, self.r, G, T, self.hd).reshape(B, -1, T, self.hd)

        y = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, is_causal=attn_mask is None)
        return self.wo(y.transpose(1, 2).flatten(-2))
