import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class BERT4RecAttention(nn.Module):
    def __init__(self, args_hidden=64, args_heads=2, args_dropout=0.1):
        super().__init__()
        self.heads = args_heads
        self.d = args_hidden // args_heads
        self.qkv_layers = nn.ModuleList([nn.Linear(args_hidden, args_hidden) for _ in range(3)])
        self.output_linear = nn.Linear(args_hidden, args_hidden)
        self.dropout = nn.Dropout(args_dropout)

    def forward(self, x, item_ids):
        """item_ids: B x L, 0 is padding"""
        B, L, E = x.size()
        mask = (item_ids > 0).unsqueeze(1).repeat(1, L, 1).unsqueeze(1)   # B x 1 x L x L

        q, k, v = [l(x).view(B, -1, self.heads, self.d).transpose(1, 2) for l in self.qkv_layers]

        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask == 0, 1e-9)
        p = F.softmax(scores, dim=-1)
        p = self.dropout(p)

        x = torch.matmul(p, v).transpose(1, 2).contiguous().view(B, -1, E)
        return self.output_linear(x)
