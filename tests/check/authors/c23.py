import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MAB(nn.Module):
    """Multihead attention block for sets: X attends to Y."""

    def __init__(self, dim_x, dim_y, dim_v, num_heads, ln=True):
        super().__init__()
        self.num_heads = num_heads
        self.dim_v = dim_v
        self.fc_q = nn.Linear(dim_x, dim_v)
        self.fc_k = nn.Linear(dim_y, dim_v)
        self.fc_v = nn.Linear(dim_y, dim_v)
        self.fc_o = nn.Linear(dim_v, dim_v)
        self.ln0 = nn.LayerNorm(dim_v) if ln else nn.Identity()
        self.ln1 = nn.LayerNorm(dim_v) if ln else nn.Identity()

    def heads(self, t):
        b, n, _ = t.shape
        return t.view(b, n, self.num_heads, self.dim_v // self.num_heads).transpose(1, 2)

    def forward(self, X, Y, y_mask=None):
        """y_mask: [B, |Y|], True for elements that exist."""
        Q = self.fc_q(X)
        K, V = self.fc_k(Y), self.fc_k(Y)

        A = self.heads(Q) @ self.heads(K).transpose(-1, -2)
        A = A / math.sqrt(self.dim_v // self.num_heads)
        if y_mask is not None:
            A = A.masked_fill(~y_mask[:, None, None, :], float("-inf"))
        O = torch.softmax(A, dim=-1) @ self.heads(V)
        O = Q + O.transpose(1, 2).reshape(Q.shape)

        O = self.ln0(O)
        O = O + F.relu(self.fc_o(O))
        return self.ln1(O)


class SAB(nn.Module):
    def __init__(self, dim_in, dim_out, num_heads):
        super().__init__()
        self.mab = MAB(dim_in, dim_in, dim_out, num_heads)

    def forward(self, X, mask=None):
        return self.mab(X, X, mask)


if __name__ == "__main__":
    enc = nn.ModuleList([SAB(3, 32, 4), SAB(32, 32, 4)])
    pts = torch.randn(5, 20, 3)
    mask = torch.arange(20)[None] < torch.tensor([20, 12, 7, 1, 15])[:, None]
    for layer in enc:
        pts = layer(pts, mask)
    print(pts.shape)
