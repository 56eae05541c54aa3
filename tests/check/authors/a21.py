import torch
from torch import nn
from torch.nn import functional as F


class RotaryPositionalEmbeddings(nn.Module):
    def __init__(self, dim, max_seq_len=2048, base=10000):
        super().__init__()
        theta = 1.0 / (base ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
        idx_theta = torch.outer(torch.arange(max_seq_len).float(), theta)
        self.register_buffer("cache", torch.stack([idx_theta.cos(), idx_theta.sin()], -1), persistent=False)

    def forward(self, x):
        seq_len = x.size(-2)
        cache = self.cache[:seq_len]
        xs = x.float().reshape(*x.shape[:-1], -1, 2)
        out = torch.stack(
            [
                xs[..., 0] * cache[..., 0] - xs[..., 1] * cache[..., 1],
                xs[..., 1] * cache[..., 0] + xs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return out.flatten(-2).type_as(x)


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim: int, num_heads: int, max_seq_len: int = 2048, attn_dropout: float = 0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.attn_dropout = attn_dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.k_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.output_proj = nn.Linear(embed_dim, embed_dim, bias=False)
        self.pos_embeddings = RotaryPositionalEmbeddings(self.head_dim, max_seq_len)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(b, s, self.num_heads, self.head_dim)
        v = self.v_proj(x).view(b, s, self.num_heads, self.head_dim)

        q = self.pos_embeddings(q)
        k = self.pos_embeddings(k)

        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            dropout_p=self.attn_dropout if self.training else 0.0,
            is_causal=True,
        )
        return self.output_proj(out.transpose(1, 2).reshape(b, s, -1))
