import torch
import torch.nn as nn
import torch.nn.functional as F


def feature_map(x):
    return F.elu(x) + 1


class LinearAttention(nn.Module):
    """O(N) attention for long (non-causal) sequences.

    x:    (N, L, D)
    mask: (N, L) float, 1 = token, 0 = padding
    """

    def __init__(self, d_model, n_heads, eps=1e-6):
        super().__init__()
        self.n_heads = n_heads
        self.eps = eps
        self.query_projection = nn.Linear(d_model, d_model)
        self.key_projection = nn.Linear(d_model, d_model)
        self.value_projection = nn.Linear(d_model, d_model)
        self.out_projection = nn.Linear(d_model, d_model)

    def forward(self, x, mask=None):
        N, L, D = x.shape
        Q = self.query_projection(x).view(N, L, self.n_heads, -1)
        K = self.key_projection(x).view(N, L, self.n_heads, -1)
        V = self.value_projection(x).view(N, L, self.n_heads, -1)

        # remove the padded keys
        if mask is not None:
            K = K * mask[:, :, None, None]

        Q = feature_map(Q)
        K = feature_map(K)

        KV = torch.einsum("nshd,nshm->nhmd", K, V)
        Z = 1 / (torch.einsum("nlhd,nhd->nlh", Q, K.sum(dim=1)) + self.eps)
        out = torch.einsum("nlhd,nhmd,nlh->nlhm", Q, KV, Z)
        return self.out_projection(out.reshape(N, L, D))
