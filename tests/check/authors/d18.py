import torch
from torch import nn


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, base=10_000, factor=1.0):
        super().__init__()
        inv_freq = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.factor = factor

    def forward(self, position_ids):
        # [B, T] -> two of [B, 1, T, dim]
        ang = (position_ids.float() / self.factor)[..., None] * self.inv_freq
        emb = ang.repeat_interleave(2, dim=-1).unsqueeze(1)
        return emb.cos(), emb.sin()


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class DecoderAttention(nn.Module):
    """Self-attention block of the decoder.

    attention_mask is additive and broadcastable to [B, H, T, T]; when missing,
    a causal one is made. position_ids [B, T] default to 0..T-1 (give them when
    rows are left-padded).
    """

    def __init__(self, hidden_size=256, num_heads=8, rope_base=10_000, rope_factor=1.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.rotary = RotaryEmbedding(self.head_dim, rope_base, rope_factor)

    def shape(self, t):
        return t.view(t.size(0), t.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        bsz, q_len, _ = hidden_states.size()
        if position_ids is None:
            position_ids = torch.arange(q_len, device=hidden_states.device).expand(bsz, -1)
        if attention_mask is None:
            attention_mask = torch.full(
                (q_len, q_len), torch.finfo(hidden_states.dtype).min, device=hidden_states.device
            ).triu(1)

        query = self.shape(self.q_proj(hidden_states))
        key = self.shape(self.k_proj(hidden_states))
        value = self.shape(self.v_proj(hidden_states))

        cos, sin = self.rotary(position_ids)
        query = query * cos + rotate_half(query) * sin
        key = key * cos + rotate_half(key) * sin

        attn = torch.matmul(query, key.transpose(2, 3)) * self.head_dim ** -0.5
        attn = attn + attention_mask
        attn = nn.functional.softmax(attn, dim=-1, dtype=torch.float32).to(query.dtype)
        out = torch.matmul(attn, value).transpose(1, 2).contiguous()
        return self.o_proj(out.view(bsz, q_len, -1))
