import torch
from torch import nn


class SinkAttention(nn.Module):
    """GQA with a learned per-head sink logit (gpt-oss style) and optional sliding window.

    hidden_states: [batch, seq, hidden]; cos / sin: [seq, head_dim // 2]
    """

    def __init__(self, hidden_size, num_heads, num_kv_heads, head_dim, sliding_window=None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.sliding_window = sliding_window
        self.sm_scale = head_dim ** -0.5
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size)
        self.sinks = nn.Parameter(torch.zeros(num_heads))

    @staticmethod
    def _rotate(x, cos, sin):
        x1, x2 = torch.chunk(x, 2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)

    def forward(self, hidden_states, cos, sin):
        b, n, _ = hidden_states.shape
        q = self.q_proj(hidden_states).view(b, n, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(hidden_states).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(hidden_states).view(b, n, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        rep = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(rep, 1), v.repeat_interleave(rep, 1)

        logits = torch.matmul(q, k.transpose(2, 3)) * self.sm_scale
        mask = torch.ones(n, n, device=q.device, dtype=torch.bool).triu(1)
        if self.sliding_window:
            mask = mask | torch.ones_like(mask).tril(-self.sliding_window)
        logits = logits.masked_fill(mask, float("-inf"))

        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, n, 1).to(logits.dtype)
        combined = torch.cat([logits, sinks], dim=-1)
        combined = combined - combined.max(dim=-1, keepdim=True).values
        probs = torch.softmax(combined, dim=-1)
        scores = probs[..., 1:]
        out = torch.matmul(scores, v)
        return self.o_proj(out.transpose(1, 2).reshape(b, n, -1))
