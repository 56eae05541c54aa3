"""Causal attention with complex-valued rotary positions."""
import torch
import torch.nn as nn
import torch.nn.functional as F


def phases(positions, dim, base=10000.0, stretch=1.0):
    """Unit complex numbers [B, T, dim/2]; stretch > 1 squeezes the positions."""
    freq = base ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    angle = positions.float().unsqueeze(-1) / stretch * freq
    return torch.polar(torch.ones_like(angle), angle)


def spin(x, ph):
    # x [B, T, H, D], neighbouring features are the two parts of one number
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    # clockwise, as in the checkpoints this has to load
    z = z * ph.unsqueeze(2).conj()
    return torch.view_as_real(z).flatten(-2).type_as(x)


class ComplexRotaryAttention(nn.Module):
    def __init__(self, n_embd, n_head, n_kv_head=None, base=10000.0, stretch=1.0, dropout=0.0):
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_kv_head or n_head
        self.d = n_embd // n_head
        self.base, self.stretch, self.dropout = base, stretch, dropout
        self.q = nn.Linear(n_embd, n_head * self.d, bias=False)
        self.k = nn.Linear(n_embd, self.n_kv_head * self.d, bias=False)
        self.v = nn.Linear(n_embd, self.n_kv_head * self.d, bias=False)
        self.o = nn.Linear(n_head * self.d, n_embd, bias=False)

    def forward(self, x, positions=None):
        B, T, _ = x.shape
        if positions is None:
            positions = torch.arange(T, device=x.device).expand(B, T)
        ph = phases(positions, self.d, self.base, self.stretch)
        q = spin(self.q(x).view(B, T, self.n_head, self.d), ph)
        k = spin(self.k(x).view(B, T, self.n_kv_head, self.d), ph)
        v = self.v(x).view(B, T, self.n_kv_head, self.d)

        # query head h belongs to kv head h % n_kv_head
        g = self.n_head // self.n_kv_head
        k, v = k.repeat(1, 1, g, 1), v.repeat(1, 1, g, 1)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            is_causal=True, dropout_p=self.dropout * self.training,
        )
        return self.o(y.transpose(1, 2).reshape(B, T, -1))


if __name__ == "__main__":
    att = ComplexRotaryAttention(96, 6, n_kv_head=3, stretch=2.0)
    print(att(torch.randn(2, 13, 96)).shape)
