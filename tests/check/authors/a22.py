import torch
import torch.nn as nn


class RelPosCausalAttention(nn.Module):
    def __init__(self, hidden, heads, max_distance=64, p=0.1):
        super().__init__()
        self.heads = heads
        self.dim = hidden // heads
        self.max_distance = max_distance
        self.W = nn.Linear(hidden, hidden * 3)
        self.O = nn.Linear(hidden, hidden)
        # one learned scalar for each (distance, head)
        self.rel_bias = nn.Embedding(max_distance + 1, heads)
        nn.init.normal_(self.rel_bias.weight, std=0.02)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        bs, length, hidden = x.shape
        q, k, v = [
            t.view(bs, length, self.heads, self.dim).permute(0, 2, 1, 3)
            for t in self.W(x).split(hidden, dim=-1)
        ]
        logits = q @ k.transpose(2, 3) * self.dim ** -0.5

        r = torch.arange(length, device=x.device)
        dist = (r[:, None] - r[None, :]).clamp(0, self.max_distance)
        bias = self.rel_bias(dist).view(1, self.heads, length, length)
        logits = logits + bias

        logits = logits.masked_fill(r[None, :] > r[:, None], float("-inf"))
        weights = self.drop(logits.softmax(dim=-1))
        out = (weights @ v).permute(0, 2, 1, 3).reshape(bs, length, hidden)
        return self.O(out)
