import math

import torch
from torch import nn


def alibi_slopes(n_heads: int) -> torch.Tensor:
    p = 2 ** math.floor(math.log2(n_heads))
    base = 2.0 ** (-(2.0 ** -(math.log2(p) - 3)))
    slopes = [base ** i for i in range(1, p + 1)]
    if p < n_heads:
        extra = 2.0 ** (-(2.0 ** -(math.log2(2 * p) - 3)))
        slopes += [extra ** i for i in range(1, 2 * (n_heads - p), 2)]
    return torch.tensor(slopes)


class BloomLikeAttention(nn.Module):
    """Causal attention with ALiBi, heads folded into the batch for baddbmm."""

    def __init__(self, hidden_size: int, n_head: int, attention_dropout: float = 0.0):
        super().__init__()
        self.n_head = n_head
        self.head_dim = hidden_size // n_head
        self.inv_norm_factor = 1.0 / math.sqrt(self.head_dim)
        self.query_key_value = nn.Linear(hidden_size, 3 * hidden_size)
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.attention_dropout = nn.Dropout(attention_dropout)
        self.register_buffer("slopes", alibi_slopes(n_head), persistent=False)

    def _alibi(self, batch, length, dtype):
        # key position is enough, softmax does not care about a per-row constant
        pos = torch.arange(length, device=self.slopes.device, dtype=torch.float32)
        slopes = self.slopes.repeat_interleave(batch)
        return (slopes[:, None, None] * pos[None, None, :]).to(dtype)

    def forward(self, hidden_states):
        b, t, c = hidden_states.shape
        fused = self.query_key_value(hidden_states).view(b, t, self.n_head, 3, self.head_dim)
        q, k, v = fused.unbind(dim=3)
        q = q.transpose(1, 2).reshape(b * self.n_head, t, self.head_dim)
        k = k.permute(0, 2, 3, 1).reshape(b * self.n_head, self.head_dim, t)
        v = v.transpose(1, 2).reshape(b * self.n_head, t, self.head_dim)

        scores = torch.baddbmm(self._alibi(b, t, q.dtype), q, k, beta=1.0, alpha=self.inv_norm_factor)
        causal = torch.ones(t, t, dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(causal, torch.finfo(scores.dtype).min)
        probs = self.attention_dropout(torch.softmax(scores, dim=-1))
        ctx = torch.bmm(probs, v).view(b, self.n_head, t, self.head_dim)
        return self.dense(ctx.transpose(1, 2).reshape(b, t, c))
