import torch
from torch import nn


class DirectedGraphAttention(nn.Module):
    r"""Message passing with dot-product attention on a dense batch of directed graphs.

    Shapes:
        nodes: (B, N, D)
        adj:   (B, N, N), ``adj[b, u, v] = 1`` for an edge u -> v
    Every node v gathers from its in-neighbours {u : u -> v} and from itself.
    """

    def __init__(self, dim, heads=4, edge_types=None):
        super().__init__()
        self.heads = heads
        self.dh = dim // heads
        self.lin_query = nn.Linear(dim, dim)
        self.lin_key = nn.Linear(dim, dim)
        self.lin_value = nn.Linear(dim, dim)
        self.lin_skip = nn.Linear(dim, dim)

    def forward(self, nodes, adj):
        B, N, D = nodes.shape
        eye = torch.eye(N, dtype=torch.bool, device=nodes.device)
        allowed = adj.bool() | eye

        q = self.lin_query(nodes).view(B, N, self.heads, self.dh)
        k = self.lin_key(nodes).view(B, N, self.heads, self.dh)
        v = self.lin_value(nodes).view(B, N, self.heads, self.dh)

        alpha = torch.einsum('bqhd,bkhd->bhqk', q, k) / self.dh ** 0.5
        alpha = alpha.masked_fill(~allowed.unsqueeze(1), float('-inf')).softmax(-1)
        msg = torch.einsum('bhqk,bkhd->bqhd', alpha, v).reshape(B, N, D)
        return msg + self.lin_skip(nodes)
