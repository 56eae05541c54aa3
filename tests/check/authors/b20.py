import torch
import torch.nn as nn


class SensorAttentionBlock(nn.Module):
    # input: (batch, time, features) coming straight from the DataLoader
    def __init__(self, n_features=64, n_heads=4, ff=128, drop=0.2):
        super().__init__()
        self.attn = nn.MultiheadAttention(n_features, n_heads, dropout=drop)
        self.norm1 = nn.LayerNorm(n_features)
        self.norm2 = nn.LayerNorm(n_features)
        self.ff = nn.Sequential(
            nn.Linear(n_features, ff),
            nn.ReLU(),
            nn.Dropout(drop),
            nn.Linear(ff, n_features),
        )

    def forward(self, x):
        a, _ = self.attn(x, x, x, need_weights=False)
        x = self.norm1(x + a)
        x = self.norm2(x + self.ff(x))
        return x
