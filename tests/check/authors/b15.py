import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class RelPositionMultiHeadAttention(nn.Module):
    """Multi-head attention with Transformer-XL relative positions, as used in Conformer.

    Args:
        x: (B, T, d_model)
        pos_emb: (1, 2T-1, d_model), relative offsets T-1, ..., 0, ..., -(T-1)
        mask: (B, 1, T) or (B, T, T), True at positions that must not be seen
    """

    def __init__(self, d_model: int, n_head: int, dropout_rate: float = 0.1):
        super().__init__()
        assert d_model % n_head == 0
        self.h = n_head
        self.d_k = d_model // n_head
        self.linear_q = nn.Linear(d_model, d_model)
        self.linear_k = nn.Linear(d_model, d_model)
        self.linear_v = nn.Linear(d_model, d_model)
        self.linear_out = nn.Linear(d_model, d_model)
        self.linear_pos = nn.Linear(d_model, d_model, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(self.h, self.d_k))
        self.pos_bias_v = nn.Parameter(torch.empty(self.h, self.d_k))
        nn.init.xavier_uniform_(self.pos_bias_u)
        nn.init.xavier_uniform_(self.pos_bias_v)
        self.dropout = nn.Dropout(dropout_rate)

    def rel_shift(self, x):
        b, h, t, p = x.shape                      # p = 2t - 1
        x = F.pad(x, (0, 1))
        x = x.view(b, h, p + 1, t)
        x = x[:, :, 1:].reshape(b, h, t, p)
        return x[..., : p // 2 + 1]

    def forward(self, x, pos_emb, mask=None):
        b, t, _ = x.shape
        q = self.linear_q(x).view(b, t, self.h, self.d_k)
        k = self.linear_k(x).view(b, t, self.h, self.d_k).transpose(1, 2)
        v = self.linear_v(x).view(b, t, self.h, self.d_k).transpose(1, 2)
        p = self.linear_pos(pos_emb).view(1, -1, self.h, self.d_k).transpose(1, 2)

        q_u = (q + self.pos_bias_u).transpose(1, 2)
        q_v = (q + self.pos_bias_v).transpose(1, 2)

        matrix_ac = torch.matmul(q_u, k.transpose(-2, -1))
        matrix_bd = self.rel_shift(torch.matmul(q_v, p.transpose(-2, -1)))
        scores = (matrix_ac + matrix_bd) / math.sqrt(self.d_k)

        if mask is not None:
            m = mask.unsqueeze(1)
            scores = scores.masked_fill(m, torch.finfo(scores.dtype).min)
            attn = torch.softmax(scores, dim=-1).masked_fill(m, 0.0)
        else:
            attn = torch.softmax(scores, dim=-1)
        y = torch.matmul(self.dropout(attn), v)
        return self.linear_out(y.transpose(1, 2).reshape(b, t, -1))
