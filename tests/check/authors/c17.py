"""Relative position self-attention for acoustic encoders (content + position terms)."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class RelPositions(nn.Module):
    """Sinusoids for the offsets T-1, T-2, ..., 0, ..., -(T-1)."""

    def __init__(self, d_model):
        super().__init__()
        inv = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        self.register_buffer("inv", inv, persistent=False)

    def forward(self, t):
        off = torch.arange(t - 1, -t, -1, device=self.inv.device, dtype=self.inv.dtype)
        ang = off[:, None] * self.inv[None, :]
        return torch.cat([ang.sin(), ang.cos()], dim=-1)       # 2T-1, d


class RelPosAttention(nn.Module):
    def __init__(self, d_model, n_head, dropout=0.0):
        super().__init__()
        assert d_model % n_head == 0
        self.n_head = n_head
        self.d_k = d_model // n_head
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)
        self.linear_out = nn.Linear(d_model, d_model)
        self.u = nn.Parameter(torch.zeros(n_head, self.d_k))
        self.v = nn.Parameter(torch.zeros(n_head, self.d_k))
        nn.init.xavier_uniform_(self.u)
        nn.init.xavier_uniform_(self.v)
        self.positions = RelPositions(d_model)
        self.drop = nn.Dropout(dropout)

    @staticmethod
    def rel_shift(x):
        """[B, H, T, 2T-1] by offset  ->  [B, H, T, T] by key."""
        b, h, t, n = x.shape
        x = F.pad(x, (1, 0))
        x = x.view(b, h, n + 1, t)
        x = x[:, :, :-1].reshape(b, h, t, n)
        return x[..., :t]

    def forward(self, x, pad_mask=None):
        """x: [B, T, D]; pad_mask: [B, T], True at padding."""
        b, t, _ = x.shape
        q = self.linear_q(x).view(b, t, self.n_head, self.d_k)
        k = self.linear_k(x).view(b, t, self.n_head, self.d_k).permute(0, 2, 3, 1)
        v = self.linear_v(x).view(b, t, self.n_head, self.d_k).transpose(1, 2)
        p = self.linear_pos(self.positions(t)).view(-1, self.n_head, self.d_k).permute(1, 2, 0)

        ac = torch.matmul((q + self.u).transpose(1, 2), k)
        bd = self.rel_shift(torch.matmul((q + self.v).transpose(1, 2), p.unsqueeze(0)))
        scores = (ac + bd) / math.sqrt(self.d_k)
        if pad_mask is not None:
            scores = scores.masked_fill(pad_mask[:, None, None, :], -1e9)
        w = self.drop(scores.softmax(dim=-1))
        return self.linear_out(torch.matmul(w, v).transpose(1, 2).reshape(b, t, -1))


if __name__ == "__main__":
    att = RelPosAttention(64, 4)
    m = torch.zeros(2, 30, dtype=torch.bool)
    m[1, 22:] = True
    print(att(torch.randn(2, 30, 64), m).shape)
