import torch
import torch.nn as nn


class PairBiasAttention(nn.Module):
    """Residue attention with a bias from the pair representation and gating.

    s: [B, N, c_s] single representation
    z: [B, N, N, c_z] pair representation, z[:, i, j] describes residue j as seen from residue i
    mask: [B, N] 1.0 for resolved residues
    """

    def __init__(self, c_s, c_z, n_head=8, inf=1e8):
        super().__init__()
        assert c_s % n_head == 0
        self.n_head = n_head
        self.c_h = c_s // n_head
        self.inf = inf
        self.layer_norm_s = nn.LayerNorm(c_s)
        self.layer_norm_z = nn.LayerNorm(c_z)
        self.linear_q = nn.Linear(c_s, c_s)
        self.linear_k = nn.Linear(c_s, c_s, bias=False)
        self.linear_v = nn.Linear(c_s, c_s, bias=False)
        self.linear_z = nn.Linear(c_z, n_head, bias=False)
        self.linear_g = nn.Linear(c_s, c_s)
        self.linear_o = nn.Linear(c_s, c_s)

    def forward(self, s, z, mask=None):
        B, N, C = s.shape
        s = self.layer_norm_s(s)
        q = self.linear_q(s).view(B, N, self.n_head, self.c_h)
        k = self.linear_k(s).view(B, N, self.n_head, self.c_h)
        v = self.linear_v(s).view(B, N, self.n_head, self.c_h)
        g = torch.sigmoid(self.linear_g(s))

        # [B, H, N, N]
        bias = self.linear_z(self.layer_norm_z(z)).transpose(1, 3)

        a = torch.einsum("bihc,bjhc->bhij", q, k) / self.c_h ** 0.5
        a = a + bias
        if mask is not None:
            a = a + self.inf * (mask[:, None, None, :] - 1.0)
        a = torch.softmax(a, dim=-1)

        o = torch.einsum("bhij,bjhc->bihc", a, v).reshape(B, N, C)
        return self.linear_o(g * o)
