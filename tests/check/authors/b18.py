import torch
from torch import nn


class TopKSparseAttention(nn.Module):
    """Sparse attention for multivariate forecasting.
    Every query keeps only its `topk` best keys, everything else is dropped.
    """

    def __init__(self, d_model: int, n_heads: int, topk: int = 8, dropout: float = 0.05):
        super().__init__()
        self.n_heads = n_heads
        self.topk = topk
        d_keys = d_model // n_heads
        self.scale = d_keys ** -0.5
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model, d_keys * n_heads)
        self.out_projection = nn.Linear(d_keys * n_heads, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, queries, keys, values):
        B, L, _ = queries.shape
        _, S, _ = keys.shape
        H = self.n_heads

        queries = self.query_projection(queries).view(B, L, H, -1)
        keys = self.key_projection(keys).view(B, S, H, -1)
        values = self.value_projection(values).view(B, S, H, -1)

        scores = torch.einsum("blhe,bshe->bhls", queries, keys) * self.scale

        u = min(self.topk, S, L)
        kth = scores.topk(u, dim=2).values[:, :, -1:, :]
        scores = scores.masked_fill(scores < kth, torch.finfo(scores.dtype).min)

        A = self.dropout(torch.softmax(scores, dim=-1))
        V = torch.einsum("bhls,bshd->blhd", A, values)
        return self.out_projection(V.reshape(B, L, -1))
