import torch
import torch.nn as nn
import torch.nn.functional as F


class GraphAttentionLayer(nn.Module):
    """Dense multi-head GAT layer. adj is (N, N) 0/1 with self loops."""

    def __init__(self, in_features, out_features, n_heads=4, dropout=0.6, alpha=0.2, concat=True):
        super().__init__()
        self.n_heads = n_heads
        self.n_hidden = out_features // n_heads if concat else out_features
        self.concat = concat
        self.W = nn.Linear(in_features, self.n_hidden * n_heads, bias=False)
        self.a_src = nn.Parameter(torch.empty(n_heads, self.n_hidden))
        self.a_dst = nn.Parameter(torch.empty(n_heads, self.n_hidden))
        nn.init.xavier_uniform_(self.a_src, gain=1.414)
        nn.init.xavier_uniform_(self.a_dst, gain=1.414)
        self.leakyrelu = nn.LeakyReLU(alpha)
        self.dropout = dropout

    def forward(self, h, adj):
        N = h.shape[0]
        Wh = self.W(h).view(N, self.n_heads, self.n_hidden)

        e_i = (Wh * self.a_src).sum(-1)       # N, heads
        e_j = (Wh * self.a_dst).sum(-1)
        e = self.leakyrelu(e_i.unsqueeze(1) + e_j.unsqueeze(0))    # N, N, heads

        attention = F.softmax(e, dim=1)
        attention = attention * adj.unsqueeze(-1)                  # only neighbours
        attention = F.dropout(attention, self.dropout, training=self.training)

        h_prime = torch.einsum('ijh,jhf->ihf', attention, Wh)
        if self.concat:
            return F.elu(h_prime.reshape(N, -1))
        return h_prime.mean(dim=1)
