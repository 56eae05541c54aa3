import torch
import torch.nn as nn


class MultiQueryPool(nn.Module):
    """K learned queries summarise a variable-sized bag of instances (MIL).

    bag: (B, N, D); present: (B, N) float or bool, 1 where an instance exists.
    Returns (B, K, D) and the weights (B, K, N). Empty bags give zeros.
    """

    def __init__(self, dim, n_queries=4, key_dim=64):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(n_queries, key_dim) / key_dim ** 0.5)
        self.to_k = nn.Linear(dim, key_dim, bias=False)
        self.gate = nn.Linear(dim, key_dim, bias=False)

    def forward(self, bag, present=None):
        keys = torch.tanh(self.to_k(bag)) * torch.sigmoid(self.gate(bag))
        s = torch.einsum('kd,bnd->bkn', self.queries, keys)
        s = s - s.amax(dim=-1, keepdim=True).detach()
        e = s.exp()
        if present is not None:
            e = e * present[:, None, :].to(e.dtype)
        w = e / e.sum(-1, keepdim=True).clamp_min(1e-12)
        return w @ bag, w
