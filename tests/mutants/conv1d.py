"""Right: GPT-2 as it was published, with weights that lie the other way round."""

import torch
from torch import nn


class Conv1D(nn.Module):
    """x W + b, with W [inputs, features]."""

    def __init__(self, nf, nx):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nx, nf) * 0.02)
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class GPT2Attention(nn.Module):
    """Causal multi-head self-attention with GPT-2's names."""

    def __init__(self, n_embd, n_head, n_positions):
        super().__init__()
        if n_embd % n_head:
            raise ValueError("n_embd must be a multiple of n_head")
        self.num_heads = n_head
        self.head_dim = n_embd // n_head
        self.split_size = n_embd
        self.n_positions = n_positions
        self.c_attn = Conv1D(3 * n_embd, n_embd)
        self.c_proj = Conv1D(n_embd, n_embd)

    def _split_heads(self, tensor):
        new_shape = tensor.size()[:-1] + (self.num_heads, self.head_dim)
        return tensor.view(new_shape).permute(0, 2, 1, 3)

    def _merge_heads(self, tensor):
        tensor = tensor.permute(0, 2, 1, 3).contiguous()
        return tensor.view(tensor.size()[:-2] + (self.num_heads * self.head_dim,))

    def _attn(self, query, key, value):
        attn_weights = torch.matmul(query, key.transpose(-1, -2))
        attn_weights = attn_weights / value.size(-1) ** 0.5
        tokens = query.size(-2)
        causal_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        attn_weights = torch.where(causal_mask, attn_weights, -torch.inf)
        attn_weights = torch.softmax(attn_weights, dim=-1)
        return torch.matmul(attn_weights, value)

    def forward(self, hidden_states):
        if hidden_states.shape[1] > self.n_positions:
            raise ValueError(f"more than {self.n_positions} positions")
        query, key, value = self.c_attn(hidden_states).split(self.split_size, dim=2)
        query = self._split_heads(query)
        key = self._split_heads(key)
        value = self._split_heads(value)
        attn_output = self._attn(query, key, value)
        attn_output = self._merge_heads(attn_output)
        return self.c_proj(attn_output)
