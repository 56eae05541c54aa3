import torch
import torch.nn as nn
import math

# Masked multi head attention for my mini GPT (shakespeare)

class MaskedMultiHeadAttention(nn.Module):
    def __init__(self, embed_size, heads, dropout=0.1):
        super(MaskedMultiHeadAttention, self).__init__()
        self.embed_size = embed_size
        self.heads = heads
        self.head_dim = embed_size // heads
        assert self.head_dim * heads == embed_size, "embed size needs to be divisible by heads"

        self.queries = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.values = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        N, seq_len, _ = x.shape

        # split embedding into self.heads pieces
        queries = self.queries(x).view(N, self.heads, seq_len, self.head_dim)
        keys = self.keys(x).view(N, self.heads, seq_len, self.head_dim)
        values = self.values(x).view(N, self.heads, seq_len, self.head_dim)

        energy = torch.matmul(queries, keys.transpose(-2, -1)) / math.sqrt(self.head_dim)
        mask = torch.tril(torch.ones(seq_len, seq_len, device=x.device))
        energy = energy.masked_fill(mask == 0, float("-inf"))
        attention = self.dropout(torch.softmax(energy, dim=-1))

        # put the heads back together
        out = torch.matmul(attention, values).view(N, seq_len, self.embed_size)
        return self.fc_out(out)
