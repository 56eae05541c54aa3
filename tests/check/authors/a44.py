from dataclasses import dataclass
from typing import Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class GemmaConfig:
    hidden_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    query_pre_attn_scalar: int = 32
    attn_logit_softcapping: Optional[float] = 50.0
    sliding_window: Optional[int] = None


class GemmaAttention(nn.Module):
    def __init__(self, config: GemmaConfig):
        super().__init__()
        self.config = config
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.scaling = config.query_pre_attn_scalar ** -0.5
        self.qkv_proj = nn.Linear(
            config.hidden_size, (self.num_heads + 2 * self.num_kv_heads) * self.head_dim, bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        b, n, _ = hidden_states.shape
        q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        q, k, v = self.qkv_proj(hidden_states).split([q_size, kv_size, kv_size], dim=-1)
        q = q.view(b, n, -1, self.head_dim).transpose(1, 2) * self.scaling
        k = k.view(b, n, -1, self.head_dim).transpose(1, 2)
        v = v.view(b, n, -1, self.head_dim).transpose(1, 2)
        k = torch.repeat_interleave(k, self.num_heads // self.num_kv_heads, dim=1)
        v = torch.repeat_interleave(v, self.num_heads // self.num_kv_heads, dim=1)

        scores = torch.matmul(q, k.transpose(2, 3))
        if self.config.attn_logit_softcapping is not None:
            scores = scores / self.config.attn_logit_softcapping
            scores = torch.tanh(scores)

        mask = torch.ones(n, n, dtype=torch.bool, device=scores.device).tril()
        if self.config.sliding_window is not None:
            mask = mask.triu(1 - self.config.sliding_window)
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        probs = F.softmax(scores.float(), dim=-1).type_as(q)
        out = torch.matmul(probs, v).transpose(1, 2).contiguous().view(b, n, -1)
        return self.o_proj(out)
