import torch
import torch.nn as nn
import torch.nn.functional as F


def graph_attention(h, adj, a_src, a_dst, slope=0.2, p=0.0, training=False):
    """Dense GAT step.

    h: (N, H, F) node features per head; adj: (N, N) 0/1 with self loops;
    a_src, a_dst: (H, F). Returns (N, H, F).
    """
    s = (h * a_src).sum(-1)
    d = (h * a_dst).sum(-1)
    e = F.leaky_relu(s.unsqueeze(1) + d.unsqueeze(0), slope)      # (N, N, H)
    e = e * adj.unsqueeze(-1)
    alpha = torch.softmax(e, dim=1)
    alpha = F.dropout(alpha, p, training=training)
    return torch.einsum("ijh,jhf->ihf", alpha, h)


class GATLayer(nn.Module):
    def __init__(self, in_features, out_features, heads=4, dropout=0.6, concat=True):
        super().__init__()
        self.heads, self.f = heads, out_features
        self.concat = concat
        self.p = dropout
        self.W = nn.Linear(in_features, heads * out_features, bias=False)
        self.a_src = nn.Parameter(torch.empty(heads, out_features))
        self.a_dst = nn.Parameter(torch.empty(heads, out_features))
        nn.init.xavier_uniform_(self.a_src)
        nn.init.xavier_uniform_(self.a_dst)

    def forward(self, x, adj):
        h = self.W(F.dropout(x, self.p, training=self.training)).view(-1, self.heads, self.f)
        adj = adj.to(h.dtype)
        out = graph_attention(h, adj, self.a_src, self.a_dst, p=self.p, training=self.training)
        return F.elu(out.flatten(1)) if self.concat else out.mean(1)
