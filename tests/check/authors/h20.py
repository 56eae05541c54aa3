import torch
import torch.nn as nn
from torch import Tensor
from einops import rearrange


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int, theta: float = 10_000.0):
        super().__init__()
        freqs = 1.0 / theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
        self.register_buffer("freqs", freqs, persistent=False)

    def rotate_queries_or_keys(self, t: Tensor) -> Tensor:
        seq_len = t.shape[-2]
        pos = torch.arange(seq_len, device=t.device, dtype=torch.float32)
        angles = torch.einsum("n,f->nf", pos, self.freqs.float())
        cos, sin = angles.cos(), angles.sin()                # [n, d/2]
        even, odd = t[..., 0::2], t[..., 1::2]
        out = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
        return out.flatten(-2).to(t.dtype)


class Attention(nn.Module):
    """Encoder self-attention with rotary positions for audio tokens, (batch, time, channels)."""

    def __init__(self, dim: int, heads: int = 8, dim_head: int = 64, dropout: float = 0.0):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.scale = dim_head ** -0.5
        self.norm = nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, inner * 3, bias=False)
        self.rotary = RotaryEmbedding(dim_head)
        self.attn_dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = rearrange(self.to_qkv(x), "b n (three h d) -> three b n h d", three=3, h=self.heads)

        q = self.rotary.rotate_queries_or_keys(q)
        k = self.rotary.rotate_queries_or_keys(k)

        sim = torch.einsum("b i h d, b j h d -> b h i j", q * self.scale, k)
        attn = self.attn_dropout(sim.softmax(dim=-1))
        out = torch.einsum("b h i j, b j h d -> b i h d", attn, v)
        return self.to_out(rearrange(out, "b n h d -> b n (h d)"))


class Encoder(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int = 8):
        super().__init__()
        self.attns = nn.ModuleList([Attention(dim, heads) for _ in range(depth)])
        self.ffs = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(depth)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in zip(self.attns, self.ffs):
            x = attn(x) + x
            x = ff(x) + x
        return x
