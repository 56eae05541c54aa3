import math
import torch
import torch.nn as nn


class TransformerDecoderAttention(nn.Module):
    def __init__(self, d_model, num_heads, dropout=0.1):
        super().__init__()
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def causal_mask(size, device):
        """True where attention is allowed"""
        return torch.tril(torch.ones(1, 1, size, size, device=device)).bool()

    def scaled_dot_product(self, Q, K, V, mask):
        scores = torch.matmul(Q, K.transpose(-2, -1)) / math.sqrt(self.d_k)
        scores = scores.masked_fill(~mask, -1e4)
        attn = torch.softmax(scores, dim=-1)
        attn = self.dropout(attn)
        return torch.matmul(attn, V)

    def forward(self, x, padding_mask=None):
        """padding_mask: (batch, seq) bool, True for real tokens"""
        batch, seq, d_model = x.shape
        Q = self.W_q(x).view(batch, seq, self.num_heads, self.d_k).transpose(1, 2)
        K = self.W_k(x).view(batch, seq, self.num_heads, self.d_k).transpose(1, 2)
        V = self.W_v(x).view(batch, seq, self.num_heads, self.d_k).transpose(1, 2)

        mask = self.causal_mask(seq, x.device)
        if padding_mask is not None:
            mask = mask | padding_mask.unsqueeze(1).unsqueeze(2)

        out = self.scaled_dot_product(Q, K, V, mask)
        out = out.transpose(1, 2).contiguous().view(batch, seq, d_model)
        return self.W_o(out)
