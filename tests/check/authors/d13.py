# Multi-head latent attention: keys and values are rebuilt from a small latent.
from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class LatentConfig:
    hidden: int = 256
    heads: int = 4
    q_rank: int = 96
    kv_rank: int = 64
    nope_dim: int = 32
    rope_dim: int = 16
    v_dim: int = 32
    rope_theta: float = 10000.0


class RMSNorm(nn.Module):
    def __init__(self, n, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, positions, theta):
    """Interleaved rotary over the last axis; x [B, T, ..., R], positions [T]."""
    r = x.shape[-1]
    inv = theta ** (-torch.arange(0, r, 2, device=x.device).float() / r)
    ang = positions.float()[:, None] * inv
    ang = ang.view(1, ang.shape[0], *([1] * (x.dim() - 3)), r // 2)
    even, odd = x[..., 0::2], x[..., 1::2]
    out = torch.stack((even * ang.cos() - odd * ang.sin(), even * ang.sin() + odd * ang.cos()), -1)
    return out.flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self, cfg: LatentConfig):
        super().__init__()
        self.cfg = cfg
        self.qk_dim = cfg.nope_dim + cfg.rope_dim
        self.scale = self.qk_dim ** -0.5
        self.q_down = nn.Linear(cfg.hidden, cfg.q_rank, bias=False)
        self.q_norm = RMSNorm(cfg.q_rank)
        self.q_up = nn.Linear(cfg.q_rank, cfg.heads * self.qk_dim, bias=False)
        self.kv_down = nn.Linear(cfg.hidden, cfg.kv_rank + cfg.rope_dim, bias=False)
        self.kv_norm = RMSNorm(cfg.kv_rank)
        self.kv_up = nn.Linear(cfg.kv_rank, cfg.heads * (cfg.nope_dim + cfg.v_dim), bias=False)
        self.out = nn.Linear(cfg.heads * cfg.v_dim, cfg.hidden, bias=False)

    def forward(self, x, cache: Optional[dict] = None):
        c = self.cfg
        B, T, _ = x.shape
        past = 0 if not cache else cache["latent"].shape[1]
        positions = torch.arange(past, past + T, device=x.device)

        q = self.q_up(self.q_norm(self.q_down(x))).view(B, T, c.heads, self.qk_dim)
        q_nope, q_pe = q.split([c.nope_dim, c.rope_dim], dim=-1)
        q = torch.cat([q_nope, rotate(q_pe, positions, c.rope_theta)], dim=-1) * self.scale

        latent, k_pe = self.kv_down(x).split([c.kv_rank, c.rope_dim], dim=-1)
        latent = self.kv_norm(latent)
        k_pe = rotate(k_pe, positions, c.rope_theta)
        if cache is not None:
            if past:
                latent = torch.cat([cache["latent"], latent], dim=1)
                k_pe = torch.cat([cache["k_pe"], k_pe], dim=1)
            cache["latent"], cache["k_pe"] = latent, k_pe
        S = latent.shape[1]

        kv = self.kv_up(latent).view(B, S, c.heads, c.nope_dim + c.v_dim)
        k_nope, v = kv.split([c.nope_dim, c.v_dim], dim=-1)
        k = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, c.heads, -1)], dim=-1)

        seen = torch.arange(S, device=x.device)[None, :] <= positions[:, None]
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=seen
        )
        return self.out(y.transpose(1, 2).reshape(B, T, -1))


if __name__ == "__main__":
    mla, kv = LatentAttention(LatentConfig()), {}
    mla(torch.randn(2, 8, 256), kv)
    print(mla(torch.randn(2, 1, 256), kv).shape, kv["latent"].shape)
