"""Graph attention over an edge list, without any scatter package."""
import torch
from torch import nn
import torch.nn.functional as F


def edge_softmax(score, group, num_groups):
    """Softmax of score [E, H] over the edges that share a value of group [E]."""
    idx = group.unsqueeze(-1).expand_as(score)
    top = torch.full((num_groups, score.size(1)), float("-inf"), device=score.device, dtype=score.dtype)
    top = top.scatter_reduce(0, idx, score.detach(), reduce="amax")
    ex = torch.exp(score - top[group])
    total = torch.zeros(num_groups, score.size(1), device=score.device, dtype=score.dtype)
    total = total.index_add(0, group, ex)
    return ex / total[group].clamp_min(1e-12)


class EdgeGAT(nn.Module):
    """GAT layer. edge_index is [2, E]: row 0 holds the senders, row 1 the
    receivers. A receiver takes a convex combination of its senders."""

    def __init__(self, d_in, d_head, n_heads=4, slope=0.2, concat=True):
        super().__init__()
        self.n_heads, self.d_head, self.slope, self.concat = n_heads, d_head, slope, concat
        self.lin = nn.Linear(d_in, n_heads * d_head, bias=False)
        self.a_send = nn.Parameter(torch.empty(n_heads, d_head))
        self.a_recv = nn.Parameter(torch.empty(n_heads, d_head))
        self.bias = nn.Parameter(torch.zeros(n_heads * d_head if concat else d_head))
        nn.init.xavier_uniform_(self.lin.weight)
        nn.init.xavier_uniform_(self.a_send)
        nn.init.xavier_uniform_(self.a_recv)

    def forward(self, x, edge_index):
        n = x.size(0)
        loop = torch.arange(n, device=x.device)
        edge_index = edge_index[:, edge_index[0] != edge_index[1]]
        src = torch.cat([edge_index[0], loop])
        dst = torch.cat([edge_index[1], loop])

        z = self.lin(x).view(n, self.n_heads, self.d_head)
        s = (z * self.a_send).sum(-1)
        r = (z * self.a_recv).sum(-1)
        score = F.leaky_relu(s[src] + r[dst], self.slope)
        alpha = edge_softmax(score, src, n)

        out = torch.zeros_like(z).index_add(0, dst, alpha.unsqueeze(-1) * z[src])
        out = out.flatten(1) if self.concat else out.mean(1)
        return out + self.bias


if __name__ == "__main__":
    ei = torch.randint(0, 12, (2, 40))
    print(EdgeGAT(8, 4)(torch.randn(12, 8), ei).shape)
