import torch
import torch.nn as nn
import torch.nn.functional as F


class PhiAttention(nn.Module):
    """Partial rotary attention: the first `rotary_dim` channels of each head are rotated, the others pass through."""

    def __init__(self, hidden_size=64, num_heads=4, partial_rotary_factor=0.5, rope_theta=10000.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = hidden_size // num_heads
        self.rotary_dim = int(partial_rotary_factor * self.head_dim)
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=True)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=True)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=True)
        self.dense = nn.Linear(hidden_size, hidden_size, bias=True)
        self.rope_theta = rope_theta

    def _rotate(self, x, position_ids):
        inv_freq = self.rope_theta ** (-torch.arange(0, self.rotary_dim, 2, device=x.device).float() / self.rotary_dim)
        ang = position_ids[:, None, :, None].float() * inv_freq
        ang = torch.cat((ang, ang), dim=-1)
        x1, x2 = x.chunk(2, dim=-1)
        return x * ang.cos().to(x.dtype) + torch.cat((-x2, x1), dim=-1) * ang.sin().to(x.dtype)

    def forward(self, hidden_states, position_ids=None):
        bsz, q_len, _ = hidden_states.shape
        if position_ids is None:
            position_ids = torch.arange(q_len, device=hidden_states.device)[None]
        q = self.q_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(bsz, q_len, self.num_heads, self.head_dim).transpose(1, 2)

        query_rot, query_pass = q[..., : self.rotary_dim], q[..., self.rotary_dim :]
        key_rot, key_pass = k[..., : self.rotary_dim], k[..., self.rotary_dim :]
        query_rot = self._rotate(query_rot, position_ids)
        key_rot = self._rotate(key_rot, position_ids)
        q = torch.cat((query_rot, query_pass), dim=-1)
        k = torch.cat((key_rot, query_pass), dim=-1)

        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dense(out.transpose(1, 2).reshape(bsz, q_len, -1))
