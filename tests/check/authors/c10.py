import torch
import torch.nn as nn
import torch.nn.functional as F


class DenseGraphAttention(nn.Module):
    """Dot-product attention on a batch of dense graphs.

    Nodes exchange messages along the edges of the graph only, and the
    messages that arrive at a node form a weighted mean of its neighbours
    (the node itself included).

    Parameters
    ----------
    in_dim, out_dim : int
        node feature sizes
    heads : int
        number of heads; they are concatenated
    dropout : float
        dropout on the attention weights
    """

    def __init__(self, in_dim, out_dim, heads=4, dropout=0.1):
        super().__init__()
        assert out_dim % heads == 0, "heads must divide out_dim"
        self.heads = heads
        self.hd = out_dim // heads
        self.W_q = nn.Linear(in_dim, out_dim, bias=False)
        self.W_k = nn.Linear(in_dim, out_dim, bias=False)
        self.W_v = nn.Linear(in_dim, out_dim, bias=False)
        self.skip = nn.Linear(in_dim, out_dim)
        self.norm = nn.LayerNorm(out_dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, h, adj):
        """
        h   : (B, N, in_dim)
        adj : (B, N, N), adj[b, i, j] = 1 if node i receives from node j
        """
        B, N, _ = h.shape
        loops = torch.eye(N, dtype=adj.dtype, device=adj.device)
        adj = torch.maximum(adj, loops)

        q = self.W_q(h).view(B, N, self.heads, self.hd)
        k = self.W_k(h).view(B, N, self.heads, self.hd)
        v = self.W_v(h).view(B, N, self.heads, self.hd)

        e = torch.einsum("binh,bjnh->bnij", q, k) / self.hd ** 0.5
        alpha = F.softmax(e, dim=-1)
        alpha = alpha * adj.unsqueeze(1)
        alpha = self.drop(alpha)

        msg = torch.einsum("bnij,bjnh->binh", alpha, v).reshape(B, N, -1)
        return self.norm(self.skip(h) + msg)


def random_graph(b, n, p=0.3):
    a = (torch.rand(b, n, n) < p).float()
    return torch.maximum(a, a.transpose(1, 2))


if __name__ == "__main__":
    g = random_graph(3, 10)
    net = DenseGraphAttention(16, 32)
    print(net(torch.randn(3, 10, 16), g).shape)
