import numpy as np
import torch
import torch.nn as nn


class ScaledDotProduct(nn.Module):
    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3))
        if mask is not None:
            attn = attn.masked_fill(mask, -1e9)
        attn = self.dropout(torch.softmax(attn, dim=-1))
        return torch.matmul(attn, v), attn


class EncoderLayerAttention(nn.Module):
    """Post-norm multi-head self-attention of the sentence encoder.

    Padding words are not to influence the words of their sentence.
    """

    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProduct(temperature=np.power(d_k, 0.5))
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, x, tokens, pad_idx=0):
        """x: [B, L, d_model], tokens: [B, L] word ids."""
        B, L, _ = x.shape
        residual = x

        q = self.w_qs(x).view(B, L, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(x).view(B, L, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(x).view(B, L, self.n_head, self.d_v).transpose(1, 2)

        is_pad = tokens.eq(pad_idx).view(B, 1, L, 1)
        out, attn = self.attention(q, k, v, mask=is_pad)

        out = out.transpose(1, 2).contiguous().view(B, L, -1)
        out = self.dropout(self.fc(out))
        return self.layer_norm(out + residual), attn


if __name__ == "__main__":
    ids = torch.tensor([[4, 8, 2, 9, 3, 0, 0], [5, 6, 7, 3, 0, 0, 0]])
    emb = nn.Embedding(10, 32, padding_idx=0)
    layer = EncoderLayerAttention(4, 32, 8, 8)
    y, a = layer(emb(ids), ids)
    print(y.shape, a.shape)
