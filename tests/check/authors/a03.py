import torch
import torch.nn as nn
import torch.nn.functional as F


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        x32 = x.float()
        out = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.eps)
        return out.to(x.dtype) * self.weight


class QKNormAttention(nn.Module):
    # Qwen3 style: RMSNorm over head_dim on queries and keys
    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim=None, eps=1e-6):
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, eps=eps)
        self.k_norm = RMSNorm(self.head_dim, eps=eps)

    def forward(self, hidden_states, position_embeddings):
        bsz, q_len, _ = hidden_states.size()
        cos, sin = position_embeddings  # (q_len, head_dim)

        query = self.q_norm(self.q_proj(hidden_states).view(bsz, q_len, -1, self.head_dim))
        key = self.q_norm(self.k_proj(hidden_states).view(bsz, q_len, -1, self.head_dim))
        value = self.v_proj(hidden_states).view(bsz, q_len, -1, self.head_dim)

        query, key, value = (z.transpose(1, 2) for z in (query, key, value))
        query = self._rope(query, cos, sin)
        key = self._rope(key, cos, sin)

        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.num_heads != self.num_kv_heads
        )
        out = out.transpose(1, 2).reshape(bsz, q_len, self.num_heads * self.head_dim)
        return self.o_proj(out)

    @staticmethod
    def _rope(x, cos, sin):
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-x2, x1], dim=-1) * sin
