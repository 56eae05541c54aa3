import torch
import torch.nn as nn
import torch.nn.functional as F


class TriangleAttention(nn.Module):
    """Triangular gated self-attention around the starting or ending node.

    z: (B, I, J, C) square pair tensor. mask: (B, I, J) bool, True = valid pair.
    """

    def __init__(self, c_in: int, c_hidden: int, heads: int = 4, starting: bool = True):
        super().__init__()
        self.starting = starting
        self.heads, self.c = heads, c_hidden
        self.norm = nn.LayerNorm(c_in)
        self.to_bias = nn.Linear(c_in, heads, bias=False)
        self.to_qkv = nn.Linear(c_in, 3 * heads * c_hidden, bias=False)
        self.to_gate = nn.Linear(c_in, heads * c_hidden)
        self.to_out = nn.Linear(heads * c_hidden, c_in)

    def forward(self, z, mask=None):
        if mask is None:
            mask = z.new_ones(z.shape[:-1], dtype=torch.bool)
        if not self.starting:
            z = z.transpose(1, 2)
            mask = mask.transpose(1, 2)

        z = self.norm(z)
        B, I, J, _ = z.shape
        q, k, v = self.to_qkv(z).view(B, I, J, 3, self.heads, self.c).permute(3, 0, 1, 4, 2, 5)

        tri = self.to_bias(z).permute(0, 3, 1, 2).unsqueeze(1)               # B 1 h J J
        pad = torch.zeros_like(mask, dtype=z.dtype).masked_fill(~mask, -3e4)
        bias = tri + pad[:, :, None, None, :]

        o = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        o = o.transpose(2, 3).flatten(-2)
        o = torch.sigmoid(self.to_gate(z)) * o
        return self.to_out(o)
