"""Train Short, Test Long (Press et al., 2022): attention with linear biases."""
import math

import torch
from torch import nn


def get_slopes(n):
    def power_of_2(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start ** i for i in range(n)]

    if math.log2(n).is_integer():
        return power_of_2(n)
    closest = 2 ** math.floor(math.log2(n))
    return power_of_2(closest) + get_slopes(2 * closest)[0::2][: n - closest]


class ALiBiAttention(nn.Module):
    def __init__(self, d_model: int, n_heads: int, dropout: float = 0.0):
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.d_head = d_model // n_heads
        self.w_q = nn.Linear(d_model, d_model, bias=False)
        self.w_k = nn.Linear(d_model, d_model, bias=False)
        self.w_v = nn.Linear(d_model, d_model, bias=False)
        self.w_o = nn.Linear(d_model, d_model, bias=False)
        self.dropout = nn.Dropout(dropout)
        slopes = torch.tensor(get_slopes(n_heads)).view(n_heads, 1, 1)
        self.register_buffer("slopes", slopes, persistent=False)

    def _bias(self, t: int, device, dtype) -> torch.Tensor:
        pos = torch.arange(t, device=device)
        distance = pos[:, None] - pos[None, :]      # [t, t]
        bias = self.slopes * distance               # [h, t, t]
        future = distance < 0
        return bias.masked_fill(future, float("-inf")).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q = self.w_q(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        k = self.w_k(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)
        v = self.w_v(x).view(b, t, self.n_heads, self.d_head).transpose(1, 2)

        logits = q @ k.transpose(2, 3) / math.sqrt(self.d_head)
        logits = logits + self._bias(t, x.device, logits.dtype)
        p = self.dropout(logits.softmax(dim=-1))
        return self.w_o((p @ v).transpose(1, 2).reshape(b, t, d))
