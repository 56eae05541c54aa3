import torch
import torch.nn as nn
import torch.nn.functional as F


class EdgeBiasedAttention(nn.Module):
    """Full attention between atoms, steered by directed pair features.

    ``pair[b, i, j]`` describes how atom j looks from atom i (for example the
    bearing of j in the local frame of i), so it biases the score of query i
    with key j. ``present`` is True for real atoms.
    """

    def __init__(self, node_dim=64, pair_dim=16, heads=8):
        super().__init__()
        self.heads = heads
        self.ln_node = nn.LayerNorm(node_dim)
        self.ln_pair = nn.LayerNorm(pair_dim)
        self.in_proj = nn.Linear(node_dim, node_dim * 3, bias=False)
        self.pair_bias = nn.Linear(pair_dim, heads, bias=False)
        self.gate = nn.Linear(node_dim, node_dim)
        self.out_proj = nn.Linear(node_dim, node_dim)
        nn.init.constant_(self.gate.bias, 1.0)

    def scores_bias(self, pair, present):
        bias = self.pair_bias(self.ln_pair(pair))
        bias = bias.permute(0, 3, 2, 1)
        if present is not None:
            bias = bias.masked_fill(~present[:, None, None, :], -1e9)
        return bias

    def forward(self, node, pair, present=None):
        B, N, D = node.shape
        x = self.ln_node(node)
        q, k, v = self.in_proj(x).reshape(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.scores_bias(pair, present))
        y = y.permute(0, 2, 1, 3).reshape(B, N, D)
        y = self.out_proj(torch.sigmoid(self.gate(x)) * y)
        if present is not None:
            y = y * present.unsqueeze(-1)
        return node + y
