import torch
import torch.nn as nn


def segment_max(src, seg, n):
    out = src.new_full((n,) + src.shape[1:], float("-inf"))
    ix = seg.view(-1, *([1] * (src.dim() - 1))).expand_as(src)
    return out.scatter_reduce(0, ix, src, "amax", include_self=True)


def segment_sum(src, seg, n):
    return src.new_zeros((n,) + src.shape[1:]).index_add(0, seg, src)


class SinkGATv2(nn.Module):
    """GATv2 scores with a learnt sink.

    Each head owns one extra logit, `sink`, that joins the softmax of every
    receiving node but brings no message. A node whose neighbours are all
    irrelevant can thus send its weight there, and a node with no incoming
    edge gets exactly zero from the neighbourhood (only the root term stays).
    The weights of the real edges therefore sum to less than one; this is
    meant. The score is an MLP score (vector a on a leaky relu), hence there
    is no 1/sqrt(d).

    edge_index[0] = from, edge_index[1] = to.
    """

    def __init__(self, dim, heads=4, edge_dim=None, negative_slope=0.2):
        super().__init__()
        self.heads, self.hd = heads, dim // heads
        self.from_lin = nn.Linear(dim, dim)
        self.to_lin = nn.Linear(dim, dim)
        self.edge_lin = nn.Linear(edge_dim, dim, bias=False) if edge_dim else None
        self.a = nn.Parameter(torch.randn(heads, self.hd) * self.hd ** -0.5)
        self.sink = nn.Parameter(torch.zeros(heads))
        self.root = nn.Linear(dim, dim)
        self.act = nn.LeakyReLU(negative_slope)

    def forward(self, x, edge_index, edge_attr=None):
        n = x.shape[0]
        a, b = edge_index
        f = self.from_lin(x).view(n, self.heads, self.hd)
        t = self.to_lin(x).view(n, self.heads, self.hd)
        m = f[a] + t[b]
        if self.edge_lin is not None and edge_attr is not None:
            m = m + self.edge_lin(edge_attr).view(-1, self.heads, self.hd)
        logit = (self.act(m) * self.a).sum(-1)                      # E, heads

        sink = self.sink.expand(n, -1)
        peak = torch.maximum(segment_max(logit.detach(), b, n), sink.detach())
        e = torch.exp(logit - peak[b])
        z = segment_sum(e, b, n) + torch.exp(sink - peak)
        w = e / z[b]
        agg = segment_sum(w.unsqueeze(-1) * f[a], b, n)
        return self.root(x) + agg.reshape(n, -1)


if __name__ == "__main__":
    torch.manual_seed(1)
    ei = torch.randint(0, 9, (2, 30))
    layer = SinkGATv2(16, heads=4, edge_dim=3)
    print(layer(torch.randn(9, 16), ei, torch.randn(30, 3)).shape)
