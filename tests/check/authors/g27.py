from typing import Optional
import torch
import torch.nn.functional as F
from torch import nn, Tensor


class PointSetAttention(nn.Module):
    """Set-transformer MAB. `keep` is (B, S): 1 for real points, 0 for padding."""

    def __init__(self, dim_q: int, dim_kv: int, dim: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.fc_q = nn.Linear(dim_q, dim)
        self.fc_k = nn.Linear(dim_kv, dim)
        self.fc_v = nn.Linear(dim_kv, dim)
        self.fc_o = nn.Linear(dim, dim)
        self.ln0 = nn.LayerNorm(dim)
        self.ln1 = nn.LayerNorm(dim)

    def _heads(self, t: Tensor) -> Tensor:
        return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, X: Tensor, Y: Tensor, keep: Optional[Tensor] = None) -> Tensor:
        Q = self.fc_q(X)
        K, V = self.fc_k(Y), self.fc_v(Y)
        attn_mask = None
        if keep is not None:
            attn_mask = keep[:, None, None, :].to(Q.dtype)
        A = F.scaled_dot_product_attention(self._heads(Q), self._heads(K), self._heads(V), attn_mask=attn_mask)
        O = self.ln0(Q + A.transpose(1, 2).flatten(2))
        return self.ln1(O + F.relu(self.fc_o(O)))


class ISAB(nn.Module):
    def __init__(self, dim_in, dim, num_inds, heads=4):
        super().__init__()
        self.I = nn.Parameter(torch.empty(1, num_inds, dim))
        nn.init.xavier_uniform_(self.I)
        self.mab0 = PointSetAttention(dim, dim_in, dim, heads)
        self.mab1 = PointSetAttention(dim_in, dim, dim, heads)

    def forward(self, X, keep=None):
        H = self.mab0(self.I.expand(X.size(0), -1, -1), X, keep)
        return self.mab1(X, H)
