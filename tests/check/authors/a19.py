import torch
from torch import nn


class DecoderSelfAttention(nn.Module):
    """
    Self attention for batched generation. Prompts are padded on the LEFT.

    Inputs
        hidden:          FloatTensor (batch, length, dim)
        attention_mask:  LongTensor (batch, length), 1 for real tokens and 0 for padding
    """

    def __init__(self, dim, num_heads, dropout=0.0):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = dim // num_heads
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.dense = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def split(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.num_heads, self.head_size).permute(0, 2, 1, 3)

    def forward(self, hidden, attention_mask=None):
        q = self.split(self.query(hidden))
        k = self.split(self.key(hidden))
        v = self.split(self.value(hidden))

        scores = torch.matmul(q, k.transpose(-1, -2)) / (self.head_size ** 0.5)
        n = hidden.size(1)
        min_value = torch.finfo(scores.dtype).min

        causal = torch.tril(torch.ones(n, n, dtype=torch.bool, device=hidden.device))
        allowed = causal[None, None, :, :]
        if attention_mask is not None:
            pad = attention_mask.to(torch.bool)
            allowed = allowed & pad[:, None, :, None]
        scores = scores.masked_fill(~allowed, min_value)

        probs = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.matmul(probs, v)
        context = context.permute(0, 2, 1, 3).flatten(2)
        return self.dense(context)
