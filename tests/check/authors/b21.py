import torch
import torch.nn as nn


class SASRecAttention(nn.Module):
    """Causal self-attention over a user's item history (next item prediction)."""

    def __init__(self, hidden_units, num_heads, dropout_rate, maxlen=50):
        super().__init__()
        self.num_heads = num_heads
        self.head_size = hidden_units // num_heads
        self.Q_w = nn.Linear(hidden_units, hidden_units)
        self.K_w = nn.Linear(hidden_units, hidden_units)
        self.V_w = nn.Linear(hidden_units, hidden_units)
        self.layernorm = nn.LayerNorm(hidden_units, eps=1e-8)
        self.dropout = nn.Dropout(dropout_rate)
        # positions in the future
        future = torch.triu(torch.ones(maxlen, maxlen)).bool()
        self.register_buffer("future", future, persistent=False)

    def forward(self, seqs, timeline_mask):
        # seqs (U, T, C), timeline_mask (U, T) True for padding items
        U, T, C = seqs.shape
        normed = self.layernorm(seqs)
        Q = self.Q_w(normed).view(U, T, self.num_heads, self.head_size).transpose(1, 2)
        K = self.K_w(seqs).view(U, T, self.num_heads, self.head_size).transpose(1, 2)
        V = self.V_w(seqs).view(U, T, self.num_heads, self.head_size).transpose(1, 2)

        w = Q.matmul(K.transpose(-1, -2)) / (self.head_size ** 0.5)
        blocked = self.future[:T, :T] | timeline_mask[:, None, None, :]
        w = w.masked_fill(blocked, torch.finfo(w.dtype).min)
        w = self.dropout(w.softmax(dim=-1))

        out = w.matmul(V).transpose(1, 2).reshape(U, T, C)
        out = normed + out
        return out * (~timeline_mask).unsqueeze(-1)
