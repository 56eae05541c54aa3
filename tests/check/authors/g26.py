import torch
import torch.nn as nn


class TextEncoderLayer(nn.Module):
    """Batch-first encoder layer: (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, d_model=128, nhead=8, ff=512, dropout=0.1):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(d_model, nhead, dropout=dropout)
        self.linear1 = nn.Linear(d_model, ff)
        self.linear2 = nn.Linear(ff, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        attn, _ = self.self_attn(x, x, x, need_weights=False)
        x = self.norm1(x + self.dropout(attn))
        ff = self.linear2(self.dropout(torch.relu(self.linear1(x))))
        return self.norm2(x + self.dropout(ff))
